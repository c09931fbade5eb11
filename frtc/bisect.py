"""Which call departs first: call by call, the Plan on its device beside a second opinion.

Without a checkpoint the second opinion is the emulator, and the suspect a kernel. With one it is the interpreter, as
typed on the program after all passes, and the suspect a weight, a scale, a pass or the Plan's writer.

The opinion on each call is made from what the Plan itself computed before it: roundings do not add up, so the bars are
near those of single kernels, and the first call that departs is the guilty one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from frtc.policy import executor_for
from frtc.probe import by_call, read
from frtc.runtime.emulator import Emulator
from frtc.runtime.executor import Executor
from frtc.runtime.plan import Call, Ref, unrolled
from frtc.runtime.plan_file import Plan
from frtc.selftest import relative_error

Array = np.ndarray[Any, Any]
BARS = {"f32": 1e-4, "16 bits": 1e-2, "e4m3": 3e-2}  # docs/numerics.md: by what a call reads and writes
WEIGHT_BAR = 1e-6  # a weight is made the same way twice
NARROW = ("bf16", "f16", "e4m3")


class Opinion(Protocol):
    """On one call after the other, in the order of an inference."""

    def weights(self, stage: str, index: int, call: Call, round: int) -> Iterable[tuple[str, Ref, Array]]:
        """Weights that it reads: name, where they lie, what they should be."""

    def expect(self, stage: str, index: int, call: Call, round: int) -> list[Array] | None:
        """What its results should be; None: no opinion."""

    def take(self, stage: str, index: int, call: Call, round: int, found: Sequence[Array]) -> None:
        """What its results are: later calls read these."""


@dataclass(frozen=True, slots=True)
class Departure:
    """The first call whose results are not what the second opinion says; `name` is module path and source line.

    weight   the weight that it reads and that is not what the second opinion says; "" where none is
    """

    stage: str
    index: int
    round: int
    op: str
    name: str
    error: float
    bar: float
    weight: str = ""

    def __str__(self) -> str:
        where = f"{self.stage}/{self.index}" + (f", round {self.round}" if self.round else "")
        what = f"its weight {self.weight} has a relative error of" if self.weight else "relative error"
        return f"{self.op} ({where}; {self.name}): {what} {self.error:.2e}, allowed {self.bar:.0e}"


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
            name, _, index = stage.rpartition("/")
            call = plan.program.stage(name).calls[int(index)]
            for weight, ref, wanted in opinion.weights(name, int(index), call, round):
                error = _weight_error(read(executor, ref, round), wanted)
                if not error <= WEIGHT_BAR:
                    return Departure(name, int(index), round, call.op, call.name, error, WEIGHT_BAR, weight)
            executor.run_stage(stage, round)
            expected = opinion.expect(name, int(index), call, round)
            found = [read(executor, ref, round) for ref in call.results]
            for ref, value, wanted in zip(call.results, found, expected or (), strict=False):
                error, bar = relative_error(value, wanted), bar_of(call, ref)
                if not error <= bar:
                    return Departure(name, int(index), round, call.op, call.name, error, bar)
            opinion.take(name, int(index), call, round, found)
    return None


class Emulated:
    """The emulator's opinion; it runs beside the device, call by call, on the device's values."""

    def __init__(self, plan: Plan, inputs: Mapping[str, Array]) -> None:
        self.executor = Emulator(by_call(plan))
        give(self.executor, inputs)

    def weights(self, stage: str, index: int, call: Call, round: int) -> Iterable[tuple[str, Ref, Array]]:
        return ()  # the emulator has the Plan's, and no other

    def expect(self, stage: str, index: int, call: Call, round: int) -> list[Array]:
        self.executor.run_stage(f"{stage}/{index}", round)
        return [read(self.executor, ref, round) for ref in call.results]

    def take(self, stage: str, index: int, call: Call, round: int, found: Sequence[Array]) -> None:
        for ref, value in zip(call.results, found, strict=True):
            self.executor.view(ref, round)[...] = value


def give(executor: Executor, inputs: Mapping[str, Array]) -> None:
    executor.reset()
    for name, array in inputs.items():
        executor.set(name, array)


def _weight_error(found: Array, wanted: Array) -> float:
    """Of equal bytes nothing is computed: a weight may have gigabytes, and float64 takes many times as much."""
    return 0.0 if found.tobytes() == wanted.tobytes() else relative_error(found, wanted)


def bar_of(call: Call, result: Ref) -> float:
    """What a kernel may differ in, given the same operands."""
    if result.dtype == "e4m3":
        return BARS["e4m3"]
    narrow = any(r is not None and r.dtype in NARROW for r in (*call.operands, *call.results))
    return BARS["16 bits" if narrow else "f32"]
