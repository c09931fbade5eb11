"""Which call departs first: call by call, the Plan on its device beside a second opinion.

Without a checkpoint the second opinion is the emulator, and the suspect a kernel. With one it is the interpreter, run
as typed on the program after all passes, and the suspect a weight, a pass or the Plan's writer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from frtc.policy import executor_for
from frtc.probe import by_call, read
from frtc.runtime.executor import Executor
from frtc.runtime.plan import Call, unrolled
from frtc.runtime.plan_file import Plan
from frtc.selftest import BARS, relative_error

Array = np.ndarray[Any, Any]
Opinion = Callable[[str, int, Call, int], list[Array] | None]  # stage, index of the call, call, round -> its results
SIXTEEN_BIT = ("bf16", "f16")


@dataclass(frozen=True, slots=True)
class Departure:
    """The first call whose results are not what the second opinion says; `name` is module path and source line."""

    stage: str
    index: int
    round: int
    op: str
    name: str
    error: float
    bar: float

    def __str__(self) -> str:
        where = f"{self.stage}/{self.index}" + (f", round {self.round}" if self.round else "")
        return f"{self.op} ({where}; {self.name}): relative error {self.error:.2e}, allowed {self.bar:.0e}"


def first_departure(
    plan: Plan,
    ordinal: int | None,
    inputs: Mapping[str, Array],
    opinion: Opinion,
    progress: Callable[[str, float], None],
) -> Departure | None:
    """Runs the Plan's calls one by one, in order."""
    with executor_for(by_call(plan), ordinal) as executor:
        give(executor, inputs)
        order = unrolled(executor.program.schedule)
        for i, (stage, round) in enumerate(order):
            progress("bisect", i / len(order))
            executor.run_stage(stage, round)
            name, _, index = stage.rpartition("/")
            call = plan.program.stage(name).calls[int(index)]
            expected = opinion(name, int(index), call, round)
            for ref, value in zip(call.results, expected or (), strict=False):
                error = relative_error(read(executor, ref, round), value)
                bar = BARS["bf16" if _rounds(call) else "f32"]
                if not error <= bar:
                    return Departure(name, int(index), round, call.op, call.name, error, bar)
    return None


class Emulated:
    """The emulator's opinion; it runs beside the device, call by call."""

    def __init__(self, plan: Plan, inputs: Mapping[str, Array]) -> None:
        self.executor = executor_for(by_call(plan), None)
        give(self.executor, inputs)

    def __call__(self, stage: str, index: int, call: Call, round: int) -> list[Array]:
        self.executor.run_stage(f"{stage}/{index}", round)
        return [read(self.executor, ref, round) for ref in call.results]


def give(executor: Executor, inputs: Mapping[str, Array]) -> None:
    executor.reset()
    for name, array in inputs.items():
        executor.set(name, array)


def _rounds(call: Call) -> bool:
    return any(r is not None and r.dtype in SIXTEEN_BIT for r in (*call.operands, *call.results))
