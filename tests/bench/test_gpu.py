"""What runs on a GPU, rehearsed by the emulator at size tiny: checks, times, rivals; one fault costs one row."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from bench import gpu_all, gpu_bench, gpu_model, gpu_table, report
from bench.full_model import Compiling, Shape, compiled, make_room, plan_path
from bench.rivals import pi0_torch, pi05_torch
from frtc.errors import UsageError
from frtc.runtime.plan_file import Plan, open_plan

LENGTHS = (12, 3)


def tiny_plan(policy: str) -> tuple[Shape, Plan]:
    shape = Shape(policy, prompt=12, horizon=10, size="tiny")
    if not plan_path(shape).exists():
        compiled(shape)
    return shape, open_plan(plan_path(shape))


def test_a_plan_passes_its_checks(policy: str) -> None:
    """SmolVLA's tiny weights magnify the rounding of bf16 (1e-1 in PyTorch too); at full size they do not."""
    shape, plan = tiny_plan(policy)
    result = gpu_model.check(plan, gpu_model.references(shape, LENGTHS, "cpu"), "cpu", 4)
    assert result["passed"]["steady"] and result["steady"]["distinct"] == 8
    assert [row["valid_tokens"] for row in result["accuracy"]] == list(LENGTHS)
    for row in result["accuracy"]:
        assert len(row["velocity_errors"]) == len(row["eager_bf16_errors"]) == 10
        assert 0 < max(row["velocity_errors"]) <= (0.3 if policy == "smolvla" else gpu_model.ABSOLUTE)
    assert result["graph_nodes"] > 100


def test_another_reference_fails_the_checks(policy: str) -> None:
    shape, plan = tiny_plan(policy)
    (found,) = gpu_model.references(shape, LENGTHS[:1], "cpu")
    other = replace(found, inputs=found.inputs | {"images": found.inputs["images"][::-1].copy()})
    result = gpu_model.check(plan, [other], "cpu", 1)
    assert not result["passed"]["absolute"] and not result["passed"]["ratio"]


def test_times_of_a_plan_and_its_rivals(tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.full_model.SCRATCH", scratch)
    monkeypatch.setenv("OUT", str(tmp_path))
    shape, _ = tiny_plan("smolvla")
    ((label, (name, make)),) = gpu_bench.RIVALS["smolvla"].items()
    rival = gpu_bench.built(name, label, make, "cpu")
    counts = gpu_bench.REHEARSAL
    bars = gpu_bench.bench("smolvla", [shape], [rival], "cpu", counts, {"device": "none"})
    written = json.loads((tmp_path / "gpu_bench_smolvla_tiny.json").read_text())
    ours, theirs = written["rows"]
    assert bars[f"graph nodes {gpu_table.label_of(ours)}"]
    assert written["policy"] == "smolvla" and theirs["shape"] == "v2-p48-c50"
    assert {"vision", "prefix", "denoise"} <= ours["parts_us"].keys() and ours["device_us"]["p50"] > 0
    assert ours["host_us"].keys() == ours["device_us"].keys()
    assert ours["contender"].startswith("frtc bf16 baseline")
    stages, classes = ours["stages"], ours["classes"]
    assert sum(s["launches"] for s in stages.values()) == ours["graph_nodes"]
    assert stages["denoise"]["flops"] > 0 and 0 < stages["denoise"]["share"] < 1
    for name in ("nbytes", "flops", "roof_us", "launches"):
        whole = sum(s[name] for s in stages.values())
        assert np.isclose(sum(c[name] for c in classes.values()), whole), name
    assert ours["changing_prompts_us"]["count"] == counts.changing


@pytest.mark.parametrize("model", [pi05_torch.Pi05, pi0_torch.Pi0])
def test_rivals_run(model: Any) -> None:
    shape = pi05_torch.Shape(1, 4, 3, steps=2, vision_layers=1, layers=2, device="cpu")
    with torch.no_grad():
        rival = model(shape)
        rival.run()
        first = rival.out.clone()
        rival.run()
    assert first.shape == (3, 32) and torch.isfinite(first).all()
    assert torch.equal(first, rival.out) and not torch.equal(first, rival.noise)


def test_the_rivals_state_token_is_seen_by_actions_alone() -> None:
    """A change of the state moves every action and no key of the prefix."""
    with torch.no_grad():
        rival = pi0_torch.Pi0(pi05_torch.Shape(1, 4, 3, steps=1, vision_layers=1, layers=2, device="cpu"))
        rival.run()
        before, keys = rival.out.clone(), rival.keys[1].clone()
        rival.state += 1
        rival.run()
    prefix = rival.shape.prefix
    assert torch.equal(rival.keys[1][:prefix], keys[:prefix])
    assert not torch.equal(rival.keys[1][prefix], keys[prefix])
    assert (rival.out != before).any(dim=1).all()


def test_a_fault_costs_one_result(capsys: pytest.CaptureFixture[str]) -> None:
    clock = gpu_all.Clock(60.0)
    assert clock.attempt("bad", lambda: 1 // 0) is None
    assert clock.attempt("good", lambda: 7) == 7
    assert clock.attempt("late", lambda: 7, least=100.0) is None
    assert clock.failed == ["bad", "late: no time"]
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_what_fails_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Plan that cannot be compiled: no result is written, the label says so."""
    monkeypatch.setenv("OUT", str(tmp_path))
    job, clock = gpu_all.Job("pi0", (Shape("pi0"),)), gpu_all.Clock(60.0)
    job.compiling = SimpleNamespace(wait=lambda shape: 1 // 0)  # type: ignore[assignment]
    gpu_all.measure(job, "cpu", clock, 1)
    assert clock.failed == ["pi0: compile v2-p48-c50 bf16"] and not list(tmp_path.iterdir())


def test_relative_error_of_what_is_not_finite() -> None:
    one = np.ones(3, np.float32)
    assert gpu_model.relative_error(one, one) == 0
    assert gpu_model.relative_error(np.array([1, np.nan, 1], np.float32), one) == float("inf")


@pytest.mark.full
def test_an_fp8_plan_is_calibrated_and_checked(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole rehearsal: scales, Plan, the same program in PyTorch, the same bars but for what only full size has.

    It takes more than a minute of CPU; three rounds of every policy are compared in tests/truth/test_fp8.py.
    """
    monkeypatch.setattr("bench.full_model.SCRATCH", scratch)
    monkeypatch.setenv("OUT", str(tmp_path))
    shape = Shape("pi05", prompt=12, horizon=10, size="tiny", precision="fp8")
    (result,) = gpu_model.measure([shape], "cpu", 2, 0.0)
    assert result == json.loads((tmp_path / "gpu_model_pi05_fp8_tiny.json").read_text())
    assert result["calibration"]["samples"] == 8 and not result["calibration"]["fallen"]
    assert result["compiled"]["scales"] == "static" and not result["compiled"]["stay_in_16_bits"]
    assert set(result["passed"]) >= {"absolute", "ratio", "steady", "graph nodes", "share of FP8", "bytes of the Plan"}
    assert result["passed"]["ratio"] and result["passed"]["steady"]
    for row in result["accuracy"]:
        assert len(row["scaled_mm_errors"]) == 10
        assert max(row["eager_bf16_errors"]) * 2 < max(row["velocity_errors"]) < 0.12
    assert gpu_model.table([result]).splitlines()[1].split()[:2] == ["pi05", "fp8"]


def checked(errors: list[float], scaled_mm: list[float], **about: Any) -> dict[str, bool]:
    """The bars of an FP8 Plan with these errors."""
    shape = Shape("pi05", precision="fp8")
    precision = {"meaning": "", "scales": "static", "fp8_share": 0.99, "stages": {}, "sites": {}} | about
    file = SimpleNamespace(stat=lambda: SimpleNamespace(st_size=about.pop("nbytes", 4e9)))
    result = {"accuracy": [{"velocity_errors": errors}], "graph_nodes": about.get("nodes", 1400)}
    result["passed"] = {"steady": True, "memory": True, "absolute": False, "ratio": False}
    with mock.patch.multiple(gpu_model, compile_report=lambda _: {"precision": precision}, plan_path=lambda _: file):
        passed: dict[str, bool] = gpu_model.check_8_bits(shape, result, [scaled_mm])["passed"]
    return passed


def test_the_bars_of_fp8() -> None:
    assert all(checked([0.02, 0.06], [0.01, 0.0462]).values())
    assert not checked([0.061], [0.06])["absolute"]
    assert not checked([0.05], [0.0384])["ratio"]
    assert not checked([0.05], [0.05], fp8_share=0.969)["share of FP8"]
    assert not checked([0.05], [0.05], nodes=1401)["graph nodes"]
    assert not checked([0.05], [0.05], nbytes=4.3e9)["bytes of the Plan"]


def timed(label: str, ms: float, nodes: int) -> dict[str, Any]:
    """A row as gpu_bench writes it: shape, precision, families; each stage takes a tenth of its time."""
    shape, *kind = label.split()
    at = {"p50": ms * 1e3, "p99": ms * 1e3, "p99.9": ms * 1e3}
    stages = {name: at | {"p50": ms * 100, "roof_us": 50.0, "share": 0.5} for name in ("vision", "prefix", "denoise")}
    row = {"contender": " ".join(["frtc", *kind]), "shape": shape, "graph_nodes": nodes, "device_us": at}
    return row | {"host_us": at, "stages": stages, "classes": {"GEMM": {"launches": 9, "roof_us": 3.0}}}


def test_precisions_of_a_policy_are_one_file() -> None:
    shapes = [Shape("pi0", precision=precision) for precision in ("fp8", "w8a16")]
    assert gpu_model.results_name(shapes) == "gpu_model_pi0_all"
    assert gpu_model.results_name(shapes[:1]) == "gpu_model_pi0_fp8"
    results = [{"policy": "pi0", "commit": "c", "precision": s.precision, "seconds": 1.0} for s in shapes]
    whole = gpu_model.together(results)
    assert [{**r, "policy": whole["policy"], "commit": whole["commit"]} for r in whole["results"]] == results
    assert whole.keys() == {"policy", "commit", "results"}
    assert gpu_model.policies_of("pi0,smolvla") == ["pi0", "smolvla"]
    with pytest.raises(UsageError):
        gpu_model.policies_of("pi0, smolvla")


def test_bars_of_times() -> None:
    rows = [timed("v2-p48-c50 bf16 baseline", 18, 1500), timed("v2-p48-c50 fp8 baseline", 31, 1500)]
    rows += [timed("v2-p200-c50 bf16 baseline", 20, 9), timed("v2-p48-c50 fp8 baseline+sm90", 5.7, 1250)]
    full = timed("v2-p200-c50 fp8 baseline+sm90", 6.2, 1) | {"full_us": {"p50": 6.6e3}}
    rows += [timed("v2-p48-c10 fp8 baseline+sm90", 5.3, 1251), full]
    rows += [timed("v1-p48-c10 fp8 baseline+sm90", 4.3, 1), timed("v3-p48-c10 fp8 baseline+sm90", 6.4, 1)]
    rows += [timed("v2-p48-c50 bf16 baseline+sm90", 9.1, 1) | {"changing_prompts_us": {"p50": 1.0, "p99": 1.04}}]
    bars = gpu_table.bars_of(rows)
    assert {name for name, kept in bars.items() if not kept} == {
        "p50 v2-p48-c50 fp8 baseline",
        "graph nodes v2-p48-c50 fp8 baseline",
        "budget 200 v2-p200-c50 bf16 baseline",
        "p50 v2-p48-c10 fp8 baseline+sm90",
        "graph nodes v2-p48-c10 fp8 baseline+sm90",
        "budget 200 v2-p200-c50 fp8 baseline+sm90",
        "full prompt v2-p200-c50 fp8 baseline+sm90",
        "p50 v3-p48-c10 fp8 baseline+sm90",
        "p50 v2-p48-c50 bf16 baseline+sm90",
        "p99 over p50 v2-p48-c50 bf16 baseline+sm90",
    }
    assert bars["vision v2-p48-c50 fp8 baseline+sm90"] and bars["p50 v2-p48-c50 fp8 baseline+sm90"]
    assert bars["denoise v2-p48-c10 fp8 baseline+sm90"] and "vision v1-p48-c10 fp8 baseline+sm90" not in bars
    slow = gpu_table.bars_of([timed("v2-p48-c50 fp8 baseline+sm90", 29.1, 1)])
    assert not any(slow[f"{stage} v2-p48-c50 fp8 baseline+sm90"] for stage in ("vision", "prefix", "denoise"))


def test_the_table_has_replays_stages_and_classes() -> None:
    rival = {"contender": "torch", "shape": "v2-p48-c50", "device_us": {"p50": 1e3, "p99": 2e3, "p99.9": 3e3}}
    text = gpu_table.table([timed("v2-p48-c50 fp8 baseline", 18, 1500), rival])
    lines = [line.split() for line in text.splitlines()]
    assert ["v2-p48-c50", "fp8", "baseline", *["18.000"] * 6, "1500"] in lines
    assert ["torch", "v2-p48-c50", "1.000", "2.000", "3.000"] in lines
    assert ["v2-p48-c50", "fp8", "baseline", "vision", "1.800", "18.000", "0.050", "50%"] in lines
    assert ["v2-p48-c50", "fp8", "baseline", "GEMM", "9", "-", "0.003", "-"] in lines


def test_shapes_are_chosen_by_words_in_their_order_and_in_each_family() -> None:
    shapes = gpu_bench.SHAPES["pi05"]
    found = [s.label for s in gpu_bench.chosen(shapes, "p48 c10 bf16,c50 fp8", ("baseline", "native"))]
    assert found == [
        f"{shape} {family}"
        for shape in ("v2-p48-c10 bf16", "v2-p48-c50 fp8", "v2-p200-c50 fp8")
        for family in ("baseline", "native")
    ]
    asked_for = [s for s in shapes if s.precision in ("fp8-rows", "w8a16")]
    assert len(asked_for) == 2 and gpu_bench.chosen(shapes, "") == [s for s in shapes if s not in asked_for]
    assert len({plan_path(s) for s in gpu_bench.chosen(shapes, "c50 fp8", ("baseline", "native"))}) == 4
    with pytest.raises(UsageError):
        gpu_bench.chosen(shapes, "c51")


def test_what_compiles_stands_still_while_something_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.full_model.SCRATCH", tmp_path)
    first, second = shapes = [Shape("smolvla", horizon=n) for n in (8, 9)]
    busy = ["-c", "while True: pass"]

    def begin(self: Compiling, shape: Shape) -> None:
        self.running[shape] = subprocess.Popen([sys.executable, *busy])
        plan_path(shape).touch()

    monkeypatch.setattr(Compiling, "_begin", begin)
    begun = Compiling(shapes, most=1)
    process = begun.running[first]
    assert begun.queued == [second]
    with begun.paused():
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        spent = ticks(process.pid)
        time.sleep(0.2)
        assert ticks(process.pid) == spent
    process.kill()
    busy[1] = "pass"
    begun.drop(first)
    assert not plan_path(first).exists() and plan_path(second).exists()
    assert first in begun and second in begun.running and not begun.queued
    begun.running[second].wait()


def test_a_plan_that_fails_costs_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statics are calibrated once for a shape, ahead of their turn; all but the first Plan are dropped."""
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr("bench.full_model.SCRATCH", tmp_path)
    shapes = [Shape("pi0", precision=p, family=f) for p, f in (("bf16", ""), ("fp8", "a"), ("fp8", "b"), ("w8a16", ""))]
    done: list[str] = []

    def begin(self: Compiling, shape: Shape) -> None:
        done.append(f"compile {shape.label}")
        self.running[shape] = SimpleNamespace(wait=lambda: 0, poll=lambda: 0)  # type: ignore[assignment]

    monkeypatch.setattr(Compiling, "_begin", begin)
    monkeypatch.setattr(Compiling, "wait", lambda self, shape: {} if shape.family != "a" else 1 // 0)
    monkeypatch.setattr(gpu_bench, "calibrated", lambda shape, device: done.append(f"calibrate {shape}"))

    def own(self: gpu_bench.Bench, shape: Shape) -> None:
        done.append(f"time {shape.label}")
        self.rows.append(timed(f"{shape} {shape.precision} baseline", 1.0, 1))

    monkeypatch.setattr(gpu_bench.Bench, "own", own)
    counts = replace(gpu_bench.REHEARSAL, changing=0)
    found = gpu_bench.Bench("pi0", shapes[0], "cpu", counts, {"compile_seconds": {}, "calibrations": {}})
    gpu_bench.measure(found, shapes, list)
    at = "v2-p48-c50"
    assert done == [
        f"compile {at} bf16",
        f"compile {at} w8a16",
        f"calibrate {at}",
        f"compile {at} fp8 a",
        f"compile {at} fp8 b",
        f"time {at} bf16",
        f"time {at} fp8 b",
        f"time {at} w8a16",
    ]
    assert found.failed == [f"{at} fp8 a"]
    assert json.loads((tmp_path / "gpu_bench_pi0.json").read_text())["failed"] == found.failed


def ticks(pid: int) -> list[str]:
    """Of the processor, in user and kernel mode."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]


def test_room_is_made_only_where_it_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.full_model.SCRATCH", tmp_path)
    (tmp_path / "pi0-full").mkdir()
    for name in ("pi0-full-v2-p48-c50-fp8.plan", "pi05-full-v2-p48-c50-fp8.plan", "notes"):
        (tmp_path / name).write_text("")
    make_room("pi05", 0)
    assert len(list(tmp_path.iterdir())) == 4
    make_room("pi05", 1 << 60)
    assert {path.name for path in tmp_path.iterdir()} == {"pi05-full-v2-p48-c50-fp8.plan", "notes"}


def test_what_nvidia_smi_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '1980, 3201, 512.25, [N/A], 580.95.05'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    said = {"sm_mhz": 1980.0, "memory_mhz": 3201.0, "watts": 512.25, "celsius": "[N/A]", "driver": "580.95.05"}
    assert report.gpu() == said
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert report.gpu() == {}
