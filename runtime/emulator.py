"""The emulator: the calls of a Plan on the CPU, over the same bytes as on the GPU, each op by its reference.

Slow and exact. Weights stay in the mapped file and are widened one op at a time, so that a Plan needs little memory
beyond its arena.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from frtc.errors import EnvironmentFault, FrtcError
from frtc.kernels.dtypes import DTYPES, is_float, round_to
from frtc.kernels.reference import REFERENCES
from frtc.runtime.executor import Array, Executor
from frtc.runtime.plan import ARENA, SLOT, STATE, WEIGHTS, Call, Ref, Slot, unrolled
from frtc.runtime.plan_file import Plan
from frtc.runtime.timing import took_us

POISON = 0xFF  # a NaN in every float type, -1 in every integer


class Emulator(Executor):
    """`poison`: scratch memory is filled with NaN before every stage, so that a read of anything stale shows.

    check_finite   off by default: what a fault makes is to be looked at
    """

    def __init__(self, plan: Plan, poison: bool = False, check_finite: bool = False) -> None:
        super().__init__(plan.program, check_finite)
        self.poison = poison
        program = plan.program
        sizes = {ARENA: program.arena_nbytes, STATE: program.state_nbytes}
        sizes |= {SLOT + slot.name: slot.nbytes for slot in (*program.inputs, *program.outputs)}
        self.memory: dict[str, Any] = {WEIGHTS: plan.weights}
        try:
            self.memory |= {space: np.zeros(nbytes, np.uint8) for space, nbytes in sizes.items()}
        except MemoryError:
            what = f"the Plan needs {sum(sizes.values()):,} bytes beside its weights, which this machine does not have"
            raise EnvironmentFault("env.memory", what) from None

    def _run(self, meanwhile: Callable[[], object]) -> None:
        meanwhile()
        for name, round in unrolled(self.program.schedule):
            self.run_stage(name, round)

    def run_stage(self, name: str, round: int = 0) -> None:
        self._check_stage(name, round)
        if self.poison:
            self.memory[ARENA].fill(POISON)
        for call in self.program.stage(name).calls:
            self._evaluate(call, round)

    def reset(self) -> None:
        self._require_open()
        self.memory[STATE].fill(0)

    def close(self) -> None:
        self.closed = True
        self.memory.clear()

    def view(self, ref: Ref, round: int = 0) -> Array:
        """The value that `ref` describes, in place."""
        self._require_open()
        dtype = DTYPES[ref.dtype].numpy
        strides = [stride * dtype.itemsize for stride in ref.strides]
        return np.ndarray(ref.shape, dtype, self.memory[ref.space + ref.slot], ref.offset + round * ref.step, strides)

    def peek(self, ref: Ref, round: int = 0) -> Array:
        return self.view(ref, round).copy()

    def _evaluate(self, call: Call, round: int) -> None:
        operands = [None if ref is None else self.view(ref, round) for ref in call.operands]
        try:
            values = REFERENCES[call.op](*operands, **call.attrs)
            results = values if isinstance(values, tuple) else (values,)
            stored = [_stored(np.asarray(v), ref) for v, ref in zip(results, call.results, strict=True)]
        except Exception as fault:  # attributes come from a file: a reference may fail on them in any way
            rows = [("call", call.name), ("reason", f"{type(fault).__name__}: {fault}")]
            raise FrtcError("plan.invalid", f"{call.op} cannot be evaluated on its operands", rows) from fault
        for value, ref in zip(stored, call.results, strict=True):
            self.view(ref, round)[...] = value

    def _host(self, slot: Slot) -> Array:
        array: Array = self.memory[SLOT + slot.name].view(DTYPES[slot.dtype].numpy).reshape(slot.shape)
        return array

    def _sample(self) -> dict[str, float]:
        stages: dict[str, float] = {}
        for name, round in unrolled(self.program.schedule):
            stages[name] = stages.get(name, 0.0) + took_us(lambda: self.run_stage(name, round))  # noqa: B023
        total = sum(stages.values())
        return {"total": total, "replay": total, "input": 0.0, **stages, "output": 0.0}


def _stored(value: Array, ref: Ref) -> Array:
    """`value` rounded once to the type of `ref`; a copy where it is a view, which the results may overwrite."""
    if value.shape != ref.shape:
        raise ValueError(f"the result has shape {value.shape}, its place {ref.shape}")
    stored = round_to(value, ref.dtype) if is_float(ref.dtype) else value.astype(DTYPES[ref.dtype].numpy, copy=False)
    return stored if stored.flags.owndata else stored.copy()
