"""Slices along the last axis, taken as far towards their sources as the ops in between allow.

Two slices hold the same numbers if they end up as the same node: that is how a repeated half of a table is proven.
"""

from __future__ import annotations

from dataclasses import dataclass

from frtc.lowering.ir import Node, Type, make
from frtc.lowering.ops import POINTWISE, concat, reshape, slice_
from frtc.passes.canonical_cast import bare
from frtc.passes.canonical_chains import normal


def sliced(node: Node, start: int, stop: int, step: int = 1) -> Node:
    """node[..., start:stop:step], pushed through whatever works element by element along the last axis."""
    if (start, stop, step) == (0, node.shape[-1], 1):
        return node
    if node.op == "concat" and node["axis"] == -1 and step == 1:
        return _of_parts(node, start, stop)
    if node.op == "reshape" and step == 2 and node.operands[0].shape == (*node.shape[:-1], node.shape[-1] // 2, 2):
        pair = sliced(node.operands[0], start, start + 1)  # element 2i + start is entry start of pair i
        return normal(reshape(pair, shape=(*node.shape[:-1], node.shape[-1] // 2)))
    args = _sliced_operands(node, start, stop, step)
    if args is None:
        out: Node = slice_(node, axis=-1, start=start, stop=stop, step=step)
        return out
    shape = (*node.shape[:-1], -((start - stop) // step))
    attrs = {k: shape if k == "shape" else v for k, v in node.attrs}
    if node.op == "broadcast" and args[0].shape == shape:
        return args[0]
    return make(node.op, args, attrs, Type(node.dtype, shape), node.loc)


def _of_parts(node: Node, start: int, stop: int) -> Node:
    """The slice of each part of a concatenation, joined again."""
    kept, at = [], 0
    for part in node.operands:
        a, b = max(start - at, 0), min(stop - at, part.shape[-1])
        if a < b:
            kept.append(sliced(part, a, b))
        at += part.shape[-1]
    return kept[0] if len(kept) == 1 else concat(*kept, axis=-1)


def _sliced_operands(node: Node, start: int, stop: int, step: int) -> list[Node] | None:
    """The operands of the op whose result is the slice of `node`; None where the op mixes elements along the axis."""
    elementwise = node.op in POINTWISE or node.op == "broadcast"
    keeps = node.op == "reshape" and node.operands[0].shape[-1:] == node.shape[-1:]
    keeps = keeps or (node.op == "transpose" and node["perm"][-1] == -1)
    keeps = keeps or (node.op in ("concat", "slice") and node["axis"] != -1)
    if not elementwise and not keeps:
        return None
    width = node.shape[-1]
    return [sliced(a, start, stop, step) if a.shape[-1:] == (width,) else a for a in node.operands]


@dataclass(frozen=True, slots=True)
class Cut:
    """source[..., start : start + step * size : step]"""

    source: Node
    start: int
    size: int
    step: int


def cut_of(node: Node) -> Cut | None:
    """What part of which value `node` is: a slice, or one entry of each pair."""
    node = bare(node)
    if node.op == "slice" and node["axis"] == -1:
        return Cut(node.operands[0], node["start"], node.shape[-1], node["step"])
    if node.op == "reshape" and node.operands[0].op == "slice":
        entry = node.operands[0]
        pairs = entry.operands[0]
        if entry["axis"] == -1 and pairs.shape == (*node.shape, 2) and entry.shape[-1] == 1:
            whole = normal(reshape(pairs, shape=(*node.shape[:-1], 2 * node.shape[-1])))
            return Cut(whole, entry["start"], node.shape[-1], 2)
    return None


def rejoined(first: Node, second: Node, pairing: str) -> Node | None:
    """The value whose halves ("half") or whose even and odd elements ("interleaved") are `first` and `second`."""
    a, b = cut_of(first), cut_of(second)
    if a is None or b is None or a.source is not b.source or a.size != b.size:
        return None
    step, apart = (1, a.size) if pairing == "half" else (2, 1)
    if a.step != step or b.step != step or b.start - a.start != apart:
        return None
    if a.start == 0 and 2 * a.size == a.source.shape[-1]:
        return a.source
    out: Node = slice_(a.source, axis=-1, start=a.start, stop=a.start + 2 * a.size)
    return out
