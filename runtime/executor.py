"""What the session on a GPU and the emulator have in common: named inputs and outputs, runs, timing.

with Session(plan) as executor:                    # or Emulator(plan)
    executor.set("noise", array)
    executor.run()
    actions = executor.get("actions")
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from frtc.errors import FrtcError, UsageError, nearest
from frtc.kernels.dtypes import DTYPES
from frtc.runtime.finite import refusal
from frtc.runtime.frames import Frames
from frtc.runtime.masked import require_unmasked
from frtc.runtime.plan import Program, Ref, Slot
from frtc.runtime.timing import Timing
from frtc.runtime.validate import rounds_of

Array = np.ndarray[Any, Any]
Self = TypeVar("Self", bound="Executor")


class Executor(ABC):
    """Runs one program. Not thread-safe: one inference at a time.

    inputs, outputs   slots by name
    bound             slots that live in memory of the caller, which is neither read nor checked here
    closed            everything was given back
    check_finite      after a run, an output that is not finite is an error (run.nonfinite), and no output can be read
    """

    def __init__(self, program: Program, check_finite: bool) -> None:
        self.program, self.check_finite, self.closed = program, check_finite, False
        self.refused: FrtcError | None = None
        self.launched_ns = 0  # time.perf_counter_ns when the device had all of the last run; 0: there is none
        self.frames: Frames | None = None  # where raw camera frames may be given instead of `images`
        self.bound: dict[str, Any] = {}
        self.inputs: Mapping[str, Slot] = {slot.name: slot for slot in program.inputs}
        self.outputs: Mapping[str, Slot] = {slot.name: slot for slot in program.outputs}
        self.rounds = {stage.name: 1 for stage in program.stages} | rounds_of(program)

    def set(self, name: str, values: Array) -> None:
        """Give an input. It stays until it is given anew."""
        self._place_for(name, values)[...] = values

    def take(self, observation: Mapping[str, Any]) -> None:
        """Raw camera frames by role for the next run, which reads them, instead of the input `images`; where there are
        `frames`."""
        raise UsageError("input.unknown", "no raw frames are taken here: give the input images")

    def get(self, name: str) -> Array:
        """A copy of an output of the last run."""
        self._require_open()
        if self.refused:
            raise self.refused
        return self._host(_find(self.outputs, name, "output")).copy()

    def time(self, runs: int = 100, warm_up: int = 3) -> Timing:
        """Time whole inferences and their parts. States move on with every run."""
        for _ in range(warm_up):
            self._sample()
        return Timing.of([self._sample() for _ in range(runs)])

    def run(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """One inference. meanwhile: done by the host while the device works."""
        self._require_open()
        self.refused = None
        self._run(meanwhile)
        if self.check_finite and not self.refused:
            self.refused = refusal(self)
        if self.refused:
            raise self.refused

    def inputs_here(self, like: Mapping[str, Array]) -> dict[str, Array]:
        """Inputs of the names, types and shapes of `like` on the host, in place: what is written there is given.
        Not so `images` behind camera frames, which count until `set` gives `images` again."""
        return {name: self._place_for(name, array) for name, array in like.items()}

    def require_here(self, output: str) -> None:
        """An error where the caller has bound it: the host will not have it."""
        self._host(_find(self.outputs, output, "output"))

    def outputs_here(self) -> dict[str, Array]:
        """The outputs on the host, in place; without those that are bound."""
        self._require_open()
        return {name: self._host(slot) for name, slot in self.outputs.items() if name not in self.bound}

    @abstractmethod
    def peek(self, ref: Ref, round: int = 0) -> Array:
        """A copy of the value that `ref` describes, as the last run left it. Nothing is checked."""

    @abstractmethod
    def _run(self, meanwhile: Callable[[], object]) -> None:
        """One inference, its outputs unchecked."""

    @abstractmethod
    def run_stage(self, name: str, round: int = 0) -> None:
        """One stage alone, its tables indexed by `round`."""

    @abstractmethod
    def reset(self) -> None:
        """Set all states to zero, as they are at first."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. May be called twice."""

    @abstractmethod
    def _host(self, slot: Slot) -> Array:
        """The slot's memory on the host."""

    @abstractmethod
    def _sample(self) -> dict[str, float]:
        """Microseconds of the parts of one inference (timing.py names them)."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    def _place_for(self, name: str, values: Array) -> Array:
        """Where an input like `values` lies on the host."""
        self._require_open()
        slot = _find(self.inputs, name, "input")
        require_unmasked(f"input {name}", values)
        if not isinstance(values, np.ndarray) or (values.dtype, values.shape) != (DTYPES[slot.dtype].numpy, slot.shape):
            about = f"{values.dtype}{list(values.shape)}" if isinstance(values, np.ndarray) else type(values).__name__
            what = f"input {name} is {about}, the Plan takes {slot.dtype}{list(slot.shape)}"
            raise UsageError("input.type", what)
        return self._host(slot)

    def _require_open(self) -> None:
        if self.closed:
            raise UsageError("session.closed", "the session is closed")

    def _check_stage(self, name: str, round: int) -> None:
        self._require_open()
        rounds = _find(self.rounds, name, "stage")
        if not 0 <= round < rounds:
            raise UsageError("stage.round", f"stage {name} has {rounds} rounds, there is no round {round}")


def _find(table: Mapping[str, Any], name: str, kind: str) -> Any:
    if name not in table:
        rows = [("known", ", ".join(table)), ("nearest", nearest(name, table))]
        raise UsageError(f"{kind}.unknown", f"the Plan has no {kind} {name!r}", [row for row in rows if row[1]])
    return table[name]
