"""Which part of the arena holds what, and for how long: for the picture of a Plan's memory."""

from __future__ import annotations

from dataclasses import dataclass

from frtc.kernels.dtypes import DTYPES
from frtc.runtime.plan import ARENA, Call, Ref, Stage


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Bytes start..end of the arena hold what call `first` of the stage wrote, up to the end of call `last`."""

    name: str
    op: str
    first: int
    last: int
    start: int
    end: int


def lifetimes(stage: Stage) -> list[Lifetime]:
    """Results end with their last reader or with the next write into their bytes; workspaces with their call."""
    found = []
    for i, call in enumerate(stage.calls):
        for ref in call.results:
            if ref.space == ARENA:
                start, end = _span(ref)
                found.append(Lifetime(call.name, call.op, i, _last(stage.calls, i, start, end), start, end))
        at, nbytes = call.scratch
        if nbytes:
            found.append(Lifetime(f"{call.name}, workspace", call.op, i, i, at, at + nbytes))
    return found


def _last(calls: tuple[Call, ...], first: int, start: int, end: int) -> int:
    last = first
    for j in range(first + 1, len(calls)):
        if any(_meets(ref, start, end) for ref in calls[j].operands):
            last = j
        if any(_meets(ref, start, end) for ref in calls[j].results):
            break
    return last


def _meets(ref: Ref | None, start: int, end: int) -> bool:
    if ref is None or ref.space != ARENA:
        return False
    own_start, own_end = _span(ref)
    return own_start < end and start < own_end


def _span(ref: Ref) -> tuple[int, int]:
    """First byte, and the one behind the last."""
    if 0 in ref.shape:
        return ref.offset, ref.offset
    reach = sum((n - 1) * stride for n, stride in zip(ref.shape, ref.strides, strict=True))
    return ref.offset, ref.offset + (reach + 1) * DTYPES[ref.dtype].itemsize
