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


def span(ref: Ref) -> Span:
    """From the first to the last byte that the value occupies, gaps included."""
    size = DTYPES[ref.dtype].itemsize
    reach = sum((n - 1) * s for n, s in zip(ref.shape, ref.strides, strict=True))
    start, space = ref.offset, ref.space + ref.slot
    return Span(space, start, start + (reach + 1) * size if 0 not in ref.shape else start)


def reads(call: Call) -> list[Span]:
    return [span(r) for r in call.operands if r is not None and r.space != "weights"]


def writes(call: Call) -> list[Span]:
    scratch = [Span(ARENA, call.scratch[0], sum(call.scratch))] if call.scratch[1] else []
    return [span(r) for r in call.results] + scratch


def conflict(a: Call, b: Call) -> bool:
    """Whether the order of the two calls matters."""
    writes_a, writes_b = writes(a), writes(b)
    pairs = [(w, r) for w in writes_a for r in [*reads(b), *writes_b]] + [(w, r) for w in writes_b for r in reads(a)]
    return any(w.meets(r) for w, r in pairs)


def with_dependences(calls: Sequence[Call]) -> tuple[Call, ...]:
    """The calls with `after` filled: the fewest edges whose paths order all conflicting pairs."""
    before: list[int] = []  # bit set of everything that must precede call i
    result = []
    for i, call in enumerate(calls):
        known, after = 0, []
        for j in range(i - 1, -1, -1):
            if not known >> j & 1 and conflict(calls[j], call):
                after.append(j)
                known |= before[j] | 1 << j
        before.append(known)
        result.append(replace(call, after=tuple(sorted(after))))
    return tuple(result)


def verify_no_race(calls: Sequence[Call]) -> None:
    """Raise Race unless every conflicting pair is ordered by a path of `after` edges."""
    before: list[int] = []
    for i, call in enumerate(calls):
        known = 0
        for j in call.after:
            if not 0 <= j < i:
                raise Race(f"call {i} ({call.name}) waits for call {j}, which does not come before it")
            known |= before[j] | 1 << j
        before.append(known)
        for j in range(i):
            if not known >> j & 1 and conflict(calls[j], call):
                raise Race(f"calls {j} ({calls[j].op} {calls[j].name}) and {i} ({call.op} {call.name}) may run at once")
