"""Processes that build trials while others are measured."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from frtc.kernels.tactic import Tactic
from frtc.tuning.builder import Job
from frtc.tuning.process import Lost, Process

MOST = 4  # processes: a trial is measured in a second or two, and built in about three
START_S, BUILD_S = 120.0, 180.0
COMMAND = (sys.executable, "-m", "frtc.tuning.builder")


class Builders:
    """`start` a build; its future holds the file of a Trial, or a text that says why there is none."""

    def __init__(self, job: Job, count: int = 0) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="frtc-trials-")
        path = Path(self._folder.name) / "job"
        path.write_bytes(pickle.dumps(job))
        count = count or min(MOST, os.cpu_count() or 1)
        self._all = [_Builder((*COMMAND, self._folder.name, str(path)), START_S) for _ in range(count)]
        self._idle = SimpleQueue[_Builder]()
        self._pool = ThreadPoolExecutor(count)
        for builder in self._all:
            self._pool.submit(self._ready, builder)

    def __enter__(self) -> Builders:
        return self

    def __exit__(self, *fault: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for builder in self._all:
            builder.kill()
        self._pool.shutdown()  # who waited for an answer sees that there is none
        for builder in self._all:
            builder.__exit__()
        self._folder.cleanup()

    def start(self, tactics: Iterable[Tactic]) -> Future[Path | str]:
        return self._pool.submit(self._build, tuple(tactics))

    def _ready(self, builder: _Builder) -> None:
        builder.begin()
        self._idle.put(builder)

    def _build(self, tactics: tuple[Tactic, ...]) -> Path | str:
        builder = self._idle.get()
        try:
            return builder.build(tactics)
        finally:
            self._idle.put(builder)


class _Builder(Process):
    about = "the process that compiles"

    def begin(self) -> str:
        """Have it start; why it does not."""
        try:
            self.hello()
        except Lost as lost:
            return str(lost)
        return ""

    def build(self, tactics: tuple[Tactic, ...]) -> Path | str:
        if failed := self.begin():
            return failed
        try:
            said = self.answer(tactics, BUILD_S)
        except Lost as lost:
            return str(lost)
        made = said.get("made")
        return Path(made) if isinstance(made, str) else str(said.get("error", "it answered something else"))
