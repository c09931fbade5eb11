"""What a mask is, as a function of one device scalar: the numbers of an expression, and for each bool when it is true.

Masks are made of ranges, comparisons, logic and at most one device scalar s (a prompt's length, a position). Ranges are
known, so every integer is base + k s with a known array `base`, and every bool is known or turns at a known threshold:

    iota(6) < n + 2        true where n >= [-1, 0, 1, 2, 3, 4]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from frtc.kernels.dtypes import DTYPES
from frtc.kernels.reference import REFERENCES
from frtc.lowering.interpret import run
from frtc.lowering.ir import Graph, Node, walk

Array = np.ndarray[Any, Any]
NEVER = np.int64(2**40)  # a threshold that no scalar reaches; its negative: always
MAX_ELEMENTS = 1 << 24


class Unknown(Exception):
    """The expression is not of this kind; the text says why, for the report."""


@dataclass(frozen=True, slots=True)
class Integers:
    """base + k * s"""

    base: Array
    k: int
    s: Node | None


@dataclass(frozen=True, slots=True)
class Bools:
    """True where s >= at if `rising`, else where s < at. Known truth is a threshold of -NEVER or NEVER."""

    at: Array
    s: Node | None
    rising: bool = True

    def __invert__(self) -> Bools:
        """not: thresholds stay, the direction turns; without a scalar, known truth turns."""
        return Bools(-self.at, None) if self.s is None else Bools(self.at, self.s, not self.rising)

    def like(self, other: Bools) -> Bools:
        """The same truth with the scalar and the direction of `other`."""
        if self.s is None and not other.rising:
            return Bools(-self.at, other.s, False)
        if self.s is None or (self.s is other.s and self.rising == other.rising):
            return Bools(self.at, other.s, other.rising)
        raise Unknown("depends on two device scalars" if self.s is not other.s else "bounds keys on both sides")


Value = Integers | Bools


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
        raise Unknown(f"depends on floats ({node.op})")
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
        return _difference(a, Integers(-sign * b.base, -sign * b.k, b.s))

    return step


def _difference(a: Integers, b: Integers) -> Integers:
    if a.s is not None and b.s is not None and a.s is not b.s:
        raise Unknown("depends on two device scalars")
    k = a.k - b.k
    return Integers(a.base - b.base, k, (a.s or b.s) if k else None)


def _below(limit: int, negate: bool) -> Callable[[Node, list[Value]], Value]:
    """a - b < limit, or not"""

    def step(node: Node, args: list[Value]) -> Value:
        a, b = args
        if not isinstance(a, Integers) or not isinstance(b, Integers):
            raise Unknown("compares bools")
        d = _difference(a, b)
        if d.k not in (-1, 0, 1):
            raise Unknown(f"compares with {d.k} times a device scalar")
        if d.k == 0:
            truth = Bools(np.where(d.base < limit, -NEVER, NEVER), None)
        else:
            truth = Bools(limit - d.base, d.s, False) if d.k == 1 else Bools(d.base - limit + 1, d.s)
        return ~truth if negate else truth

    return step


def _together(args: list[Value]) -> list[Bools]:
    bools = [a for a in args if isinstance(a, Bools)]
    if len(bools) < len(args):
        raise Unknown("mixes integers and bools")
    model = next((b for b in bools if b.s is not None), bools[0])
    return [b.like(model) for b in bools]


def both(x: Bools, y: Bools) -> Bools:
    """x and y"""
    x, y = _together([x, y])
    return Bools((np.maximum if x.rising else np.minimum)(x.at, y.at), x.s, x.rising)


def _and(node: Node, args: list[Value]) -> Value:
    x, y = _together(args)
    return both(x, y)


def _or(node: Node, args: list[Value]) -> Value:
    x, y = _together(args)
    return ~both(~x, ~y)


def _not(node: Node, args: list[Value]) -> Value:
    return ~_together(args)[0]


def _concat(node: Node, args: list[Value]) -> Value:
    parts = _together(args)
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
