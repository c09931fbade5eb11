"""The weights of two sides, by name: equal to the bit, or how far apart. Read in pieces, so memory stays bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from frtc.console import size
from frtc.diff_sides import Weight

Array = np.ndarray[Any, Any]
PIECE = 1 << 20  # elements compared at once: 8 MiB of float64


@dataclass(frozen=True, slots=True)
class Moved:
    """A weight that differs. a, b: type and shape

    relative   ||b - a|| / ||a||; None where the shapes differ, a is all zero, or a value is not finite
    largest    the largest absolute difference; None where the shapes differ, or a value is not finite
    """

    name: str
    a: str
    b: str
    relative: float | None
    largest: float | None

    @property
    def rank(self) -> tuple[bool, bool, float, str]:
        """Sorts by size of change: other shapes first, then the largest relative difference."""
        return self.largest is not None, self.relative is not None, -(self.relative or 0.0), self.name


@dataclass(frozen=True, slots=True)
class Weights:
    """both: names on both sides; equal: of those, equal to the bit; only_a, only_b: (name, type)."""

    both: int
    equal: int
    moved: tuple[Moved, ...]
    only_a: tuple[tuple[str, str], ...] = ()
    only_b: tuple[tuple[str, str], ...] = ()

    @property
    def differ(self) -> bool:
        return bool(self.moved or self.only_a or self.only_b)

    def data(self) -> dict[str, Any]:
        return {**asdict(self), "moved": [asdict(m) for m in self.moved]}


def compare_weights(
    a: Mapping[str, Weight], b: Mapping[str, Weight], progress: Callable[[str, float], None]
) -> Weights:
    """By name. Equal digests are equal bytes; what has none, or other ones, is read."""
    shared = [name for name in a if name in b]
    total, done = max(sum(a[name].nbytes for name in shared), 1), 0
    moved: list[Moved] = []
    for name in shared:
        progress(f"compare weights, {size(done)} of {size(total)}", done / total)
        done += a[name].nbytes
        if found := _moved(name, a[name], b[name]):
            moved.append(found)
    only_a = tuple((name, w.type) for name, w in a.items() if name not in b)
    only_b = tuple((name, w.type) for name, w in b.items() if name not in a)
    ranked = tuple(sorted(moved, key=lambda m: m.rank))
    return Weights(len(shared), len(shared) - len(moved), ranked, only_a, only_b)


def _moved(name: str, a: Weight, b: Weight) -> Moved | None:
    if a.type == b.type and a.digest and a.digest == b.digest:
        return None
    if a.shape != b.shape:
        return Moved(name, a.type, b.type, None, None)
    equal, relative, largest = distance(a.array(), rows_of(b.array()))
    return None if equal and a.dtype == b.dtype else Moved(name, a.type, b.type, relative, largest)


def rows_of(array: Array) -> Iterator[Array]:
    """The array's rows in pieces of about PIECE elements; a scalar is one row."""
    whole = np.atleast_1d(array)
    step = max(1, PIECE // max(1, whole[:1].size))
    for start in range(0, len(whole), step):
        yield whole[start : start + step]


def distance(a: Array, pieces: Iterator[Array]) -> tuple[bool, float | None, float | None]:
    """(equal to the bit, ||b - a|| / ||a||, max |b - a|) of an array and the rows of another of the same shape."""
    whole, at = np.atleast_1d(a), 0
    equal, moved, norm, largest = True, 0.0, 0.0, 0.0
    for y in pieces:
        x = whole[at : at + len(y)]
        at += len(y)
        same = x.dtype == y.dtype and _bytes(x) == _bytes(y)
        wide = x.astype(np.float64)
        norm += float(np.vdot(wide, wide))
        if same or not y.size:
            continue
        np.subtract(y, wide, out=wide, casting="unsafe", dtype=np.float64)
        equal, moved = False, moved + float(np.vdot(wide, wide))
        largest = max(largest, float(np.abs(wide, out=wide).max()))
    if not moved:
        return equal, 0.0, 0.0
    if not np.isfinite(moved + norm):
        return equal, None, None
    return equal, (moved / norm) ** 0.5 if norm else None, largest


def _bytes(array: Array) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
