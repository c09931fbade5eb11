"""Every family of kernels under memcheck, racecheck and initcheck, and a Plan's whole inference under memcheck.

    PYTHONPATH=. python3 -m bench.sanitize [--family baseline sm_90a] [--tool memcheck racecheck initcheck]

What runs is in tests/kernels/sanitized.py. Three faulty kernels are there, too: a tool that does not see the one made
for it fails the run, as any error that a tool reports elsewhere does. All runs go on at once, for SECONDS in all. A
case that does not end in QUIET seconds is named and left, and so are later ones of its kernel: they are not judged,
which is not clean. A table, sanitize.json, and a log for each run, written as it goes: SIGTERM ends all with a table.

The tool is $SANITIZER, that of a pip package beside torch, or CUDA's. What 2025.3, of
CUDA 13.0, does not see or sees wrongly, by the release notes of 2026.4:
    copies by tensor maps (cp.async.bulk.tensor) are seen by no tool; memcheck of 2026.2 checks them, and is asked to
    what wgmma reads is checked for its bounds, not for races
    racecheck on Hopper: races that there are not, of mbarriers (until 2025.4 and 2026.3), of warpgroups and clusters
        (until 2026.1); 2025.3 came to no end, either. Hopper's own kernels are not judged by racecheck before 2026.3
    cp.async that fills with zeros may count as a longer read (until 2026.4)
`pip install nvidia-cuda-sanitizer-api` brings a newer one; it runs on the same driver.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench import report
from bench.calibrated import calibrated
from bench.full_model import ARCH, STATIC, Shape, checkpoint, options, plan_path, scales_of
from frtc.codegen.nvrtc import compile_all
from frtc.compiler import compile
from frtc.console import table as columns
from frtc.errors import EnvironmentFault
from tests.kernels.sanitized import DONE, FAMILIES, PROCESS, TOOLS, cases_of, fault_job

FAULTY, PLAN = "faulty", "plan"
INSTALLED = Path("/usr/local/cuda/bin/compute-sanitizer")
EXIT_CODE = 86  # of the tool, where it reports anything
SECONDS = 150.0  # of all, from the start
# Seconds that a case may take, with the start of the program before the first one. Racecheck follows every access.
QUIET = {"memcheck": 25.0, "racecheck": 90.0, "initcheck": 25.0}
PORTS = 49152  # first one that a tool talks to its target through; each start of it has twenty of its own
JUDGES = {("sm_90a", "racecheck"): (2026, 3)}  # the first version that can be believed
PARTS = {("sm_90a", "racecheck"): 4, ("sm_90a", "memcheck"): 2, ("sm_90a", "initcheck"): 2}  # at the same time
TINY = Shape("pi05", prompt=12, horizon=10, size="tiny", precision=STATIC)
SUMMARY = re.compile(r"^=+ (?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", re.M)
REPORT = re.compile(r"={9} (?!COMPUTE-SANITIZER|.*SUMMARY)\S")  # begins a report; its other lines are indented
COUNTED = re.compile(rf"^{DONE} (\d+) cases, (\d+) wrong", re.M)
CASE, WRONG = re.compile(r"^case: (.*)", re.M), re.compile(r"^wrong: ", re.M)


@dataclass(frozen=True, slots=True)
class Part:
    """What one process is asked for: `cases` of the family, by place; none: it knows itself."""

    what: str
    tool: str
    cases: tuple[int, ...] = ()
    number: int = 0

    @property
    def log(self) -> str:
        return f"{self.what}-{self.tool}{f'-{self.number}' if self.number else ''}.log"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of a tool: what was printed, how it ended, and why it was ended where it did not end by itself."""

    text: str
    code: int
    ended: str = ""

    @property
    def done(self) -> bool:
        return not self.ended and bool(COUNTED.search(self.text))

    @property
    def begun(self) -> list[str]:
        return CASE.findall(self.text)

    @property
    def judged(self) -> int:
        """Cases behind which another one came, or the end."""
        return len(self.begun) if self.done else max(len(self.begun) - 1, 0)

    @property
    def wrong(self) -> int:
        counted = COUNTED.search(self.text)
        return int(counted.group(2)) if counted else len(WRONG.findall(self.text))

    @property
    def errors(self) -> int | None:
        """As the tool counts them, or its reports where it was ended; None where it gave no summary itself."""
        if summary := SUMMARY.search(self.text):
            return next((int(n) for n in summary.groups() if n), 0)
        return sum(reports_of(self.text).values()) if self.ended else None


@dataclass(frozen=True, slots=True)
class Row:
    """One family under one tool.

    cases     that came to their end, of so many
    errors    as the tool counts them; None where it gave no summary
    wrong     cases whose results were wrong
    code      of the program that ended with another than 0
    reports   how many the tool printed, by case
    stuck     (case, why) of those that came to no end
    last      line of a run that ended before its time, or why there was none
    """

    what: str
    tool: str
    cases: int
    of: int
    errors: int | None
    wrong: int
    seconds: float
    code: int
    reports: Mapping[str, int]
    stuck: tuple[tuple[str, str], ...] = ()
    last: str = ""

    @property
    def ok(self) -> bool:
        return self.verdict in ("clean", "seen")

    @property
    def verdict(self) -> str:
        """Of the faulty kernel: whether it was seen, and said by the exit code."""
        if self.what == FAULTY:
            return "seen" if self.errors and self.code == EXIT_CODE else "NOT SEEN"
        if self.errors or self.wrong or self.code:
            return "FAILED"
        if self.cases < self.of or not self.of:
            return "NOT JUDGED"
        return "FAILED" if self.errors is None else "clean"


def sanitizer() -> Path:
    """The program; $SANITIZER names another one."""
    wheels = [Path(folder) / "nvidia/cu13/compute-sanitizer/compute-sanitizer" for folder in sys.path]
    named = os.environ.get("SANITIZER")
    tried = [Path(named)] if named else [*wheels, INSTALLED]
    for path in tried:
        if path.is_file():
            return path.resolve()
    hint = "it comes with CUDA, or: pip install nvidia-cuda-sanitizer-api; SANITIZER=PATH names one"
    raise EnvironmentFault("bench.sanitizer", "there is no compute-sanitizer here", [("tried", str(tried[-1]))], hint)


def version_of(tool: Path) -> str:
    """ "2025.3.1.0" """
    said = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=60).stdout
    found = re.search(r"Version (\S+)", said)
    return found.group(1) if found else said.strip()[:80]


def row_of(what: str, tool: str, of: int, attempts: Sequence[Attempt], seconds: float) -> Row:
    """What all starts of a tool for a family say. of: how many cases there are; 0: as many as were begun."""
    errors = [each.errors for each in attempts]
    codes = [each.code for each in attempts if not each.ended and each.code]
    last = next((last_line(each.text) for each in attempts if not each.done and not each.ended), "")
    reports = sum((reports_of(each.text) for each in attempts), Counter[str]())
    stuck = tuple((each.begun[-1] if each.begun else "the start", each.ended) for each in attempts if each.ended)
    return Row(
        what, tool, sum(each.judged for each in attempts), of or sum(len(each.begun) for each in attempts),
        None if None in errors else sum(n for n in errors if n), sum(each.wrong for each in attempts),
        round(seconds, 1), next(iter(codes), 0), dict(reports), stuck, last,
    )  # fmt: skip


def last_line(text: str) -> str:
    """Of the program, or of the tool where the program said nothing."""
    lines = text.strip().splitlines() or ["it said nothing"]
    return next((line for line in reversed(lines) if not line.startswith("=")), lines[-1])[:200]


def reports_of(text: str) -> Counter[str]:
    """Of each case that it began with: "case: NAME"."""
    found, case = Counter[str](), "before the first case"
    for line in text.splitlines():
        if line.startswith("case: "):
            case = line.removeprefix("case: ")
        elif REPORT.match(line):
            found[case] += 1
    return found


def numbers_of(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2])


def checks_of(version: str, part: Part) -> list[str]:
    """Those that are not made unless asked for, of tools that know them; fewer for a Plan.

    With them 2026.4 does not come back from the launch of a graph, and the kernels have them as cases. A Plan asks in
    what memory frames lie; that the driver does not know a program's own would count as an error.
    """
    if part.what == PLAN:
        return ["--report-api-errors", "no"]
    return ["--check-tensor-ops", "yes"] if part.tool == "memcheck" and numbers_of(version) >= (2026, 2) else []


def command_of(tool: Path, version: str, part: Part, cases: Sequence[int], start: int) -> list[str]:
    target = str(plan_path(TINY)) if part.what == PLAN else part.what
    checks = ["--tool", part.tool, "--error-exitcode", str(EXIT_CODE), *checks_of(version, part)]
    said = ["--print-limit", "200", "--show-backtrace", "no", "--destroy-on-device-error", "kernel"]  # and go on
    own = ["--port", str(PORTS + 20 * start), "--launch-timeout", "60"]
    listed = [",".join(map(str, cases))] if cases else []
    asked = [sys.executable, "-m", "tests.kernels.sanitized", target, part.tool, *listed]
    return [str(tool), *checks, *said, *own, *asked]


@dataclass(frozen=True, slots=True)
class Runner:
    """What all runs share. until: when there is no more time; stopped: somebody wants the end now."""

    tool: Path
    version: str
    kernels: Mapping[str, Sequence[str]]  # of each case of a family
    logs: Path
    until: float
    stopped: threading.Event
    starts: Iterator[int]

    def run(self, part: Part) -> tuple[list[Attempt], float]:
        """Starts the tool, and again behind a case that came to no end, without others of its kernel."""
        begun, attempts, left = time.monotonic(), list[Attempt](), part.cases
        while not attempts or left:
            if self.ended(begun, float("inf")):
                break
            attempts.append(self.attempt(part, left))
            if attempts[-1].done or not left:
                break
            at = max(len(attempts[-1].begun) - 1, 0)
            names = self.kernels[part.what]
            left = tuple(case for case in left[at + 1 :] if names[case] != names[left[at]])
        return attempts, time.monotonic() - begun

    def ended(self, moved: float, quiet: float) -> str:
        """Why what said nothing since `moved` has to end."""
        now = time.monotonic()
        if self.stopped.is_set():
            return "stopped from outside"
        if now > self.until:
            return "no time left"
        return f"no end in {quiet:.0f} s" if now - moved > quiet else ""

    def attempt(self, part: Part, cases: Sequence[int]) -> Attempt:
        """One start; its output goes straight to the log."""
        log, quiet = self.logs / part.log, QUIET[part.tool] if cases else float("inf")
        begin = log.stat().st_size if log.exists() else 0
        command = command_of(self.tool, self.version, part, cases, next(self.starts))
        paths = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
        with log.open("ab") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": paths},
                start_new_session=True,
            )  # fmt: skip
        moved, seen, ended = time.monotonic(), 0, ""
        while process.poll() is None and not ended:
            time.sleep(0.1)
            text = said_since(log, begin)
            if (count := len(CASE.findall(text))) != seen:
                moved, seen = time.monotonic(), count
            if ended := self.ended(moved, quiet):
                end(process, text)
                with log.open("a") as out_text:
                    out_text.write(f"\n{ended}\n")
        return Attempt(said_since(log, begin), process.wait(), ended)


def said_since(log: Path, begin: int) -> str:
    with log.open("rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace")


def end(process: subprocess.Popen[bytes], text: str) -> None:
    """The tool and the program under it, which would else keep the device."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for number in re.findall(rf"^{PROCESS} (\d+)", text, re.M):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(int(number), signal.SIGKILL)
    process.wait()


def shares(kernels: Sequence[str], count: int) -> list[tuple[int, ...]]:
    """Cases in so many parts, about as many in each; those of a kernel are not parted."""
    by_kernel: dict[str, list[int]] = {}
    for case, kernel in enumerate(kernels):
        by_kernel.setdefault(kernel, []).append(case)
    parts: list[list[int]] = [[] for _ in range(min(count, len(by_kernel)))]
    for cases in sorted(by_kernel.values(), key=len, reverse=True):
        min(parts, key=len).extend(cases)
    return [tuple(part) for part in parts]


def judged_by(version: str, what: str, tool: str) -> bool:
    return numbers_of(version) >= JUDGES.get((what, tool), ())


def parts_of(kernels: Mapping[str, Sequence[str]], tools: Iterable[str], version: str) -> list[Part]:
    """What is slow first, so that none is left alone at the end."""
    kinds = [kind for kind in ("racecheck", "memcheck", "initcheck") if kind in set(tools)]
    found = [
        Part(family, kind, cases, number)
        for kind in kinds
        for family in kernels
        if judged_by(version, family, kind)
        for number, cases in enumerate(shares(kernels[family], PARTS.get((family, kind), 1)), 1)
    ]
    plan = [Part(PLAN, "memcheck")] if "memcheck" in kinds else []
    return [*sorted(found, key=lambda part: part.what == "baseline"), *plan, *(Part(FAULTY, kind) for kind in kinds)]


def prepare(families: Sequence[str], tools: Sequence[str]) -> dict[str, list[str]]:
    """Kernels into the cache of cubins, and a tiny Plan with its self-test: instrumented processes only launch.

    The kernels of each family's cases come back.
    """
    cases = {family: cases_of(family) for family in families}
    jobs = [job for found in cases.values() for case in found for job in case.jobs()]
    compile_all([*jobs, *map(fault_job, tools)])
    if "memcheck" in tools:
        folder = checkpoint(TINY.policy, TINY.size)
        calibrated(TINY, "cpu")
        compile(folder, ARCH, plan_path(TINY), replace(options(TINY), self_test=True), scales=scales_of(TINY))
    return {family: [case.kernel.name for case in found] for family, found in cases.items()}


def measured(runner: Runner, parts: Sequence[Part], jobs: int, said: Callable[[str], None]) -> list[Row]:
    """A row for each family and tool, in the order of the parts."""
    runner.logs.mkdir(parents=True, exist_ok=True)
    for part in parts:
        (runner.logs / part.log).unlink(missing_ok=True)
    found: dict[tuple[str, str], list[tuple[list[Attempt], float]]] = {(p.what, p.tool): [] for p in parts}
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(runner.run, part): part for part in parts}
        for each in as_completed(running):
            part, (attempts, seconds) = running[each], each.result()
            found[part.what, part.tool].append((attempts, seconds))
            judged = sum(attempt.judged for attempt in attempts)
            said(f"{part.log[:-4]}: {judged} cases in {seconds:.0f} s")
    return [
        row_of(
            what, tool, len(runner.kernels.get(what, ())), [each for attempts, _ in runs for each in attempts],
            max(seconds for _, seconds in runs),
        )
        for (what, tool), runs in found.items()
    ]  # fmt: skip


def unjudged(kernels: Mapping[str, Sequence[str]], tools: Iterable[str], version: str) -> list[Row]:
    """Of tools that are too old for a family."""
    return [
        Row(
            family, tool, 0, len(kernels[family]), 0, 0, 0.0, 0, {},
            last=f"needs {wanted[0]}.{wanted[1]}, this is {version}",
        )
        for (family, tool), wanted in JUDGES.items()
        if family in kernels and tool in tools and not judged_by(version, family, tool)
    ]  # fmt: skip


def line(row: Row) -> tuple[str, ...]:
    errors = "no summary" if row.errors is None else str(row.errors)
    counts = (f"{row.cases} of {row.of}", errors, str(row.wrong), f"{row.seconds:.0f}")
    return (row.what, row.tool, *counts, row.verdict)


def table(rows: Sequence[Row]) -> str:
    text = columns([("family", "tool", "cases", "errors", "wrong", "s", ""), *map(line, rows)])
    for row in rows:
        if not row.ok and row.last:
            text += f"\n{row.what} {row.tool}: {row.last}"
        for case, why in row.stuck:
            text += f"\n{row.what} {row.tool}: {why}: {case[:150]}"
        for case, count in () if row.what == FAULTY else row.reports.items():
            text += f"\n{row.what} {row.tool}: {count} in {case[:150]}"
    return text


def to_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [{**asdict(row), "verdict": row.verdict, "ok": row.ok} for row in rows]


@contextmanager
def stoppable() -> Iterator[threading.Event]:
    """Set by SIGTERM and SIGINT, which end nothing else meanwhile."""
    stopped = threading.Event()
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: stopped.set()) for number in numbers]
    try:
        yield stopped
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--family", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--tool", nargs="+", default=list(TOOLS), choices=TOOLS)
    parser.add_argument("--jobs", type=int, default=8, help="runs at a time on the one GPU")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="in all; what is not judged then is not clean")
    given = parser.parse_args(arguments)
    begun, tool = time.monotonic(), sanitizer()
    version = version_of(tool)
    kernels = prepare(given.family, given.tool)
    print(f"compute-sanitizer {version}; kernels and Plan made in {time.monotonic() - begun:.0f} s", flush=True)
    logs = Path(os.environ.get("OUT") or "bench/results") / "sanitize"
    with stoppable() as stopped:
        runner = Runner(tool, version, kernels, logs, begun + given.seconds, stopped, itertools.count())
        parts = parts_of(kernels, given.tool, version)
        rows = measured(runner, parts, given.jobs, lambda text: print(text, flush=True))
        rows = sorted(rows + unjudged(kernels, given.tool, version), key=lambda row: (row.what, row.tool))
    seconds = round(time.monotonic() - begun, 1)
    about = report.about("bench.sanitize", "cuda") | {"sanitizer": version, "seconds": seconds}
    report.write("sanitize", about | {"rows": to_json(rows)})
    print(table(rows))
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
