"""Early launches in the graph: which edges are programmatic. That results stay the same is for test_early_gpu.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from frtc.errors import FrtcError
from frtc.kernels.cubin import parameters_of
from frtc.runtime.driver import Driver
from frtc.runtime.graph import Graph
from frtc.runtime.plan import Overlap, Program, Stage
from frtc.runtime.plan_file import Plan, open_plan
from frtc.runtime.session import Session
from tests.runtime import early_plan, small_plan
from tests.runtime.null_driver import NullApi

EDGES = [(0, 1), (1, 3), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7), (7, 8), (8, 9)]  # test_session.py draws the graph
TIMED = [(1, 2), (2, 4), (3, 4), (6, 7), (9, 10), (12, 13)]  # behind each stage is an event: 5, 8, 11


def early_program(*kernels: str) -> Program:
    """The small program; launches of these kernels are early."""
    made = small_plan.program()
    chosen = {small_plan.KERNELS.index(name) for name in kernels}
    stages = tuple(
        replace(stage, calls=tuple(
            replace(call, launches=tuple(replace(n, early=n.kernel in chosen) for n in call.launches))
            for call in stage.calls
        ))
        for stage in made.stages
    )  # fmt: skip
    return replace(made, stages=stages)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "small.plan"
    small_plan.write(path)
    return path


def session_of(path: Path, program: Program) -> Session:
    plan: Plan = open_plan(path)
    image = bytes(plan.files()["cubin.000"])
    plan.program = program
    return Session(plan, driver=Driver(api=NullApi({k: parameters_of(image, k) for k in small_plan.KERNELS})))


def edges(session: Session, name: str = "") -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(all edges, the programmatic ones), nodes as positions."""
    graph = session.graphs[name].executable
    at = {node[0]: i for i, node in enumerate(graph.nodes)}
    every = sorted((at[a], at[node[0]]) for node in graph.nodes for a in node[1])
    return every, sorted((at[a], at[b]) for a, b in graph.early)


def test_no_launch_is_early(path: Path) -> None:
    session = session_of(path, small_plan.program())
    session.warm()
    assert edges(session) == (EDGES, [])


def test_all_are_early(path: Path) -> None:
    """The first nodes have no edges; the ends of a stage release the next one's start."""
    session = session_of(path, early_program(*small_plan.KERNELS))
    session.warm()
    assert edges(session) == (EDGES, EDGES)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("small_silu", [(0, 1)]),
        ("small_add", [(1, 3), (2, 3)]),
        ("small_scale", [(3, 4), (5, 6), (7, 8)]),
        ("small_linear", [(4, 5), (6, 7), (8, 9)]),
    ],
)
def test_edges_into_early_launches_alone(path: Path, kernel: str, expected: list[tuple[int, int]]) -> None:
    session = session_of(path, early_program(kernel))
    session.warm()
    assert edges(session) == (EDGES, expected)


def test_edges_from_events_are_full(path: Path) -> None:
    session = session_of(path, early_program(*small_plan.KERNELS))
    session.time(1)
    every, early = edges(session, "\0timed")
    assert early == TIMED and set(every) > set(early)
    kinds = [node[2] for node in session.graphs["\0timed"].executable.nodes]
    assert all("event" in (kinds[a], kinds[b]) for a, b in set(every) - set(early))


def test_full_edges_on_demand(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRTC_EDGES", "full")
    session = session_of(path, early_program(*small_plan.KERNELS))
    session.warm()
    assert edges(session) == (EDGES, [])


OVERLAP = Overlap(("in", "step"), ((), (), (0, 1), (2,), (2, 3)))  # one edge more than it needs


def test_edges_between_stages_that_overlap_are_full(path: Path) -> None:
    """A node may have edges of both kinds. Behind the first round, everything is as it was."""
    session = session_of(path, replace(early_program(*small_plan.KERNELS), overlap=OVERLAP))
    session.warm()
    every, early = edges(session)
    assert every == sorted([*EDGES, (3, 5)])
    assert sorted(set(every) - set(early)) == [(3, 4), (3, 5)]


@pytest.mark.parametrize("overlap", [None, Overlap(("none", "nothing"), ())])
def test_stages_without_calls_leave_the_edges_from_copies(path: Path, overlap: Overlap | None) -> None:
    """What comes behind them waits for the copies, and by full edges: a copy releases nobody early."""
    session = session_of(path, early_program(*small_plan.KERNELS))
    steps = [(Stage("none", ()), 0), (Stage("nothing", ()), 0), (session.program.stage("in"), 0)]
    copies = session._copies()
    session.graphs["made"] = Graph(
        session.driver, session.functions, session.addresses, steps, copies=copies, overlap=overlap
    )
    assert edges(session, "made") == ([(0, 1), (0, 3), (1, 2), (2, 4), (3, 4), (4, 5)], [(1, 2), (2, 4), (3, 4)])


def test_timed_stages_do_not_overlap(path: Path) -> None:
    session = session_of(path, replace(early_program(*small_plan.KERNELS), overlap=OVERLAP))
    session.time(1)
    assert edges(session, "\0timed")[1] == TIMED


def test_stages_one_after_the_other_on_demand(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRTC_EDGES", "serial")
    session = session_of(path, replace(early_program(*small_plan.KERNELS), overlap=OVERLAP))
    session.warm()
    assert edges(session) == (EDGES, EDGES)


def test_other_words_for_edges_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRTC_EDGES", "ful")
    with pytest.raises(FrtcError, match="FRTC_EDGES=ful") as caught:
        session_of(path, small_plan.program()).warm()
    assert caught.value.code == "option.edges"


def test_a_kernel_that_does_not_wait_is_not_early(tmp_path: Path) -> None:
    """The kernels of the small program do not: the reader sees it in their code."""
    small_plan.write(tmp_path / "early.plan", early_program("small_silu"))
    with pytest.raises(FrtcError, match="'small_silu' does not wait, and a launch of it is early"):
        open_plan(tmp_path / "early.plan")


def test_compiled_kernels_wait(tmp_path: Path) -> None:
    """All launches of a compiled Plan are early, and a build whose kernels do not wait is refused."""
    early_plan.write(tmp_path / "early.plan", early_plan.made("hopper"))
    program = open_plan(tmp_path / "early.plan").program
    assert all(launch.early for stage in program.stages for call in stage.calls for launch in call.launches)
    with early_plan.defined("FRTC_SABOTAGE_NO_WAIT"):
        early_plan.write(tmp_path / "careless.plan", early_plan.made("hopper"))
    with pytest.raises(FrtcError, match="does not wait, and a launch of it is early"):
        open_plan(tmp_path / "careless.plan")
