"""Launches timed on a driver with planted times: both methods find the slow one, and memory is put back each time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from frtc.errors import FrtcError
from frtc.kernels.cubin import parameters_of
from frtc.kernels.targets import load_targets
from frtc.runtime import profile as module
from frtc.runtime.driver import Driver
from frtc.runtime.graph import Graph
from frtc.runtime.plan_file import Plan, open_plan
from frtc.runtime.profile import Line, Profile, middle, profile, resolution_of, rounds_in, shared
from frtc.runtime.session import Session
from tests.runtime import small_plan
from tests.runtime.timed_driver import EMPTY_US, STEP_US, TimedApi

US = dict(zip(small_plan.KERNELS, (5.0, 2.0, 30.0, 1.0), strict=True))  # linear, silu, scale, add
NAMES = [("in", 0, 0), ("in", 0, 1), ("in", 1, 0), ("in", 2, 0), ("step", 0, 0), ("step", 1, 0)]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    path = tmp_path_factory.mktemp("plan") / "small.plan"
    small_plan.write(path)
    return open_plan(path)


@pytest.fixture
def api(plan: Plan) -> TimedApi:
    image = bytes(plan.files()["cubin.000"])
    return TimedApi({name: parameters_of(image, name) for name in small_plan.KERNELS}, US)


@pytest.fixture
def session(plan: Plan, api: TimedApi) -> Iterator[Session]:
    with Session(plan, driver=Driver(api=api)) as session:
        yield session


def test_both_methods_find_the_planted_times(session: Session) -> None:
    found = profile(session)
    assert [(t.stage, t.call, t.launch) for t in found.launches] == NAMES
    alone, added = ([getattr(t, name) for t in found.launches] for name in ("alone_us", "in_graph_us"))
    step = 2 * STEP_US
    assert alone == pytest.approx([5, 2, 5, 1, 30, 5], abs=step)
    # in.1 runs beside in.0 and adds nothing: it shares what the next launch adds
    assert added == pytest.approx([5, 2, 0.5, 0.5, 30, 5], abs=step)
    assert [t.group for t in found.launches] == [1, 1, 2, 2, 1, 1]
    assert found.start_us == pytest.approx(EMPTY_US, abs=step) and found.resolution_us == pytest.approx(STEP_US)
    assert found.replay_us == pytest.approx(EMPTY_US + 8 + 3 * 35, abs=step)
    assert found.sum_us(rounds_in(session.program)) == pytest.approx(found.replay_us, abs=step)


def test_clocks_that_swing_do_not_show(session: Session, api: TimedApi) -> None:
    """By a tenth, in 126 replays: between graphs that are timed one after the other those would be microseconds."""
    api.swing = 0.1
    added = [t.in_graph_us for t in profile(session).launches]
    assert added == pytest.approx([5, 2, 0.5, 0.5, 30, 5], rel=0.11, abs=0.3)


@pytest.mark.parametrize(("window", "lead"), [(1, 3), (2, 3), (4, 4), (5, 8)])
def test_windows_do_not_show(session: Session, window: int, lead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW", window)
    monkeypatch.setattr(module, "LEAD", lead)
    found = profile(session)
    assert [(t.stage, t.call, t.launch) for t in found.launches] == NAMES
    assert found.sum_us(rounds_in(session.program)) == pytest.approx(found.replay_us, abs=8 * STEP_US)
    assert max(found.launches, key=lambda t: t.in_graph_us).stage == "step"


def test_a_graph_finds_memory_as_the_line_has_it_there(
    session: Session, api: TimedApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count of launches before it, also when a graph has run again and again."""
    monkeypatch.setattr(module, "WINDOW", 2)
    monkeypatch.setattr(module, "LEAD", 1)
    api.states = session.addresses["state"]
    profile(session)
    line = [small_plan.KERNELS[i] for i in (0, 1, 0, 3, 2, 0)]
    parts = [(found, kernels) for found, kernels in api.found if 0 < len(kernels) <= 3]
    assert len(parts) > 100
    for found, kernels in parts:
        assert line[found : found + len(kernels)] == kernels
    assert {found for found, _ in parts} == {0, 1, 3}  # where the windows' leads begin


def test_everything_is_given_back(session: Session, api: TimedApi) -> None:
    session.warm()
    held, before = len(api.live), api.calls.copy()
    profile(session)
    made = api.calls - before
    assert len(api.live) == held
    assert made["cuGraphCreate"] == made["cuGraphDestroy"] and made["cuEventCreate"] == made["cuEventDestroy"]
    assert not any(api.device(session.addresses["state"], session.program.state_nbytes))


def test_what_cannot_be_built_leaves_nothing(session: Session, api: TimedApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two graphs: the first one is given back, too."""
    built = itertools.count()

    def failing(*args: Any) -> Graph:
        if next(built) == 3:  # an empty one, the whole, then two in turn
            raise FrtcError("driver.call", "no memory")
        return Graph(*args)

    session.warm()
    held, before = len(api.live), api.calls.copy()
    monkeypatch.setattr(module, "Graph", failing)
    with pytest.raises(FrtcError, match="no memory"):
        profile(session)
    made = api.calls - before
    assert len(api.live) == held and next(built) == 4
    assert made["cuGraphCreate"] == made["cuGraphDestroy"] and made["cuEventCreate"] == made["cuEventDestroy"]


def test_caches_forget_a_plan_that_is_larger(session: Session, api: TimedApi, monkeypatch: pytest.MonkeyPatch) -> None:
    p, target = session.program, load_targets()[session.program.target.name]
    planned = p.weights_nbytes + p.arena_nbytes + p.state_nbytes

    def evicted(l2: int) -> set[int]:
        monkeypatch.setattr(module, "load_targets", lambda: {target.name: replace(target, l2=l2)})
        before = len(api.log)
        profile(session)
        return {call[3] for call in api.log[before:] if call[0] == "cuMemsetD8Async"} - {p.state_nbytes}

    assert evicted(planned) == set()
    assert evicted(planned - 1) == {2 * (planned - 1)}


def test_parts_of_a_line(plan: Plan) -> None:
    line = Line.of(plan.program.stages)
    assert [call.name for call in line.calls] == ["in.0", "in.1", "in.2", "step.0", "step.1"]
    assert [call.after for call in line.calls] == [(), (), (0, 1), (2,), (3,)]
    part = line.part(1, 4).calls  # from the second launch of in.0 on
    assert [(call.name, len(call.launches), call.after) for call in part] == [
        ("in.0", 1, ()), ("in.1", 1, ()), ("in.2", 1, (0, 1)),
    ]  # fmt: skip
    assert part[0].launches == line.calls[0].launches[1:]
    assert line.part(2, 2).calls == ()


def test_alone_a_launch_waits_for_the_one_before(plan: Plan) -> None:
    """Also one that starts early where it stands."""
    line = Line.of(plan.program.stages)
    early = replace(line.calls[1], launches=(replace(line.calls[1].launches[0], early=True),))
    (call,) = replace(line, calls=(line.calls[0], early, *line.calls[2:])).alone(2, 3).calls
    assert call.after == () and call.launches == line.calls[1].launches * 3


def test_the_middle_ignores_outliers() -> None:
    assert middle([1.0, 1.2, 1.4, 99.0, 1.0, 1.2, 0.0, 1.0]) == pytest.approx(1.1)
    assert middle([3.0]) == 3.0


def test_resolution() -> None:
    assert resolution_of([[1.0] * 15, [2.0] * 15]) == 1.0  # no noise: the clock's step
    wide = [i / 10 for i in range(16)]  # the middle half spans 0.7: a deviation of 0.52
    assert resolution_of([wide] * 3) == pytest.approx(2 / 16**0.5 * 0.7 / 1.35)


def test_neighbours_below_the_resolution_are_taken_together() -> None:
    assert shared([3.0, 0.1, -0.2, 2.1, 4.0, 0.5], 1.0) == [
        (3.0, 1), *[(pytest.approx(2.0 / 3), 3)] * 3, *[(2.25, 2)] * 2,
    ]  # fmt: skip
    assert shared([0.1, 0.1], 1.0) == [(0.1, 2)] * 2
    assert shared([2.0], 1.0) == [(2.0, 1)]


def test_the_sum_counts_rounds() -> None:
    time = module.LaunchTime("step", 0, 0, 1.0, 2.0, 1)
    assert Profile((time, replace(time, stage="in")), 0.1, 1.0, 9.0).sum_us({"in": 1, "step": 3}) == 9.0
