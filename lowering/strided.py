"""Strided views: which reshapes, transposes, slices and broadcasts move no data.

A Strided says where element (i, j, ...) of a value lies in the row-major storage of another:
offset + sum(index * stride).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Strided:
    """Offset and strides are in elements of the storage."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @staticmethod
    def packed(shape: tuple[int, ...]) -> Strided:
        strides, step = [], 1
        for extent in reversed(shape):
            strides.append(step)
            step *= extent
        return Strided(shape, tuple(reversed(strides)))

    @property
    def is_packed(self) -> bool:
        """Row-major without gaps from element 0 on; strides of axes with one element do not matter."""
        wanted = Strided.packed(self.shape)
        same = all(n == 1 or a == b for n, a, b in zip(self.shape, self.strides, wanted.strides, strict=True))
        return self.offset == 0 and same

    @property
    def is_dense(self) -> bool:
        """Touches each of the first `size` elements of the storage exactly once, in any order."""
        step = 1
        for stride, extent in sorted((s, n) for n, s in zip(self.shape, self.strides, strict=True) if n > 1):
            if stride != step:
                return False
            step *= extent
        return self.offset == 0

    def transpose(self, perm: tuple[int, ...]) -> Strided:
        """`perm` permutes the last axes, as in the op."""
        lead = len(self.shape) - len(perm)
        shape = self.shape[:lead] + tuple(self.shape[p] for p in perm)
        return Strided(shape, self.strides[:lead] + tuple(self.strides[p] for p in perm), self.offset)

    def slice(self, axis: int, start: int, stop: int, step: int) -> Strided:
        i = len(self.shape) + axis
        shape = self.shape[:i] + (-((start - stop) // step),) + self.shape[i + 1 :]
        strides = self.strides[:i] + (self.strides[i] * step,) + self.strides[i + 1 :]
        return Strided(shape, strides, self.offset + start * self.strides[i])

    def broadcast(self, shape: tuple[int, ...]) -> Strided:
        lead = len(shape) - len(self.shape)
        own = zip(self.shape, self.strides, shape[lead:], strict=True)
        return Strided(shape, (0,) * lead + tuple(0 if n == 1 and m != 1 else s for n, s, m in own), self.offset)

    def reshape(self, shape: tuple[int, ...]) -> Strided | None:
        """The view with another shape, or None where elements would have to move."""
        runs: list[tuple[int, int]] = []  # maximal axes (extent, stride of the last element), outermost first
        for extent, stride in zip(self.shape, self.strides, strict=True):
            if extent == 1:
                continue
            if runs and runs[-1][1] == extent * stride:
                runs[-1] = (runs[-1][0] * extent, stride)
            else:
                runs.append((extent, stride))
        if 0 in self.shape:
            return Strided.packed(shape)
        strides: list[int] = []
        left, step = runs.pop() if runs else (1, 1)
        for extent in reversed(shape):
            if extent > 1 and left == 1:
                if not runs:
                    return None
                left, step = runs.pop()
            if left % extent:
                return None
            strides.append(step)
            left, step = left // extent, step * extent
        return Strided(shape, tuple(reversed(strides)), self.offset) if left == 1 and not runs else None

    @property
    def last(self) -> int:
        """The highest element of the storage that the view touches."""
        return self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
