"""The commands on the demo's checkpoint and Plan: exit codes, text, JSON, and what is never imported."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import frtc
from frtc import cli
from frtc.console import Progress, Result, show, show_error, size
from frtc.errors import FrtcError
from frtc.models.synthetic import write_checkpoint
from frtc.runtime.manifest import File, Manifest
from frtc.runtime.plan_file import open_plan
from frtc.runtime.timing import Timing
from frtc.runtime.validate import check_manifest
from tests.cli.face import call
from tests.conftest import ROOT, Demo, checkout

Capture = pytest.CaptureFixture[str]


def fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], env=checkout(), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_demo(demo: Demo) -> None:
    """README's first command: check, two compiles, self-test, verify against the checkpoint, actions, latency."""
    for word in ("$ frtc check", "--arch thor", "--arch hopper", "26 equal to the bit", "actions [10, 14]", "p99.9"):
        assert word in demo.text
    actions = np.load(demo.folder / "actions.npy")
    assert actions.shape == (10, 14) and np.isfinite(actions).all()
    for target, sm in (("thor", 110), ("hopper", 90)):
        assert open_plan(demo.folder / f"pi05-{target}.plan").program.target.sm == sm
    assert not list(demo.folder.glob(".*.partial"))


def test_compile_says_what_was_assumed(demo: Demo) -> None:
    for name in ("cameras", "actions", "state_in_prompt", "steps"):
        assert f"\n  {name}" in demo.text.partition("ASSUMED")[2]
    assert "compiles, not run" in demo.text and "run on hardware" in demo.text


def test_bare_compile_of_lerobot_s_layout(capsys: Capture, tmp_path: Path) -> None:
    """Its files prove everything: nothing is assumed, cameras have the robot's names."""
    write_checkpoint(tmp_path / "ck", "lerobot", "tiny")
    out = tmp_path / "pi05.plan"
    report = call(capsys, "compile", tmp_path / "ck", "--arch", "thor", "-o", out, "--json").json()
    assert report["assumed"] == [] and ["origin", "lerobot-0.6", "config.json: use_relative_actions"] in report["facts"]
    said = call(capsys, "run", out, "--device", "cpu", "--image", "top=" + str(ROOT / "examples/frames/top.png"))
    assert said.code == 0 and "assumed" not in said.out + said.err


def test_overview_and_help(capsys: Capture) -> None:
    assert all(f"\n  {name}" in call(capsys).out for name in cli.COMMANDS)
    assert call(capsys, "--version").out.strip() == f"frtc {frtc.__version__}"
    for name in cli.COMMANDS:
        with pytest.raises(SystemExit) as left:
            cli.main([name, "--help"])
        assert left.value.code == 0 and "--json" in capsys.readouterr().out


def test_models(capsys: Capture) -> None:
    said = call(capsys, "models", "--json").json()
    evidence = {t["name"]: t["evidence"] for t in said["targets"]}
    assert {k for k, v in evidence.items() if v == "run on hardware"} == {"hopper"}
    assert set(evidence) >= {"thor", "rtx5090", "rtx4090", "orin", "a100"}
    assert [m["name"] for m in said["models"]][:2] == ["pi05", "pi0"]
    assert set(said["models"][0]["layouts"]) >= {"openpi", "lerobot"}
    assert said["measured"] and {row["target"] for row in said["measured"]} == {"hopper"}
    text = call(capsys, "models").out
    assert "checkpoints of" in text and "NVIDIA H200" in text and "a100: compiles, not run" in text


def test_doctor(capsys: Capture) -> None:
    said = call(capsys, "doctor", "--json").json()
    found = {f["name"]: f for f in said["findings"]}
    assert said["can"]["compile"] and found["run: numpy"]["found"] == np.__version__
    assert found["compile: NVRTC"]["found"].startswith("13.")
    assert "compile here: yes" in call(capsys, "doctor").out


def test_check_shows_evidence(capsys: Capture, demo: Demo) -> None:
    said = call(capsys, "check", demo.checkpoint, "--weights", "--json").json()
    facts = {name: (value, source) for name, value, source in said["facts"]}
    assert facts["origin"] == ("openpi", "no policy_preprocessor.json")
    assert facts["horizon"] == (10, "config.json: action_horizon")
    assert [a["field"] for a in said["assumed"]] == ["cameras", "actions", "state_in_prompt", "steps"]
    assert [c["role"] for c in said["cameras"]] == ["base", "left_wrist", "right_wrist"]


def test_check_data(capsys: Capture, demo: Demo, tmp_path: Path) -> None:
    """A third of the recorded values beyond the quantiles, and one joint that never moved."""
    stats = json.loads((demo.checkpoint / "assets/synthetic/norm_stats.json").read_text())["norm_stats"]["state"]
    low, high = np.array(stats["q01"]), np.array(stats["q99"])
    steps = np.linspace(-1, 1, 90)[:, None] * 1.5
    state = (low + high) / 2 + steps * (high - low) / 2
    state[:, 3] = (low + high)[3] / 2
    np.savez(tmp_path / "data.npz", state=state)
    said = call(capsys, "check", demo.checkpoint, "--data", tmp_path / "data.npz", "--json").json()["data"]
    assert said[0]["name"] == "state[0]" and said[0]["outside"] == pytest.approx(1 / 3, abs=0.02)
    assert [d["name"] for d in said if d["constant"]] == ["state[3]"]
    assert call(capsys, "check", demo.checkpoint, "--data", tmp_path / "none.npz").error == "input.file"


def test_inspect(capsys: Capture, demo: Demo) -> None:
    said = call(capsys, "inspect", demo.plan, "--calls", "--kernels", "--weights")
    assert said.code == 0 and "schedule: vision, prefix, let.x_t, denoise.once, 10 x (denoise)" in said.out
    assert "assumed: actions = absolute" in said.out and "tensor(" in said.out and "overlap" not in said.out
    hopper = call(capsys, "inspect", demo.folder / "pi05-hopper.plan").out
    assert "overlap, up to the first repetition: vision, prefix, let.x_t, denoise.once, denoise\n" in hopper
    data = call(capsys, "inspect", demo.plan, "--json").json()
    assert data["overlap"] == [] and data["frames"] == "device" and "camera frames: resized on the device" in said.out
    program = open_plan(demo.plan).program
    assert data["graph_nodes"] == sum(data["launches"].values()) + 9 * data["launches"]["denoise"]
    assert len(data["weights"]) == len(program.weights) and len(data["kernels"]) == len(program.kernels)
    sites = call(capsys, "inspect", demo.plan, "--sites").out
    assert "precision: w8a16 (FP8 storage of weights, bf16 rate)\n" in sites and data["precision"]["kind"] == "w8a16"
    assert re.search(r"^  vision/\d+ +w8a16 +vision.projector.weight$", sites, re.M)


def test_run_json_budget_and_baseline(capsys: Capture, demo: Demo, tmp_path: Path) -> None:
    words = ("run", demo.plan, "--device", "cpu", "--json", "--prompt", "transfer the cube")
    said = call(capsys, *words, "--budget", "0.001")
    data = said.json()
    assert said.code == 3 and data["error"]["code"] == "run.budget"
    host, parts = data["host_us"], data["stages_us"]
    assert list(host["total"]) == ["min", "p50", "p90", "p99", "p99.9", "max"]
    assert {"vision", "prefix", "denoise"} < set(parts)
    assert sum(host[k]["p50"] for k in ("prepare", "run", "finish")) == pytest.approx(host["total"]["p50"], rel=0.02)
    assert len(data["device"]["assumed"]) == 4 and data["device"]["kind"] == "cpu"
    fast = tmp_path / "fast.json"
    fast.write_text(json.dumps({"host_us": {"total": {"p50": 1.0}}}))
    said = call(capsys, *words[:-3], "--baseline", fast, "--rate", "100", "--idle", "0")
    assert said.code == 3 and said.error == "run.baseline" and "first after idling" in said.out
    fast.write_text("{}")
    assert call(capsys, *words, "--baseline", fast).json()["error"]["code"] == "run.baseline_file"


def test_run_gives_the_demo_s_actions_from_the_same_files(capsys: Capture, demo: Demo, tmp_path: Path) -> None:
    frames = ROOT / "examples" / "frames"
    images = {"base": "top", "left_wrist": "left_wrist", "right_wrist": "right_wrist"}
    words = [w for role, name in images.items() for w in ("--image", f"{role}={frames / name}.png")]
    said = call(capsys, "run", demo.plan, "--device", "cpu", *words, "--state", frames / "state.npy",
                "--prompt", "transfer the cube", "--actions", tmp_path / "again.npy")  # fmt: skip
    assert said.code == 0
    assert np.array_equal(np.load(tmp_path / "again.npy"), np.load(demo.folder / "actions.npy"))


def test_two_compiles_give_the_same_program(demo: Demo, tmp_path: Path) -> None:
    report = frtc.compile(demo.checkpoint, "thor", tmp_path / "b.plan", frtc.CompileOptions(self_test=False))
    assert report.plan_id == open_plan(demo.plan).plan_id
    assert report.file_nbytes == (tmp_path / "b.plan").stat().st_size
    assert report.graph_nodes == 9 * report.launches["denoise"] + sum(report.launches.values())
    assert json.loads(json.dumps(report.to_json()))["plan_id"] == report.plan_id


def test_cubins_hold_nothing_of_the_process(demo: Demo) -> None:
    """NVRTC puts its process into the names of internal variables: with one of those no two compiles would be equal."""
    for target in ("thor", "hopper"):
        files = open_plan(demo.folder / f"pi05-{target}.plan").files()
        assert len(files) > 20 and not [name for name, data in files.items() if b"_INTERNAL_" in bytes(data)]


def test_stop_prints_the_ir_and_writes_nothing(capsys: Capture, demo: Demo, tmp_path: Path) -> None:
    out = tmp_path / "none.plan"
    words = ("compile", demo.checkpoint, "--arch", "a100", "-o", out, "--dump", tmp_path / "d", "--debug", "2")
    said = call(capsys, *words, "--stop", "canonicalize")
    assert said.code == 0 and not out.exists()
    assert "rms_norm(" in said.out and "stopped after pass canonicalize" in said.out
    assert "rule rms_norm" in said.err
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == ["00_import.ir", "01_canonicalize.ir"]


def test_the_robot_never_loads_the_compiler(demo: Demo) -> None:
    code = f"""
import sys
from frtc.cli import main
for banned in ("torch", "jinja2", "onnx", "safetensors", "PIL"):
    sys.modules[banned] = None
assert main(["inspect", {str(demo.plan)!r}, "--json"]) == 0
assert main(["verify", {str(demo.plan)!r}, "--self-test", "--device", "cpu", "--json"]) == 0
assert main(["compile", "x", "--arch", "thor"]) == 5 and main(["models"]) == 0
assert main(["diff", {str(demo.plan)!r}, {str(demo.folder / "pi05-hopper.plan")!r}]) == 0
print([m for m in sys.modules if m.startswith(("frtc.codegen", "frtc.lowering", "frtc.passes"))])
"""
    assert fresh(code).strip().endswith("[]")


def test_no_gpu_is_said_in_under_a_second(demo: Demo) -> None:
    """Never a silent CPU: exit 5, quickly. The best of three, less what an interpreter with NumPy takes to start."""
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("this machine has a GPU")
    took = []
    for _ in range(3):
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "frtc", "run", str(demo.plan)], env=checkout(),
                              capture_output=True, text=True, cwd=ROOT)  # fmt: skip
        took.append(time.perf_counter() - started)
        assert done.returncode == 5 and "error[env.no_gpu]" in done.stderr and not done.stdout
    started = time.perf_counter()
    fresh("import numpy, ml_dtypes")
    assert min(took) < 1.0 + (time.perf_counter() - started)


def test_api(demo: Demo) -> None:
    with frtc.load(demo.plan, device="cpu", seed=1) as policy:
        assert policy.cameras == ("base", "left_wrist", "right_wrist")
        frame = np.zeros((48, 64, 3), np.uint8)
        seen = {**dict.fromkeys(policy.cameras, frame), "state": np.zeros(14, np.float32), "prompt": "wave"}
        policy.warm()
        first, second = policy.infer(seen, draw=5), policy.infer(seen)
        assert first.draw == 5 and second.draw == 6
        assert first.actions.shape == (10, 14) and first.output.shape == (10, 32)
        assert not np.array_equal(first.actions, second.actions)
        policy.reset()
        again = policy.infer(seen, draw=5)
        assert np.array_equal(again.actions, first.actions)
        given = policy.infer({**seen, "noise": np.zeros((10, 32), np.float32)})
        assert given.draw is None and not np.array_equal(given.actions, again.actions)
        parts = again.latency_us
        assert parts["prepare"] + parts["run"] + parts["finish"] == pytest.approx(parts["total"], rel=0.02)
        assert isinstance(policy.executor.time(1, 0), Timing)


def test_every_name_of_the_api_loads() -> None:
    assert all(getattr(frtc, name) for name in frtc.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        frtc.nonsense  # noqa: B018


def test_loading_says_what_is_assumed(demo: Demo, caplog: pytest.LogCaptureFixture) -> None:
    frtc.load(demo.plan, device="cpu").close()
    said = [record.message for record in caplog.records]
    assert len(said) == 4 and all("assumed:" in line and "confirm with --" in line for line in said)


def test_a_terminal_obeys_no_file(capsys: Capture) -> None:
    """Names in checkpoints and Plans are anybody's."""
    failure = FrtcError("weights.extra", "1 tensor too many", [("extra", "a\r\x9b31m")])
    show(Result("two\nlines, é: \x1b[2J\u202ex\udc80", failure=failure), as_json=False)
    out, err = capsys.readouterr()
    assert out == "two\nlines, é: \\x1b[2J\\u202ex\\udc80\n" and r"extra  a\r\x9b31m" in err
    assert show_error(failure, as_json=False) == failure.exit_code
    assert capsys.readouterr().err == err


def test_progress_is_for_terminals_only() -> None:
    class Terminal:
        text = ""

        def __init__(self, tty: bool) -> None:
            self.tty = tty

        def isatty(self) -> bool:
            return self.tty

        def write(self, text: str) -> None:
            self.text += text

        def flush(self) -> None:
            pass

    for tty in (True, False):
        stream = Terminal(tty)
        progress = Progress(stream)  # type: ignore[arg-type]
        progress("write weights, 1.00 GB of 2.00 GB", 0.5)
        progress.close()
        assert ("write weights, 1.00 GB of 2.00 GB  50%" in stream.text) == tty
    assert size(6_440_000_000) == "6.44 GB" and size(12) == "12 B"


def test_a_vocabulary_larger_than_its_table_is_refused(demo: Demo) -> None:
    """No kernel looks whether a row is there."""
    plan = open_plan(demo.plan)
    files = tuple(File(name, len(data)) for name, data in plan.files().items())
    (table,) = (c.operands[0] for s in plan.program.stages for c in s.calls if c.op == "embedding")
    policy = json.loads(json.dumps(plan.program.policy))
    (step,) = (step for step in policy["prepare"] if "vocab" in step)
    assert table and step["vocab"] == table.shape[0]
    check_manifest(Manifest(replace(plan.program, policy=policy), files, ()))
    step["vocab"] += 1
    with pytest.raises(FrtcError, match=f"a vocabulary of {step['vocab']} pieces") as caught:
        check_manifest(Manifest(replace(plan.program, policy=policy), files, ()))
    assert caught.value.code == "plan.invalid"
