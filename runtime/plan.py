"""What a Plan says: the program as immutable records. runtime/plan_file.py reads and writes them, docs/plan-format.md
explains the bytes.

A Plan is pointer-only. A value is a Ref: a space, a byte offset, and how its elements lie there. A Call is one op of
the IR on Refs, made of one or more launches; the device path needs only the launches, the emulator only the ops.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from frtc.kernels.dtypes import DTYPES

SCHEMA = "frtc.plan/1"
# Bytes: rows of weights, arena and state start at multiples of ROW_ALIGN, long ones of LONG_ALIGN: a tile of rows that
# begin in the middle of a 128-byte line costs wgmma's products up to 1.6 times the time (512 x 1152 x 4304 on an H200).
ROW_ALIGN, LONG_ALIGN, LONG = 16, 128, 1024


def row_pitch(nbytes: int) -> int:
    """Bytes from row to row where a row has so many."""
    align = LONG_ALIGN if nbytes >= LONG else ROW_ALIGN
    return -(-nbytes // align) * align


WEIGHTS, ARENA, STATE, SLOT = "weights", "arena", "state", "slot"
SPACES = (WEIGHTS, ARENA, STATE, SLOT)


@dataclass(frozen=True, slots=True)
class Ref:
    """A value in memory.

    space     "weights": the Plan's weights, in one block; "arena": scratch of one run; "state": memory that outlives a
              run (values that pass from program to program, KV cache); "slot": the input or output named by `slot`
    offset    byte offset of element 0
    step      bytes added per round, for tables indexed by the round of the enclosing repeat
    shape, strides   in elements
    """

    space: str
    offset: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    step: int = 0
    slot: str = ""


@dataclass(frozen=True, slots=True)
class TensorMap:
    """How the tensor memory accelerator sees an operand or a result; encoded when its address is known.

    of        ("operand", i) or ("result", i): the map begins at element 0 of that Ref of the call and stays inside it
    extents   in elements, innermost axis first; up to five axes
    strides   bytes, of every axis but the innermost, which has no gaps
    box       what one copy moves, in elements, axes as in `extents`
    swizzle   bytes: 0, 32, 64 or 128
    """

    of: tuple[str, int]
    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch.

    kernel    index into Program.kernels
    smem      dynamic shared memory, bytes
    params    (kind, value) in the kernel's order: "operand" and "result" take the address of that Ref of the call
              (null where the operand is absent), "scratch" the call's workspace plus `value` bytes, "counters" the same
              for its counters, "tensormap" that entry of `tensormaps` by value, "i32", "i64", "f32" a number
    early     it may begin before the launches that it depends on have ended: its kernel waits for them itself
    meets     its blocks wait for each other: all of them must be on multiprocessors at once
    """

    kernel: int
    grid: tuple[int, int, int]
    block: int
    smem: int
    params: tuple[tuple[str, int | float], ...]
    tensormaps: tuple[TensorMap, ...] = ()
    early: bool = False
    meets: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """One op. Absent optional operands are None.

    name      module path and source line it came from
    after     indices of earlier calls of the same program that must be complete before this one starts
    scratch   byte offset of the workspace in the arena, and its size
    counters  byte offset in the state space, and size, of memory that is zero at first and that every run leaves zero
    """

    name: str
    op: str
    attrs: Mapping[str, Any]
    operands: tuple[Ref | None, ...]
    results: tuple[Ref, ...]
    launches: tuple[Launch, ...]
    after: tuple[int, ...] = ()
    scratch: tuple[int, int] = (0, 0)
    counters: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Entry:
    """A device function: the cubin (a tensor of the Plan) and its symbol. `smem` is the most any launch asks for."""

    cubin: str
    symbol: str
    smem: int


@dataclass(frozen=True, slots=True)
class Stage:
    """A program: its calls in a legal order. One inference is made of stages; each can also run alone."""

    name: str
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class Run:
    stage: str


@dataclass(frozen=True, slots=True)
class Repeat:
    count: int
    body: tuple[Run | Repeat, ...]


@dataclass(frozen=True, slots=True)
class Overlap:
    """The stages that the schedule runs first, whose calls wait for calls instead of whole stages.

    stages   in the order of the schedule, each once
    after    of each of their calls, all in one sequence: indices of earlier ones that must be complete before it starts
    """

    stages: tuple[str, ...]
    after: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """External memory: an input or an output of an inference, row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return DTYPES[self.dtype].itemsize * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """A weight: a tensor of the Plan. The Plan's recipe says how it is made of the model's parameters."""

    name: str
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in memory: with two or more axes, the last one is padded to the pitch of rows."""
        if len(self.shape) < 2:
            return self.shape
        size = DTYPES[self.dtype].itemsize
        return (*self.shape[:-1], row_pitch(self.shape[-1] * size) // size)

    @property
    def nbytes(self) -> int:
        return DTYPES[self.dtype].itemsize * math.prod(self.stored_shape)


@dataclass(frozen=True, slots=True)
class BuiltFor:
    """The GPU the cubins are for.

    sms   multiprocessors that it must have, because blocks of some launches wait for each other; 0: any number
    """

    name: str
    sm: int
    nvcc: str
    min_driver: int
    family: str
    evidence: str
    sms: int = 0


@dataclass(frozen=True, slots=True)
class Program:
    """Everything that decides actions, apart from the bytes of weights and cubins (which the container holds).

    weights_nbytes, arena_nbytes, state_nbytes   device memory, bytes
    overlap   None: each stage starts when the one before it is complete
    policy    the policy spec as JSON (runtime/policy.py); lists stay lists, unlike in Call.attrs
    """

    model: str
    target: BuiltFor
    weights_nbytes: int
    arena_nbytes: int
    state_nbytes: int
    kernels: tuple[Entry, ...]
    weights: tuple[WeightEntry, ...]
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    stages: tuple[Stage, ...]
    schedule: tuple[Run | Repeat, ...]
    policy: dict[str, Any] = field(default_factory=dict)
    overlap: Overlap | None = None

    def stage(self, name: str) -> Stage:
        return next(s for s in self.stages if s.name == name)


def joined(stages: Sequence[Stage], after: Sequence[tuple[int, ...]]) -> list[Call]:
    """The calls of all of them in one sequence, each with what it waits for there."""
    calls = (call for stage in stages for call in stage.calls)
    return [replace(call, after=waits) for call, waits in zip(calls, after, strict=True)]


def unrolled(steps: tuple[Run | Repeat, ...], round: int = 0) -> list[tuple[str, int]]:
    """The stages of one inference in order, each with the round its tables are indexed by."""
    order: list[tuple[str, int]] = []
    for step in steps:
        if isinstance(step, Run):
            order.append((step.stage, round))
        else:
            for k in range(step.count):
                order += unrolled(step.body, k)
    return order
