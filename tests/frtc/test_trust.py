"""Evidence: what verify passes goes into the Plan, what is not proven is said at every opening."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import frtc
from frtc import observation
from frtc.codegen.plan_evidence import change_evidence
from frtc.errors import CheckFailed, FrtcError
from frtc.policy import notes
from frtc.record import record
from frtc.runtime.emulator import Emulator
from frtc.runtime.plan_file import open_plan
from frtc.trust import lacks, trust_of
from frtc.verified import Difference, Sample, Verified
from tests.cli.face import call
from tests.conftest import Demo

Capture = pytest.CaptureFixture[str]
UNITS = np.array([[0.5, 0.25], [0.125, 0.75]])


def found(error: float = 1e-3, samples: int = 2) -> Verified:
    """As if two steps had been compared; the second sample's errors are twice the first's."""

    def sample(gain: float) -> Sample:
        steps = (Difference("step", k, "x", error * gain * (k + 1), 2e-2, True, UNITS * gain * (k + 1)) for k in (0, 1))
        return Sample((Difference("vision", 0, "t", error * gain, 2e-2), *steps), error * gain, 1 - error, UNITS * gain)

    return Verified(tuple(sample(i + 1.0) for i in range(samples)), 2e-2, 2e-2)


def copied(demo: Demo, folder: Path, *without: str) -> Path:
    """The demo's Plan, some of its evidence gone."""
    path = Path(shutil.copy(demo.plan, folder / "p.plan"))
    plan_id = open_plan(path).plan_id
    assert change_evidence(path, plan_id, lambda e: {k: v for k, v in e.items() if k not in without}) == ""
    return path


@pytest.fixture
def opened(demo: Demo) -> Any:
    from frtc.compiler import CompileOptions, open_model

    return open_model(demo.checkpoint, CompileOptions())


def test_the_demo_s_verify_is_recorded(demo: Demo, capsys: Capture) -> None:
    plan = open_plan(demo.plan)
    verified = plan.evidence["verified"]
    assert verified["device"].startswith("the emulator") and verified["precision"] == "w8a16"
    assert verified["samples"] == 1 and 0 < verified["worst_velocity"] < verified["bar"] == 6e-2
    against = verified["against"]
    assert against["checkpoint"] == "pi05" and len(against["weights"]) == 64
    assert against["headers"] == plan.evidence["source"]["headers"]
    assert [d["name"] for d in verified["dimensions"]] == [f"action[{i}]" for i in range(14)]
    assert lacks(plan) == () and "recorded in the Plan's evidence" in demo.text
    data = call(capsys, "inspect", demo.plan, "--json").json()
    assert data["trust"] == {"verified": verified, "self_test": True, "synthetic": []}
    assert "verified  against pi05" in call(capsys, "inspect", demo.plan).out


@pytest.mark.parametrize(
    ("gone", "said"),
    [(("verified",), ("was not verified",)), (("self_test",), ("holds no self-test",)),
     (("verified", "self_test"), ("was not verified", "holds no self-test"))],
)  # fmt: skip
def test_what_is_not_proven_is_said_each_time(
    gone: tuple[str, ...], said: tuple[str, ...], demo: Demo, tmp_path: Path, capsys: Capture,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    path = copied(demo, tmp_path, *gone)
    for _ in range(2):
        caplog.clear()
        frtc.load(path, device="cpu").close()
        lines = [r.message for r in caplog.records if "unproven" in r.message]
        assert len(lines) == 1 and all(words in lines[0] for words in said)
    (line,) = lacks(open_plan(path))
    assert line in call(capsys, "inspect", path).out
    data = call(capsys, "inspect", path, "--json").json()
    assert (data["trust"]["verified"] is None, data["trust"]["self_test"]) == (
        "verified" in gone,
        "self_test" not in gone,
    )
    caplog.clear()
    assert call(capsys, "run", path, "--device", "cpu", "--json").json()["device"]["trust"] == data["trust"]
    assert [r.message for r in caplog.records if line in r.message]


def test_forged_evidence_proves_nothing(demo: Demo) -> None:
    plan = replace(open_plan(demo.plan), evidence={"verified": "yes", "self_test": [1]})
    assert trust_of(plan) == {"verified": None, "self_test": False, "synthetic": []} and len(notes(plan)) == 4 + 1


def test_a_calibration_on_made_up_observations_is_said(demo: Demo) -> None:
    honest = open_plan(demo.plan)
    calibration = {"scales": "static", "synthetic": ["camera base is constant", "the state never moves"]}
    plan = replace(honest, evidence={**honest.evidence, "calibration": calibration})
    (line,) = lacks(plan)
    assert line.startswith("synthetic: ") and "camera base is constant; the state never moves" in line
    many = {"synthetic": [f"camera {i} is constant" for i in range(24)]}
    (line,) = lacks(replace(honest, evidence={**honest.evidence, "calibration": many}))
    assert line.endswith("camera 0 is constant; camera 1 is constant; and 22 more findings")
    assert lacks(replace(honest, evidence={**honest.evidence, "calibration": {"synthetic": 3}})) == ()


def test_recording_changes_the_evidence_alone(demo: Demo, tmp_path: Path, opened: Any) -> None:
    path = copied(demo, tmp_path, "verified")
    before = open_plan(path)
    path.chmod(0o640)
    link = tmp_path / "link.plan"
    link.symlink_to(path)
    plan = open_plan(link)
    assert record(frtc.Policy(plan, Emulator(plan)), opened, found()) == ""
    after = open_plan(path)
    assert after.plan_id == before.plan_id and after.sha256 == before.sha256 and after.data == before.data
    assert {k: v for k, v in after.evidence.items() if k != "verified"} == before.evidence
    assert after.evidence["verified"]["worst_velocity"] == 4e-3 and after.evidence["verified"]["samples"] == 2
    assert link.is_symlink() and os.stat(path).st_mode & 0o777 == 0o640
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.plan", "p.plan"]


def test_evidence_that_outgrows_its_room_moves_the_data(demo: Demo, tmp_path: Path) -> None:
    path = copied(demo, tmp_path)
    before = open_plan(path)
    assert change_evidence(path, before.plan_id, lambda e: {**e, "long": "x" * 600_000}) == ""
    after = open_plan(path)
    assert len(after.evidence["long"]) == 600_000 and after.plan_id == before.plan_id and after.data == before.data


def test_a_failure_takes_back_what_an_earlier_comparison_said(
    demo: Demo, tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copied(demo, tmp_path)
    plan = open_plan(path)
    policy = frtc.Policy(plan, Emulator(plan))
    failed = found(error=0.5)
    assert isinstance(failed.failure(), CheckFailed)
    with monkeypatch.context() as another:
        another.setattr("frtc.record.weights_digest", lambda files: "0" * 64)
        assert record(policy, opened, failed) == "" and "verified" in open_plan(path).evidence, "another checkpoint"
    assert record(policy, opened, failed) == "" and "verified" not in open_plan(path).evidence


def test_a_plan_that_cannot_be_written_is_a_note(
    demo: Demo, tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copied(demo, tmp_path, "verified")
    plan = open_plan(path)
    policy, before = frtc.Policy(plan, Emulator(plan)), path.read_bytes()
    path.chmod(0o444)
    assert record(policy, opened, found()) == "the Plan is read-only"
    path.chmod(0o644)
    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        assert record(policy, opened, found()) == "the Plan cannot be written: No space left on device"
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["p.plan"]
    shutil.copy(demo.folder / "pi05-hopper.plan", path)
    assert "another Plan" in record(policy, opened, found()) and "verified" not in open_plan(path).evidence


def test_the_report_over_samples_steps_and_dimensions() -> None:
    data = found().data()
    assert [d["name"] for d in data["dimensions"]] == ["action[0]", "action[1]"]
    assert [d["worst"] for d in data["dimensions"]] == [1.0, 1.5], "the second sample's are twice as large"
    assert [d["mean"] for d in data["dimensions"]] == pytest.approx([0.46875, 0.75])
    assert [d["worst_step"] for d in data["dimensions"]] == [2.0, 3.0], "and the second step's"
    assert [(s["where"], s["velocity_error"]) for s in data["steps"]] == [("step x", 2e-3), ("step[1] x", 4e-3)]
    assert data["steps"][1]["units"] == [2.0, 3.0] and data["worst_velocity"] == 4e-3
    assert (data["whole"], data["worst"], data["samples"]) == (2e-3, [1.5, 1], 2)
    named = replace(found(), names=("shoulder.pos", "gripper.pos")).data()
    assert [d["name"] for d in named["dimensions"]] == ["shoulder.pos", "gripper.pos"]
    assert found(error=8e-3).failed[0].where == "step[1] x" and found(error=8e-3).failure() is not None


def test_recorded_observations(demo: Demo, tmp_path: Path, capsys: Capture) -> None:
    """Three of six, in an .npz file; no other source beside them."""
    steps = frtc.load(demo.plan, device="cpu").steps
    made = [observation.seeded(steps, seed) for seed in range(6)]
    np.savez(tmp_path / "data.npz", **{name: np.stack([np.asarray(m[name]) for m in made]) for name in made[0]})
    words = ("verify", demo.plan, demo.checkpoint, "--device", "cpu", "--data", tmp_path / "data.npz", "--no-record")
    said = call(capsys, *words, "--prompt", "fold")
    assert (said.code, said.error) == (2, "verify.data")
    before = demo.plan.read_bytes()
    data = call(capsys, *words, "--samples", "3", "--json").json()
    assert data["samples"] == 3 and data["failed"] == [] and "recorded" not in data
    assert demo.plan.read_bytes() == before and len(data["steps"]) == 10 and len(data["dimensions"]) == 14


def test_what_a_file_says_neither_moves_the_terminal_nor_adds_a_line(
    demo: Demo, tmp_path: Path, capsys: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    """Where it is said at opening, in a table, and in an error as Python itself prints it."""
    path, bad = copied(demo, tmp_path), "\x1b[2J\x9b1A\u202e\nverified  by all"
    plan_id = open_plan(path).plan_id
    forged = {"calibration": {"synthetic": [bad]}, "source": {"checkpoint": bad}}
    assert change_evidence(path, plan_id, lambda e: {**e, **forged}) == ""
    shown = r"\x1b[2J\x9b1A\u202e\nverified  by all"
    assert [shown in note for note in notes(open_plan(path))].count(True) == 1
    caplog.clear()
    frtc.load(path, device="cpu").close()
    assert sum(shown in line for line in caplog.messages) == 1 and all(map(str.isprintable, caplog.messages))
    said = call(capsys, "inspect", path)
    assert said.out.count(shown) == 2 and all(map(str.isprintable, said.out.split("\n")))
    error = str(FrtcError("input.file", bad, [("found", bad)]))
    assert all(map(str.isprintable, error.split("\n"))) and r"\x1b[2J" in error
