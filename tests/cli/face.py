"""Calling the command line in-process, and reading what it says."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from frtc.cli import main


@dataclass(frozen=True, slots=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The dotted code of the error that was printed, "" if none."""
        found = re.search(r"error\[([\w.]+)\]", self.err)
        return found[1] if found else ""

    def json(self) -> Any:
        return json.loads(self.out)


def call(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Said:
    capsys.readouterr()
    code = main([str(word) for word in words])
    said = capsys.readouterr()
    return Said(code, said.out, said.err)
