"""Early launches compute what launches one after the other compute, bit for bit; kernels that do not wait are seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frtc.kernels.dtypes import round_to
from frtc.kernels.targets import Target
from frtc.runtime import validate
from frtc.runtime.plan_file import open_plan
from frtc.runtime.session import Session
from tests.runtime import early_plan
from tests.runtime.here import target_here

pytestmark = pytest.mark.gpu
REPLAYS = 200


@pytest.fixture(scope="module")
def target() -> Target:
    return target_here(lambda target: "pdl" in target.has, "early launches")


def session_of(path: Path, edges: str, monkeypatch: pytest.MonkeyPatch) -> Session:
    """With its graphs built; the variable is read when they are."""
    monkeypatch.setenv("FRTC_EDGES", edges)
    session = Session(open_plan(path), check_finite=False)
    session.warm(stages=True)
    return session


def actions(session: Session, seed: int) -> np.ndarray[Any, Any]:
    session.set("noise", round_to(early_plan.noise(seed), "bf16"))
    session.run()
    return session.get("actions").view(np.uint16).copy()


def differing(path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Replays, of REPLAYS with other inputs each, whose results depend on the edges."""
    with session_of(path, "full", monkeypatch) as full, session_of(path, "", monkeypatch) as early:
        wanted = [actions(full, seed) for seed in range(REPLAYS)]
        assert len({a.tobytes() for a in wanted}) == REPLAYS, "inputs decide results"
        found = [actions(early, seed) for seed in range(REPLAYS)]
        for name, session in (("full", full), ("early", early)):
            launches = sum(len(c.launches) for s in session.program.stages for c in s.calls)
            replay = session.time(20).parts["replay"].min
            print(f"{name} edges: {replay:.1f} us, {launches} launches in the stages, {early_plan.ROUNDS} rounds")
    return sum(not np.array_equal(a, b) for a, b in zip(wanted, found, strict=True))


def test_early_equals_full(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = early_plan.made(target.name)
    launches = [launch for s in built.program.stages for call in s.calls for launch in call.launches]
    assert len(launches) > 50 and all(launch.early for launch in launches)
    early_plan.write(tmp_path / "early.plan", built)
    assert differing(tmp_path / "early.plan", monkeypatch) == 0


def test_rounds_of_single_stages(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes whose parameters were set again keep their edges."""
    early_plan.write(tmp_path / "early.plan", early_plan.made(target.name))
    with session_of(tmp_path / "early.plan", "", monkeypatch) as session:
        for seed in range(20):
            wanted = actions(session, seed)
            session.run_stage("let.z")
            for k in range(early_plan.ROUNDS):
                session.run_stage("step", k)
            assert np.array_equal(session.get("actions").view(np.uint16), wanted)


def test_kernels_that_do_not_wait_are_noticed(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with kernels that release those behind them and wait for nobody."""
    with early_plan.defined("FRTC_SABOTAGE_NO_WAIT"):
        early_plan.write(tmp_path / "careless.plan", early_plan.made(target.name))
    monkeypatch.setattr(validate, "waits", lambda image, kernel: True)  # the reader would see it
    assert differing(tmp_path / "careless.plan", monkeypatch) > 0
