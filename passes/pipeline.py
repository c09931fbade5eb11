"""The runner of passes: it observes, the passes do not know. The list itself is in passes/standard.py.

After each pass the IR is verified. The runner alone knows of the FRTC_* variables; passes know nothing of them.

FRTC_CHECK=0..2   0: types are checked as nodes are built; 1 (default): verify after each pass; 2: also run each program
                  before and after, widened and as typed, and compare
FRTC_DUMP=dir     write 00_import.ir, 01_<pass>.ir, ...
FRTC_STOP=pass    stop after that pass and print the IR
FRTC_DEBUG=1..4   1: passes and times; 2: rules fired; 4: the IR after each pass (3 and 5 belong to codegen); on stderr
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from frtc.errors import FrtcError, UsageError
from frtc.lowering.ir import Module
from frtc.lowering.text import show_module
from frtc.lowering.verify import Invalid, verify_module
from frtc.passes.check import compare
from frtc.passes.rewrite import FIRED, Pass


@dataclass(frozen=True, slots=True)
class Options:
    """What the runner does beside running; `from_environment` reads the FRTC_* variables."""

    check: int = 1
    dump: Path | None = None
    stop: str = ""
    debug: int = 0

    @staticmethod
    def from_environment() -> Options:
        env = os.environ
        dump = env.get("FRTC_DUMP")
        return Options(
            _level(env, "FRTC_CHECK", 1, 2),
            Path(dump) if dump else None,
            env.get("FRTC_STOP", ""),
            _level(env, "FRTC_DEBUG", 0, 5),
        )


def _level(env: Mapping[str, str], name: str, default: int, highest: int) -> int:
    value = env.get(name, str(default))
    if value not in map(str, range(highest + 1)):
        raise UsageError("usage.variable", f"{name}={value} is no level from 0 to {highest}")
    return int(value)


@dataclass(slots=True)
class Report:
    """What happened: (pass, seconds) in order, and how often each rule fired."""

    passes: list[tuple[str, float]] = field(default_factory=list)
    fired: Counter[str] = field(default_factory=Counter)


def run_passes(module: Module, passes: Sequence[Pass], options: Options | None = None) -> tuple[Module, Report]:
    """Run the passes in order. One that fails or breaks the IR leaves a reproducer and raises Invalid with its path."""
    options = options or Options.from_environment()
    report, names = Report(), [name_of(one) for one in passes]
    if options.stop and options.stop not in names:
        raise UsageError("usage.variable", f"FRTC_STOP={options.stop} is no pass", [("passes", ", ".join(names))])
    _dump(module, 0, "import", options)
    for number, one in enumerate(passes, 1):
        name = names[number - 1]
        started, fired = time.perf_counter(), Counter[str]()
        token = FIRED.set(fired)
        try:
            after = one(module)
            if options.check >= 1:
                verify_module(after)
            if options.check >= 2:
                compare(module, after, name)
        except FrtcError:  # the user's, not ours
            raise
        except Exception as error:
            raise Invalid(f"pass {name} failed: {error}; reproducer: {_reproducer(module, name)}") from error
        finally:
            FIRED.reset(token)
        module = after
        report.passes.append((name, time.perf_counter() - started))
        report.fired.update(fired)
        _log(options, name, report, fired, module)
        _dump(module, number, name, options)
        if options.stop == name:
            print(show_module(module))
            break
    return module, report


def name_of(one: Pass) -> str:
    """The pass's function, also where a pass is a function with a target's abilities bound to it."""
    return getattr(one, "__name__", "") or one.func.__module__.rpartition(".")[2]  # type: ignore[attr-defined]


def _log(options: Options, name: str, report: Report, fired: Counter[str], module: Module) -> None:
    if options.debug >= 1:
        print(f"pass {name:24s} {report.passes[-1][1]:7.2f} s", file=sys.stderr)
    if options.debug >= 2:
        for rule, times in sorted(fired.items()):
            print(f"  rule {rule:24s} x{times}", file=sys.stderr)
    if options.debug >= 4:
        print(show_module(module), file=sys.stderr)


def _dump(module: Module, number: int, name: str, options: Options) -> None:
    if options.dump is not None:
        write_dump(options.dump / f"{number:02d}_{name}.ir", show_module(module).encode())


def write_dump(path: Path, data: bytes) -> None:
    """A file of FRTC_DUMP, its folder made where there is none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as fault:
        hint = "--dump and FRTC_DUMP name a folder that can be written to"
        raise FrtcError("output.write", f"cannot write {path}: {fault.strerror}", hint=hint) from None


def _reproducer(module: Module, name: str) -> str:
    """The text that went into the failing pass; `python -m frtc.passes FILE` runs the pass on it again."""
    handle, path = tempfile.mkstemp(prefix=f"frtc-{name}-", suffix=".ir")
    with os.fdopen(handle, "w") as file:
        file.write(f"# pass {name}\n{show_module(module)}")
    return path
