"""What a command says: results on standard output, progress on standard error, and there only for a person.

A command returns a Result; only this file prints it. With --json the data goes out as one JSON object, errors included.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from frtc.errors import FrtcError, one_line, plain

EVERY_S = 0.1  # between two redrawings of the progress line


@dataclass(frozen=True, slots=True)
class Result:
    """What a command found. `text` is for people, `data` for programs; `failure`: it ran, but a check failed."""

    text: str
    data: Mapping[str, Any] = field(default_factory=dict)
    failure: FrtcError | None = None

    @property
    def exit_code(self) -> int:
        return self.failure.exit_code if self.failure else 0


def show(result: Result, as_json: bool) -> int:
    """Print a result; returns the exit code."""
    if as_json:
        error = {"error": error_data(result.failure)} if result.failure else {}
        print(json.dumps(_finite({**result.data, **error}), indent=1, allow_nan=False))
    else:
        print(plain(result.text))
        if result.failure:
            print(error_text(result.failure), file=sys.stderr)
    return result.exit_code


def _finite(value: Any) -> Any:
    """JSON knows neither NaN nor infinity: they are null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, (list, tuple)) else value


def show_error(error: FrtcError, as_json: bool) -> int:
    """Print a user's error; returns the exit code."""
    if as_json:
        print(json.dumps({"error": error_data(error)}, indent=1))
    else:
        print(error_text(error), file=sys.stderr)
    return error.exit_code


def error_text(error: FrtcError) -> str:
    """The error with the place in the documentation that explains its code."""
    labels = [label for label, _ in error.rows] + (["hint"] if error.hint else [])
    width = max(map(len, [*labels, "more"])) if labels else len("more")
    return f"{error}\n  {'more':<{width}}  docs/errors.md#{error.code}"


def error_data(error: FrtcError) -> dict[str, Any]:
    rows = [[label, text] for label, text in error.rows]
    return {"code": error.code, "what": error.what, "rows": rows, "hint": error.hint, "exit": error.exit_code}


class Progress:
    """One line on a terminal, redrawn: what is being done and how much of it. Silent elsewhere."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.shown, self.last, self.width = self.stream.isatty(), "", 0
        self.at = 0.0

    def __call__(self, what: str, share: float) -> None:
        now = time.monotonic()
        if not self.shown or (what == self.last and share < 1 and now - self.at < EVERY_S):
            return
        line = f"{what} {share:4.0%}"
        self.stream.write("\r" + line.ljust(self.width))
        self.stream.flush()
        self.last, self.at, self.width = what, now, len(line)

    def close(self) -> None:
        if self.width:
            self.stream.write("\r" + " " * self.width + "\r")
            self.stream.flush()
            self.width = 0


def size(nbytes: float) -> str:
    """ "6.44 GB": decimal units, as disks and bandwidths are sold."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes:.0f} B"


def table(rows: Iterable[Sequence[str]], indent: str = "  ") -> str:
    """Left-aligned columns; the last one is as long as it is."""
    cells = [[one_line(str(cell)) for cell in row] for row in rows]
    if not cells:
        return ""
    widths = [max(len(row[i]) for row in cells if i < len(row)) for i in range(max(map(len, cells)))]
    lines = [indent + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=False)) for row in cells]
    return "\n".join(line.rstrip() for line in lines)
