"""Every family of kernels under memcheck, racecheck and initcheck, and a Plan's whole inference under memcheck.

    PYTHONPATH=. python3 -m bench.sanitize [--family baseline sm_90a] [--tool memcheck racecheck initcheck]

What runs is in tests/kernels/sanitized.py. Three faulty kernels come first: a tool that does not see the one made for
it fails the run, as any error that a tool reports elsewhere does. A table, sanitize.json, and one log for each run.

The tool is $SANITIZER, that of a pip package beside torch, or CUDA's. What 2025.3, of CUDA 13.0, does not see or sees
wrongly, by its own release notes:
    copies by tensor maps (cp.async.bulk.tensor) are seen by no tool; memcheck of 2026.2 checks them, and is asked to
    what wgmma reads is checked for its bounds, not for races
    racecheck on Hopper: races that there are not, of mbarriers (until 2025.4 and 2026.3), warpgroups, clusters (2026.1)
    cp.async that fills with zeros may count as a longer read (until 2026.4)
`pip install nvidia-cuda-sanitizer-api` brings a newer one; it runs on the same driver.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from tests.kernels.sanitized import DONE, FAMILIES, TOOLS, cases_of, fault_job

FAULTY, PLAN = "faulty", "plan"
INSTALLED = Path("/usr/local/cuda/bin/compute-sanitizer")
EXIT_CODE = 86  # of the tool, where it reports anything
SECONDS_MOST = 150.0  # of one run
PORTS = 49152  # first one that a tool talks to its target through; each run has twenty of its own
TINY = Shape("pi05", prompt=12, horizon=10, size="tiny", precision=STATIC)
SUMMARY = re.compile(r"^=+ (?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", re.M)
REPORT = re.compile(r"={9} (?!COMPUTE-SANITIZER|.*SUMMARY)\S")  # begins a report; its other lines are indented
COUNTED = re.compile(rf"^{DONE} (\d+) cases, (\d+) wrong", re.M)


@dataclass(frozen=True, slots=True)
class Row:
    """One run: what under which tool.

    errors    as the tool counts them; None where it gave no summary
    wrong     cases whose results were wrong
    reports   how many the tool printed, by case
    """

    what: str
    tool: str
    cases: int
    wrong: int
    errors: int | None
    seconds: float
    code: int
    reports: Mapping[str, int]
    last: str = ""

    @property
    def ok(self) -> bool:
        """Clean; of the faulty kernel: seen, and said by the exit code."""
        if self.what == FAULTY:
            return bool(self.errors) and self.code == EXIT_CODE
        return self.errors == 0 and self.code == 0 and self.cases > 0 and self.wrong == 0


def sanitizer() -> Path:
    """The program; $SANITIZER names another one."""
    wheels = [Path(folder) / "nvidia/cu13/compute-sanitizer/compute-sanitizer" for folder in sys.path]
    named = os.environ.get("SANITIZER")
    tried = [Path(named)] if named else [*wheels, INSTALLED]
    for path in tried:
        if path.is_file():
            return path
    hint = "it comes with CUDA, or: pip install nvidia-cuda-sanitizer-api; SANITIZER=PATH names one"
    raise EnvironmentFault("bench.sanitizer", "there is no compute-sanitizer here", [("tried", str(tried[-1]))], hint)


def version_of(tool: Path) -> str:
    """ "2025.3.1.0" """
    said = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=60).stdout
    found = re.search(r"Version (\S+)", said)
    return found.group(1) if found else said.strip()[:80]


def row_of(what: str, tool: str, text: str, code: int, seconds: float) -> Row:
    """What a run's output says."""
    summary, counted = SUMMARY.search(text), COUNTED.search(text)
    errors = next((int(n) for n in summary.groups() if n), 0) if summary else None
    cases, wrong = map(int, counted.groups()) if counted else (0, 0)
    lines = text.strip().splitlines()
    last = "" if counted or not lines else next((x for x in reversed(lines) if not x.startswith("=")), lines[-1])[:200]
    return Row(what, tool, cases, wrong, errors, round(seconds, 1), code, dict(reports_of(text)), last)


def reports_of(text: str) -> Counter[str]:
    """Of each case that it began with: "case: NAME"."""
    found, case = Counter[str](), "before the first case"
    for line in text.splitlines():
        if line.startswith("case: "):
            case = line.removeprefix("case: ")
        elif REPORT.match(line):
            found[case] += 1
    return found


def checks_of(version: str, kind: str) -> list[str]:
    """Those that are not made unless asked for, of tools that know them."""
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    return ["--check-tensor-ops", "yes"] if kind == "memcheck" and numbers >= (2026, 2) else []


def command_of(tool: Path, version: str, what: str, kind: str, place: int) -> list[str]:
    target = str(plan_path(TINY)) if what == PLAN else what
    checks = ["--tool", kind, "--error-exitcode", str(EXIT_CODE), *checks_of(version, kind)]
    said = ["--print-limit", "200", "--show-backtrace", "no", "--destroy-on-device-error", "kernel"]  # and go on
    own = ["--port", str(PORTS + 20 * place), "--launch-timeout", "60"]
    return [str(tool), *checks, *said, *own, sys.executable, "-m", "tests.kernels.sanitized", target, kind]


def run(tool: Path, version: str, what: str, kind: str, place: int, logs: Path) -> Row:
    begun = time.monotonic()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")])),
    }
    try:
        done = subprocess.run(
            command_of(tool, version, what, kind, place), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", timeout=SECONDS_MOST, env=environment,
        )  # fmt: skip
        text, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as late:
        out = late.stdout or b""
        text, code = (out.decode(errors="replace") if isinstance(out, bytes) else out) + "\nno end in time", -1
    (logs / f"{what}-{kind}.log").write_text(text)
    return row_of(what, kind, text, code, time.monotonic() - begun)


def runs_of(families: Iterable[str], tools: Iterable[str]) -> list[tuple[str, str]]:
    """(what, tool), longest first, so that none is left alone at the end."""
    kinds = [kind for kind in ("racecheck", "memcheck", "initcheck") if kind in set(tools)]
    plan = [(PLAN, "memcheck")] if "memcheck" in kinds else []
    return [*((what, kind) for kind in kinds for what in families), *plan, *((FAULTY, kind) for kind in kinds)]


def prepare(families: Sequence[str], tools: Sequence[str]) -> None:
    """Kernels into the cache of cubins, and a tiny Plan with its self-test: instrumented processes only launch."""
    cases = [case for family in families for case in cases_of(family)]
    compile_all([*(job for case in cases for job in case.jobs()), *map(fault_job, tools)])
    if "memcheck" in tools:
        folder = checkpoint(TINY.policy, TINY.size)
        calibrated(TINY, "cpu")
        compile(folder, ARCH, plan_path(TINY), replace(options(TINY), self_test=True), scales=scales_of(TINY))


def measured(
    tool: Path, wanted: Sequence[tuple[str, str]], jobs: int, logs: Path, said: Callable[[Row], None]
) -> list[Row]:
    logs.mkdir(parents=True, exist_ok=True)
    version = version_of(tool)
    with ThreadPoolExecutor(jobs) as pool:
        running = [
            pool.submit(run, tool, version, what, kind, place, logs) for place, (what, kind) in enumerate(wanted)
        ]
        rows = []
        for each in running:
            rows.append(each.result())
            said(rows[-1])
        return rows


def line(row: Row) -> tuple[str, ...]:
    errors = "no summary" if row.errors is None else str(row.errors)
    wanted = "seen" if row.what == FAULTY else "clean"
    return (
        row.what,
        row.tool,
        str(row.cases),
        errors,
        str(row.wrong),
        f"{row.seconds:.0f}",
        wanted if row.ok else "FAILED",
    )


def table(rows: Sequence[Row]) -> str:
    text = columns([("family", "tool", "cases", "errors", "wrong", "s", ""), *map(line, rows)])
    for row in rows:
        if not row.ok and row.last:
            text += f"\n{row.what} {row.tool}: {row.last}"
        for case, count in () if row.what == FAULTY else row.reports.items():
            text += f"\n{row.what} {row.tool}: {count} in {case[:150]}"
    return text


def to_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [{**asdict(row), "ok": row.ok} for row in rows]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--family", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--tool", nargs="+", default=list(TOOLS), choices=TOOLS)
    parser.add_argument("--jobs", type=int, default=4, help="runs at a time on the one GPU")
    given = parser.parse_args(arguments)
    begun, tool = time.monotonic(), sanitizer()
    version = version_of(tool)
    prepare(given.family, given.tool)
    print(f"compute-sanitizer {version}; kernels and Plan made in {time.monotonic() - begun:.0f} s", flush=True)
    logs = Path(os.environ.get("OUT") or "bench/results") / "sanitize"
    wanted = runs_of(given.family, given.tool)
    rows = measured(tool, wanted, given.jobs, logs, lambda row: print("  ".join(line(row)), flush=True))
    about = report.about("bench.sanitize", "cuda") | {
        "sanitizer": version,
        "seconds": round(time.monotonic() - begun, 1),
    }
    report.write("sanitize", about | {"rows": to_json(rows)})
    print(table(rows))
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
