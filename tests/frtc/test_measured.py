"""frtc/measured.json says what the files of results say, and only what a GPU of ours measured at full size."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from frtc.kernels.targets import load_targets
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measured", ROOT / "tools" / "measured.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_up_to_date(tool: ModuleType) -> None:
    assert tool.OUT.read_text() == tool.text(), "run: python tools/measured.py"


def test_every_row_says_where_it_comes_from(tool: ModuleType) -> None:
    rows = json.loads(tool.OUT.read_text())
    assert rows
    for row in rows:
        assert row["times"]["commit"] and row["times"]["command"].startswith("python3 -m bench.")
        assert load_targets()[row["target"]].evidence == "run on hardware"
        assert 0 < row["p50_us"] <= row["p99_us"] and row["nodes"] > 0


def test_numbers_are_those_of_the_results(tool: ModuleType) -> None:
    """By another path: every time of ours in the files, none twice."""
    found = {}
    for path in sorted((ROOT / "bench/results").glob("gpu_bench*.json"), key=lambda p: p.stem):
        data = json.loads(path.read_text())
        for row in data["rows"]:
            if row["contender"].startswith("frtc") and data["device"].startswith("NVIDIA"):
                precision, family = row["contender"].split()[1:]
                found[data.get("policy", "pi05"), precision, family, row["shape"]] = round(row["device_us"]["p50"], 1)
    rows = json.loads(tool.OUT.read_text())
    assert {(r["model"], r["precision"], r["family"], r["shape"]): r["p50_us"] for r in rows} == found


def bench(policy: str, device: str, p50: float) -> dict[str, Any]:
    row = {"shape": "v2-p48-c50", "graph_nodes": 9, "device_us": {"p50": p50, "p99": p50}}
    return {
        "policy": policy, "device": device, "commit": "abc", "command": "c",
        "rows": [row | {"contender": "frtc fp8 sm_90a"}, row | {"contender": "torch tuned bf16"}],
    }  # fmt: skip


def test_rehearsals_rivals_and_small_models_are_left_out(tool: ModuleType, tmp_path: Path) -> None:
    files = {
        "gpu_bench": bench("pi05", "NVIDIA H200", 1.0),
        "gpu_bench_pi05": bench("pi05", "NVIDIA H200", 2.0),
        "gpu_bench_pi0": bench("pi0", "this CPU, a rehearsal", 3.0),
        "gpu_bench_smolvla_tiny": bench("smolvla", "NVIDIA H200", 4.0),
        "gpu_bench_other": bench("other", "NVIDIA B200", 5.0),
    }
    for name, data in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    (row,) = tool.measured(tmp_path)
    assert (row["model"], row["precision"], row["family"], row["p50_us"]) == ("pi05", "fp8", "sm_90a", 2.0)


def test_the_worst_step_of_all_prompts(tool: ModuleType, tmp_path: Path) -> None:
    accuracy = [{"velocity_errors": [0.01, 0.012]}, {"velocity_errors": [0.0149, 0.002]}]
    checked = {"policy": "pi0", "shape": "v2-p48-c50", "device": "NVIDIA H200", "commit": "d", "accuracy": accuracy}
    timed = bench("pi0", "NVIDIA H200", 1.0)
    timed["rows"][0]["contender"] = "frtc bf16 baseline"
    (tmp_path / "gpu_bench_pi0.json").write_text(json.dumps(timed))
    (tmp_path / "gpu_model_pi0.json").write_text(json.dumps(checked))
    fp8 = {**checked, "precision": "fp8", "accuracy": [{"velocity_errors": [0.05]}]}
    timed["rows"].append({**timed["rows"][0], "contender": "frtc fp8 baseline"})
    (tmp_path / "gpu_bench_pi0.json").write_text(json.dumps(timed))
    (tmp_path / "gpu_model_pi0_fp8.json").write_text(json.dumps(fp8))
    several = {"results": [{"precision": "fp8", "accuracy": fp8["accuracy"]}, {"precision": "w8a16"}]}
    shared = {k: v for k, v in checked.items() if k != "accuracy"}
    several["results"][1]["accuracy"] = [{"velocity_errors": [0.03]}]
    timed["rows"].append({**timed["rows"][0], "contender": "frtc w8a16 baseline+sm90"})
    (tmp_path / "gpu_bench_pi0.json").write_text(json.dumps(timed))
    several["results"][1]["family"] = "baseline+sm90"
    (tmp_path / "gpu_model_pi0_all.json").write_text(json.dumps(shared | several))
    row, other, third = tool.measured(tmp_path)
    assert (third["precision"], third["velocity_error"], third["accuracy"]["commit"]) == ("w8a16", 0.03, "d")
    assert other["precision"] == "fp8" and other["velocity_error"] == 0.05
    assert row["velocity_error"] == 0.0149 and row["accuracy"]["commit"] == "d" and row["times"]["commit"] == "abc"


def test_the_scale_bench_is_no_row(tool: ModuleType, tmp_path: Path) -> None:
    """Its weights are no model's and its shapes have names of their own: bench/fit.py reads it."""
    found = {"device": "NVIDIA H200", "rows": [{"label": "v2-p48-c50-s10 fp8", "device_us": {"p50": 1.0}}]}
    (tmp_path / "gpu_scale.json").write_text(json.dumps(found))
    assert tool.measured(tmp_path) == []
