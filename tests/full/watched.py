"""A child process, its whole tree watched: seconds, processor seconds, and the most anonymous memory at any moment."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT, checkout

PERIOD = 0.1  # seconds between samples


@dataclass(frozen=True, slots=True)
class Watched:
    """out: standard output; busy: other processes waited for our processors when it started."""

    out: str
    seconds: float
    cpu_seconds: float
    peak_anon: int  # bytes
    busy: bool

    @property
    def judged_seconds(self) -> float:
        """What a bar in seconds is compared with: the clock; processor seconds where the machine does other work."""
        return self.cpu_seconds if self.busy else self.seconds

    def figures(self) -> dict[str, float | int | bool]:
        return {
            "seconds": round(self.seconds, 1), "cpu_seconds": round(self.cpu_seconds, 1),
            "peak_anon": self.peak_anon, "busy_machine": self.busy,
        }  # fmt: skip


def watch(command: Sequence[str], **env: str) -> Watched:
    """Run `python command…` in the checkout. Fails with its output if it fails."""
    busy = os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1)
    before, start, peak = _children_cpu(), time.perf_counter(), 0
    environment: Mapping[str, str] = {**checkout(), **env}
    pipe = subprocess.PIPE
    child = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment, text=True, stdout=pipe, stderr=pipe)
    while True:
        try:
            out, err = child.communicate(timeout=PERIOD)
            break
        except subprocess.TimeoutExpired:
            peak = max(peak, sum(_anon(pid) for pid in _tree(child.pid)))
    assert child.returncode == 0, f"{' '.join(command)}\n{out}\n{err}"
    return Watched(out, time.perf_counter() - start, _children_cpu() - before, peak, busy)


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _tree(pid: int) -> Iterator[int]:
    yield pid
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from _tree(int(child))
    except OSError:  # it has ended
        return


def _anon(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
