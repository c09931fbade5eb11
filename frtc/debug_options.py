"""The debugging flags of `frtc compile`: each means what its FRTC_* variable means, and wins over it."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any, NamedTuple

from frtc.errors import UsageError
from frtc.options import pathname
from frtc.passes.pipeline import Options


class Setting(NamedTuple):
    """A flag, its variable and what it does; docs/debugging.md is this table."""

    flag: str
    variable: str
    values: str
    effect: str


SETTINGS = (
    Setting("--debug", "FRTC_DEBUG", "0..5", "1 passes and times · 2 rules fired · 3 chosen kernels and why · "
            "4 IR after each pass · 5 generated sources and compiler lines; on standard error"),
    Setting("--dump", "FRTC_DUMP", "DIR", "`00_import.ir`, `01_canonicalize.ir`, … then `src/` and `cubin/`; "
            "two runs compare with `diff -r`"),
    Setting("--check", "FRTC_CHECK", "0..2", "0 types only · 1 verify after each pass (default) · 2 also run before "
            "and after each pass on the CPU and compare, widened and as typed"),
    Setting("--stop", "FRTC_STOP", "PASS", "stop after a pass and print the IR; no Plan is written"),
)  # fmt: skip


LEVELS = {"debug": 5, "check": 2}  # the highest of each


def add_debug_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("debugging", "each flag wins over the variable of the same meaning")
    for setting in SETTINGS:
        kind = pathname if setting.values == "DIR" else str
        group.add_argument(
            setting.flag, type=kind, metavar=setting.values, help=f"{setting.effect} ({setting.variable})"
        )


def settings_of(args: argparse.Namespace) -> Options:
    """What the flags say, and the variables where a flag is silent."""
    given: dict[str, Any] = {}
    for setting in SETTINGS:
        name = setting.flag.lstrip("-")
        value = getattr(args, name)
        if value is not None:
            given[name] = _level(setting.flag, value, LEVELS[name]) if name in LEVELS else value
    return replace(Options.from_environment(), **given)


def _level(flag: str, value: str, highest: int) -> int:
    if value not in map(str, range(highest + 1)):
        raise UsageError("usage.option", f"{flag} {value} is no level from 0 to {highest}")
    return int(value)
