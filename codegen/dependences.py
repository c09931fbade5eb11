"""True dependences between the calls of a program, and the verifier that nothing races.

Two calls conflict if one writes bytes that the other reads or writes. The later one then waits for the earlier one;
everything else may run at once. The verifier derives the order anew from the finished records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from frtc.kernels.dtypes import DTYPES
from frtc.runtime.plan import ARENA, Call, Ref


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [start, end) of a space that a call touches."""

    space: str
    start: int
    end: int

    def meets(self, other: Span) -> bool:
        return self.space == other.space and self.start < other.end and other.start < self.end


class Race(Exception):
    """Two calls that may run at once touch the same bytes, one of them writing. Always a bug in codegen."""


def span(ref: Ref, rounds: int = 1) -> Span:
    """From the first to the last byte that the value occupies in any round, gaps included."""
    size = DTYPES[ref.dtype].itemsize
    reach = sum((n - 1) * s for n, s in zip(ref.shape, ref.strides, strict=True))
    start, space = ref.offset, ref.space + ref.slot
    nbytes = (reach + 1) * size if 0 not in ref.shape else 0
    return Span(space, start, start + nbytes + ref.step * (rounds - 1))


@dataclass(frozen=True, slots=True)
class Touched:
    """What a call reads (weights never change) and writes."""

    reads: tuple[Span, ...]
    writes: tuple[Span, ...]

    @staticmethod
    def by(call: Call, rounds: int) -> Touched:
        scratch = (Span(ARENA, call.scratch[0], sum(call.scratch)),) if call.scratch[1] else ()
        read = tuple(span(r, rounds) for r in call.operands if r is not None and r.space != "weights")
        return Touched(read, (*(span(r, rounds) for r in call.results), *scratch))

    def conflicts(self, other: Touched) -> bool:
        """Whether the order of the two calls matters."""
        return any(w.meets(s) for w in self.writes for s in (*other.reads, *other.writes)) or any(
            w.meets(s) for w in other.writes for s in self.reads
        )


def with_dependences(calls: Sequence[Call], rounds: Sequence[int] = ()) -> tuple[Call, ...]:
    """The calls with `after` filled: the fewest edges whose paths order all conflicting pairs, and those whose blocks
    wait for each other: two of them at once could each hold what the other needs.

    rounds   of the repeat around the program of each call, 1 by default: its tables step as often
    """
    touched, meets = _touched(calls, rounds), [any(launch.meets for launch in call.launches) for call in calls]
    before: list[int] = []  # bit set of everything that must precede call i
    result = []
    for i, call in enumerate(calls):
        known, after = 0, []
        for j in range(i - 1, -1, -1):
            if not known >> j & 1 and ((meets[i] and meets[j]) or touched[j].conflicts(touched[i])):
                after.append(j)
                known |= before[j] | 1 << j
        before.append(known)
        result.append(replace(call, after=tuple(sorted(after))))
    return tuple(result)


def verify_no_race(calls: Sequence[Call], rounds: Sequence[int] = ()) -> None:
    """Raise Race unless every conflicting pair is ordered by a path of `after` edges."""
    touched = _touched(calls, rounds)
    before: list[int] = []
    for i, call in enumerate(calls):
        known = 0
        for j in call.after:
            if not 0 <= j < i:
                raise Race(f"call {i} ({call.name}) waits for call {j}, which does not come before it")
            known |= before[j] | 1 << j
        before.append(known)
        for j in range(i):
            if not known >> j & 1 and touched[j].conflicts(touched[i]):
                raise Race(f"calls {j} ({calls[j].op} {calls[j].name}) and {i} ({call.op} {call.name}) may run at once")


def _touched(calls: Sequence[Call], rounds: Sequence[int]) -> list[Touched]:
    return [Touched.by(call, often) for call, often in zip(calls, rounds or [1] * len(calls), strict=True)]
