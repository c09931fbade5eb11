"""Launches of the small Plan timed on a real GPU: what they add in a graph adds up to a replay."""

from __future__ import annotations

from pathlib import Path

import pytest

from frtc.errors import EnvironmentFault
from frtc.kernels.targets import load_targets
from frtc.runtime.driver import Driver
from frtc.runtime.plan_file import open_plan
from frtc.runtime.profile import profile, rounds_in
from frtc.runtime.session import Session
from tests.runtime import small_plan

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    try:
        driver = Driver()
    except EnvironmentFault as fault:
        pytest.skip(f"no CUDA device: {fault.what}")
    names = [t.name for t in load_targets().values() if t.sm == driver.device.sm]
    if not names:
        pytest.skip(f"no target for sm_{driver.device.sm}")
    path: Path = tmp_path_factory.mktemp("plan") / "small.plan"
    small_plan.write(path, small_plan.program(names[0]))
    session = Session(open_plan(path), driver=driver)
    session.set("x", small_plan.inputs(1)["x"])
    session.warm()
    return session


def test_differences_add_up_to_a_replay(session: Session) -> None:
    found = profile(session)
    total = found.sum_us(rounds_in(session.program))
    for t in found.launches:
        print(f"{t.stage}/{t.call}.{t.launch}: alone {t.alone_us:.2f} us, in the graph {t.in_graph_us:.2f} us")
    print(f"sum {total:.2f} us, replay {found.replay_us:.2f} us, resolution {found.resolution_us:.3f} us")
    assert len(found.launches) == sum(len(c.launches) for s in session.program.stages for c in s.calls)
    assert all(t.alone_us >= 0 for t in found.launches)
    assert total == pytest.approx(found.replay_us, rel=0.1)


def test_results_are_as_before(session: Session) -> None:
    session.run()
    expected = session.get("y")
    profile(session)
    session.run()
    assert (session.get("y") == expected).all()
