"""Evaluate weight expressions in pieces: rows [a, b) of a weight, in float64, rounded once, without holding the whole.

A slice of rows is pushed through the expression down to the parameters, so that a piece reads only its own bytes.
Expressions that only move data round each parameter once to its type and move it: no arithmetic, no float64. What
several weights compute in common, `share` turns into a leaf that is evaluated once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from threading import Lock
from typing import Any

import numpy as np

from frtc.kernels.dtypes import DTYPES, round_to
from frtc.kernels.reference import REFERENCES
from frtc.lowering.interpret import run
from frtc.lowering.ir import Graph, Node, Type, make, rebuild, tensor, walk
from frtc.lowering.ops import POINTWISE, slice_
from frtc.runtime.plan import row_pitch

Array = np.ndarray[Any, Any]
Lookup = Callable[[str], Array]  # parameter -> its value in any float type

SHARED = "shared "  # begins the names of shared values: no parameter's name holds a space

PIECE = 1 << 20  # elements evaluated at once: 8 MiB of float64; from 32 MiB on, glibc maps fresh pages for every array
MOVES = frozenset({"tensor", "slice", "reshape", "transpose", "broadcast", "concat"})
LEAVES = frozenset({"tensor", "const"})
REDUCTIONS = frozenset({"reduce_sum", "reduce_mean", "reduce_max"})


def share(expressions: Mapping[str, Node], tensors: Lookup) -> tuple[dict[str, Node], Lookup]:
    """The expressions with what several of them compute as leaves, and a lookup that evaluates each of these once.

    A shared value keeps all bits of its float64, so that no result changes; it has at most PIECE elements.
    """
    whole = Graph("weights", (), tuple(expressions.items()))
    common = _common(whole)
    definitions: dict[str, Node] = {}

    def visit(old: Node, new: Node) -> Node:
        if old not in common:
            return new
        name = f"{SHARED}{len(definitions)}"
        definitions[name] = new
        return tensor(name, new.t)

    changed = rebuild(whole, visit)
    values: dict[str, Array] = {}
    busy = {name: Lock() for name in definitions}

    def lookup(name: str) -> Array:
        if name not in definitions:
            return tensors(name)
        with busy[name]:
            if name not in values:
                values[name] = _shared_value(definitions[name], lookup)
            return values[name]

    return dict(changed.outputs), lookup


def _shared_value(definition: Node, lookup: Lookup) -> Array:
    if definition.op != "channel_scale":
        return _run(definition, lookup, "exact")
    w = definition.operands[0]
    whole = np.empty(w.shape, np.float32)
    step = max(1, PIECE // max(1, w.shape[1]))
    for start in range(0, w.shape[0], step):
        rows = slice(start, min(w.shape[0], start + step))
        whole[rows] = _in_f32(take_rows(w, rows.start, rows.stop), lookup)
    scales: Array = REFERENCES["channel_scale"](whole)
    return scales


def _run(node: Node, tensors: Lookup, mode: str) -> Array:
    return run(Graph("weight", (), (("out", node),)), {}, tensors, mode)["out"]


def _common(whole: Graph) -> set[Node]:
    """Small values that are computed for several weights, each as near to its readers as it goes."""
    readers: dict[Node, set[str]] = {}
    for name, root in whole.outputs:
        for node in walk([root]):
            readers.setdefault(node, set()).add(name)
    computed: dict[Node, bool] = {}
    for node in whole.nodes:
        computed[node] = node.op not in MOVES | LEAVES or any(computed[a] for a in node.operands)
    shared = [n for n, names in readers.items() if len(names) > 1 and computed[n]]
    fits = {n for n in shared if isinstance(n.type, Type) and n.type.size <= PIECE}
    outside = {a for n in whole.nodes if n not in fits for a in n.operands}
    uses = whole.users()
    return {n for n in fits if n in outside or n in whole.roots or uses[n] > 1}


def pieces(expression: Node, tensors: Lookup) -> Iterator[Array]:
    """The weight's rows in order, each piece rounded once to the weight's type; C-contiguous, at least one axis."""
    rows = expression.shape[0] if expression.shape else 1
    width = max(1, expression.t.size // max(rows, 1))
    step = max(1, PIECE // width)
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        part = expression if stop - start == rows else take_rows(expression, start, stop)
        yield np.ascontiguousarray(np.atleast_1d(_evaluate(part, tensors)))


def _evaluate(whole: Node, tensors: Lookup) -> Array:
    if whole.op == "quantize":  # from the values as they are, not as 16 bits would round them
        w, scale = (_in_f32(a, tensors) for a in whole.operands)
        return round_to(REFERENCES["quantize"](w, scale), whole.dtype)
    graph, tensors = _sliced_leaves(Graph("weight", (), (("out", whole),)), tensors)
    if _moves(graph):
        return run(graph, {}, tensors, "typed")["out"]
    return round_to(run(graph, {}, tensors, "exact")["out"], whole.dtype)


def _in_f32(node: Node, tensors: Lookup) -> Array:
    """The value of an expression in float32, whatever its type would round it to."""
    graph, tensors = _sliced_leaves(Graph("weight", (), (("out", node),)), tensors)
    return run(graph, {}, tensors, "wide" if _moves(graph) else "exact")["out"].astype(np.float32, copy=False)


def _moves(graph: Graph) -> bool:
    """No arithmetic on floats."""
    return all(n.op in MOVES or (n.op == "const" and not n.t.is_float) for n in graph.nodes)


def _sliced_leaves(graph: Graph, tensors: Lookup) -> tuple[Graph, Lookup]:
    """Slices of tensors as tensors of their own: what is not read is not converted either."""
    parts: dict[str, Node] = {}

    def visit(old: Node, new: Node) -> Node:
        if new.op != "slice" or new.operands[0].op != "tensor":
            return new
        name = f"{new.operands[0]['key']}{new.attrs}"
        parts[name] = new
        return tensor(name, new.t)

    def lookup(key: str) -> Array:
        if key not in parts:
            return tensors(key)
        part = parts[key]
        view: Array = REFERENCES["slice"](lookup(part.operands[0]["key"]), **dict(part.attrs))
        return view

    return rebuild(graph, visit), lookup


def take_rows(node: Node, start: int, stop: int) -> Node:
    """Rows [start, stop) along the leading axis, the slice pushed towards the leaves as far as it goes."""
    if (start, stop) == (0, node.shape[0]):
        return node
    pushed = _push(node, start, stop)
    if pushed is not None:
        return pushed
    result: Node = slice_(node, axis=-len(node.shape), start=start, stop=stop)
    return result


def _push(node: Node, start: int, stop: int) -> Node | None:
    rank, rows = len(node.shape), stop - start
    type = Type(node.dtype, (rows, *node.shape[1:]))
    if node.op in POINTWISE:
        args = [_broadcast_rows(a, rank, start, stop) for a in node.operands]
        return make(node.op, args, dict(node.attrs), type, node.loc)
    if node.op in REDUCTIONS and node["keepdims"] and -rank not in node["axes"] and node.args[0] is not None:
        return make(node.op, [take_rows(node.args[0], start, stop)], dict(node.attrs), type, node.loc)
    if node.op == "quantize":
        return make(node.op, [take_rows(a, start, stop) for a in node.operands], {}, type, node.loc)
    if node.op == "concat" and node["axis"] == -rank:
        return _concat_rows(node, start, stop)
    if node.op == "concat":
        return make(node.op, [take_rows(a, start, stop) for a in node.operands], dict(node.attrs), type, node.loc)
    if node.op in ("linear", "matmul") and rank == 2 and len(node.operands) == 2 and len(node.operands[0].shape) == 2:
        x, w = node.operands
        return make(node.op, [take_rows(x, start, stop), w, *node.args[2:]], dict(node.attrs), type, node.loc)
    if node.op == "slice" and node["axis"] == -rank and node["step"] == 1 and node.args[0] is not None:
        return take_rows(node.args[0], node["start"] + start, node["start"] + stop)
    if node.op == "slice" and node["axis"] != -rank and node.args[0] is not None:
        return make(node.op, [take_rows(node.args[0], start, stop)], dict(node.attrs), type, node.loc)
    if node.op == "const" and node.get("value") is not None:
        return make(node.op, (), dict(node.attrs), type, node.loc)
    if node.op == "reshape" and node.args[0] is not None:
        return _reshape_rows(node, node.args[0], start, stop)
    return None


def _broadcast_rows(operand: Node, rank: int, start: int, stop: int) -> Node:
    whole = len(operand.shape) < rank or operand.shape[0] == 1
    return operand if whole else take_rows(operand, start, stop)


def _concat_rows(node: Node, start: int, stop: int) -> Node:
    parts, at = [], 0
    for part in node.operands:
        first, last = max(start - at, 0), min(stop - at, part.shape[0])
        if first < last:
            parts.append(take_rows(part, first, last))
        at += part.shape[0]
    type = Type(node.dtype, (stop - start, *node.shape[1:]))
    return parts[0] if len(parts) == 1 else make("concat", parts, dict(node.attrs), type, node.loc)


def _reshape_rows(node: Node, source: Node, start: int, stop: int) -> Node | None:
    """Rows of the result are whole groups of rows of the source, or the other way round."""
    if not source.shape or source.t.size == 0:
        return None
    per_row, per_source = node.t.size // node.shape[0], source.t.size // source.shape[0]
    if (start * per_row) % per_source or (stop * per_row) % per_source:
        return None
    inner = take_rows(source, start * per_row // per_source, stop * per_row // per_source)
    shape = (stop - start, *node.shape[1:])
    return make("reshape", [inner], {"shape": shape}, Type(node.dtype, shape), node.loc)


def padded_row(type: Type) -> int:
    """Elements from one row (last axis) to the next in memory."""
    size = DTYPES[type.dtype].itemsize
    if type.rank < 2:
        return type.shape[-1] if type.shape else 1
    return row_pitch(type.shape[-1] * size) // size
