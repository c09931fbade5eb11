"""The sanitizers' run without a GPU: what is launched covers every kernel, and what a tool says decides."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import stat
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from bench import sanitize
from bench.sanitize import (
    EXIT_CODE,
    FAULTY,
    PLAN,
    Attempt,
    Part,
    Row,
    Runner,
    measured,
    parts_of,
    reports_of,
    row_of,
    sanitizer,
    shares,
    table,
    unjudged,
    version_of,
)
from frtc.codegen.nvrtc import compile_all
from frtc.errors import EnvironmentFault
from frtc.kernels.catalog import CATALOG
from tests.kernels.harness import GUARD, expected, operands_of, view_of
from tests.kernels.sanitized import FAMILIES, TOOLS, cases_of, fault_job, finished_rows, gaps, path_of

CLEAN = """========= COMPUTE-SANITIZER
case: smxx_gemm 61x1021
case: smxx_norm 5x1001
sanitized: 2 cases, 0 wrong
========= ERROR SUMMARY: 0 errors
"""
FAULT = """========= COMPUTE-SANITIZER
case: smxx_gemm 61x1021
========= Invalid __global__ write of size 4 bytes
=========     at void frtc::gemm+0x40
=========     Address 0x7f00 is out of bounds
=========
========= Invalid __global__ write of size 4 bytes
=========     at void frtc::gemm+0x40
case: smxx_norm 5x1001
sanitized: 2 cases, 0 wrong
========= ERROR SUMMARY: 2 errors
"""
RACE = """========= COMPUTE-SANITIZER
case: sm90_gemm 61x1021
========= Warning: Race reported between Write access at 0x10 in frtc::sm90_gemm
=========     and Read access at 0x20 in frtc::sm90_gemm [4 hazards]
sanitized: 1 cases, 0 wrong
========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)
"""


def judged(text: str, code: int, what: str = "baseline", tool: str = "memcheck", of: int = 2) -> Row:
    return row_of(what, tool, of, [Attempt(text, code)], 1.0)


def test_clean_is_clean() -> None:
    row = judged(CLEAN, 0)
    assert (row.cases, row.wrong, row.errors, row.reports, row.ok) == (2, 0, 0, {}, True)


def test_what_a_tool_reports_fails_and_is_laid_at_its_case() -> None:
    row = judged(FAULT, EXIT_CODE)
    assert row.errors == 2 and row.reports == {"smxx_gemm 61x1021": 2} and not row.ok
    race = judged(RACE, EXIT_CODE, "sm_90a", "racecheck", 1)
    assert race.errors == 1 and race.reports == {"sm90_gemm 61x1021": 1} and not race.ok
    assert "baseline memcheck: 2 in smxx_gemm 61x1021" in table([row, race])


@pytest.mark.parametrize(
    ("text", "code", "verdict"),
    [
        (CLEAN, 1, "FAILED"),  # the program failed, whatever the summary
        (CLEAN.replace("0 wrong", "1 wrong"), 0, "FAILED"),
        (CLEAN.replace("case: smxx_norm 5x1001\n", ""), 0, "NOT JUDGED"),  # one of two cases
        (CLEAN.replace("sanitized: 2 cases, 0 wrong\n", ""), 0, "NOT JUDGED"),  # it did not come to its end
        (CLEAN.replace("========= ERROR SUMMARY: 0 errors\n", ""), 0, "FAILED"),  # the tool did not
        ("========= Error: Device not supported\n", 0, "NOT JUDGED"),
        ("", -1, "FAILED"),
    ],
)
def test_what_did_not_run_to_its_end_is_not_clean(text: str, code: int, verdict: str) -> None:
    row = judged(text, code)
    assert row.verdict == verdict and not row.ok and verdict in table([row])


def test_what_was_ended_counts_for_what_it_judged() -> None:
    """Its last case is named; the next start judges the rest."""
    begun = CLEAN[: CLEAN.index("sanitized")]
    first, second = Attempt(begun, -9, "no end in 25 s"), Attempt(CLEAN, 0)
    row = row_of("sm_90a", "racecheck", 4, [first, second], 1.0)
    assert (row.cases, row.errors, row.code, row.stuck) == (3, 0, 0, (("smxx_norm 5x1001", "no end in 25 s"),))
    assert row.verdict == "NOT JUDGED" and "no end in 25 s: smxx_norm 5x1001" in table([row])
    seen = row_of("sm_90a", "racecheck", 4, [Attempt(RACE[: RACE.index("sanitized")], -9, "no time left")], 1.0)
    assert seen.errors == 1 and seen.verdict == "FAILED"
    assert row_of("sm_90a", "racecheck", 4, [], 0.0).verdict == "NOT JUDGED"


def test_a_fault_has_to_be_seen() -> None:
    assert judged(FAULT, EXIT_CODE, "faulty").ok and judged(RACE, EXIT_CODE, "faulty", "racecheck").ok
    assert not judged(FAULT, 0, "faulty").ok  # an exit code that hides it
    assert not judged(CLEAN, 0, "faulty").ok


def test_reports_before_any_case() -> None:
    assert reports_of("========= Error: no device\n========= ERROR SUMMARY: 1 error") == {"before the first case": 1}


KERNELS = {"baseline": ["a", "b", "a"], "sm_90a": [*"cddecffghh"]}


def test_every_case_of_every_run_is_there() -> None:
    parts = parts_of(KERNELS, TOOLS, "2026.4.0.0")
    assert len({part.log for part in parts}) == len(parts)
    for what, kernels in KERNELS.items():
        for tool in TOOLS:
            places = [place for part in parts if (part.what, part.tool) == (what, tool) for place in part.cases]
            assert sorted(places) == list(range(len(kernels)))
    assert [(p.what, p.tool) for p in parts if not p.cases] == [
        (PLAN, "memcheck"), *((FAULTY, tool) for tool in ("racecheck", "memcheck", "initcheck")),
    ]  # fmt: skip


def test_cases_of_a_kernel_stay_together() -> None:
    parts = shares(KERNELS["sm_90a"], 3)
    assert len(parts) == 3 and max(map(len, parts)) == 4
    named = [{KERNELS["sm_90a"][place] for place in part} for part in parts]
    assert sum(map(len, named)) == len(set().union(*named)) == 6


def test_a_tool_that_is_too_old_judges_nothing() -> None:
    """That is said, and is not clean."""
    assert not [p for p in parts_of(KERNELS, TOOLS, "2025.3.1.0") if (p.what, p.tool) == ("sm_90a", "racecheck")]
    (row,) = unjudged(KERNELS, TOOLS, "2025.3.1.0")
    assert row.verdict == "NOT JUDGED" and not row.ok and "needs 2026.3, this is 2025.3.1.0" in table([row])
    assert not unjudged(KERNELS, TOOLS, "2026.4.0.0") and not unjudged({"baseline": ["a"]}, TOOLS, "2025.3")


def fake_tool(folder: Path, text: str, code: int) -> Path:
    """Prints `text` and ends with `code`, whatever it is asked."""
    said = folder / "said.txt"
    said.write_text(text)
    return script(folder, f'cat "{said}"\nexit {code}\n')


def script(folder: Path, body: str) -> Path:
    path = folder / "compute-sanitizer"
    path.write_text("#!/bin/bash\n" + body)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# A program whose case 1 has no end; like the tool's, it is another process, and would live on.
HANGS = """for last; do :; done
(
    echo "process: $BASHPID"
    for place in ${last//,/ }; do
        echo "case: number $place"
        if [ $place = 1 ]; then sleep 60; fi
    done
    echo "sanitized: 1 cases, 0 wrong"
) &
wait $!
echo "========= ERROR SUMMARY: 0 errors"
"""


def runner(tool: Path, logs: Path, kernels: dict[str, list[str]], seconds: float = 60.0) -> Runner:
    until = time.monotonic() + seconds
    return Runner(tool, "2026.4", kernels, logs, until, threading.Event(), itertools.count())


def test_a_run_leaves_a_log_and_a_verdict(tmp_path: Path) -> None:
    shown: list[str] = []
    asked = runner(fake_tool(tmp_path, FAULT, EXIT_CODE), tmp_path / "logs", {"baseline": ["a", "b"]})
    for _ in range(2):  # the second one leaves nothing of the first
        rows = measured(asked, [Part("baseline", "memcheck", (0, 1), 1)], 1, shown.append)
        assert (tmp_path / "logs/baseline-memcheck-1.log").read_text() == FAULT
    assert len(shown) == 2 and [row.verdict for row in rows] == ["FAILED"]
    assert json.loads(json.dumps(sanitize.to_json(rows)))[0]["ok"] is False


def alive(process: int) -> bool:
    """Whether it runs; one that has ended may stay in the table until the process that adopted it looks."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def test_a_case_without_end_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, later ones of its kernel are not tried, those of others are; nothing of it lives on."""
    monkeypatch.setitem(sanitize.QUIET, "memcheck", 1.0)
    asked = runner(script(tmp_path, HANGS), tmp_path, {"sm_90a": ["a", "b", "b", "c"]})
    (row,) = measured(asked, [Part("sm_90a", "memcheck", (0, 1, 2, 3), 1)], 1, lambda text: None)
    assert (row.cases, row.of, row.verdict) == (2, 4, "NOT JUDGED") and row.stuck == (("number 1", "no end in 1 s"),)
    log = (tmp_path / "sm_90a-memcheck-1.log").read_text()
    assert "case: number 3" in log and "case: number 2" not in log
    (first, _) = re.findall(r"process: (\d+)", log)
    assert not alive(int(first))


def test_the_time_of_all_is_limited(tmp_path: Path) -> None:
    asked = runner(script(tmp_path, HANGS), tmp_path, {"sm_90a": ["a", "b"]}, seconds=1.0)
    parts = [Part("sm_90a", "memcheck", (1,), 1), Part("sm_90a", "initcheck", (1,), 1), Part(FAULTY, "memcheck")]
    rows = measured(asked, parts, 1, lambda text: None)
    assert [row.stuck for row in rows] == [(("number 1", "no time left"),), (), ()]
    assert [row.verdict for row in rows] == ["NOT JUDGED", "NOT JUDGED", "NOT SEEN"]


def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: Path) -> None:
    monkeypatch.setenv("SANITIZER", str(tool))
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(sanitize, "prepare", lambda families, tools: {"baseline": ["smxx_gemm", "smxx_norm"]})
    monkeypatch.setattr("bench.report.about", lambda module, device: {})


@pytest.mark.parametrize(("text", "code", "wanted"), [(CLEAN, 0, 1), (FAULT, EXIT_CODE, 1)])
def test_the_exit_code_is_that_of_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, code: int, wanted: int
) -> None:
    """Either the family is not clean, or the fault was not seen."""
    prepared(tmp_path, monkeypatch, fake_tool(tmp_path, text, code))
    assert sanitize.main(["--family", "baseline", "--tool", "initcheck"]) == wanted
    rows = json.loads((tmp_path / "sanitize.json").read_text())["rows"]
    assert [(row["what"], row["ok"]) for row in rows] == [("baseline", not code), ("faulty", bool(code))]


def test_who_ends_it_gets_logs_and_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared(tmp_path, monkeypatch, script(tmp_path, HANGS))
    before = signal.getsignal(signal.SIGTERM)
    ending = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM))
    ending.start()
    assert sanitize.main(["--family", "baseline", "--tool", "initcheck"]) == 1
    ending.join()
    assert signal.getsignal(signal.SIGTERM) is before
    assert "stopped from outside: number 1" in capsys.readouterr().out
    (row, _) = json.loads((tmp_path / "sanitize.json").read_text())["rows"]
    assert (row["cases"], row["of"], row["verdict"]) == (1, 2, "NOT JUDGED")
    assert "stopped from outside" in (tmp_path / "sanitize/baseline-initcheck-1.log").read_text()


def test_newer_tools_check_copies_by_tensor_maps() -> None:
    memory, races = sanitize.Part("sm_90a", "memcheck"), sanitize.Part("sm_90a", "racecheck")
    assert sanitize.checks_of("2026.4.0.0", memory) == ["--check-tensor-ops", "yes"]
    assert sanitize.checks_of("2026.4.0.0", races) == sanitize.checks_of("2025.3.1.0", memory) == []
    assert sanitize.checks_of("", memory) == []
    assert sanitize.checks_of("2026.4.0.0", sanitize.Part(sanitize.PLAN, "memcheck")) == ["--report-api-errors", "no"]


def test_no_tool_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANITIZER", "/no/such/tool")
    with pytest.raises(EnvironmentFault, match="there is no compute-sanitizer"):
        sanitizer()


def test_the_version_is_read(tmp_path: Path) -> None:
    text = "NVIDIA (R) Compute Sanitizer\nVersion 2025.3.1.0 (build 36400806) (public-release)\n"
    assert version_of(fake_tool(tmp_path, text, 0)) == "2025.3.1.0"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kernel_of_a_family_runs(family: str) -> None:
    cases = cases_of(family)
    served = {(case.kernel.name, case.kernel.op) for case in cases}
    assert served == {(kernel.name, kernel.op) for kernel in CATALOG.kernels if kernel.family == family}
    assert {case.kernel.family for case in cases} == {family} and len(cases) <= 130


def test_every_way_of_the_native_mainloop_runs() -> None:
    ways = {way for case in cases_of("sm_90a") if case.kernel.name == "sm90_gemm" for way in path_of(case)}
    assert ways == {
        ("PARTS", "rows"), ("PARTS", "columns"), ("PARTS", "turns"),
        ("SPLIT", 0), ("SPLIT", 1), ("SPLIT", 2), ("WARPGROUPS", True), ("WARPGROUPS", False),
    }  # fmt: skip


def test_inputs_suit_the_references() -> None:
    for family in FAMILIES:
        for case in cases_of(family)[::5]:
            assert len(expected(case, operands_of(case))) == len(case.site.results)


@pytest.mark.parametrize("family", FAMILIES)
def test_gaps_are_what_no_element_has(family: str) -> None:
    """Of rows that kernels finish themselves; with the elements they are the whole buffer, staged rows all its end."""
    found = [(case, *stored) for case in cases_of(family) if (stored := finished_rows(case))]
    assert any(gaps(rows) for _, param, rows in found if param.kind == "scratch")
    for case, param, rows in found:
        nbytes = case.kernel.scratch(case.site, case.config) - int(param.value) if param.kind == "scratch" else None
        holes = gaps(rows)
        raw = np.zeros(2 * GUARD + (nbytes or holes[-1].stop if holes else rows.nbytes), np.uint8)
        for hole in holes:
            raw[GUARD + hole.start : GUARD + hole.stop] = 1
        assert not view_of(raw, rows).view(np.uint8).any()
        assert raw.size - 2 * GUARD == rows.nbytes + raw.sum()


def test_the_faults_compile() -> None:
    assert len({cubin.image for cubin in compile_all([fault_job(tool) for tool in TOOLS])}) == len(TOOLS)
