"""Accidents that other engines' users met: each is found here, or cannot happen.

A scale list shifted by one site, a scale off by a factor, a swapped weight: tests/frtc/test_bisect.py. Calibration on
zeros, scales of another fine-tune: tests of calibration.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frtc import selftest
from frtc.policy import Policy
from frtc.runtime.emulator import Emulator
from frtc.runtime.plan import Call
from frtc.runtime.plan_file import open_plan
from frtc.runtime.policy import Absolute, Norm, Slice, Unnormalise
from frtc.runtime.policy import Policy as Spec
from frtc.runtime.policy_steps import PolicySteps, Prepared
from tests.cli.face import call
from tests.conftest import Demo
from tests.frtc.faults import planted
from tests.frtc.test_bisect import changed_program

LOW, HIGH = (-2.0, 0.0, 10.0), (2.0, 1.0, 30.0)
MEAN, STD = (0.5, -1.0, 3.0), (2.0, 0.25, 10.0)


@pytest.mark.parametrize("value", [1.7, -1.7, 40.0])
@pytest.mark.parametrize(
    ("norm", "robot"),
    [(Norm("openpi_range", LOW, HIGH), lambda y: (y + 1) / 2 * (np.subtract(HIGH, LOW)) + LOW),
     (Norm("lerobot_range", LOW, HIGH, 1e-8), lambda y: (y + 1) / 2 * (np.subtract(HIGH, LOW)) + LOW),
     (Norm("openpi_mean_std", MEAN, STD), lambda y: y * np.array(STD) + MEAN),
     (Norm("lerobot_mean_std", MEAN, STD, 1e-8), lambda y: y * np.array(STD) + MEAN),
     (Norm("identity"), lambda y: y * np.ones(3))],
)  # fmt: skip
def test_actions_are_not_clipped_before_they_are_un_normalised(norm: Norm, robot: Any, value: float) -> None:
    """Quantiles are not limits: a normalised action of 1.7 is beyond them, and is meant."""
    steps = PolicySteps(Spec((), (Slice(2, 3), Unnormalise(norm))))
    actions = steps.finish(np.full((4, 8), value, np.float32), Prepared({}, None, None))
    np.testing.assert_allclose(actions, np.broadcast_to(robot(np.float64(np.float32(value))), (2, 3)), rtol=1e-6)


def test_a_relative_action_beyond_the_quantiles_is_not_clipped_either() -> None:
    steps = PolicySteps(Spec((), (Slice(1, 3), Unnormalise(Norm("openpi_range", LOW, HIGH)), Absolute(()))))
    (first,) = steps.finish(np.full((1, 3), 1.7, np.float32), Prepared({}, np.ones(3), None))
    np.testing.assert_allclose(first, [3.4, 1.35, 37.0], rtol=1e-6)


@pytest.mark.parametrize("stage", ["vision", "prefix"])
def test_an_activation_mixed_up_in_one_epilogue_fails_the_self_test(stage: str, demo: Demo, tmp_path: Path) -> None:
    """SiLU for GELU where a stage's products share a kernel; the rest is whole, the evidence that of the honest Plan.

    In an expert this small it moves the velocity by less than the bar: there --bisect finds it (test_bisect.py).
    """

    def silu(call: Call) -> Call:
        return replace(call, attrs={**call.attrs, "act": "silu"})

    honest = open_plan(demo.plan)
    calls, program = honest.program.stage(stage).calls, honest.program
    for index in (i for i, c in enumerate(calls) if str(c.attrs.get("act")).startswith("gelu")):
        program = changed_program(program, stage, index, silu)
    mixed = planted(honest, tmp_path / "mixed.plan", program=program)
    outcome = selftest.check(Policy(mixed, Emulator(mixed)))
    assert outcome.failure() is not None and outcome.failed[0].where.startswith(stage)


def test_an_activation_mixed_up_is_named_by_the_command(
    demo: Demo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From end to end: the check fails (exit 3), and bisection names the call."""
    honest = open_plan(demo.plan)
    index = next(i for i, c in enumerate(honest.program.stage("prefix").calls) if "act" in c.attrs and "mlp" in c.name)
    program = changed_program(honest.program, "prefix", index, lambda c: replace(c, attrs={**c.attrs, "act": "silu"}))
    path = planted(honest, tmp_path / "mixed.plan", program=program).path
    said = call(capsys, "verify", path, "--self-test", "--device", "cpu")
    assert (said.code, said.error) == (3, "verify.self_test")
    said = call(capsys, "verify", path, demo.checkpoint, "--device", "cpu", "--bisect", "--json")
    found = said.json()["departs"]
    assert said.code == 3 and (found["stage"], found["index"], found["op"]) == ("prefix", index, "gated_linear")
