"""The command line: `frtc COMMAND ...`. Each command is a module that is imported when it runs, so that `frtc run` on a
robot never loads the compiler.

A command's module has `options(parser)` and `run(args) -> Result`. Exit codes: docs/design.md, section 8.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

import frtc
from frtc.console import Result, show, show_error
from frtc.errors import EnvironmentFault, FrtcError, UsageError, nearest

COMMANDS = {  # name -> what it does; its module is frtc.commands.<name>
    "compile": "checkpoint to Plan, for one GPU; needs none",
    "calibrate": "activation scales for FP8, from recorded observations",
    "update": "new weights and statistics in a Plan, from a checkpoint of the same model",
    "run": "run a Plan and time it, on the GPU or on the CPU's emulator",
    "verify": "prove a Plan: its own self-test, or against the checkpoint",
    "inspect": "what is in a Plan: policy, programs, memory, kernels, weights",
    "diff": "what two checkpoints or two Plans differ in",
    "estimate": "what an inference takes on a GPU: roofline and expected time; needs none",
    "explain": "what became of every node of the model, and why",
    "check": "what a checkpoint and its files prove, without compiling",
    "doctor": "what this machine can do: Python, wheels, driver, GPU",
    "models": "models, layouts and targets that this frtc knows",
}
ENDING = (signal.SIGTERM, signal.SIGHUP)  # signals that unwind as Ctrl-C does


class Ended(KeyboardInterrupt):
    """A signal that asks the process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Parser(argparse.ArgumentParser):
    """argparse, its complaints as errors of ours."""

    def error(self, message: str) -> NoReturn:
        raise UsageError("usage.option", message, hint=f"`{self.prog} --help` lists the options")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: of a signal 128 and its number, as shells report it."""
    try:
        with _unwinding():
            return _answer(argv)
    except Ended as end:
        return 128 + end.number
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


@contextmanager
def _unwinding() -> Iterator[None]:
    """Signals of ENDING raise, so that whoever writes a file removes it. One that is ignored (nohup) or that the
    calling program handles stays so; only the main thread may set handlers."""
    here = threading.current_thread() is threading.main_thread()
    ours = [number for number in ENDING if here and signal.getsignal(number) is signal.SIG_DFL]

    def end(number: int, frame: FrameType | None) -> None:
        for each in ours:
            signal.signal(each, signal.SIG_IGN)  # a closing terminal sends several; one unwinding is enough
        raise Ended(number)

    try:
        for number in ours:
            signal.signal(number, end)
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _answer(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in arguments
    try:
        if not arguments or arguments[0] in ("-h", "--help"):
            print(overview())
            return 0
        if arguments[0] == "--version":
            print(f"frtc {frtc.__version__}")
            return 0
        return show(run(arguments), as_json)
    except FrtcError as error:
        return report_bug(error, as_json, arguments) if error.exit_code == 1 else show_error(error, as_json)
    except BrokenPipeError:  # the reader of our output has gone; nothing more can be said
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if isinstance(error.__context__, Ended):  # the terminal closed, and with it the progress line
            raise error.__context__ from None
        return report_bug(error, as_json, arguments)


def run(arguments: Sequence[str]) -> Result:
    """The result of one command."""
    name, *rest = arguments
    if name not in COMMANDS:
        rows = [("known", ", ".join(COMMANDS))]
        rows += [("nearest", near)] if (near := nearest(name, COMMANDS)) else []
        raise UsageError("usage.command", f"there is no command {name}", rows)
    try:
        return _run_command(name, rest)
    except ImportError as fault:
        missing = (fault.name or "").partition(".")[0]
        if missing in ("", "frtc"):
            raise
        what = f"`frtc {name}` needs {missing}, which is not installed"
        raise EnvironmentFault("env.package", what, [("found", str(fault))], "pip install 'frtc[compile]'") from None


def _run_command(name: str, rest: Sequence[str]) -> Result:
    module = importlib.import_module(f"frtc.commands.{name}")
    parser = Parser(prog=f"frtc {name}", description=COMMANDS[name], allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="the result as JSON on standard output")
    module.options(parser)
    parse = parser.parse_args if "--" in rest else parser.parse_intermixed_args  # options between positionals, too
    result: Result = module.run(parse(rest))
    return result


def overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {about}" for name, about in COMMANDS.items()]
    usage = "usage: frtc COMMAND [options]        `frtc COMMAND --help` lists its options"
    return "\n".join([f"frtc {frtc.__version__}: {frtc.__doc__ or ''}".split("\n")[0], usage, "", *lines])


def report_bug(error: Exception, as_json: bool, arguments: Sequence[str]) -> int:
    """A bug in frtc: write what a maintainer needs and say where it lies."""
    from frtc.bug import write_report

    path = write_report(error, arguments)
    code = error.code if isinstance(error, FrtcError) else "internal"
    what = error.what if isinstance(error, FrtcError) else f"{type(error).__name__}: {error}".split("\n")[0]
    rows = [*(error.rows if isinstance(error, FrtcError) else ()), ("report", str(path))]
    bug = FrtcError(code, what, rows, "this is a bug in frtc: please send the report")
    show_error(bug, as_json)
    return 1


if __name__ == "__main__":
    sys.exit(main())
