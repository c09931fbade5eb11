"""The sanitizers' run without a GPU: what is launched covers every kernel, and what a tool says decides."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from bench import sanitize
from bench.sanitize import EXIT_CODE, Row, measured, reports_of, row_of, runs_of, sanitizer, table, version_of
from frtc.codegen.nvrtc import compile_all
from frtc.errors import EnvironmentFault
from frtc.kernels.catalog import CATALOG
from tests.kernels.harness import expected, operands_of
from tests.kernels.sanitized import FAMILIES, TOOLS, cases_of, fault_job, path_of

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


def judged(text: str, code: int, what: str = "baseline", tool: str = "memcheck") -> Row:
    return row_of(what, tool, text, code, 1.0)


def test_clean_is_clean() -> None:
    row = judged(CLEAN, 0)
    assert (row.cases, row.wrong, row.errors, row.reports, row.ok) == (2, 0, 0, {}, True)


def test_what_a_tool_reports_fails_and_is_laid_at_its_case() -> None:
    row = judged(FAULT, EXIT_CODE)
    assert row.errors == 2 and row.reports == {"smxx_gemm 61x1021": 2} and not row.ok
    race = judged(RACE, EXIT_CODE, "sm_90a", "racecheck")
    assert race.errors == 1 and race.reports == {"sm90_gemm 61x1021": 1} and not race.ok
    assert "baseline memcheck: 2 in smxx_gemm 61x1021" in table([row, race])


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (CLEAN, 1),  # the program failed, whatever the summary
        (CLEAN.replace("0 wrong", "1 wrong"), 0),
        (CLEAN.replace("sanitized: 2 cases", "sanitized: 0 cases"), 0),
        (CLEAN.replace("sanitized: 2 cases, 0 wrong\n", ""), 0),  # it did not come to its end
        (CLEAN.replace("========= ERROR SUMMARY: 0 errors\n", ""), 0),  # the tool did not
        ("========= Error: Device not supported\n", 0),
        ("", -1),
    ],
)
def test_what_did_not_run_to_its_end_fails(text: str, code: int) -> None:
    assert not judged(text, code).ok


def test_a_fault_has_to_be_seen() -> None:
    assert judged(FAULT, EXIT_CODE, "faulty").ok and judged(RACE, EXIT_CODE, "faulty", "racecheck").ok
    assert not judged(FAULT, 0, "faulty").ok  # an exit code that hides it
    assert not judged(CLEAN, 0, "faulty").ok


def test_reports_before_any_case() -> None:
    assert reports_of("========= Error: no device\n========= ERROR SUMMARY: 1 error") == {"before the first case": 1}


def test_every_run_is_there() -> None:
    runs = runs_of(FAMILIES, TOOLS)
    assert len(runs) == len(set(runs)) == 2 * 3 + 1 + 3
    assert runs_of(["sm_90a"], ["initcheck"]) == [("sm_90a", "initcheck"), ("faulty", "initcheck")]


def fake_tool(folder: Path, text: str, code: int) -> Path:
    """Prints `text` and ends with `code`, whatever it is asked."""
    path = folder / "compute-sanitizer"
    said = folder / "said.txt"
    said.write_text(text)
    path.write_text(f'#!/bin/sh\ncat "{said}"\nexit {code}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_run_leaves_a_log_and_a_verdict(tmp_path: Path) -> None:
    shown: list[Row] = []
    rows = measured(
        fake_tool(tmp_path, FAULT, EXIT_CODE), [("baseline", "memcheck")], 1, tmp_path / "logs", shown.append
    )
    assert shown == rows and not rows[0].ok and (tmp_path / "logs/baseline-memcheck.log").read_text() == FAULT
    assert json.loads(json.dumps(sanitize.to_json(rows)))[0]["ok"] is False


@pytest.mark.parametrize(("text", "code", "wanted"), [(CLEAN, 0, 1), (FAULT, EXIT_CODE, 1)])
def test_the_exit_code_is_that_of_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, code: int, wanted: int
) -> None:
    """Either the family is not clean, or the fault was not seen."""
    monkeypatch.setenv("SANITIZER", str(fake_tool(tmp_path, text, code)))
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(sanitize, "prepare", lambda families, tools: None)
    monkeypatch.setattr("bench.report.about", lambda module, device: {})
    assert sanitize.main(["--family", "baseline", "--tool", "initcheck"]) == wanted
    rows = json.loads((tmp_path / "sanitize.json").read_text())["rows"]
    assert [(row["what"], row["ok"]) for row in rows] == [("baseline", not code), ("faulty", bool(code))]


def test_newer_tools_check_copies_by_tensor_maps() -> None:
    assert sanitize.checks_of("2026.4.0.0", "memcheck") == ["--check-tensor-ops", "yes"]
    assert sanitize.checks_of("2026.4.0.0", "racecheck") == sanitize.checks_of("2025.3.1.0", "memcheck") == []
    assert sanitize.checks_of("", "memcheck") == []


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
    assert {case.kernel.family for case in cases} == {family} and len(cases) <= 80


def test_every_way_of_the_native_mainloop_runs() -> None:
    ways = {way for case in cases_of("sm_90a") if case.kernel.name == "sm90_gemm" for way in path_of(case)}
    assert ways == {
        ("PARTS", "rows"), ("PARTS", "columns"), ("PARTS", "turns"),
        ("SPLIT", True), ("SPLIT", False), ("WARPGROUPS", True), ("WARPGROUPS", False),
    }  # fmt: skip


def test_inputs_suit_the_references() -> None:
    for family in FAMILIES:
        for case in cases_of(family)[::5]:
            assert len(expected(case, operands_of(case))) == len(case.site.results)


def test_the_faults_compile() -> None:
    assert len({cubin.image for cubin in compile_all([fault_job(tool) for tool in TOOLS])}) == len(TOOLS)
