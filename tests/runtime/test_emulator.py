"""The emulator: the calls of a Plan by their references, over the Plan's own bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from frtc.errors import EnvironmentFault, FrtcError, UsageError
from frtc.kernels.dtypes import DTYPES
from frtc.runtime.emulator import Emulator
from frtc.runtime.plan import Call, Program, Ref, Slot, Stage
from frtc.runtime.plan_file import Plan, open_plan
from tests.runtime import small_plan


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    path = tmp_path_factory.mktemp("plan") / "small.plan"
    small_plan.write(path)
    return open_plan(path)


def test_answer(plan: Plan) -> None:
    with Emulator(plan, poison=True) as emulator:
        for seed in range(3):
            x = small_plan.inputs(seed)["x"]
            emulator.set("x", x)
            emulator.run()
            np.testing.assert_allclose(emulator.get("y"), small_plan.answer(x), rtol=1e-6)


def test_stages_one_by_one(plan: Plan) -> None:
    """Single stages at single rounds give what a whole run gives."""
    x = small_plan.inputs()["x"]
    emulator = Emulator(plan)
    emulator.set("x", x)
    emulator.run_stage("in")
    for k in range(small_plan.ROUNDS):
        emulator.run_stage("step", k)
    np.testing.assert_allclose(emulator.get("y"), small_plan.answer(x), rtol=1e-6)
    with pytest.raises(UsageError, match="stage step has 3 rounds, there is no round 3"):
        emulator.run_stage("step", 3)


def test_padding_is_not_written(plan: Plan) -> None:
    emulator = Emulator(plan, poison=True)
    emulator.run_stage("in")
    rows = emulator.memory["arena"].view(np.uint32)[: 3 * 12].reshape(3, 12)
    assert (rows[:2, 10:] == 0xFFFFFFFF).all() and (rows[:, :10] != 0xFFFFFFFF).all()


def test_reads_of_stale_memory_show(plan: Plan) -> None:
    """A call whose operand nobody wrote: poison makes the output NaN, without it the last run's value looks right."""
    stage_in, stage_step = plan.program.stages
    kept = stage_in.calls[1:]
    stale = replace(stage_in, calls=(kept[0], replace(kept[1], after=(0,))))
    broken = replace(plan, program=replace(plan.program, stages=(stale, stage_step)))
    x = small_plan.inputs()["x"]
    for poison in (False, True):
        emulator = Emulator(broken, poison)
        emulator.set("x", x)
        emulator.run()
        assert np.isnan(emulator.get("y")).any() == poison


def test_reset(plan: Plan) -> None:
    emulator = Emulator(plan)
    emulator.set("x", small_plan.inputs()["x"])
    emulator.run()
    assert emulator.memory["state"].any()
    emulator.reset()
    assert not emulator.memory["state"].any()


def single(plan: Plan, call: Call, out: Slot, **changes: object) -> Emulator:
    """An emulator of one call that writes `out`."""
    program: Program = replace(plan.program, outputs=(out,), stages=(Stage("in", (call,)),), **changes)  # type: ignore[arg-type]
    return Emulator(replace(plan, program=replace(program, schedule=program.schedule[:1])))


def test_rounds_once_to_the_result_type(plan: Plan) -> None:
    x = Ref("slot", 0, "f32", (3, 8), (8, 1), slot="x")
    y = Ref("slot", 0, "bf16", (3, 8), (8, 1), slot="y")
    emulator = single(plan, Call("c", "exp", {}, (x,), (y,), ()), Slot("y", "bf16", (3, 8)))
    values = small_plan.inputs()["x"]
    emulator.set("x", values)
    emulator.run()
    assert np.array_equal(emulator.get("y"), np.exp(values).astype(DTYPES["bf16"].numpy))


def test_results_may_overwrite_operands(plan: Plan) -> None:
    """An op that returns a view of its operand, transposed onto the operand's own memory."""
    a = Ref("slot", 0, "f32", (3, 8), (8, 1), slot="x")
    swapped = Ref("slot", 0, "f32", (8, 3), (3, 1), slot="x")
    call = Call("c", "transpose", {"perm": (-1, -2)}, (a,), (swapped,), ())
    emulator = single(plan, call, Slot("y", "f32", (1,)))
    values = small_plan.inputs()["x"]
    emulator.set("x", values)
    emulator.run()
    assert np.array_equal(emulator.view(swapped), values.T)


def test_inputs_are_checked(plan: Plan) -> None:
    emulator = Emulator(plan)
    with pytest.raises(UsageError, match="the Plan has no input 'y'") as caught:
        emulator.set("y", np.zeros(3))
    assert caught.value.code == "input.unknown"
    with pytest.raises(UsageError, match=r"input x is float64\[3, 8\], the Plan takes f32\[3, 8\]") as caught:
        emulator.set("x", np.zeros((3, 8)))
    assert caught.value.code == "input.type"
    with pytest.raises(UsageError, match=r"input x is list"):
        emulator.set("x", [[0.0]])  # type: ignore[arg-type]
    with pytest.raises(FrtcError, match=r"input x is a masked array") as masked:
        emulator.set("x", np.ma.array(np.zeros((3, 8), np.float32)))
    assert masked.value.code == "input.masked"


def test_a_reference_that_fails_is_reported(plan: Plan) -> None:
    x = Ref("slot", 0, "f32", (3, 8), (8, 1), slot="x")
    y = Ref("slot", 0, "f32", (8,), (1,), slot="y")
    for attrs in ({"shape": (5,)}, {"shape": "five"}, {"shape": (24,)}):
        emulator = single(plan, Call("layers.0", "reshape", attrs, (x,), (y,), ()), Slot("y", "f32", (8,)))
        with pytest.raises(FrtcError, match="reshape cannot be evaluated") as caught:
            emulator.run()
        assert caught.value.code == "plan.invalid" and ("call", "layers.0") in caught.value.rows


def test_too_little_memory(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "zeros", none_left)
    with pytest.raises(EnvironmentFault, match="needs 1,168 bytes beside its weights") as caught:
        Emulator(plan)
    assert caught.value.code == "env.memory"


def test_timing(plan: Plan) -> None:
    timing = Emulator(plan).time(runs=5)
    assert list(timing.parts) == ["total", "replay", "input", "in", "step", "output"]
    assert timing.parts["total"].count == 5
    total = timing.parts["total"]
    assert 0 < total.min <= total.percentiles["p50"] <= total.percentiles["p99.9"] <= total.max
