"""Foreign answers through the IR after all passes: the golden tensors and lerobot's outputs from raw observations."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from frtc.passes.check import relative_error
from frtc.passes.pipeline import Options
from tests.models import truth
from tests.truth.emulated import Emulated
from tests.truth.traced import (
    Answer,
    Array,
    Interpreted,
    Runner,
    Subject,
    ask,
    fixture_case,
    golden_case,
    imported,
    observation,
    optimised,
    policy_steps,
    subject,
)

STEP_BAR, LOOP_BAR, SERVING_BAR, ROWS = 1e-5, 1e-4, 2e-2, 4  # docs/design.md, section 9
KINDS = ("pi05", "pi0")
FIXTURES = tuple(f"{kind}.{case}" for kind in KINDS for case in truth.cases(kind))
NAMES = (*(f"{kind}.golden" for kind in KINDS), *FIXTURES)
TARGETS = ("", "hopper")  # "": kernels that can run everything


@cache
def answer(name: str, precision: str, target: str, runner: Runner = Interpreted) -> Answer:
    one = subject(name, precision)
    return ask(one, optimised(one.module, target), "wide" if precision == "f32" else "typed", runner)


def step_errors(found: Array, reference: Array) -> list[float]:
    return [relative_error(v, w) for v, w in zip(found, reference, strict=True)]


def worst_row(found: Array, reference: Array) -> float:
    """The largest relative error of a single action's velocity."""
    rows = zip(found.reshape(-1, found.shape[-1]), reference.reshape(-1, reference.shape[-1]), strict=True)
    return max(relative_error(v, w) for v, w in rows)


def loop_error(found: Array, one: Subject) -> float:
    return relative_error(found - one.x[0], one.actions - one.x[0])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NAMES)
def test_widened(name: str, target: str) -> None:
    one, found = subject(name, "f32"), answer(name, "f32", target)
    assert len(found.velocity) == len(one.x) == 10
    assert max(step_errors(found.velocity, one.velocity)) <= STEP_BAR
    assert worst_row(found.velocity, one.velocity) <= ROWS * STEP_BAR
    assert loop_error(found.actions, one) <= LOOP_BAR


@pytest.mark.parametrize("runner", [Interpreted, Emulated])
@pytest.mark.parametrize("name", NAMES)
def test_serving_precision(name: str, runner: Runner) -> None:
    """bf16 with its fp32 islands, as IR and as a Plan: within 2e-2, and 1.5 times what the precision costs in torch."""
    one, found = subject(name, "bf16"), answer(name, "bf16", "hopper", runner)
    bar = min(SERVING_BAR, 1.5 * max(yardstick(name)))
    errors = step_errors(found.velocity, one.velocity)
    assert max(errors) <= bar
    assert worst_row(found.velocity, one.velocity) <= ROWS * bar
    assert loop_error(found.actions, one) <= bar
    assert min(errors) > 1e-4, "this ran in float32"


@cache
def yardstick(name: str) -> list[float]:
    """Errors of our eager model in bf16; for a fixture no larger than lerobot's own."""
    kind, which = name.split(".")
    case = golden_case(kind) if which == "golden" else fixture_case(kind, which)
    dtype = torch.bfloat16
    served = truth.KINDS[kind].MODEL.build(case.model.config, dtype).eval()
    served.load_state_dict(case.model.state_dict())
    with torch.no_grad():
        if case.frames is None or case.ids is None:
            kv = served.prefix.from_embeddings(case.image_tokens.to(dtype), case.prompt.to(dtype), case.n)
        else:
            kv = served.prefix(served.vision(case.frames), case.ids, case.n)
        times = zip(case.model.config.times, case.x, strict=True)
        seen = case.context(kv)
        found = np.stack([served.denoise.velocity(x, torch.tensor(t), *seen).numpy() for t, x in times])
    return step_errors(found, case.velocity.numpy())


@pytest.mark.parametrize("name", FIXTURES)
def test_lerobots_own_bf16(name: str) -> None:
    """lerobot with dtype="bfloat16" strays from its float32 self about as far as the IR does."""
    kind, case = name.split(".")
    theirs = truth.cases(kind)[case]["bf16_error"]
    errors = step_errors(answer(name, "bf16", "hopper").velocity, subject(name, "bf16").velocity)
    assert max(errors) <= 1.5 * max(theirs)


def test_prefix_widened() -> None:
    """Image tokens, keys and values of each prefix layer as lerobot has them; valid positions only."""
    expected, env = truth.arrays(truth.FIXTURE / "expected.safetensors"), answer("pi05.pick", "f32", "hopper").env
    images, valid = len(env["image_tokens"]), expected["pick.prefix"].shape[0]
    assert valid == images + int(env["n"])
    assert relative_error(env["image_tokens"], expected["pick.prefix"][:images]) <= STEP_BAR
    for layer in range(3):
        assert relative_error(env[f"k.{layer}"][0, :valid], expected["pick.keys"][layer]) <= STEP_BAR
        assert relative_error(env[f"v.{layer}"][0, :valid], expected["pick.values"][layer]) <= STEP_BAR


@pytest.mark.parametrize("name", FIXTURES)
def test_robot_units(name: str) -> None:
    """From the raw observation to robot units: token ids equal, actions as lerobot's."""
    kind, case = name.split(".")
    opened, module = imported(kind, tuple(truth.cases(kind)[case]["cameras"]), "f32")
    expected = truth.arrays(truth.fixture_folder(kind) / "expected.safetensors")
    steps = policy_steps(opened, module)
    prepared = steps.prepare(observation(kind, case))
    tokens = expected[f"{case}.tokens"]
    assert np.array_equal(prepared.inputs["tokens"][: len(tokens)], tokens)
    actions = steps.finish(answer(name, "f32", "hopper").actions, prepared)
    np.testing.assert_allclose(actions, expected[f"{case}.actions"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", [f"{kind}.pick" for kind in KINDS])
def test_every_pass_keeps_the_meaning(name: str) -> None:
    """FRTC_CHECK=2: the module before and after each pass, run on random inputs, widened and as typed."""
    optimised(subject(name, "bf16").module, "hopper", Options(check=2))
