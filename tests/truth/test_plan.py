"""The lerobot fixtures through Plans: compiled for hopper, from raw observations, on the CPU and on a GPU.

Per step: x_k is lerobot's own, the Plan answers with the next x, and the velocity is the change over dt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
WIDENED, ABSOLUTE, RATIO = 1e-4, 2e-2, 1.5  # docs/design.md, section 9
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

    def errors(self, name: str) -> list[float]:
        """Of each step's velocity, after an inference has left what the steps read."""
        reference = zip(self.expected[f"{name}.x"], self.expected[f"{name}.velocity"], strict=True)
        return [relative_error(self.velocity(x, k), v) for k, (x, v) in enumerate(reference)]


def expected_of(kind: str) -> dict[str, np.ndarray]:
    return arrays(fixture_folder(kind) / "expected.safetensors")


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def plan(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("plan") / "lerobot.plan"
    options = frtc.CompileOptions(frtc.PolicyOptions(origin="lerobot-0.6"), self_test=False)
    frtc.compile(fixture_folder(kind) / "checkpoint", "hopper", out, options)
    return out


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def loaded(request: pytest.FixtureRequest, kind: str, plan: Path) -> Iterator[Loaded]:
    with frtc.load(plan, device=request.param) as policy:
        policy.warm()
        yield Loaded(kind, policy, expected_of(kind))


@pytest.mark.parametrize("name", NAMES)
def test_widened_from_the_raw_observation(kind: str, name: str) -> None:
    """Before codegen, in float32: the policy steps and the module after all passes."""
    expected, subject = expected_of(kind), traced.fixture(kind, name, "f32")
    tokens = expected[f"{name}.tokens"]
    assert np.array_equal(subject.inputs["tokens"][: int(subject.inputs["n"])], tokens)
    found = traced.ask(subject, traced.optimised(subject.module, "hopper"), "wide")
    steps = zip(found.velocity, expected[f"{name}.velocity"], strict=True)
    assert max(relative_error(v, w) for v, w in steps) <= WIDENED
    noise = subject.inputs["noise"]
    assert relative_error(found.actions - noise, subject.actions - noise) <= WIDENED


@pytest.mark.parametrize("name", NAMES)
def test_velocities_and_actions_are_lerobots(loaded: Loaded, name: str) -> None:
    expected, seen = loaded.expected, loaded.observation(name)
    answer = loaded.policy.infer(seen)
    errors = loaded.errors(name)
    served = zip(expected[f"{name}.velocity_bf16"], expected[f"{name}.velocity"], strict=True)
    own = [relative_error(v, w) for v, w in served]
    assert max(errors) <= min(ABSOLUTE, RATIO * max(own)), (errors, own)
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
