"""A process that answers questions, from outside: started when asked, ended when it takes too long, started again after
it died.

It says who it is in one line of JSON, then answers one for each line it reads: the name of a file with a pickled
question, which was written here.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import frtc

Self = TypeVar("Self", bound="Process")
END_S = 10.0  # seconds it may take to be killed
LINE_MOST = 4 << 20  # bytes of an answer
LAST_MOST = 160  # characters of what it said last


class Lost(Exception):
    """The process gave no answer; the text says why."""


class Process:
    """start_s: seconds until it says who it is."""

    about = "the measuring process"

    def __init__(self, command: Sequence[str], start_s: float) -> None:
        self.command, self.start_s = tuple(command), start_s
        self._process: subprocess.Popen[bytes] | None = None
        self._read = b""
        self._folder = tempfile.TemporaryDirectory(prefix="frtc-tune-")
        self._errors = Path(self._folder.name) / "stderr"

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        self.end()
        self._folder.cleanup()

    def hello(self) -> dict[str, Any] | None:
        """What a process that was started now says of itself; None: there is one already."""
        if self._process is not None and self._process.poll() is None:
            return None
        self.end()
        root = str(Path(frtc.__file__).parents[1])
        paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                env={**os.environ, "PYTHONPATH": paths},
            )  # fmt: skip
        return self._line(self.start_s)

    def answer(self, question: object, seconds: float) -> dict[str, Any]:
        """What the process says to it within so long; raises Lost."""
        assert self._process is not None and self._process.stdin is not None
        path = Path(self._folder.name) / "question"
        path.write_bytes(pickle.dumps(question))
        try:
            self._process.stdin.write(f"{path}\n".encode())
            self._process.stdin.flush()
        except OSError:
            raise Lost(self._ended()) from None
        return self._line(seconds)

    def kill(self) -> None:
        """From another thread than the one that waits for an answer."""
        if process := self._process:
            process.kill()

    def end(self) -> None:
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

    def _line(self, seconds: float) -> dict[str, Any]:
        """The next answer."""
        assert self._process is not None and self._process.stdout is not None
        out, until = self._process.stdout.fileno(), time.monotonic() + seconds
        while b"\n" not in self._read:
            left = until - time.monotonic()
            if left <= 0 or not select.select([out], [], [], left)[0]:
                self.end()
                raise Lost(f"no answer within {seconds:.0f} s")
            piece = os.read(out, LINE_MOST)
            if not piece:
                raise Lost(self._ended())
            self._read += piece
            if len(self._read) > LINE_MOST:
                self.end()
                raise Lost("it answered without end")
        line, _, self._read = self._read.partition(b"\n")
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            said = None
        if not isinstance(said, dict):
            self.end()
            raise Lost(f"it answered {line[:80].decode(errors='replace')!r}")
        return said

    def _ended(self) -> str:
        """Why the process is gone."""
        assert self._process is not None
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            code = None
        self.end()
        how = "no answer" if code is None else f"signal {-code}" if code < 0 else f"exit status {code}"
        last = self._errors.read_text(errors="replace").strip().splitlines()[-1:]
        return ": ".join([f"{self.about} ended", how, *(line[:LAST_MOST] for line in last)])


def own_output() -> Any:
    """say(answer) of a process that answers: what a library prints goes to standard error; only answers go out."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    return say
