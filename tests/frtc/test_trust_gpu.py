"""Trust on a real GPU, in every precision: no call departs, the self-test passes, NaN does not come out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from frtc import observation, selftest
from frtc.bisect import Emulated, first_departure
from frtc.compiler import compile, silent
from frtc.errors import CheckFailed
from frtc.policy import Policy
from frtc.runtime.finite import refusal
from frtc.runtime.plan_file import Plan, open_plan
from tests.frtc.faults import planted, weight
from tests.frtc.in_memory import KINDS, Maker
from tests.frtc.test_bisect import changed_program
from tests.runtime.here import target_here

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Plan]:
    """The Plan of a tiny checkpoint for the GPU that is here, by precision."""
    target = target_here().name
    folder = tmp_path_factory.mktemp("trust")
    maker = Maker(folder, target)

    def plan(kind: str) -> Plan:
        options = replace(maker.options, precision="fp8" if kind == "rows" else kind)
        out, scales = folder / f"{kind}.plan", maker.scales if kind == "fp8" else None
        compile(folder / "ck", target, out, options, scales=scales)
        return open_plan(out)

    return cache(plan)


@pytest.mark.parametrize("kind", KINDS)
def test_no_call_departs_from_the_emulator(kind: str, plans: Callable[[str], Plan]) -> None:
    """From the device's own operands, call by call, within the bars of docs/numerics.md."""
    plan = plans(kind)
    with Policy.load(plan.path, 0, untested=True) as policy:
        prepared = policy.steps.prepare(observation.seeded(policy.steps), draw=0)
        inputs = {name: array.copy() for name, array in prepared.inputs.items()}
        outcome = selftest.check(policy)
    found = first_departure(plan, 0, inputs, Emulated(plan, inputs), silent)
    assert found is None, str(found)
    print(kind, "self-test", max((v.error, v.where) for v in outcome.values))
    assert outcome.failure() is None, str(outcome.failure())


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_activation_is_named(kind: str, plans: Callable[[str], Plan], tmp_path: Path) -> None:
    """The emulator is told SiLU where the device's kernel has GELU: as if the kernel were the wrong one."""
    plan = plans(kind)
    calls = plan.program.stage("prefix").calls
    index = next(i for i, c in enumerate(calls) if c.op == "gated_linear")
    program = changed_program(plan.program, "prefix", index, lambda c: replace(c, attrs={**c.attrs, "act": "silu"}))
    other = planted(plan, tmp_path / "other.plan", program=program)
    with Policy.load(plan.path, 0, untested=True) as policy:
        prepared = policy.steps.prepare(observation.seeded(policy.steps), draw=0)
        inputs = {name: array.copy() for name, array in prepared.inputs.items()}
    found = first_departure(plan, 0, inputs, Emulated(other, inputs), silent)
    assert found is not None and (found.stage, found.index) == ("prefix", index)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_does_not_come_out(kind: str, plans: Callable[[str], Plan], tmp_path: Path) -> None:
    plan = plans(kind)
    value = weight(plan, "denoise.action_in.weight")
    value.reshape(-1)[0] = np.nan
    bad = planted(plan, tmp_path / "nan.plan", {"denoise.action_in.weight": value})
    with Policy.load(bad.path, 0, untested=True) as policy:
        with pytest.raises(CheckFailed) as caught:
            policy.infer(observation.seeded(policy.steps), draw=0)
        assert caught.value.code == "run.nonfinite"
        assert dict(caught.value.rows)["first"].startswith("stage denoise")
    with Policy.load(plan.path, 0, untested=True) as policy:
        policy.infer(observation.seeded(policy.steps), draw=0)
        costs = []
        for _ in range(200):
            started = time.perf_counter()
            assert refusal(policy.executor) is None
            costs.append(time.perf_counter() - started)
    print(kind, f"the look at the outputs: {1e6 * np.median(costs):.1f} us")
    assert np.median(costs) < 100e-6
