"""Rows that a launch may read before it waits: those that nothing before it in its program writes.

A launch may begin before those that it depends on have ended, and waits for them before it reads what they write. Rows
of keys and values that an earlier program has cached are complete long before, if some launch that comes before this
one has waited for all that came before itself: one that lets the next launch begin only then.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from frtc.codegen.dependences import Span, span
from frtc.kernels.dtypes import DTYPES
from frtc.runtime.plan import Call, Ref


def settled_rows(calls: Sequence[Call], at: int, places: Sequence[int], begun: Sequence[bool], rounds: int = 1) -> int:
    """How many leading rows (axis -2) of all these operands of calls[at] may be read before it waits; 0 where none may.

    begun   calls that let the next one begin before they have waited
    """
    if all(begun[j] for j in _before(calls, at)):
        return 0
    written = [span(result, rounds) for call in calls for result in call.results]
    refs = [calls[at].operands[place] for place in places]
    return min((_untouched(ref, written) for ref in refs if ref is not None), default=0)


def _before(calls: Sequence[Call], at: int) -> set[int]:
    """All calls that a path of `after` leads to."""
    found, stack = set[int](), list(calls[at].after)
    while stack:
        j = stack.pop()
        if j not in found:
            found.add(j)
            stack += calls[j].after
    return found


def _untouched(ref: Ref, written: Sequence[Span]) -> int:
    """Rows from the first on whose bytes none of the spans meets, in every matrix of the operand."""
    size, (*lead, rows, _), (*steps, row, _) = DTYPES[ref.dtype].itemsize, ref.shape, ref.strides
    if ref.step or row <= 0:
        return 0
    for index in product(*map(range, lead)):
        start = ref.offset + size * sum(i * step for i, step in zip(index, steps, strict=True))
        here = Span(ref.space + ref.slot, start, start + rows * row * size)
        for other in written:
            if here.meets(other):
                rows = min(rows, max(0, (other.start - start) // (row * size)))
    return rows
