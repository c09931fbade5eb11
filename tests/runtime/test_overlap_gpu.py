"""Stages that overlap compute what stages one after the other compute, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frtc.kernels.dtypes import round_to
from frtc.kernels.targets import Target
from frtc.runtime.plan import Program
from frtc.runtime.plan_file import open_plan
from frtc.runtime.session import Session
from tests.runtime import overlap_plan
from tests.runtime.here import target_here

pytestmark = pytest.mark.gpu
REPLAYS = 200


@pytest.fixture(scope="module")
def target() -> Target:
    return target_here(lambda target: target.overlaps, "stages that overlap")


@pytest.fixture(scope="module", params=["baseline", "native"])
def path(target: Target, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "overlap.plan"
    overlap_plan.write(path, overlap_plan.made(target.name, target.families(request.param)))
    return path


def actions(session: Session, seed: int) -> np.ndarray[Any, Any]:
    for name, values in overlap_plan.inputs(seed).items():
        session.set(name, round_to(values, "bf16"))
    session.run()
    return session.get("actions").view(np.uint16).copy()


def differing(
    path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Program], Program] = lambda program: program
) -> int:
    """Replays, of REPLAYS with other inputs each, whose results depend on the overlap."""
    found = {}
    for edges in ("serial", ""):
        monkeypatch.setenv("FRTC_EDGES", edges)
        plan = open_plan(path)
        plan.program = change(plan.program)
        with Session(plan, check_finite=False) as session:
            session.warm()
            found[edges] = [actions(session, seed) for seed in range(REPLAYS)]
            print(f"{edges or 'overlap'}: {session.time(20).parts['replay'].min:.1f} us")
    assert len({a.tobytes() for a in found["serial"]}) == REPLAYS, "inputs decide results"
    return sum(not np.array_equal(a, b) for a, b in zip(*found.values(), strict=True))


def test_overlap_equals_serial(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert differing(path, monkeypatch) == 0


def test_calls_that_do_not_wait_are_noticed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where no call waits for one of another stage."""
    assert differing(path, monkeypatch, overlap_plan.careless) > 0
