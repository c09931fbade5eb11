"""Errors a user can cause or meet: a dotted code, what, where, what was found, what to do; how texts of files show.

This file imports nothing, so every room of the house may use it. Exit codes are in docs/design.md, section 8.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FrtcError(Exception):
    """A failure whose cause lies outside frtc. Printed without a traceback.

    code   stable dotted name a program can match, e.g. "weights.missing"
    what   one sentence: what is wrong, with names and numbers filled in
    rows   (label, text) pairs: where, what was found, nearest candidates
    hint   what to do next
    """

    exit_code = 4  # input cannot be compiled or opened

    def __init__(self, code: str, what: str, rows: Iterable[tuple[str, str]] = (), hint: str = "") -> None:
        super().__init__(what)
        self.code, self.what, self.rows, self.hint = code, what, tuple(rows), hint

    def __str__(self) -> str:
        rows = [(one_line(label), text) for label, text in (*self.rows, *([("hint", self.hint)] if self.hint else []))]
        width = max((len(label) for label, _ in rows), default=0)
        lines = [_deeper(f"error[{self.code}]: {self.what}", 4)]
        lines += [_deeper(f"  {label:<{width}}  {text}", width + 4) for label, text in rows]
        return plain("\n".join(lines))


class UsageError(FrtcError):
    """An option's value or an impossible combination."""

    exit_code = 2


class CheckFailed(FrtcError):
    """It ran, but a check failed: verify, self-test, baseline, budget."""

    exit_code = 3


class EnvironmentFault(FrtcError):
    """No GPU, driver too old, Plan built for another GPU, Python too old to compile."""

    exit_code = 5


def plain(text: str) -> str:
    """Names from files may hold what a terminal obeys: lines of what it shows, all else as Python writes it."""
    return "\n".join(map(one_line, text.split("\n")))


def one_line(text: str) -> str:
    """The same where a text has one line: a second one would pass for something that frtc says."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _deeper(text: str, columns: int) -> str:
    """Further lines of a text, of a compiler or a name, stand where none of ours begins."""
    return text.replace("\n", "\n" + " " * columns)


def nearest(name: str, candidates: Iterable[str], n: int = 3) -> str:
    """The candidates most like `name`, comma separated; empty if none is near."""
    return ", ".join(difflib.get_close_matches(name, list(candidates), n=n, cutoff=0.5))
