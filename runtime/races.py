"""Do calls race? Derived anew from what they touch, whatever made the Plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from frtc.kernels.dtypes import DTYPES
from frtc.runtime.plan import ARENA, STATE, WEIGHTS, Call, Ref

MEETING = "\0meeting"  # a space of one byte, beside those of the Plan
Span = tuple[str, int, int]  # space (a slot's name after it), first byte, byte behind the last


def extent(ref: Ref, rounds: int) -> Span:
    """The bytes that a value occupies in any round, gaps included."""
    reach = sum((n - 1) * stride for n, stride in zip(ref.shape, ref.strides, strict=True))
    nbytes = 0 if 0 in ref.shape else (reach + 1) * DTYPES[ref.dtype].itemsize
    return f"{ref.space}{ref.slot}", ref.offset, ref.offset + nbytes + ref.step * (rounds - 1)


def race_in(calls: Sequence[Call], rounds: Sequence[int]) -> str:
    """ "" where a path of `after` orders calls that touch the same bytes, one of them writing, and those whose blocks
    wait for each other; else which two are not in order. rounds: of the repeat around each of them.

    The bytes are cut into segments at every first and last byte. It is enough that each call comes after the last
    writer of its segments, and a writer after the readers since: everything earlier is ordered before those.
    """
    each = list(zip(calls, rounds, strict=True))
    reads = [[extent(r, often) for r in c.operands if r is not None and r.space != WEIGHTS] for c, often in each]
    writes = [[*(extent(r, often) for r in c.results), *_workspace(c)] for c, often in each]
    segments = _Segments(reads + writes)
    before: list[int] = []  # bit set of the calls that precede each call
    for i, call in enumerate(calls):
        known = 0
        for j in call.after:
            known |= before[j] | 1 << j
        before.append(known)
        wants = segments.touch(reads[i], i, writes=False) | segments.touch(writes[i], i, writes=True)
        if loose := wants & ~known & ~(1 << i):
            other = loose.bit_length() - 1
            why = "share bytes, or their blocks wait for each other"
            return f"calls {other} ({calls[other].op}) and {i} ({call.op}) may run at once but {why}"
    return ""


def _workspace(call: Call) -> Iterator[Span]:
    """And what calls of launches whose blocks wait for each other write in turn: at once, each could hold blocks of the
    device that the other waits for."""
    if any(launch.meets for launch in call.launches):
        yield MEETING, 0, 1
    for space, (start, nbytes) in ((ARENA, call.scratch), (STATE, call.counters)):
        if nbytes:
            yield space, start, start + nbytes


class _Segments:
    """Bytes that are always touched together. Of each segment: bit sets of the last writer and of the readers since."""

    def __init__(self, spans: Sequence[Sequence[Span]]) -> None:
        cuts: dict[str, set[int]] = {}
        for space, start, end in (span for group in spans for span in group):
            cuts.setdefault(space, set()).update((start, end))
        self.index = {space: {at: i for i, at in enumerate(sorted(points))} for space, points in cuts.items()}
        self.writer = {space: [0] * len(points) for space, points in cuts.items()}
        self.readers = {space: [0] * len(points) for space, points in cuts.items()}

    def touch(self, spans: Sequence[Span], call: int, writes: bool) -> int:
        """Bit set of the calls that must come before `call` touches these bytes."""
        wants = 0
        for space, start, end in spans:
            writer, readers = self.writer[space], self.readers[space]
            for i in range(self.index[space][start], self.index[space][end]):
                wants |= writer[i]
                if writes:
                    wants |= readers[i]
                    writer[i], readers[i] = 1 << call, 0
                else:
                    readers[i] |= 1 << call
        return wants
