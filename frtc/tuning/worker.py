"""The measuring process from outside: one candidate in a chain of its own, or a whole program with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frtc.errors import EnvironmentFault
from frtc.kernels.targets import Target
from frtc.tuning.chain import Chain
from frtc.tuning.process import Lost, Process
from frtc.tuning.trial import Asked

COMMAND = (sys.executable, "-m", "frtc.tuning.child")
START_S, ANSWER_S = 90.0, 20.0  # seconds it may take to start, to measure one candidate
US_MOST = 1e9

Results = tuple[tuple[float, ...], ...]  # some elements of each result


@dataclass(frozen=True, slots=True)
class Answer:
    """Microseconds and some elements of each result, or why there are none."""

    us: float = 0.0
    failed: str = ""
    results: Results = ()


@dataclass(frozen=True, slots=True)
class Tried:
    """A whole program: microseconds by part (runtime/timing.py), some elements of its outputs and of what was looked at
    within, by site; or why there are none."""

    times: Mapping[str, float] = field(default_factory=dict)
    outputs: Results = ()
    probes: Mapping[str, Results] = field(default_factory=dict)
    failed: str = ""


class Worker(Process):
    """`device`: what the process said of its GPU, once it has been started."""

    def __init__(
        self, command: Sequence[str] | None = None, start_s: float = START_S, answer_s: float = ANSWER_S
    ) -> None:
        super().__init__(command or COMMAND, start_s)
        self.answer_s = answer_s
        self.device: Mapping[str, Any] = {}

    def start(self) -> None:
        """Have a process that waits for questions; an error says why there is none."""
        try:
            hello = self.hello()
        except Lost as lost:
            raise _not_measured(str(lost)) from None
        if hello is None:
            return
        device = hello.get("device")
        if not isinstance(device, dict) or type(device.get("sm")) is not int or not isinstance(device.get("name"), str):
            self.end()
            raise _not_measured(str(hello.get("error", "it does not say what GPU it has"))[:200])
        self.device = device

    def measure(self, chain: Chain) -> Answer:
        """Ask for one candidate. Whatever happens to the process, there is an answer."""
        try:
            said = self._said(chain, self.answer_s)
        except Lost as lost:
            return Answer(failed=str(lost))
        us: Any = said.get("us")
        results: Any = said.get("results")
        if _is_time(us) and _are_results(results):
            return Answer(float(us), results=_results(results))
        return Answer(failed=self._refused(said))

    def run(self, trial: Path, probes: Sequence[str], seconds: float) -> Tried:
        """Ask for a whole program, by the file that it lies in. As `measure`."""
        try:
            said = self._said(Asked(str(trial), tuple(probes)), seconds)
        except Lost as lost:
            return Tried(failed=str(lost))
        times: Any = said.get("times")
        outputs: Any = said.get("outputs")
        probed: Any = said.get("probes")
        records = isinstance(times, dict) and "replay" in times and isinstance(probed, dict)
        if records and all(map(_lasted, times.values())) and all(map(_are_results, (outputs, *probed.values()))):
            found = {key: _results(some) for key, some in probed.items()}
            return Tried({name: float(us) for name, us in times.items()}, _results(outputs), found)
        return Tried(failed=self._refused(said))

    def _said(self, question: object, seconds: float) -> dict[str, Any]:
        self.start()
        return self.answer(question, seconds)

    def _refused(self, said: Mapping[str, Any]) -> str:
        self.end()  # after a fault its context is of no use
        error = said.get("error")
        return error[:200] if isinstance(error, str) else f"it answered {json.dumps(said)[:80]}"


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_time(value: Any) -> bool:
    return _is_number(value) and 0 < value < US_MOST


def _lasted(value: Any) -> bool:
    return _is_number(value) and 0 <= value < US_MOST


def _are_results(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, list) and all(map(_is_number, v)) for v in value)


def _results(value: list[list[float]]) -> Results:
    return tuple(map(tuple, value))


def require_gpu(target: Target) -> None:
    """A measuring process starts here, on the target's GPU."""
    with Worker() as worker:
        worker.start()
        device = worker.device
    if device["sm"] != target.sm:
        rows = [("wants", f"{target.name} (sm_{target.sm})"), ("found", f"{device['name']} (sm_{device['sm']})")]
        what = f"--tune for {target.name} measures on that GPU, and another one is here"
        raise EnvironmentFault("tune.gpu", what, rows, "tune there with --tactics FILE, and use FILE here")


def _not_measured(found: str) -> EnvironmentFault:
    hint = "compile without --tune; --tactics FILE uses what was measured on another machine"
    return EnvironmentFault("tune.process", "nothing can be measured here", [("found", found)], hint)
