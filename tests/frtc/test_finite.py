"""A run that made NaN: an error that names the stage, and no actions, neither returned nor written nor left to read."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

import frtc
from frtc import observation
from frtc.errors import CheckFailed, FrtcError
from frtc.kernels.cubin import parameters_of
from frtc.runtime.driver import Driver
from frtc.runtime.finite import refusal
from frtc.runtime.plan_file import open_plan
from frtc.runtime.session import Session
from tests.cli.face import call
from tests.conftest import Demo
from tests.frtc.faults import planted, weight
from tests.runtime import small_plan
from tests.runtime.null_driver import NullApi

Capture = pytest.CaptureFixture[str]


def poisoned(demo: Demo, out: Path, name: str) -> Path:
    """One number of one weight is NaN."""
    plan = open_plan(demo.plan)
    value = weight(plan, name)
    value.reshape(-1)[0] = np.nan
    return planted(plan, out, {name: value}).path


@pytest.mark.parametrize(
    ("name", "stage"),
    [("vision.tower.layers.1.fc1.weight", "vision"), ("prefix.layers.1.mlp.down.weight", "prefix"),
     ("denoise.action_in.weight", "denoise")],
)  # fmt: skip
def test_the_stage_is_named_and_nothing_comes_out(
    name: str, stage: str, demo: Demo, tmp_path: Path, capsys: Capture
) -> None:
    path = poisoned(demo, tmp_path / "nan.plan", name)
    said = call(capsys, "run", path, "--device", "cpu", "--actions", tmp_path / "actions.npy", "--json")
    error = said.json()["error"]
    assert (said.code, error["code"], error["exit"]) == (3, "run.nonfinite", 3)
    rows = dict(error["rows"])
    assert rows["output"].startswith("actions[0, 0] is nan") and rows["first"].split(", ")[0] == f"stage {stage}"
    assert ("," in rows["first"]) == (stage != "denoise")  # ten rounds: the call that was first is not known
    assert set(said.json()) == {"error"} and [p.name for p in tmp_path.iterdir()] == ["nan.plan"]


def test_infinite_errors_are_null_in_json(demo: Demo, tmp_path: Path, capsys: Capture) -> None:
    """JSON has no word for NaN and infinity; a self-test of them is a check that failed, not a bad input."""
    path = poisoned(demo, tmp_path / "nan.plan", "denoise.action_in.weight")

    def no_such_word(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    for words in ((), (demo.checkpoint,), (demo.checkpoint, "--bisect")):
        said = call(capsys, "verify", path, *words, "--device", "cpu", "--json")
        found = json.loads(said.out, parse_constant=no_such_word)
        assert said.code == found["error"]["exit"] == 3 and "null" in said.out


def test_a_policy_returns_no_actions(demo: Demo, tmp_path: Path) -> None:
    path = poisoned(demo, tmp_path / "nan.plan", "denoise.action_in.weight")
    with frtc.load(path, device="cpu") as policy:
        seen = observation.seeded(policy.steps)
        for _ in range(2):  # at every run, not at the first alone
            with pytest.raises(CheckFailed) as caught:
                policy.infer(seen)
            assert caught.value.code == "run.nonfinite"
        with pytest.raises(CheckFailed):
            policy.executor.get(policy.output)
    with frtc.load(path, device="cpu", check_finite=False) as policy:
        with pytest.raises(FrtcError) as second:  # the policy's last step has a look of its own
            policy.infer(seen)
        assert second.value.code == "output.nonfinite"
        assert np.isnan(policy.executor.get(policy.output)).any()


def session_on_nothing(path: Path, check_finite: bool) -> Session:
    plan = open_plan(path)
    image = bytes(plan.files()["cubin.000"])
    api = NullApi({name: parameters_of(image, name) for name in small_plan.KERNELS})
    return Session(plan, driver=Driver(api=api), check_finite=check_finite)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_session_looks_at_its_copy_on_the_host(value: float, tmp_path: Path) -> None:
    """No kernel runs here: what lies in the outputs' pinned memory is what a device would have copied there."""
    small_plan.write(tmp_path / "small.plan")
    with session_on_nothing(tmp_path / "small.plan", check_finite=True) as session:
        session.run()
        host = session.outputs_here()["y"]
        session._copy_out = lambda: host.__setitem__((1, 2), value)  # type: ignore[method-assign]
        with pytest.raises(CheckFailed, match="y of this run is not finite") as caught:
            session.run()
        assert dict(caught.value.rows)["output"] == f"y[1, 2] is {value}; 1 of {host.size} numbers are not finite"
        with pytest.raises(CheckFailed):
            session.get("y")
        session._copy_out = lambda: host.fill(1)  # type: ignore[method-assign]
        session.run()
        assert (session.get("y") == 1).all(), "the next good run is a good run"
    with session_on_nothing(tmp_path / "small.plan", check_finite=False) as session:
        host = session.outputs_here()["y"]
        session._copy_out = lambda: host.fill(value)  # type: ignore[method-assign]
        session.run()
        assert np.array_equal(session.get("y"), np.full(host.shape, value, np.float32), equal_nan=True)


def test_an_output_in_the_caller_s_memory_is_not_looked_at(tmp_path: Path) -> None:
    small_plan.write(tmp_path / "small.plan")
    with session_on_nothing(tmp_path / "small.plan", check_finite=True) as session:
        session.outputs_here()["y"][...] = np.nan
        session.bound["y"] = None
        assert refusal(session) is None


def test_what_the_look_costs(demo: Demo) -> None:
    """Of a few hundred numbers: microseconds (docs/numerics.md says how many were measured)."""
    with frtc.load(demo.plan, device="cpu") as policy:
        policy.executor.outputs_here()[policy.output][...] = 1
        best = np.inf
        for _ in range(50):
            started = time.perf_counter()
            assert refusal(policy.executor) is None
            best = min(best, time.perf_counter() - started)
    assert best < 200e-6
