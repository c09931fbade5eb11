"""`frtc diff` on real checkpoints and Plans: what was changed is found, nothing else is; users' mistakes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import frtc
from frtc import observation
from frtc.models.checkpoint import open_checkpoint, read_header
from frtc.models.synthetic import write_checkpoint
from frtc.runtime.plan_file import Plan, open_plan
from frtc.runtime.policy import Camera
from tests.cli.face import Said, call
from tests.conftest import Demo
from tests.runtime import frames_plan

Capture = pytest.CaptureFixture[str]
UP = "paligemma_with_expert.gemma_expert.model.layers.1.mlp.up_proj.weight"
UP_PARAMETER = "denoise.layers.1.mlp.up.weight"
STATS = "assets/synthetic/norm_stats.json"
SECTIONS = ("config", "policy", "weights", "launches", "memory", "numbers")


def differing(capsys: Capture, *words: str | Path) -> Any:
    """The JSON of `frtc diff`, which ran."""
    said = call(capsys, "diff", *words, "--json")
    assert said.code == 0, said.err
    return said.json()


def add_one(folder: Path, tensor: str, at: int) -> None:
    """One element of a bf16 tensor, in place."""
    info = read_header(folder / "model.safetensors")[tensor]
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(info.offset + 2 * at)
        value = np.frombuffer(file.read(2), ml_dtypes.bfloat16)
        file.seek(info.offset + 2 * at)
        file.write((value.astype(np.float32) + 1).astype(ml_dtypes.bfloat16).tobytes())


@pytest.fixture(scope="module")
def changed(demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's checkpoint with one element of one weight changed."""
    folder = shutil.copytree(demo.checkpoint, tmp_path_factory.mktemp("changed") / "ck")
    add_one(folder, UP, 77)
    return folder


IN_16_BITS = frtc.CompileOptions(self_test=False, precision="bf16")  # without scales


@pytest.fixture(scope="module")
def plan(demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the demo's checkpoint."""
    out = tmp_path_factory.mktemp("plan") / "bf16.plan"
    frtc.compile(demo.checkpoint, "thor", out, IN_16_BITS)
    return out


@pytest.fixture(scope="module")
def changed_plan(changed: Path) -> Path:
    out = changed.with_name("changed.plan")
    frtc.compile(changed, "thor", out, IN_16_BITS)
    return out


@pytest.fixture(scope="module")
def short_plan(demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another horizon."""
    out = tmp_path_factory.mktemp("short") / "short.plan"
    frtc.compile(demo.checkpoint, "thor", out, frtc.CompileOptions(self_test=False, horizon=6))
    return out


def test_the_same_checkpoint_twice(capsys: Capture, demo: Demo) -> None:
    said = call(capsys, "diff", demo.checkpoint, demo.checkpoint, "--exit-code", "--json")
    data = said.json()
    assert said.code == 0 and data["differing"] == []
    assert data["weights"]["both"] == data["weights"]["equal"] > 100
    assert data["config"]["compared"] > 20 and data["policy"]["compared"] > 50
    assert data["launches"] is data["memory"] is data["numbers"] is None


def test_one_weight_changed(capsys: Capture, demo: Demo, changed: Path) -> None:
    data = differing(capsys, demo.checkpoint, changed)
    assert data["differing"] == ["weights"]
    (moved,) = data["weights"]["moved"]
    a, b = (open_checkpoint(folder).read(UP).astype(np.float64) for folder in (demo.checkpoint, changed))
    assert moved["name"] == UP_PARAMETER and moved["a"] == moved["b"] == "bf16[128,64]"
    assert moved["largest"] == np.abs(b - a).max() == pytest.approx(1, abs=0.01)
    assert moved["relative"] == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a), rel=1e-9)
    said = call(capsys, "diff", demo.checkpoint, changed, "--exit-code")
    assert (said.code, said.error) == (3, "diff.differs") and f"\n  {UP_PARAMETER}" in said.out
    assert "109 equal to the bit, 1 differ" in said.out and "in  weights" in said.err
    assert not call(capsys, "diff", demo.checkpoint, changed, "--no-weights", "--exit-code").code


def test_statistics_changed(capsys: Capture, demo: Demo, tmp_path: Path) -> None:
    folder = shutil.copytree(demo.checkpoint, tmp_path / "ck")
    data = json.loads((folder / STATS).read_text())
    data["norm_stats"]["state"]["q99"][3] += 0.25
    (folder / STATS).write_text(json.dumps(data))
    found = differing(capsys, demo.checkpoint, folder)
    assert found["differing"] == ["policy"]
    (change,) = found["policy"]["changes"]
    assert change["name"] == "state.norm.std_or_high[3]" and change["b"] - change["a"] == pytest.approx(0.25)


def test_layouts_of_one_seed_hold_equal_weights(capsys: Capture, tmp_path: Path) -> None:
    """By the model's parameters, whatever the file calls them and however it lays them out."""
    for layout in ("openpi", "lerobot", "jax"):
        write_checkpoint(tmp_path / layout, layout, "tiny", dtype="f32")
    for other in ("lerobot", "jax"):
        found = differing(capsys, tmp_path / "openpi", tmp_path / other)
        assert "weights" not in found["differing"] and found["weights"]["equal"] == found["weights"]["both"] > 100
        origins = [c for c in found["config"]["changes"] if c["name"] == "origin"]
        assert [c["b"] for c in origins] == (["lerobot-0.6"] if other == "lerobot" else [])


def test_another_model(capsys: Capture, demo: Demo, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "pi0", "openpi", "tiny", kind="pi0")
    found = differing(capsys, demo.checkpoint, tmp_path / "pi0")
    assert {"name": "model", "a": "pi05", "b": "pi0"} in found["config"]["changes"]
    only = [dict(found["weights"][side]) for side in ("only_a", "only_b")]
    assert "denoise.norm.dense.weight" in only[0] and any("state" in name for name in only[1])
    found = differing(capsys, demo.plan, tmp_path / "pi0")
    assert found["weights"] is None and any("weights are not compared" in note for note in found["notes"])


def test_two_targets(capsys: Capture, demo: Demo, tmp_path: Path) -> None:
    """In one precision: each takes kernels of its own, which compute the same."""
    hopper = tmp_path / "hopper.plan"
    frtc.compile(demo.checkpoint, "hopper", hopper, frtc.CompileOptions(self_test=False, precision="w8a16"))
    found = differing(capsys, demo.plan, hopper)
    assert found["differing"] == ["config", "launches", "memory", "program"]  # stages that overlap share no memory
    assert all(c["name"].startswith("target: ") for c in found["config"]["changes"])
    assert found["weights"]["moved"] == [] and found["numbers"]["equal"]
    stages = {s["name"]: s for s in found["launches"]["stages"]}
    assert any(r["op"] == "linear" and "smxx_gemm" in r["a"] for r in stages["prefix"]["retiled"])
    assert any(r["op"] == "attention" and "sm90_attention" in r["b"] for r in stages["prefix"]["retiled"])
    text = call(capsys, "diff", demo.plan, hopper).out
    assert "actions equal to the bit" in text and "compiles, not run" in text and "2 x gated_linear" in text


def test_two_precisions(capsys: Capture, demo: Demo) -> None:
    """Those of two targets where nobody asks: both products' operands in FP8 are other launches and other numbers."""
    hopper = demo.folder / "pi05-hopper.plan"
    found = differing(capsys, demo.plan, hopper)
    assert found["differing"] == ["config", "launches", "memory", "numbers", "program"]
    precisions = next(c for c in found["config"]["changes"] if c["name"] == "precision")
    assert (precisions["a"], precisions["b"]) == ("w8a16", "fp8")
    assert found["weights"]["moved"] == [] and 0 < found["numbers"]["relative"] < 0.05
    program = open_plan(hopper).program
    together = next(c for c in found["memory"] if c["name"] == "together")
    assert together["b"] == program.weights_nbytes + program.arena_nbytes + program.state_nbytes


def test_numbers_of_a_changed_weight(capsys: Capture, plan: Path, changed_plan: Path) -> None:
    """What two runs by hand give; and the weights that are made of the changed one."""
    found = differing(capsys, plan, changed_plan, "--seed", "5")
    assert found["differing"] == ["weights", "numbers", "program"]
    answers = []
    for path in (plan, changed_plan):
        with frtc.load(path, device="cpu", seed=5) as policy:
            answers.append(policy.infer(observation.seeded(policy.steps, 5), draw=0))
            noise = policy.inputs["noise"].astype(np.float64)
    a, b = (answer.output - noise for answer in answers)
    numbers, units = found["numbers"], np.abs(answers[1].actions.astype(np.float64) - answers[0].actions)
    assert numbers["relative"] == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a), rel=1e-6)
    assert numbers["relative"] > 1e-4 and numbers["by_dim"] == pytest.approx(units.max(axis=0), rel=1e-6)
    assert numbers["largest"] == max(numbers["by_dim"]) == numbers["by_dim"][numbers["dimension"]]
    (moved,) = found["weights"]["moved"]
    assert "layers.1.mlp" in moved["name"] and moved["largest"] == pytest.approx(1, abs=0.01)
    said = call(capsys, "diff", plan, changed_plan)
    assert "relative error of actions - noise" in said.out and "robot units, dimension" in said.out


def test_a_plan_and_its_checkpoint(capsys: Capture, demo: Demo, plan: Path, changed: Path, changed_plan: Path) -> None:
    """Every weight is made anew: equal to the bit where the Plan came from it, else those that depend on the change."""
    assert differing(capsys, demo.plan, demo.checkpoint)["differing"] == []
    assert differing(capsys, plan, demo.checkpoint)["differing"] == []
    found = differing(capsys, changed, plan)
    (moved,) = found["weights"]["moved"]
    (between,) = differing(capsys, plan, changed_plan)["weights"]["moved"]
    assert found["differing"] == ["weights"] and moved == between


def test_another_horizon(capsys: Capture, demo: Demo, short_plan: Path) -> None:
    found = differing(capsys, demo.plan, short_plan)
    assert {"name": "horizon", "a": 10, "b": 6} in found["config"]["changes"]
    assert {"name": "slice.horizon", "a": 10, "b": 6} in found["policy"]["changes"]
    assert found["numbers"] is None and any("noise: A [10, 32], B [6, 32]" in note for note in found["notes"])
    assert found["weights"]["both"] == len(open_plan(demo.plan).program.weights)
    said = call(capsys, "diff", demo.plan, short_plan, "--numbers")
    assert (said.code, said.error) == (2, "diff.inputs") and "actions" in said.err and not said.out


def test_one_program_is_said_at_once(
    capsys: Capture, demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal plan_id: no weight is hashed, none is read."""
    copy = tmp_path / "copy.plan"
    shutil.copy(demo.plan, copy)

    def read(plan: Plan) -> None:
        raise AssertionError("read")

    monkeypatch.setattr(Plan, "verify", read)
    said = call(capsys, "diff", demo.plan, copy, "--exit-code")
    assert said.code == 0 and f"one program, plan {open_plan(copy, verify=False).plan_id}" in said.out
    assert differing(capsys, demo.plan, copy)["same"] is True


def test_one_plan_has_the_kernel_for_camera_frames(capsys: Capture, tmp_path: Path) -> None:
    step = frames_plan.images([Camera("base", "x")])
    new = frames_plan.write(tmp_path / "new.plan", step)
    old = frames_plan.write(tmp_path / "old.plan", step, frames=False)
    said = call(capsys, "diff", old, new)
    assert "other files of the program differ: frames.1" in said.out
    assert "camera frames: resized on the host, compile again" in call(capsys, "inspect", old).out


def test_a_checkpoint_without_tokenizer(capsys: Capture, demo: Demo, tmp_path: Path) -> None:
    """Its policy cannot be told, its weights can; with the option all of it."""
    folder = shutil.copytree(demo.checkpoint, tmp_path / "ck")
    (folder / "tokenizer.json").unlink()
    found = differing(capsys, demo.checkpoint, folder)
    assert found["policy"] is None and any("tokenizer.missing" in note for note in found["notes"])
    assert found["weights"]["equal"] == found["weights"]["both"] > 100
    found = differing(capsys, demo.checkpoint, folder, "--tokenizer", demo.checkpoint / "tokenizer.json")
    assert found["differing"] == [] and found["policy"]["compared"] > 50


def test_long_sections_are_cut(capsys: Capture, demo: Demo, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "seed1", "openpi", "tiny", seed=1)
    short, whole = (call(capsys, "diff", demo.checkpoint, tmp_path / "seed1", *w).out for w in ((), ("--all",)))
    assert "more: --all" in short and "more: --all" not in whole
    assert len(whole.splitlines()) > len(short.splitlines()) + 50


def empty(folder: Path, demo: Demo) -> Path:
    (folder / "x").mkdir()
    return folder / "x"


def pickled(folder: Path, demo: Demo) -> Path:
    (folder / "x").mkdir()
    (folder / "x" / "model.bin").write_bytes(b"PK\x03\x04")
    return folder / "x"


def text(folder: Path, demo: Demo) -> Path:
    (folder / "x").write_text("weights, honestly")
    return folder / "x"


def unknown(folder: Path, demo: Demo) -> Path:
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (folder / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    return folder / "x.safetensors"


def flipped(folder: Path, demo: Demo) -> Path:
    """One bit of the last weight: another Plan's, so that the weights are looked at."""
    path = folder / "x.plan"
    shutil.copy(demo.folder / "pi05-hopper.plan", path)
    plan = open_plan(path, verify=False)
    start = path.stat().st_size - len(plan.data)
    at = start + plan.program.weights[-1].offset
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    return path


def cut(folder: Path, demo: Demo) -> Path:
    shutil.copy(demo.plan, folder / "x.plan")
    os.truncate(folder / "x.plan", 100_000)
    return folder / "x.plan"


def named_plan(folder: Path, demo: Demo) -> Path:
    (folder / "x.plan").write_text("a plan for the weekend, and more than eight bytes")
    return folder / "x.plan"


def nan(folder: Path, demo: Demo) -> Path:
    copy = shutil.copytree(demo.checkpoint, folder / "x")
    info = read_header(copy / "model.safetensors")[UP]
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(info.offset)
        file.write(b"\xc0\x7f")
    return copy


HOSTILE: dict[str, tuple[Callable[[Path, Demo], Path], str]] = {
    "nothing": (lambda folder, demo: folder / "nowhere", "checkpoint.not_found"),
    "no Plan": (lambda folder, demo: folder / "nowhere.plan", "checkpoint.not_found"),
    "a folder without weights": (empty, "checkpoint.not_found"),
    "a pickle": (pickled, "checkpoint.pickle"),
    "a text": (text, "checkpoint.format"),
    "tensors of no model": (unknown, "checkpoint.kind"),
    "a damaged Plan": (flipped, "plan.damaged"),
    "a truncated Plan": (cut, "plan.truncated"),
    "a text called .plan": (named_plan, "plan.invalid"),
    "a weight with NaN": (nan, "checkpoint.nonfinite"),
}


@pytest.mark.parametrize("first", [True, False], ids=["A", "B"])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name: str, first: bool, capsys: Capture, demo: Demo, tmp_path: Path) -> None:
    make, code = HOSTILE[name]
    path = make(tmp_path, demo)
    sides = (path, demo.plan) if first else (demo.plan, path)
    said: Said = call(capsys, "diff", *sides)
    assert (said.code, said.error) == (4, code), said.err
    assert "Traceback" not in said.err and not said.out


def test_options(capsys: Capture, demo: Demo) -> None:
    both = (demo.checkpoint, demo.plan)
    assert call(capsys, "diff", demo.plan).error == "usage.option"
    assert call(capsys, "diff", *both, "--device", "gpu").error == "option.device"
    said = call(capsys, "diff", *both, "--numbers")
    assert (said.code, said.error) == (2, "diff.inputs") and "checkpoint" in said.err
    said = call(capsys, "diff", *both, "--adapter", "lora")
    assert (said.code, said.error) == (2, "diff.inputs") and "is a Plan" in said.err
