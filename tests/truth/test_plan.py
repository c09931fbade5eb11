"""The lerobot fixture through a Plan: compiled for hopper, from raw observations, on the CPU and on a GPU.

Per step: x_k is lerobot's own, the Plan answers with the next x, and the velocity is the change over dt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import frtc
from frtc.policy import Policy
from tests.models.truth import CASES, FIXTURE, arrays

STEPS = 10
ABSOLUTE, RATIO = 2e-2, 1.5  # docs/design.md, section 9
NAMES = [name for name in CASES if len(CASES[name]) == 2]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("plan") / "lerobot.plan"
    options = frtc.CompileOptions(frtc.PolicyOptions(origin="lerobot-0.6"), self_test=False)
    frtc.compile(FIXTURE / "checkpoint", "hopper", out, options)
    return out


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def policy(request: pytest.FixtureRequest, plan: Path) -> Iterator[Policy]:
    with frtc.load(plan, device=request.param) as loaded:
        loaded.warm()
        yield loaded


def observation(policy: Policy, name: str) -> dict[str, Any]:
    """The raw observation under the Plan's own camera roles, in the checkpoint's order."""
    raw = arrays(FIXTURE / "observations.safetensors")
    about = json.loads((FIXTURE / "fixture.json").read_text())["cases"][name]
    frames = [raw[f"{name}.observation.images.{camera}"] for camera in CASES[name]]
    seen: dict[str, Any] = dict(zip(policy.cameras, frames, strict=True))
    return seen | {
        "state": raw[f"{name}.observation.state"],
        "prompt": about["task"],
        "noise": raw[f"{name}.noise"],
    }


def relative_error(y: np.ndarray, reference: np.ndarray) -> float:
    error = np.linalg.norm(y.astype(np.float64) - reference) / np.linalg.norm(reference.astype(np.float64))
    return float(error) if np.isfinite(error) else float("inf")


@pytest.mark.parametrize("name", NAMES)
def test_velocities_and_actions_are_lerobots(policy: Policy, name: str) -> None:
    expected = arrays(FIXTURE / "expected.safetensors")
    seen = observation(policy, name)
    answer = policy.infer(seen)
    errors = [relative_error(_velocity(policy, x, k), v) for k, (x, v) in enumerate(_steps(expected, name))]
    own = [
        relative_error(b, v)
        for b, (_, v) in zip(expected[f"{name}.velocity_bf16"], _steps(expected, name), strict=True)
    ]
    assert max(errors) <= min(ABSOLUTE, RATIO * max(own)), (errors, own)
    whole = expected[f"{name}.x"][-1] - expected[f"{name}.velocity"][-1] / STEPS
    noise = seen["noise"]
    assert relative_error(answer.output - noise, whole - noise) <= ABSOLUTE
    span = np.ptp(expected[f"{name}.actions"], axis=0).max()
    assert np.abs(answer.actions - expected[f"{name}.actions"]).max() <= ABSOLUTE * span


def _steps(expected: dict[str, np.ndarray], name: str) -> list[tuple[np.ndarray, np.ndarray]]:
    return list(zip(expected[f"{name}.x"], expected[f"{name}.velocity"], strict=True))


def _velocity(policy: Policy, x: np.ndarray, k: int) -> np.ndarray:
    policy.executor.set("noise", np.ascontiguousarray(x))
    policy.executor.run_stage("let.x_t")
    policy.executor.run_stage("denoise", k)
    return (x - policy.executor.get("actions")) * np.float32(STEPS)


@pytest.mark.parametrize("name", NAMES[:1])
def test_a_swapped_camera_is_noticed(policy: Policy, name: str) -> None:
    expected, seen = arrays(FIXTURE / "expected.safetensors"), observation(policy, name)
    first, second = policy.cameras
    policy.infer(seen | {first: seen[second], second: seen[first]})
    errors = [relative_error(_velocity(policy, x, k), v) for k, (x, v) in enumerate(_steps(expected, name))]
    assert max(errors) > 2 * ABSOLUTE
