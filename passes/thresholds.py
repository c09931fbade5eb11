"""Integers and truth values as functions of one device scalar s.

An integer is base + k s with a known array `base`. A bool is true from a known threshold of s on, or up to one:

    iota(6) < n + 2        true where n >= [-1, 0, 1, 2, 3, 4]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from frtc.lowering.ir import Node

Array = np.ndarray[Any, Any]
NEVER = np.int64(2**40)  # a threshold that no scalar reaches; its negative: always


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


def difference(a: Integers, b: Integers) -> Integers:
    if a.s is not None and b.s is not None and a.s is not b.s:
        raise Unknown("depends on two device scalars")
    k = a.k - b.k
    return Integers(a.base - b.base, k, (a.s or b.s) if k else None)


def below(d: Integers, limit: int) -> Bools:
    """d < limit"""
    if d.k == 0:
        return Bools(np.where(d.base < limit, -NEVER, NEVER), None)
    if d.k == 1:
        return Bools(limit - d.base, d.s, False)
    if d.k == -1:
        return Bools(d.base - limit + 1, d.s)
    raise Unknown(f"compares with {d.k} times a device scalar")


def together(args: list[Value]) -> list[Bools]:
    bools = [a for a in args if isinstance(a, Bools)]
    if len(bools) < len(args):
        raise Unknown("mixes integers and bools")
    model = next((b for b in bools if b.s is not None), bools[0])
    return [b.like(model) for b in bools]


def both(x: Bools, y: Bools) -> Bools:
    """x and y"""
    x, y = together([x, y])
    return Bools((np.maximum if x.rising else np.minimum)(x.at, y.at), x.s, x.rising)
