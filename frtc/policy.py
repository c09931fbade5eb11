"""A Plan ready to act: raw observation in, robot actions out.

policy = frtc.load("pi05.plan")                  # the GPU or an error; device="cpu" emulates, slowly
policy.warm()
answer = policy.infer({"base": img, "left_wrist": img, "state": q, "prompt": "fold the towel"})
answer.actions                                   # f32 [horizon, dim], robot units
answer.latency_us                                # {"total": ..., "prepare": ..., "run": ..., "finish": ...}
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frtc.errors import FrtcError, UsageError, one_line
from frtc.runtime.executor import Executor
from frtc.runtime.plan_file import Plan, open_plan
from frtc.runtime.policy import Policy as PolicySpec
from frtc.runtime.policy_steps import PolicySteps
from frtc.trust import lacks

LOG = logging.getLogger("frtc")
TOKENIZER = "tokenizer"  # the Plan's tensor of tokenizer bytes


@dataclass(frozen=True, slots=True)
class Inference:
    """One answer.

    actions      f32 [horizon, dim], robot units
    output       what the model gave, f32, before slicing and un-normalisation
    draw         which Philox draw the noise was; None: given by the caller
    latency_us   "total" from observation to actions; "prepare" (policy steps), "run" (copies and the graph), "finish".
                 On a GPU also "copy" (frames on the host), "launch" (all else until the device has everything), "wait"
    """

    actions: NDArray[np.float32]
    output: NDArray[np.float32]
    draw: int | None
    latency_us: Mapping[str, float]


class Policy:
    """A Plan on a device. Not thread-safe: one inference at a time. States are zero at first; `reset` zeroes them."""

    def __init__(self, plan: Plan, executor: Executor, seed: int = 0) -> None:
        self.plan, self.executor, self.busy = plan, executor, Lock()
        spec = PolicySpec.from_json(plan.program.policy)
        tokenizer = plan.files().get(TOKENIZER)
        self.steps = PolicySteps(spec, None if tokenizer is None else bytes(tokenizer), seed)
        self.output = next(iter(executor.outputs))
        self.inputs = executor.inputs_here(self.steps.inputs)  # written where the device reads them
        if unmade := executor.inputs.keys() - self.inputs.keys():
            what = f"no step of the Plan's policy makes the input {', '.join(sorted(unmade))}"
            raise FrtcError("plan.invalid", what, hint="give it by frtc.Session, or compile the Plan again")

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: str | int = "cuda",
        seed: int = 0,
        stream: Any = None,
        untested: bool = False,
        check_finite: bool = True,
    ) -> Policy:
        """Open a Plan, check it from end to end, and put it on a device. Never falls back to the CPU.

        device         "cuda", "cuda:1", 1, or "cpu" for the emulator;  stream: a CUDA stream of the caller's
        untested       accept kernels that nobody has run on this GPU although their self-test has not passed here
        check_finite   outputs with NaN or infinity are an error that names the stage, `run.nonfinite`; actions that
                       are not finite are refused without it, too, as `output.nonfinite`
        """
        ordinal = ordinal_of(device)
        plan = open_plan(path, verify=ordinal is None)  # a session compares the hashes while it uploads
        for note in notes(plan):
            LOG.warning("%s: %s", one_line(plan.path.name), note)
        executor = executor_for(plan, ordinal, stream, untested, check_finite)
        try:
            return cls(plan, executor, seed)
        except BaseException:
            executor.close()
            raise

    @property
    def spec(self) -> PolicySpec:
        return self.steps.policy

    @property
    def cameras(self) -> tuple[str, ...]:
        """The observation's keys of camera frames, in the model's order."""
        return self.steps.cameras

    def infer(self, observation: Mapping[str, Any], draw: int | None = None) -> Inference:
        """Actions for an observation: cameras by role, "state", "prompt", and "noise" if the caller draws it.

        draw   the number of the noise's draw, where the observation holds none; by default the next one
        """
        if not self.busy.acquire(blocking=False):
            what = "the policy is in the middle of another inference, whose inputs this one would overwrite"
            raise UsageError("session.busy", what, hint="call infer from one thread, or take turns by a lock")
        try:
            return self._infer(observation, draw)
        finally:
            self.busy.release()

    def _infer(self, observation: Mapping[str, Any], draw: int | None) -> Inference:
        self._require_open()
        executor, frames = self.executor, self.executor.frames
        marks = [time.perf_counter_ns()]
        if executor.bound:
            executor.inputs_here(self.steps.inputs)  # refuses those that are not
            executor.require_here(self.output)
        prepared = self.steps.prepare(observation, draw, executor.take if frames else None, self.inputs)
        marks.append(time.perf_counter_ns())
        executor.run(self.steps.rehearse)
        output = executor.get(self.output)
        marks.append(time.perf_counter_ns())
        actions = self.steps.finish(output, prepared)
        marks.append(time.perf_counter_ns())
        prepare, run, finish = ((b - a) / 1e3 for a, b in pairwise(marks))
        total = (marks[-1] - marks[0]) / 1e3
        latency = {"total": total, "prepare": prepare, "run": run, "finish": finish}
        if launched := executor.launched_ns:
            copy = frames.copy_us if frames else 0.0
            launch, wait = (launched - marks[0]) / 1e3 - copy, (marks[2] - launched) / 1e3
            latency |= {"copy": copy, "launch": launch, "wait": wait}
        return Inference(actions, output, prepared.draw, latency)

    def warm(self) -> None:
        """Build everything now: after this, no call allocates, compiles or captures, whatever the prompt.

        But for cameras: the first frame of a size makes filters and memory, and a later one of another size again.
        """
        self._require_open()
        warm = getattr(self.executor, "warm", None)
        if warm is not None:
            warm(frames=True)
        self.steps.draw_ahead()

    def reset(self) -> None:
        self._require_open()
        self.executor.reset()

    def close(self) -> None:
        """Give the device's memory back. May be called twice."""
        self.executor.close()

    def _require_open(self) -> None:
        if self.executor.closed:
            raise UsageError("session.closed", "the policy is closed", hint="open it again with frtc.load")

    def __enter__(self) -> Policy:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()


load = Policy.load


def notes(plan: Plan) -> tuple[str, ...]:
    """What every open says, a line each: values of the policy that nothing confirmed, evidence that was ignored or is
    not there."""
    assumed = PolicySpec.from_json(plan.program.policy).assumed if plan.program.policy else ()
    said = (f"assumed: {a.field} = {a.value} ({a.why}); confirm with {a.option}" for a in assumed)
    return tuple(map(one_line, (*said, *plan.notes, *lacks(plan))))


def ordinal_of(device: str | int) -> int | None:
    """The GPU's number; None for the CPU."""
    text = f"cuda:{device}" if type(device) is int else device
    found = re.fullmatch("cpu|cuda(?::([0-9]{1,4}))?", text) if isinstance(text, str) else None
    if found is None:
        raise UsageError("option.device", f"there is no device {device!r}", [("choices", "cuda, cuda:N, cpu")])
    return None if text == "cpu" else int(found[1] or 0)


def executor_for(
    plan: Plan, ordinal: int | None, stream: Any = None, untested: bool = True, check_finite: bool = False
) -> Executor:
    """The session on a GPU, or the emulator. Unless `untested`, kernels must be proven before anything is uploaded."""
    if ordinal is None:
        from frtc.runtime.emulator import Emulator

        return Emulator(plan, check_finite=check_finite)
    from frtc.proven import require_proof
    from frtc.runtime.driver import Driver
    from frtc.runtime.session import Session

    driver = Driver(ordinal)
    try:
        driver.require(plan.program.target, plan.path)
        if not untested:
            require_proof(plan, driver)
    except BaseException:
        driver.release()
        raise
    return Session(plan, ordinal, stream, driver, check_finite)
