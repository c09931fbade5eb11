"""What the numbers and truth values of a mask are, found from the expression that makes it.

Masks are made of ranges, comparisons, logic and at most one device scalar (a prompt's length, a position). Ranges are
known; what an unknown integer of one element is made of does not matter: it is the scalar.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from frtc.kernels.dtypes import DTYPES
from frtc.kernels.reference import REFERENCES
from frtc.lowering.interpret import run
from frtc.lowering.ir import Graph, Node, walk
from frtc.passes.thresholds import NEVER, Bools, Integers, Unknown, Value, below, both, difference, together

MAX_ELEMENTS = 1 << 24


def value_of(node: Node, known: dict[Node, Value]) -> Value:
    """The value of an integer or bool expression; `known` keeps what was found. Raises Unknown."""
    if node not in known:
        known[node] = _value(node, known)
    return known[node]


def _value(node: Node, known: dict[Node, Value]) -> Value:
    if isinstance(node.type, tuple) or node.t.size > MAX_ELEMENTS:
        raise Unknown("is too large")
    if node.is_const:
        return _known(node)
    if node.t.is_float:
        raise Unknown(f"depends on floats ({node.get('name') or node.op})")
    step = _STEPS.get(node.op)
    try:
        if step is None:
            raise Unknown(f"depends on {node.get('name') or node.op}")
        return step(node, [value_of(a, known) for a in node.operands])
    except Unknown:
        if node.t.size == 1 and node.dtype != "bool":  # whatever it is made of: a device scalar
            return Integers(np.zeros(node.shape, np.int64), 1, node)
        raise


def _known(node: Node) -> Value:
    if any(n.op in ("weight", "tensor") for n in walk([node])):
        raise Unknown("depends on weights")
    array = run(Graph("mask", (), (("out", node),)), {})["out"]
    if node.dtype == "bool":
        return Bools(np.where(array, -NEVER, NEVER), None)
    whole = array.astype(np.int64)
    if not np.array_equal(whole, array):
        raise Unknown("depends on fractions")
    return Integers(whole, 0, None)


def _move(node: Node, args: list[Value]) -> Value:
    """An op that moves elements moves bases and thresholds alike."""
    attrs = dict(node.attrs)
    (x,) = args
    if isinstance(x, Integers):
        return Integers(REFERENCES[node.op](x.base, **attrs), x.k, x.s)
    return Bools(REFERENCES[node.op](x.at, **attrs), x.s, x.rising)


def _cast(node: Node, args: list[Value]) -> Value:
    (x,) = args
    if isinstance(x, Integers) and DTYPES[node.dtype].kind == "int" and DTYPES[node.dtype].itemsize >= 4:
        return x
    raise Unknown(f"casts {node.operands[0].dtype} to {node.dtype}")


def _linear(sign: int) -> Callable[[Node, list[Value]], Value]:
    """a + b, a - b"""

    def step(node: Node, args: list[Value]) -> Value:
        a, b = args
        if not isinstance(a, Integers) or not isinstance(b, Integers):
            raise Unknown("adds bools")
        return difference(a, Integers(-sign * b.base, -sign * b.k, b.s))

    return step


def _below(limit: int, negate: bool) -> Callable[[Node, list[Value]], Value]:
    """a - b < limit, or not"""

    def step(node: Node, args: list[Value]) -> Value:
        a, b = args
        if not isinstance(a, Integers) or not isinstance(b, Integers):
            raise Unknown("compares bools")
        truth = below(difference(a, b), limit)
        return ~truth if negate else truth

    return step


def _and(node: Node, args: list[Value]) -> Value:
    x, y = together(args)
    return both(x, y)


def _or(node: Node, args: list[Value]) -> Value:
    x, y = together(args)
    return ~both(~x, ~y)


def _not(node: Node, args: list[Value]) -> Value:
    return ~together(args)[0]


def _concat(node: Node, args: list[Value]) -> Value:
    parts = together(args)
    return Bools(np.concatenate([p.at for p in parts], node["axis"]), parts[0].s, parts[0].rising)


_STEPS: dict[str, Callable[[Node, list[Value]], Value]] = {
    "add": _linear(1),
    "sub": _linear(-1),
    "lt": _below(0, False),
    "le": _below(1, False),
    "gt": _below(1, True),
    "ge": _below(0, True),
    "and": _and,
    "or": _or,
    "not": _not,
    "cast": _cast,
    "concat": _concat,
    **dict.fromkeys(("reshape", "transpose", "broadcast", "slice"), _move),
}
