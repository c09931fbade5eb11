"""What an inference takes: exact work of single calls, the same answer of a module and of its Plan, other targets."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from frtc import cli
from frtc.commands import estimate as command
from frtc.estimate import (
    FITTED_PATH,
    Estimate,
    Fitted,
    Priced,
    _becomes,
    calls_of_module,
    calls_of_plan,
    flops_of,
    kind_of,
    nbytes_of,
    roofline_us,
    rounds_of_module,
    rounds_of_plan,
)
from frtc.kernels.catalog import CATALOG, NoKernel
from frtc.kernels.spec import Operand, Param, Site, Stage
from frtc.kernels.tactic import Pick, Tactic
from frtc.kernels.targets import load_targets
from frtc.runtime.plan import Launch, Program
from tests.frtc.in_memory import Made, Maker

PLAIN = Fitted("hopper", "NVIDIA H200", "no source", {}, {}, {}, (), {})
BASELINE = ("baseline",)
Make = Callable[..., Made]


def of(dtype: str, *shape: int) -> Operand:
    return Operand.packed(dtype, *shape)


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    return Maker(tmp_path_factory.mktemp("estimate"))


@pytest.fixture(scope="module")
def make(maker: Maker) -> Make:
    """Each kind of each family once."""
    return cache(maker.make)


# ---- single calls ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("site", "flops", "weights", "moved"),
    [
        (Site("linear", (of("bf16", 50, 64), of("e4m3", 32, 64)), (of("bf16", 50, 32),)),
         2 * 50 * 64 * 32, 32 * 64, 50 * 64 * 2 + 50 * 32 * 2),
        (Site("gated_linear", (of("bf16", 50, 64), of("bf16", 32, 64), of("bf16", 32, 64)), (of("bf16", 50, 32),)),
         2 * 50 * 64 * 64, 32 * 64 * 2, 32 * 64 * 2 + 50 * 64 * 2 + 50 * 32 * 2),
        (Site("matmul", (of("bf16", 3, 5, 8), of("bf16", 3, 8, 7)), (of("f32", 3, 5, 7),)),
         2 * 3 * 5 * 7 * 8, 3 * 8 * 7 * 2, 3 * 5 * 8 * 2 + 3 * 5 * 7 * 4),
        (Site("attention", (of("bf16", 8, 50, 64), of("bf16", 1, 90, 64), of("bf16", 1, 90, 32)),
              (of("bf16", 8, 50, 32),)),
         2 * 8 * 50 * 90 * (64 + 32), 90 * 64 * 2, (8 * 50 * 64 + 90 * 32 + 8 * 50 * 32) * 2),
        (Site("rms_norm", (of("bf16", 50, 64), of("f32", 64)), (of("bf16", 50, 64),)),
         0, 64 * 4, 2 * 50 * 64 * 2),
        # a table gives no more than what is read of it, and what a stride repeats lies there once
        (Site("index", (of("i32"), of("f32", 1000, 64)), (of("f32", 64),)), 0, 1000 * 64 * 4, 4 + 64 * 4),
        (Site("mul", (Operand("f32", (50, 64), (0, 1)), of("f32", 50, 64)), (of("f32", 50, 64),)),
         0, 50 * 64 * 4, (64 + 50 * 64) * 4),
    ],
    ids=lambda value: value.op if isinstance(value, Site) else "",
)  # fmt: skip
def test_what_a_call_does(site: Site, flops: float, weights: float, moved: float) -> None:
    assert flops_of(site) == flops
    assert nbytes_of(site, [i == 1 for i in range(len(site.operands))]) == (weights, moved)


def test_a_lookup_moves_what_it_returns() -> None:
    site = Site("embedding", (of("bf16", 100_000, 64), of("i32", 48)), (of("bf16", 48, 64),))
    assert nbytes_of(site, (True, False)) == (48 * 64 * 2, 48 * 4 + 48 * 64 * 2)


def priced(site: Site, target: str = "hopper", **about: Any) -> Priced:
    weights = tuple(i == 1 for i in range(len(site.operands)))
    choice = CATALOG.select(site, load_targets()[target], BASELINE)
    return Priced("only", site, weights, choice, 1, 1, **about)


TALL = Site("linear", (of("bf16", 4096, 4096), of("bf16", 4096, 4096)), (of("bf16", 4096, 4096),))
FEW = Site("linear", (of("bf16", 16, 4096), of("bf16", 4096, 4096)), (of("bf16", 16, 4096),))


def test_a_roofline_takes_measured_ceilings_where_there_are_any() -> None:
    hopper = load_targets()["hopper"]
    measured = replace(PLAIN, ceilings={"hopper": {"dram": 4e12, "tflops": {"bf16": 500}}})
    product = 2 * 4096**3
    assert roofline_us(priced(TALL), hopper, measured)[1] == pytest.approx(product / 500e12 * 1e6)
    assert roofline_us(priced(TALL), hopper, PLAIN)[1] == pytest.approx(product / (hopper.tflops["bf16"] * 1e6))
    assert roofline_us(priced(FEW), hopper, measured)[0] == pytest.approx(4096 * 4096 * 2 / 4e12 * 1e6)
    assert roofline_us(priced(FEW), hopper, PLAIN)[0] == pytest.approx(4096 * 4096 * 2 / hopper.dram * 1e6)


def test_values_that_outgrow_the_l2_come_from_memory_too() -> None:
    hopper = load_targets()["hopper"]
    small = replace(hopper, l2=1 << 20)
    both = 3 * 4096 * 4096 * 2
    assert roofline_us(priced(TALL), small, PLAIN)[0] == pytest.approx(both / hopper.dram * 1e6)
    assert both - 4096 * 4096 * 2 > hopper.l2  # 64 MiB of activations: also of Hopper's
    assert roofline_us(priced(FEW), small, PLAIN)[0] == pytest.approx(4096 * 4096 * 2 / hopper.dram * 1e6)


@pytest.mark.parametrize(("site", "bound"), [(TALL, "compute"), (FEW, "memory")])
def test_what_bounds_a_stage(site: Site, bound: str) -> None:
    """A hundred small norms beside it: latency only where they take most of the time."""
    hopper, norm = load_targets()["hopper"], Site("rms_norm", (of("bf16", 16, 64), None), (of("bf16", 16, 64),),
                                                  {"eps": 1e-6, "offset": 0.0})  # fmt: skip
    alone = Estimate.of([priced(site)], hopper, "bf16", {}, PLAIN)
    beside = Estimate.of([priced(site), replace(priced(norm), count=1000)], hopper, "bf16", {}, PLAIN)
    assert alone.parts[0].bound == bound and beside.parts[0].bound == "latency"


def test_factors_and_gaps() -> None:
    fit = replace(PLAIN, gaps_us={"baseline": 0.5}, factors={"baseline product": 2.0})
    assert (kind_of(TALL), kind_of(FEW)) == ("product", "product of few rows")
    assert fit.expected_us("baseline product", 10.0, 3) == 21.5
    assert fit.expected_us("baseline attention", 10.0, 3) == 11.5
    assert fit.expected_us("sm90 product", 10.0, 3) == 10.0
    call = replace(priced(TALL), count=4)
    (part,) = Estimate.of([call], load_targets()["hopper"], "bf16", {}, fit).parts
    assert part.expected_us == pytest.approx(4 * (2 * call.cost_us + 0.5)) and part.launches == 4


def test_what_nobody_measured_is_named() -> None:
    hopper = load_targets()["hopper"]
    known = replace(PLAIN, factors={"baseline product": 1.1})
    assert Estimate.of([priced(TALL)], hopper, "bf16", {}, known).notes[1:] == ()
    (note,) = Estimate.of([priced(TALL), priced(FEW)], hopper, "bf16", {}, known).notes[1:]
    assert note == "never measured, as their cost models say: baseline product of few rows"


def test_a_tactic_says_what_its_call_takes() -> None:
    call = priced(TALL)
    tactic = Tactic("the site", call.choice.kernel.name, call.choice.config, 77.0)
    timed = replace(call, choice=replace(call.choice, pick=Pick(0, tactic, "a file")), count=2)
    (part,) = Estimate.of([timed], load_targets()["hopper"], "bf16", {}, replace(PLAIN, factors={"x y": 9.0})).parts
    assert (timed.label, part.expected_us) == ("measured call", 154.0)


# ---- whole inferences -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bf16", "fp8", "rows", "w8a16"])
def test_a_plan_and_its_module_say_the_same(maker: Maker, make: Make, kind: str) -> None:
    made = make(kind)
    target = maker.target
    by_module = calls_of_module(made.module, target, target.families())
    by_plan = calls_of_plan(made.plan.program, target, target.families())
    one = Estimate.of(by_module, target, kind, rounds_of_module(made.module.schedule), PLAIN)
    two = Estimate.of(by_plan, target, kind, rounds_of_plan(made.plan.program), PLAIN)
    assert one.to_json() == two.to_json()
    assert all(call.frozen for call in by_plan)
    launches = {s.name: sum(len(c.launches) for c in s.calls) for s in made.plan.program.stages}
    rounds = rounds_of_plan(made.plan.program)
    assert {p.stage: p.launches for p in one.parts} == {name: n * rounds[name] for name, n in launches.items()}
    assert {p.rounds for p in one.parts if p.stage == "denoise"} == {3}


def test_other_launches_are_not_taken_for_todays(maker: Maker, make: Make) -> None:
    program = make("bf16").plan.program
    calls = calls_of_plan(with_grids(program, (7, 7, 7)), maker.target, maker.target.families())
    estimate = Estimate.of(calls, maker.target, "bf16", rounds_of_plan(program), PLAIN)
    assert not any(call.frozen for call in calls) and "chosen anew, not the Plan's own" in estimate.notes[-1]


def with_grids(program: Program, grid: tuple[int, int, int]) -> Program:
    def moved(launch: Launch) -> Launch:
        return replace(launch, grid=grid)

    return replace(
        program,
        stages=tuple(
            replace(s, calls=tuple(replace(c, launches=tuple(map(moved, c.launches))) for c in s.calls))
            for s in program.stages
        ),
    )


def test_a_plan_on_other_targets(make: Make) -> None:
    program = make("rows").plan.program
    for name in ("thor", "rtx5090"):
        target = load_targets()[name]
        calls = calls_of_plan(program, target, target.families())
        estimate = Estimate.of(calls, target, "fp8", rounds_of_plan(program), PLAIN)
        assert estimate.prediction and estimate.notes[0].startswith("PREDICTION")
        assert not any(call.frozen for call in calls) and estimate.expected_us > estimate.roofline_us > 0
    with pytest.raises(NoKernel):
        calls_of_plan(program, load_targets()["a100"], BASELINE)


def test_only_what_was_measured_is_no_prediction(maker: Maker, make: Make) -> None:
    program = make("bf16").plan.program
    calls = calls_of_plan(program, maker.target, maker.target.families())
    fits = (PLAIN, replace(PLAIN, target="thor"))
    said = [Estimate.of(calls, maker.target, "bf16", rounds_of_plan(program), fit).prediction for fit in fits]
    assert said == [False, True]


def test_the_fit_that_everybody_gets() -> None:
    """Every factor belongs to kernels that exist, none is absurd, and what was held out is within the bar."""
    fit = Fitted.read(FITTED_PATH)
    families = {kernel.family for kernel in CATALOG.kernels} | {"measured"}
    assert fit.factors and {label.split()[0] for label in fit.factors} <= families
    assert all(0.2 <= factor <= 3 for factor in fit.factors.values())
    assert fit.held_out and max(map(abs, fit.held_out.values())) <= 0.15
    assert fit.ceilings[fit.target]["dram"] > 1e12 and fit.target in load_targets()


# ---- the command ----------------------------------------------------------------------------------------------------


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Mapping[str, Any]]:
    capsys.readouterr()
    code = cli.main(["estimate", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_checkpoint_on_some_targets(maker: Maker, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(maker.opened.checkpoint.folder)
    code, found = said(capsys, folder, "--arch", "hopper,thor", "--precision", "bf16", "--steps", "3", "--horizon", "4")
    hopper, thor = found["estimates"]
    assert code == 0 and not found["refused"]
    assert (hopper["target"], hopper["prediction"]) == ("hopper", False)
    assert (thor["target"], thor["prediction"], thor["evidence"]) == ("thor", True, "compiles, not run")
    for estimate in (hopper, thor):
        assert math.isclose(sum(s["expected_us"] for s in estimate["stages"]), estimate["expected_us"])
    assert {s["stage"]: s["rounds"] for s in hopper["stages"]}["denoise"] == 3


def test_targets_that_cannot_are_named(maker: Maker, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(maker.opened.checkpoint.folder)
    code, found = said(capsys, folder, "--precision", "fp8", "--static-scales")
    assert code == 0 and {r["target"] for r in found["refused"]} == {"orin", "a100"}
    assert {e["target"] for e in found["estimates"]} == {"thor", "rtx5090", "rtx4090", "hopper"}
    assert "multiplies no FP8" in found["refused"][0]["why"]
    code, found = said(capsys, folder, "--precision", "fp8", "--arch", "a100")
    assert code == 2 and found["error"]["code"] == "option.precision"
    code, found = said(capsys, folder, "--precision", "fp8", "--arch", "a100,hopper,hopper")  # once, and not in vain
    assert code == 2 and found["error"]["code"] == "option.precision"
    assert ([e["target"] for e in found["estimates"]], [r["target"] for r in found["refused"]]) == (
        ["hopper"],
        ["a100"],
    )
    code, found = said(capsys, folder, "--arch", "hoper")
    assert code == 2 and found["error"]["code"] == "option.arch"
    for arch in ("", "hopper,"):
        code, found = said(capsys, folder, "--arch", arch)
        assert code == 2 and found["error"]["what"] == "the name of a target is empty"


def test_scales_that_no_target_would_use(capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is read."""
    for options in (["--precision", "bf16"], ["--arch", "hopper", "--family", "baseline"], ["--arch", "orin"]):
        code, found = said(capsys, "nowhere", "--static-scales", *options)
        assert code == 2 and found["error"]["code"] == "option.scales", options
    assert said(capsys, "nowhere", "--static-scales", "--arch", "hopper")[1]["error"]["code"] == "checkpoint.not_found"


def test_a_plan_on_the_command_line(
    make: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own target by default among all; where its calls do not run, a checkpoint is asked for."""
    plan = make("rows").plan
    monkeypatch.setattr(command, "is_plan", lambda path: True)
    monkeypatch.setattr(command, "open_plan", lambda path, verify: plan)
    code, found = said(capsys, "some.plan")
    assert code == 0 and {r["target"] for r in found["refused"]} == {"orin", "a100"}
    refused = found["refused"][0]
    assert refused["hint"] == f"frtc estimate CHECKPOINT --arch {refused['target']}" and "FP8" in refused["why"]
    assert "another GPU's" not in refused["why"]
    assert cli.main(["estimate", "some.plan"]) == 0
    assert f"\n  hint  {refused['hint']}\n" in capsys.readouterr().out
    anew = {e["target"]: "chosen anew" in e["notes"][-1] for e in found["estimates"]}
    assert anew == {"thor": True, "rtx5090": True, "rtx4090": True, "hopper": False}
    assert {e["precision"] for e in found["estimates"]} == {"fp8"}
    code, found = said(capsys, "some.plan", "--arch", "hopper,a100")
    assert code == 2 and found["error"]["code"] == "estimate.checkpoint"
    assert found["error"]["hint"] == "frtc estimate CHECKPOINT --arch a100" and "FP8" in str(found["error"]["rows"])
    assert [e["target"] for e in found["estimates"]] == ["hopper"]
    for option in (["--views", "3"], ["--precision", "bf16"], ["--static-scales"], ["--family", "native"]):
        code, found = said(capsys, "some.plan", *option)
        assert code == 2 and found["error"]["code"] == "estimate.option" and option[0] in found["error"]["what"]


def test_the_table(maker: Maker, make: Make) -> None:
    program = make("bf16").plan.program
    calls = calls_of_plan(program, maker.target, maker.target.families())
    lines = str(Estimate.of(calls, maker.target, "bf16", rounds_of_plan(program), PLAIN)).splitlines()
    assert lines[0].startswith("hopper, bf16: ") and lines[0].endswith(" ms expected")
    assert lines[1].split("  ")[1].strip() == "stage" and any(line.startswith("  denoise x 3 ") for line in lines)
    assert lines[-3].split()[0] == "total" and "100%" in lines[-3]
    assert lines[-2].endswith(": run on hardware; the factors are fitted to NVIDIA H200, no source")
    assert lines[-1].startswith("  never measured, as their cost models say: baseline ")


def test_a_launch_that_reads_settled_rows_is_known_again() -> None:
    """The builder sets one parameter of it; any other one makes it another launch."""
    params = (Param("operand", 0), Param("i32", 0), Param("i32", 7))
    stage = Stage("source", "entry", (4, 1, 1), 128, 1024, params, settled=(1, 0))
    plain = Stage("source", "entry", (4, 1, 1), 128, 1024, params)
    found = (("operand", 0), ("i32", 560), ("i32", 7))
    assert _becomes(stage, ((4, 1, 1), 128, 1024, found)) and not _becomes(plain, ((4, 1, 1), 128, 1024, found))
    assert not _becomes(stage, ((4, 1, 1), 128, 1024, (*found[:2], ("i32", 8))))
    assert not _becomes(stage, ((4, 1, 1), 128, 1024, found[:2])) and not _becomes(stage, ((5, 1, 1), 128, 1024, found))
