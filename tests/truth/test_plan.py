"""The lerobot fixtures through Plans: compiled for hopper, from raw observations, on the CPU and on a GPU.

Per step: x_k is lerobot's own, the Plan answers with the next x, and the velocity is the change over dt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import frtc
from frtc.passes.check import relative_error
from frtc.policy import Policy
from tests.models.truth import arrays, cases, fixture_folder
from tests.truth import traced

STEPS = 10
STAGE, WIDENED, ABSOLUTE, RATIO, ROWS = 1e-5, 1e-4, 2e-2, 1.5, 4  # docs/design.md, section 9
KINDS = ("pi05", "pi0", "smolvla")
NAMES = ("pick", "edge")  # a Plan has two views


@dataclass(frozen=True, slots=True)
class Loaded:
    """A Plan of one kind, running, with lerobot's answers."""

    kind: str
    policy: Policy
    expected: dict[str, np.ndarray]

    def observation(self, name: str) -> dict[str, Any]:
        """The raw observation under the Plan's own camera roles, in the checkpoint's order."""
        raw, about = arrays(fixture_folder(self.kind) / "observations.safetensors"), cases(self.kind)[name]
        frames = [raw[f"{name}.{camera}"] for camera in about["cameras"]]
        seen: dict[str, Any] = dict(zip(self.policy.cameras, frames, strict=True))
        return seen | {
            "state": raw[f"{name}.observation.state"],
            "prompt": about["task"],
            "noise": raw[f"{name}.noise"],
        }

    def velocity(self, x: np.ndarray, k: int) -> np.ndarray:
        executor = self.policy.executor
        executor.set("noise", np.ascontiguousarray(x))
        executor.run_stage("let.x_t")
        executor.run_stage("denoise", k)
        found: np.ndarray = (x - executor.get("actions")) * np.float32(STEPS)
        return found

    def velocities(self, name: str) -> np.ndarray:
        """f32 [steps, horizon, width] from lerobot's own x, after an inference has left what the steps read."""
        return np.stack([self.velocity(x, k) for k, x in enumerate(self.expected[f"{name}.x"])])

    def errors(self, name: str) -> list[float]:
        return list(map(relative_error, self.velocities(name), self.expected[f"{name}.velocity"]))


def worst_row(found: np.ndarray, reference: np.ndarray) -> float:
    """The largest relative error of a single action's velocity."""
    width = found.shape[-1]
    return max(map(relative_error, found.reshape(-1, width), reference.reshape(-1, width)))


def expected_of(kind: str) -> dict[str, np.ndarray]:
    return arrays(fixture_folder(kind) / "expected.safetensors")


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def plan(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("plan") / "lerobot.plan"
    options = frtc.CompileOptions(frtc.PolicyOptions(origin="lerobot-0.6"), "bf16", self_test=False)
    frtc.compile(fixture_folder(kind) / "checkpoint", "hopper", out, options)
    return out


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def loaded(request: pytest.FixtureRequest, kind: str, plan: Path) -> Iterator[Loaded]:
    with frtc.load(plan, device=request.param) as policy:
        policy.warm()
        yield Loaded(kind, policy, expected_of(kind))


@cache
def widened(kind: str, name: str) -> tuple[traced.Subject, traced.Answer]:
    """Before codegen, in float32: the policy steps and the module after all passes."""
    subject = traced.fixture(kind, name, "f32")
    return subject, traced.ask(subject, traced.optimised(subject.module, "hopper"), "wide")


@pytest.mark.parametrize("name", NAMES)
def test_widened_from_the_raw_observation(kind: str, name: str) -> None:
    expected, (subject, found) = expected_of(kind), widened(kind, name)
    tokens = expected[f"{name}.tokens"]
    assert np.array_equal(subject.inputs["tokens"][: int(subject.inputs["n"])], tokens)
    wanted = expected[f"{name}.velocity"]
    assert max(map(relative_error, found.velocity, wanted)) <= STAGE
    assert worst_row(found.velocity, wanted) <= ROWS * STAGE
    noise = subject.inputs["noise"]
    assert relative_error(found.actions - noise, subject.actions - noise) <= WIDENED


def test_prefix_widened(kind: str) -> None:
    """Image tokens, keys and values of each prefix layer; ours are padded behind the prompt."""
    expected, env = expected_of(kind), widened(kind, "pick")[1].env
    images, kept = len(env["image_tokens"]), len(expected["pick.prefix"])
    assert relative_error(env["image_tokens"], expected["pick.prefix"][:images]) <= STAGE
    ahead = kept - images - int(env["n"])  # a state token is last with lerobot and first with us, before the padding
    rows = [*range(ahead, kept), *range(ahead)]
    for layer, (keys, values) in enumerate(zip(expected["pick.keys"], expected["pick.values"], strict=True)):
        assert relative_error(np.squeeze(env[f"k.{layer}"][:, rows]), keys) <= STAGE
        assert relative_error(np.squeeze(env[f"v.{layer}"][:, rows]), values) <= STAGE


@pytest.mark.parametrize("name", NAMES)
def test_velocities_and_actions_are_lerobots(loaded: Loaded, name: str) -> None:
    expected, seen = loaded.expected, loaded.observation(name)
    answer = loaded.policy.infer(seen)
    found, wanted = loaded.velocities(name), expected[f"{name}.velocity"]
    errors, own = (list(map(relative_error, v, wanted)) for v in (found, expected[f"{name}.velocity_bf16"]))
    bar = min(ABSOLUTE, RATIO * max(own))
    assert max(errors) <= bar, (errors, own)
    assert worst_row(found, wanted) <= ROWS * bar
    whole = expected[f"{name}.x"][-1] - expected[f"{name}.velocity"][-1] / STEPS
    noise = seen["noise"]
    assert relative_error(answer.output - noise, whole - noise) <= ABSOLUTE
    span = np.ptp(expected[f"{name}.actions"], axis=0).max()
    assert np.abs(answer.actions - expected[f"{name}.actions"]).max() <= ABSOLUTE * span


@pytest.mark.parametrize("name", NAMES[:1])
def test_a_swapped_camera_is_noticed(loaded: Loaded, name: str) -> None:
    seen = loaded.observation(name)
    first, second = loaded.policy.cameras
    loaded.policy.infer(seen | {first: seen[second], second: seen[first]})
    assert max(loaded.errors(name)) > 2 * ABSOLUTE


@pytest.mark.parametrize("name", NAMES[:1])
def test_a_prompt_that_lacks_a_word_is_noticed(loaded: Loaded, name: str) -> None:
    seen = loaded.observation(name)
    loaded.policy.infer(seen | {"prompt": seen["prompt"].removesuffix("cup")})
    assert max(loaded.errors(name)) > 2 * ABSOLUTE
