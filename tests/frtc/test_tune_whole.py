"""The search in the whole chain without a GPU: planted times, planted faults, a compiler that compiles nothing."""

from __future__ import annotations

import json
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from frtc.codegen.nvrtc import Cubin
from frtc.codegen.nvrtc import Job as Compiled
from frtc.kernels.catalog import CATALOG, Choice, label
from frtc.kernels.spec import Site
from frtc.kernels.tactic import Tactic, Tactics, key_of, read_tactics
from frtc.lowering.text import show_module
from frtc.runtime.driver import Driver
from frtc.runtime.emulator import POISON
from frtc.runtime.plan import ARENA
from frtc.runtime.session import Session
from frtc.tuning import builders, search, trial, tuned, whole, worker
from frtc.tuning.builder import Builder, Job, trial_of
from frtc.tuning.builders import Builders
from frtc.tuning.child import EMULATED
from frtc.tuning.options import Tuning, TuningReport
from frtc.tuning.questions import MOST, places_of, worth_trying
from frtc.tuning.trial import Trial, exact_weights, run
from frtc.tuning.tuned import prepare, tuned_build
from frtc.tuning.whole import Decided, NoBase, Whole
from frtc.tuning.worker import Worker
from tests.codegen.emulated import built, module_of, no_compiler
from tests.frtc.test_tune import FAMILIES, HOPPER
from tests.runtime.null_driver import CopyingApi

TEXT = """
graph g(x: bf16[40,256]) {
  @b : bf16[512]
  @v : bf16[256,512]
  @w : bf16[512,256]
  %0 = linear(%x, @w, @b, act=gelu_tanh) : bf16[40,512]
  %1 = linear(%0, @v) : bf16[40,256]
  return y=%1
}
"""
UP, DOWN = "linear(bf16[40,256]", "linear(bf16[40,512]"
PLACES = {next(part for part in (UP, DOWN) if place.key.startswith(part)): place
          for place in places_of(built(module_of(TEXT)), HOPPER, FAMILIES, CATALOG, {})}  # fmt: skip
OWN = {part: str(place.candidates[0]) for part, place in PLACES.items()}
SECOND, THIRD = (str(PLACES[UP].candidates[i]) for i in (1, 2))
NBYTES = {"i32": 4, "f32": 4, "tensormap": 128}  # of a parameter; others are addresses
HERE = Path(__file__).parent
Plant = Callable[..., None]
Does = Sequence[tuple[str, str, Any]]  # (site, kernel, microseconds saved or a fault)


def inputs() -> dict[str, Any]:
    generator = np.random.default_rng(0)
    return {"x": generator.standard_normal((40, 256), np.float32).astype(ml_dtypes.bfloat16)}


def job() -> Job:
    return Job(show_module(module_of(TEXT)), HOPPER, FAMILIES, Tactics("hopper", ""), inputs())


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Processes that measure and build as planted; alone every candidate takes the same."""

    def planted(does: Does = (), broken: Sequence[str] = (), deadly: Sequence[str] = (), **more: Any) -> None:
        (tmp_path / "planted.json").write_text(json.dumps({"sm": 90, "times": [], "whole": list(does), **more}))
        (tmp_path / "broken.json").write_text(json.dumps({"broken": list(broken), "deadly": list(deadly)}))
        tuner = (sys.executable, str(HERE / "fake_tuner.py"), str(tmp_path / "planted.json"))
        builder = (sys.executable, str(HERE / "fake_builder.py"), str(tmp_path / "broken.json"))
        monkeypatch.setattr(worker, "COMMAND", tuner)
        monkeypatch.setattr(builders, "COMMAND", builder)

    def compiled(jobs: Sequence[Compiled], **_: object) -> list[Cubin]:
        return [Cubin(b"cubin", "kernel") for _ in jobs]

    monkeypatch.setattr(search, "compile_all", compiled)
    return planted


def searched(seconds: float = 60.0, known: Mapping[str, Tactic] | None = None) -> tuple[Whole, list[Decided]]:
    with Worker() as working, Builders(job(), 2) as building:
        found = Whole(building, working, time.monotonic() + seconds)
        found.begin([dict(known or {})], [place.key for place in PLACES.values()])
        return found, list(found.run(list(PLACES.values()), found.programs(), lambda what, share: None))


def named(found: Whole) -> dict[str, str]:
    return {part: str(found.chosen[place.key]) for part, place in PLACES.items() if place.key in found.chosen}


# ---- what is found --------------------------------------------------------------------------------------------------


def test_what_is_quicker_in_its_place_stays(plant: Plant) -> None:
    """Of one site a candidate saves a tenth; of the other one by less than what counts."""
    hardly = str(PLACES[DOWN].candidates[1])
    plant([(UP, SECOND, 50.0), (UP, THIRD, 100.0), (DOWN, hardly, 1.0)])
    found, decided = searched()
    assert named(found) == {UP: THIRD, DOWN: OWN[DOWN]}
    assert found.before["g"] == 1000.0 and found.now["g"] == 900.0 and not found.left
    assert [d.place.key for d in decided] == [PLACES[DOWN].key, PLACES[UP].key]  # most time first
    rows = {d.place.key: d.row() for d in decided}
    tried = {c["kernel"]: c["us"] for c in rows[PLACES[UP].key]["candidates"]}
    assert tried == {str(t): {SECOND: 950.0, THIRD: 900.0}.get(str(t), 1000.0) for t in PLACES[UP].candidates}
    up, down = (next(t for t in found.tactics() if t.site == PLACES[part].key) for part in (UP, DOWN))
    assert up.us + down.us == pytest.approx(900.0, rel=0.2)  # the estimates of the two kernels differ a little


@pytest.mark.parametrize("slow", range(1, 24, 2))
def test_a_gpu_that_becomes_slower_hides_and_makes_no_gain(plant: Plant, slow: int) -> None:
    """From some answer on everything takes a tenth more: between what was there and its candidates, among them, or when
    one is confirmed."""
    plant([(UP, THIRD, 50.0)], slow=slow)
    found, _ = searched()
    assert named(found) in ({UP: THIRD, DOWN: OWN[DOWN]}, {UP: OWN[UP], DOWN: OWN[DOWN]})
    assert named(found)[UP] == THIRD or slow in range(len(PLACES[DOWN].candidates) + 2, 20), "no trial was torn apart"


def test_what_was_found_is_in_all_later_trials(plant: Plant) -> None:
    """Trials that were begun before it was found are not: their programs have another kernel in that place."""
    better = str(PLACES[DOWN].candidates[3])
    plant([(DOWN, better, 100.0), (UP, SECOND, 100.0)])
    found, (first, second) = searched()
    assert named(found) == {UP: SECOND, DOWN: better} and found.now["g"] == 800.0
    assert first.times[better]["g"] == 900.0 and second.times[OWN[UP]]["g"] == 900.0
    assert second.times[THIRD]["g"] == 900.0


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("crash", "the measuring process ended: signal 11"),
        ("exit", "the measuring process ended: exit status 7: planted"),
        ("hang", "no answer within 3 s"),
        ("garbage", "it answered 'Segmentation fault (core dumped)'"),
        ("negative", 'it answered {"us": -1}'),
        ("fault", "cuStreamSynchronize failed: CUDA_ERROR_LAUNCH_FAILED"),
        ("wrong", "its results are not those of the others: relative error 2.2e-01"),
        ("lazy", "its results are not those of the others: relative error nan"),
        ("long", "its results have another size than those of the others"),
        ("astray", "its outputs are not those of the others: relative error 2.2e-01"),
    ],
)
def test_what_a_candidate_does_in_the_chain_is_survived_and_said(
    does: str, reason: str, plant: Plant, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(whole, "TRIAL_S", 3.0)
    monkeypatch.setattr(whole, "TIMES", 0)
    plant([(UP, SECOND, does), (UP, THIRD, 100.0)])
    found, decided = searched()
    (one,) = (d for d in decided if d.place.key == PLACES[UP].key)
    assert one.failed == {SECOND: reason} and named(found) == {UP: THIRD, DOWN: OWN[DOWN]}
    assert {"kernel": SECOND, "failed": reason} in one.row()["candidates"] and SECOND not in one.times
    ends = does not in ("wrong", "lazy", "long", "astray")
    assert (tmp_path / "planted.starts").read_bytes() == b".." if ends else b"."


def test_a_candidate_that_does_not_compile_is_said(plant: Plant) -> None:
    only = str(PLACES[DOWN].candidates[-3])  # of the candidates the only one with this tile
    plant([(DOWN, SECOND, 100.0)], broken=[entry_of(only)])
    _, (down, _) = searched()
    assert set(down.failed) == {only} and down.failed[only].startswith("it does not compile: ")
    assert "NVRTC_ERROR_COMPILATION" in down.failed[only] and down.chosen == SECOND


def entry_of(name: str) -> str:
    """The template's instance of a candidate of the second product."""
    site = next(
        c.site for calls in built(module_of(TEXT)).emitted.values() for c in calls if key_of(c.site) == PLACES[DOWN].key
    )
    choice = next(c for c in CATALOG.candidates(site, HOPPER, FAMILIES) if label(c.kernel, c.config) == name)
    return choice.kernel.stages(site, choice.config, HOPPER)[0].entry


def test_a_compiler_that_dies_costs_its_candidate_only(plant: Plant) -> None:
    only = str(PLACES[DOWN].candidates[-3])
    plant([(DOWN, SECOND, 100.0)], deadly=[entry_of(only)])
    _, (down, _) = searched()
    assert down.failed == {only: "the process that compiles ended: signal 11"} and down.chosen == SECOND


def test_a_lucky_time_is_no_gain(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was quicker once and is not when it runs again stays out."""
    plant([(UP, SECOND, 100.0)])
    calls, real = list[Path](), Worker.run

    def lucky(self: Worker, path: Path, probes: Sequence[str], seconds: float) -> Any:
        tried = real(self, path, probes, seconds)
        if tried.times["g"] < 1000.0:
            calls.append(path)
        return replace(tried, times=dict.fromkeys(tried.times, 1100.0)) if len(calls) > 1 else tried

    monkeypatch.setattr(Worker, "run", lucky)
    found, _ = searched()
    assert named(found) == OWN and found.now["g"] == 1000.0 and len(calls) == 2 and len(set(calls)) == 1


def test_without_a_base_there_is_no_search(plant: Plant) -> None:
    plant([(UP, OWN[UP], "fault")])
    with pytest.raises(NoBase, match="CUDA_ERROR_LAUNCH_FAILED"):
        searched()
    plant([])
    with pytest.raises(NoBase, match="there was no time"):
        searched(seconds=0.0)


def test_time_is_kept_and_what_was_not_reached_is_said(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over while the first site has its turn: what was found until then counts."""
    plant([(DOWN, SECOND, 100.0)])
    monkeypatch.setattr(Whole, "_left", lambda self: 60.0 if len(asked) < 3 else 0.0)
    asked, real = list[Path](), Worker.run

    def counted(self: Worker, path: Path, probes: Sequence[str], seconds: float) -> Any:
        asked.append(path)
        return real(self, path, probes, seconds)

    monkeypatch.setattr(Worker, "run", counted)
    found, (one,) = searched()
    assert one.cut and one.row()["cut"] and named(found)[DOWN] == SECOND
    assert found.left == [("g", PLACES[DOWN].key), ("g", PLACES[UP].key)]
    assert len(asked) == 4  # base, two candidates, the better one again


# ---- candidates -----------------------------------------------------------------------------------------------------


def small_products() -> tuple[Site, list[Choice]]:
    """A product of few rows, with kernels that say when the next launch may begin."""
    text = (
        "graph g(x: bf16[10,1024]) {\n  @w : bf16[1024,1024]\n  %0 = linear(%x, @w) : bf16[10,1024]\n  return y=%0\n}"
    )
    (call,) = (c for calls in built(module_of(text)).emitted.values() for c in calls if c.site.op == "linear")
    return call.site, list(CATALOG.candidates(call.site, HOPPER, HOPPER.families()))


def test_candidates_that_mean_nothing_alone_are_tried_in_the_chain() -> None:
    _, found = small_products()
    large = next(c for c in found if c.config.get("ALONE") is True)
    best = next(c for c in found if c.config == {**large.config, "ALONE": False, "RELEASE": "waited"})
    chosen = next(c for c in found if c.kernel.name != best.kernel.name)
    alone = {label(c.kernel, c.config): 9.0 for c in found} | {label(best.kernel, best.config): 1.0}
    first, *others = worth_trying(found, chosen, alone)
    assert first is chosen and others[0] is best and len(others) <= MOST
    alike = [c for c in found if c.kernel is best.kernel and c.config["SPLIT"] == best.config["SPLIT"]]
    assert len(alike) == 4 and all(c in others for c in alike)


def test_candidates_that_failed_alone_are_not_tried() -> None:
    _, found = small_products()
    chosen, *_ = found
    bad = worth_trying(found, chosen, {})[1]
    assert bad not in worth_trying(found, chosen, {label(bad.kernel, bad.config): None})


# ---- trials ---------------------------------------------------------------------------------------------------------


def made() -> Trial:
    with no_compiler():
        return Builder(job()).trial(())


def test_a_trial_is_the_program_that_is_compiled_here() -> None:
    """The module goes to another process as text; weights, places and launches are the same."""
    here = trial_of(built(module_of(TEXT)), inputs())
    there = made()
    assert there.program == here.program and there.kernels == here.kernels and there.probes == here.probes
    with no_compiler():
        other = Builder(job()).trial([PLACES[UP].candidates[1]])
    assert other.kernels[PLACES[UP].key] == SECOND and other.program != here.program


def test_probes_see_the_call_and_the_one_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a call that writes nothing: what it should have written is NaN, whatever lay there before."""
    keys = [PLACES[UP].key, PLACES[DOWN].key]
    right = run(made(), keys, gpu=False)
    assert [len(right["probes"][key]) for key in keys] == [2, 1] and right["times"].keys() >= {"g", "replay"}
    assert right["probes"][keys[0]][1] == right["probes"][keys[1]][0] == right["outputs"][0]
    assert all(np.isfinite(some).all() and np.std(some) > 0 for some in right["probes"][keys[0]])
    real = trial.Emulator._evaluate

    def lazy(self: Any, call: Any, round: int) -> None:
        if call.attrs.get("act") != "gelu_tanh":
            real(self, call, round)

    monkeypatch.setattr(trial.Emulator, "_evaluate", lazy)
    wrong = run(made(), keys, gpu=False)
    assert np.isnan(wrong["probes"][keys[0]]).all()
    assert "nan" in search.differs(
        tuple(map(tuple, wrong["probes"][keys[0]])), tuple(map(tuple, right["probes"][keys[0]]))
    )


def test_on_a_gpu_a_probe_is_a_graph_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a driver that only records: weights everywhere, scratch memory poisoned, of the program what is looked at."""
    one = made()
    one = replace(one, cubins=dict.fromkeys(one.cubins, b"\x7fELF"))
    sizes = {}
    for call in (c for stage in one.program.stages for c in stage.calls):
        for launch in call.launches:
            kinds = (NBYTES.get(kind, 8) for kind, _ in launch.params)
            sizes[one.program.kernels[launch.kernel].symbol] = tuple(kinds)
    api, graphs = CopyingApi(sizes), list[Any]()
    instantiate = api.do_cuGraphInstantiate
    api.do_cuGraphInstantiate = lambda graph, flags: graphs.append(graph) or instantiate(graph, flags)  # type: ignore

    class Recorded(Session):
        def __init__(self, plan: Any, **more: Any) -> None:
            super().__init__(plan, driver=Driver(api=api), **more)
            sessions.append(self)

    sessions = list[Session]()
    monkeypatch.setattr(trial, "Session", Recorded)
    monkeypatch.setattr(trial, "BLOCK", 1 << 12)
    found = run(one, [PLACES[UP].key], gpu=True)
    assert found["times"]["g"] == 1.0 and len(found["probes"][PLACES[UP].key]) == 2
    (session,) = sessions
    poisoned = [args for name, *args in api.log if name == "cuMemsetD8Async" and args[1] == POISON]
    assert [args[0] for args in poisoned] == [session.addresses[ARENA]]
    (g,) = one.program.stages
    launches = sum(len(call.launches) for call in g.calls)
    assert [len(graph.nodes) for graph in graphs] == [launches, launches, launches + 2]  # probe, whole, with events
    assert api.calls["cuMemcpyDtoD"] > 4 and not api.live and not api.contexts


def test_the_process_that_measures_runs_whole_programs(tmp_path: Path) -> None:
    """The real one, emulated; it knows no chains."""
    path = tmp_path / "trial"
    path.write_bytes(pickle.dumps(made()))
    with Worker((*worker.COMMAND, EMULATED)) as working:
        tried = working.run(path, [PLACES[UP].key], 60.0)
        again = working.run(path, [], 60.0)
        gone = working.run(tmp_path / "gone", [], 60.0)
    assert not tried.failed and tried.times["g"] > 0 and len(tried.probes[PLACES[UP].key]) == 2
    assert again.outputs == tried.outputs and not again.probes
    assert gone.failed.startswith("the measuring process ended: exit status 1: FileNotFoundError")


def test_weights_that_random_bytes_are_no_values_of_are_refused() -> None:
    text = "graph g(i: i32[4]) {\n  @t : i32[8,4]\n  %0 = embedding(@t, %i) : i32[4,4]\n  return y=%0\n}"
    with pytest.raises(ValueError, match="no values of weight t, i32"):
        list(exact_weights(built(module_of(text))))


# ---- whole builds ---------------------------------------------------------------------------------------------------


def build_with(tuning: Tuning, given: Any = None) -> tuple[Any, TuningReport]:
    progress.clear()
    with no_compiler():
        return tuned_build(
            prepare(tuning, HOPPER),
            module_of(TEXT),
            FAMILIES,
            lambda what, share: progress.append(what),
            given or inputs(),
        )


progress: list[str] = []


def configs(result: Any) -> list[str]:
    return [label(c.choice.kernel, c.choice.config) for calls in result.emitted.values() for c in calls]


def test_the_chain_decides_after_the_sites(plant: Plant, tmp_path: Path) -> None:
    """Alone one candidate is the quickest, in the chain another one: the emulator's results are the same."""
    file = tmp_path / "t.json"
    plant([(UP, SECOND, 50.0), (UP, THIRD, 100.0)], emulate=True, times=[(SECOND, 10.0)])
    first, report = build_with(Tuning(measure=True, file=file))
    assert configs(first) == [THIRD, SECOND]  # of the other site what is quickest alone
    log = report.evidence()["tuning"]
    assert json.loads(json.dumps(log)) == log and not log["stopped"]
    chain = log["chain"]
    assert [row["chosen"] for row in chain["log"]] and not chain["stopped"] and not chain["not_reached"]
    assert chain["before"]["g"] == 1000.0 and chain["after"]["g"] == 900.0
    text = str(report)
    assert (
        "in the chain  2 sites in " in text
        and ", 1 with another kernel than before" in text
        and "g 1.000 ms before, 0.900 after" in text
    )
    assert {"tune, site 1 of 2", "tune in the chain, g, site 2 of 2"} <= set(progress)
    said = report.to_json()["tuned"]["chain"]
    assert said["decided"] == {PLACES[UP].key: THIRD, PLACES[DOWN].key: SECOND}
    assert said["after"] == chain["after"] and "log" not in said
    again, used = build_with(Tuning(file=file))
    assert again.program == first.program and used.measured == {"t.json": 2}
    assert read_tactics(file, "hopper").gpu == "Planted"


def test_what_is_quickest_alone_and_slower_together_is_not_taken(plant: Plant) -> None:
    plant([(UP, SECOND, -50.0), (DOWN, SECOND, -50.0)], times=[(SECOND, 10.0)])
    first, report = build_with(Tuning(measure=True))
    assert configs(first) == [OWN[UP], OWN[DOWN]]
    assert report.evidence()["tuning"]["chain"]["after"]["g"] == 1000.0


def test_what_is_quickest_alone_and_wrong_together_is_not_taken(plant: Plant) -> None:
    plant([(UP, SECOND, "astray")], times=[(SECOND, 10.0)])
    first, report = build_with(Tuning(measure=True))
    assert configs(first)[0] != SECOND
    assert "what was quickest alone is not taken together: its outputs are not those" in str(report)


def test_seconds_that_do_not_suffice_are_said(plant: Plant) -> None:
    plant()
    first, report = build_with(Tuning(measure=True, seconds=1e-6))
    assert configs(first) == [OWN[UP], OWN[DOWN]]
    text = str(report)
    assert "2 sites not reached in time (--tune-seconds)\n" in text
    assert "2 sites not reached in time (--tune-seconds): 2 of g" in text
    assert "stopped       there was no time for it (--tune-seconds)" in text


def test_a_program_that_does_not_run_leaves_what_was_found_alone(plant: Plant) -> None:
    plant([(UP, OWN[UP], "crash"), (DOWN, SECOND, "crash")], times=[(SECOND, 10.0)])
    first, report = build_with(Tuning(measure=True))
    assert configs(first) == [SECOND, SECOND]
    assert "the measuring process ended: signal 11" in report.evidence()["tuning"]["chain"]["stopped"]


def test_without_inputs_sites_are_measured_alone(plant: Plant) -> None:
    plant(times=[(SECOND, 10.0)])
    with no_compiler():
        first, report = tuned_build(prepare(Tuning(True), HOPPER), module_of(TEXT), FAMILIES, lambda what, share: None)
    assert configs(first) == [SECOND, SECOND] and "chain" not in report.evidence()["tuning"]
    assert tuned.ALONE < 1
