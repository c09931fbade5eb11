"""`frtc doctor`: Python, wheels, compiler, driver, GPU; what this machine can do and what is missing."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from frtc.console import Result, table
from frtc.doctor import can, examine

MARKS = {True: "ok", False: "--", None: "  "}


def options(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def run(args: argparse.Namespace) -> Result:
    found = examine()
    able = {what: can(found, what) for what in ("run", "compile")}
    rows = [(MARKS[f.ok], f.name, f.found, f.hint) for f in found]
    said = {True: "yes", False: "no"}
    text = f"{table(rows)}\nrun on this GPU: {said[able['run']]}; compile here: {said[able['compile']]}"
    return Result(text, {"findings": [asdict(f) for f in found], "can": able})
