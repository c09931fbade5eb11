"""Robots that openpi declares: its formulas in scalar Python, its order of work, and declarations that do not fit."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frtc.errors import FrtcError, UsageError
from frtc.models.policies import PI0, PI05, PolicyFamily
from frtc.models.robots import ROBOTS
from frtc.observation import seeded
from frtc.policy_files import PolicyFiles, Sizes, read_policy_files
from frtc.policy_options import PolicyOptions, action_mask
from frtc.robot_units import to_robot_units
from frtc.runtime.policy import Absolute, Policy, Slice
from frtc.runtime.policy_steps import PolicySteps
from frtc.runtime.steps_vector import apply

TOKENIZER = Path(__file__).parents[1] / "fixtures" / "pi05_lerobot" / "checkpoint" / "tokenizer.json"
SIZES = {"pi0": Sizes(28, 48, 1024, 3, 32, 32), "pi05": Sizes(28, 200, 1024, 3, 32)}
FLIPPED = (1, 2, 8, 9)  # joints whose sign differs
GRIPPERS = (6, 13)


def decoded(state: list[float]) -> list[float]:
    """A state of the two-armed robot as the model knows it: openpi's formulas."""
    made = [-x if i in FLIPPED else x for i, x in enumerate(state)]
    for i in GRIPPERS:
        place = made[i] * (0.05800 - 0.01844) + 0.01844
        sine = (0.022**2 + place**2 - 0.036**2) / (2 * 0.022 * place)
        made[i] = (math.asin(min(max(sine, -1.0), 1.0)) - 0.5476) / (1.6296 - 0.5476)
    return made


def encoded(action: list[float]) -> list[float]:
    """An action of the model as the robot takes it."""
    made = [-x if i in FLIPPED else x for i, x in enumerate(action)]
    for i in GRIPPERS:
        made[i] = ((made[i] + 0.5476) + 0.6213) / (1.4910 + 0.6213)
    return made


def trained(action: list[float]) -> list[float]:
    """The inverse of `encoded`: how openpi made the actions that the model learnt from."""
    made = [-x if i in FLIPPED else x for i, x in enumerate(action)]
    for i in GRIPPERS:
        made[i] = made[i] * (1.4910 + 0.6213) - 0.6213 - 0.5476
    return made


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.0, 1.0, shape)


def statistics(dim: int, seed: int) -> dict[str, list[float]]:
    mean, std = numbers(seed, dim) - 0.5, numbers(seed + 1, dim) + 0.5
    return {"mean": mean.tolist(), "std": std.tolist(), "q01": (mean - 2).tolist(), "q99": (mean + std).tolist()}


def openpi(folder: Path, state: int = 14, actions: int = 14) -> Path:
    shutil.copy(TOKENIZER, folder / "tokenizer.json")
    (folder / "assets" / "lab").mkdir(parents=True)
    stats = {"norm_stats": {"state": statistics(state, 3), "actions": statistics(actions, 7)}}
    (folder / "assets" / "lab" / "norm_stats.json").write_text(json.dumps(stats))
    return folder


def read(folder: Path, family: PolicyFamily = PI0, **options: Any) -> PolicyFiles:
    return read_policy_files(folder, family, PolicyOptions(**options))


def test_units_by_openpis_formulas() -> None:
    """Also beyond what the gripper reaches (clipped), and to the bit, as both compute in float64."""
    robot = ROBOTS["aloha"]
    for row in [*(numbers(11, 200, 14) * 8 - 4).tolist(), *numbers(12, 50, 14).tolist(), [0.0] * 14, [1.0] * 14]:
        found = apply(robot.state_steps, np.array(row))
        np.testing.assert_allclose(found, decoded(row), rtol=1e-15, atol=1e-15)
        assert [float(x) for i, x in enumerate(found) if i not in GRIPPERS] == [
            -x if i in FLIPPED else x for i, x in enumerate(row) if i not in GRIPPERS
        ]
        assert apply(robot.action_steps, np.array([row])).tolist() == [encoded(row)]
    closed, opened = (apply(robot.state_steps, np.full(14, x))[6] for x in (0.0, 1.0))
    assert abs(closed - -1.0797) < 1e-3, "the crank is at -0.62 rad, which is where commands are 0, too"
    assert abs(opened - (np.pi / 2 - 0.5476) / 1.082) < 1e-3, "the crank stands at a right angle"


def test_round_trips() -> None:
    robot = ROBOTS["aloha"]
    rows = numbers(21, 60, 14) * 2 - 1
    back = apply(robot.action_steps, np.array([trained(row) for row in rows.tolist()]))
    np.testing.assert_allclose(back, rows, rtol=0, atol=1e-15)
    joints = [i for i in range(14) if i not in GRIPPERS]
    assert np.array_equal(apply(robot.action_steps, apply(robot.state_steps, rows))[:, joints], rows[:, joints])


def test_made_observations_are_inside_the_statistics(tmp_path: Path) -> None:
    """The state of a made observation comes out, by the robot's steps, where the statistics are."""
    robot, rows = ROBOTS["aloha"], numbers(22, 40, 14) * 1.9 - 1.0
    np.testing.assert_allclose(
        apply(robot.state_steps, to_robot_units(robot.state_steps, rows)), rows, rtol=0, atol=1e-12
    )
    actions = robot.action_steps
    np.testing.assert_allclose(apply(actions, to_robot_units(actions, rows)), rows, rtol=0, atol=1e-12)
    files = read(openpi(tmp_path), robot="aloha")
    steps = PolicySteps(files.policy(SIZES["pi0"]), files.tokenizer)
    normal = steps.prepare(seeded(steps)).inputs["state"][:14]
    reached = [i for i in range(14) if i not in GRIPPERS]  # these statistics leave what a gripper reaches
    assert (np.abs(normal[reached]) <= 1.0001).all() and np.abs(normal).max() < 4


@pytest.mark.parametrize("family", [PI0, PI05], ids=lambda f: f.name)
def test_openpis_order_of_work(tmp_path: Path, family: PolicyFamily) -> None:
    """A chunk of robot actions, made into what the model learnt by openpi's training transforms, comes out again."""
    files = read(openpi(tmp_path), family, robot="aloha", strict=True, **in_prompt(family))
    sizes = SIZES[family.name]
    steps = PolicySteps(Policy.from_json(json.loads(json.dumps(files.policy(sizes).to_json()))), files.tokenizer)
    state, actions = numbers(31, 14).astype(np.float32), numbers(32, 3, 14)
    known = decoded([float(x) for x in state])
    relative = [[a - known[i] * (i not in GRIPPERS) for i, a in enumerate(trained(row))] for row in actions.tolist()]
    prepared = steps.prepare(observation(steps, state))
    if family is PI0:
        want = [np.float32(normalised(family, 3, i, x)) for i, x in enumerate(known)]
        np.testing.assert_array_max_ulp(prepared.inputs["state"][:14], np.array(want), maxulp=1)
    output = np.zeros((3, 32), np.float32)
    output[:, :14] = [[normalised(family, 7, i, x) for i, x in enumerate(row)] for row in relative]
    np.testing.assert_allclose(steps.finish(output, prepared), actions, rtol=0, atol=2e-6)


def in_prompt(family: PolicyFamily) -> dict[str, Any]:
    return {} if family.state_input else {"state_in_prompt": True}


def observation(steps: PolicySteps, state: np.ndarray) -> dict[str, Any]:
    frames = {role: np.zeros((28, 28, 3), np.uint8) for role in steps.cameras}
    return {**frames, "state": state, "prompt": "pick"}


def normalised(family: PolicyFamily, seed: int, i: int, x: float) -> float:
    stats = {name: values[i] for name, values in statistics(14, seed).items()}
    if family.openpi_norm == "openpi_mean_std":
        return (x - stats["mean"]) / (stats["std"] + 1e-6)
    return (x - stats["q01"]) / (stats["q99"] - stats["q01"] + 1e-6) * 2 - 1


DECLARED = [  # robot, family, state, actions, mask, roles
    ("aloha", PI0, 14, 14, "delta:6,-1,6,-1", ["cam_high", "cam_left_wrist", "cam_right_wrist"]),
    ("aloha", PI05, 14, 14, "delta:6,-1,6,-1", ["cam_high", "cam_left_wrist", "cam_right_wrist"]),
    ("aloha-sim", PI0, 14, 14, "absolute", ["cam_high"]),
    ("droid", PI0, 8, 8, "absolute", ["exterior_image_1_left", "wrist_image_left"]),
    ("droid", PI05, 8, 8, "absolute", ["exterior_image_1_left", "wrist_image_left"]),
    ("libero", PI0, 8, 7, "delta:6,-1", ["image", "wrist_image"]),
    ("libero", PI05, 8, 7, "absolute", ["image", "wrist_image"]),
]


@pytest.mark.parametrize(("name", "family", "state", "actions", "mask", "roles"), DECLARED)
def test_declarations(
    tmp_path: Path, name: str, family: PolicyFamily, state: int, actions: int, mask: str, roles: list[str]
) -> None:
    """Cameras, sizes and relative actions; statistics may be longer than the robot (openpi pads some with zeros)."""
    files = read(openpi(tmp_path, 32, 32), family, robot=name, strict=True, **in_prompt(family))
    policy = files.policy(SIZES[family.name])
    assert [camera.role for camera in files.cameras] == roles
    assert [c.source for c in files.cameras] == [key for _, key in family.cameras][: len(roles)]
    assert (files.told.state.dim, policy.find(Slice)) == (state, Slice(3, actions))
    want = action_mask(mask, actions)
    assert policy.find(Absolute) == (Absolute(want) if want else None)
    steps = ["scale", "linkage"] if "aloha" in name else []
    sources = {fact.name: (fact.value, fact.source) for fact in files.facts}
    assert sources["robot"] == (name, "option") and sources["state_dim"] == (state, f"robot {name}")
    assert sources["actions"] == (mask, f"robot {name}")
    assert sources.get("state_steps", ([], ""))[0] == steps
    assert [type(step).__name__.lower() for step in policy.state_steps] == steps
    assert len(policy.action_steps) == len(steps)


def test_options_change_a_declaration(tmp_path: Path) -> None:
    openpi(tmp_path)
    said = read(tmp_path, robot="aloha", actions="absolute", camera=(("front", "base_0_rgb"),), strict=True)
    assert not said.told.mask and [(c.role, c.source) for c in said.cameras] == [("front", "base_0_rgb")]
    assert [c.role for c in read(tmp_path, robot="aloha", views=2).cameras] == ["cam_high", "cam_left_wrist"]


def test_without_a_robot_nothing_is_changed_and_that_is_said(tmp_path: Path) -> None:
    files = read(openpi(tmp_path))
    assert not files.told.state_steps and not files.told.action_steps and not files.told.mask
    (said,) = [a for a in files.assumed if a.field == "actions"]
    assert "no change of units" in said.why and said.option.startswith("--robot NAME")


REFUSED = [
    ({}, {"robot": "alhoa"}, "policy.robot", "nearest  aloha"),
    ({}, {"robot": ""}, "policy.robot", "choices  aloha, aloha-sim, droid, libero"),
    ({"state": 8}, {"robot": "aloha"}, "policy.robot", "aloha has 14 numbers in state, the statistics 8"),
    ({"actions": 7}, {"robot": "aloha"}, "policy.robot", "aloha has 14 numbers in actions, the statistics 7"),
    ({}, {"robot": "aloha", "state_dim": 7}, "policy.dims", "state_dim 7, but aloha has 14"),
    ({}, {"robot": "droid", "action_dim": 14}, "policy.dims", "action_dim 14, but droid has 8"),
    ({}, {"robot": "aloha", "views": 4}, "policy.cameras", "--views 4"),
    ({}, {"robot": "droid", "camera": (("a", "right_wrist_0_rgb"),)}, "policy.cameras", "no camera right_wrist_0_rgb"),
    ({}, {"robot": "droid", "actions": "delta:9"}, "policy.actions", "9 actions are relative to a state of 8 numbers"),
]


@pytest.mark.parametrize(("stats", "options", "code", "message"), REFUSED)
def test_refused(tmp_path: Path, stats: dict[str, int], options: dict[str, Any], code: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(openpi(tmp_path, **stats), **options)
    assert caught.value.code == code and message in str(caught.value)


def test_a_family_that_is_not_declared_is_refused(tmp_path: Path) -> None:
    """A robot's actions mean one thing for one family: another's are not guessed."""
    with pytest.raises(UsageError, match="openpi does not declare libero for pi9"):
        read(openpi(tmp_path), replace(PI0, name="pi9"), robot="libero")


def test_a_state_of_another_robot_is_refused_at_run_time(tmp_path: Path) -> None:
    files = read(openpi(tmp_path), robot="aloha")
    steps = PolicySteps(files.policy(SIZES["pi0"]), files.tokenizer)
    with pytest.raises(FrtcError, match=r"the state has the shape \[7\], not \[14\]") as caught:
        steps.prepare(observation(steps, np.zeros(7, np.float32)))
    assert caught.value.code == "input.state_shape"
