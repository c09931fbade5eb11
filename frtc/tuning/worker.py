"""The measuring process from outside: started when asked, ended when it takes too long, started again after it died."""

from __future__ import annotations

import json
import os
import pickle
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import frtc
from frtc.errors import EnvironmentFault
from frtc.kernels.targets import Target
from frtc.tuning.chain import Chain

COMMAND = (sys.executable, "-m", "frtc.tuning.child")
START_S, ANSWER_S, END_S = 90.0, 20.0, 10.0  # seconds it may take to start, to measure one candidate, to be killed
LINE_MOST = 1 << 20  # bytes of an answer
LAST_MOST = 160  # characters of what it said last
US_MOST = 1e9


@dataclass(frozen=True, slots=True)
class Answer:
    """Microseconds and some elements of each result, or why there are none."""

    us: float = 0.0
    failed: str = ""
    results: tuple[tuple[float, ...], ...] = ()


class _Lost(Exception):
    """The process gave no answer; the text says why."""


class Worker:
    """`device`: what the process said of its GPU, once it has been started."""

    def __init__(
        self, command: Sequence[str] | None = None, start_s: float = START_S, answer_s: float = ANSWER_S
    ) -> None:
        self.command, self.start_s, self.answer_s = tuple(command or COMMAND), start_s, answer_s
        self.device: Mapping[str, Any] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._read = b""
        self._folder = tempfile.TemporaryDirectory(prefix="frtc-tune-")
        self._errors = Path(self._folder.name) / "stderr"

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *fault: object) -> None:
        self._end()
        self._folder.cleanup()

    def start(self) -> None:
        """Have a process that waits for questions; an error says why there is none."""
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        root = str(Path(frtc.__file__).parents[1])
        paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                env={**os.environ, "PYTHONPATH": paths},
            )  # fmt: skip
        try:
            hello = self._line(self.start_s)
        except _Lost as lost:
            raise _not_measured(str(lost)) from None
        device = hello.get("device")
        if not isinstance(device, dict) or type(device.get("sm")) is not int or not isinstance(device.get("name"), str):
            self._end()
            raise _not_measured(str(hello.get("error", "it does not say what GPU it has"))[:200])
        self.device = device

    def measure(self, chain: Chain) -> Answer:
        """Ask for one candidate. Whatever happens to the process, there is an answer."""
        self.start()
        assert self._process is not None and self._process.stdin is not None
        path = Path(self._folder.name) / "chain"
        path.write_bytes(pickle.dumps(chain))
        try:
            self._process.stdin.write(f"{path}\n".encode())
            self._process.stdin.flush()
            said = self._line(self.answer_s)
        except OSError:
            return Answer(failed=self._ended())
        except _Lost as lost:
            return Answer(failed=str(lost))
        us: Any = said.get("us")
        results: Any = said.get("results")
        if _is_number(us) and 0 < us < US_MOST and _are_results(results):
            return Answer(float(us), results=tuple(map(tuple, results)))
        self._end()  # after a fault its context is of no use
        error = said.get("error")
        return Answer(failed=error[:200] if isinstance(error, str) else f"it answered {json.dumps(said)[:80]}")

    def _line(self, seconds: float) -> dict[str, Any]:
        """The next answer."""
        assert self._process is not None and self._process.stdout is not None
        out, until = self._process.stdout.fileno(), time.monotonic() + seconds
        while b"\n" not in self._read:
            left = until - time.monotonic()
            if left <= 0 or not select.select([out], [], [], left)[0]:
                self._end()
                raise _Lost(f"no answer within {seconds:.0f} s")
            piece = os.read(out, LINE_MOST)
            if not piece:
                raise _Lost(self._ended())
            self._read += piece
            if len(self._read) > LINE_MOST:
                self._end()
                raise _Lost("it answered without end")
        line, _, self._read = self._read.partition(b"\n")
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            said = None
        if not isinstance(said, dict):
            self._end()
            raise _Lost(f"it answered {line[:80].decode(errors='replace')!r}")
        return said

    def _ended(self) -> str:
        """Why the process is gone."""
        assert self._process is not None
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            code = None
        self._end()
        about = "no answer" if code is None else f"signal {-code}" if code < 0 else f"exit status {code}"
        last = self._errors.read_text(errors="replace").strip().splitlines()[-1:]
        return ": ".join(["the measuring process ended", about, *(line[:LAST_MOST] for line in last)])

    def _end(self) -> None:
        process, self._process, self._read = self._process, None, b""
        if process is None:
            return
        process.kill()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):  # what was written to a process that died
                    stream.close()
        with suppress(subprocess.TimeoutExpired):  # the kernel driver holds it until the GPU lets go
            process.wait(END_S)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _are_results(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, list) and all(map(_is_number, v)) for v in value)


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
