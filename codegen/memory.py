"""Memory planner: intermediates of a program share one arena; two share bytes only if they are never alive together.

Offline first-fit over buffers in order of falling size, the usual heuristic for offline memory allocation (for example
"greedy by size" in Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGN = 256  # bytes; the alignment of cuMemAlloc, and more than any vector load or TMA box needs


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A buffer of `nbytes` that must hold its contents from call `first` to call `last`, both included."""

    nbytes: int
    first: int
    last: int


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def plan_arena(buffers: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Byte offset of each buffer, and the size of the arena."""
    offsets = [0] * len(buffers)
    placed: list[int] = []
    for i in sorted(range(len(buffers)), key=lambda i: (-buffers[i].nbytes, i)):
        here = buffers[i]
        rivals = sorted(
            (offsets[j], offsets[j] + aligned(buffers[j].nbytes))
            for j in placed
            if buffers[j].first <= here.last and here.first <= buffers[j].last
        )
        at = 0
        for start, end in rivals:
            if start - at >= aligned(here.nbytes):
                break
            at = max(at, end)
        offsets[i] = at
        placed.append(i)
    size = max((offsets[i] + aligned(b.nbytes) for i, b in enumerate(buffers)), default=0)
    return offsets, size
