"""Vector steps: what they compute, where they stand, their JSON, and forged ones."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from frtc.errors import FrtcError
from frtc.runtime.policy import (
    Absolute,
    Camera,
    Images,
    Linkage,
    Norm,
    Policy,
    Rescale,
    Scale,
    Slice,
    State,
    Unnormalise,
)
from frtc.runtime.policy_steps import PolicySteps
from frtc.runtime.steps_vector import apply
from tests.runtime.test_policy import mutants, paths

NORM = Norm("openpi_mean_std", (1.0, 2.0, 3.0), (1.0, 2.0, 4.0), 1e-6)
CRANK = Linkage((1,), low=0.01, high=0.05, arm=0.04, crank=0.02, zero=0.5, full=1.5)
POLICY = Policy(
    prepare=(Scale((-1.0,)), CRANK, State(3, NORM, width=4)),
    finish=(
        Slice(2, 3),
        Unnormalise(NORM),
        Absolute((True, True, False)),
        Rescale((0, 2), shift=1.0, low=-1.0, high=3.0),
        Scale((2.0, -2.0, 1.0)),
    ),
)


def test_json_round_trip_and_order() -> None:
    text = json.dumps(POLICY.to_json())
    assert Policy.from_json(json.loads(text)) == POLICY
    assert POLICY.state_steps == POLICY.prepare[:2] and POLICY.action_steps == POLICY.finish[3:]
    assert [step["step"] for step in json.loads(text)["finish"]] == [
        "slice",
        "unnormalise",
        "absolute",
        "rescale",
        "scale",
    ]


def test_a_younger_field_with_its_default_is_left_out() -> None:
    """Policies from before it keep their bytes; those that need it say so, and an older reader refuses them."""
    camera = (Camera("base", "base"),)
    old = Policy((Images(camera, 8, "torch_bilinear", -1.0),), ())
    assert "place" not in old.to_json()["prepare"][0]
    new = Policy((Images(camera, 8, "torch_bilinear", -1.0, "end"),), ())
    assert new.to_json()["prepare"][0]["place"] == "end"
    for policy in (old, new):
        assert Policy.from_json(json.loads(json.dumps(policy.to_json()))) == policy


def test_the_state_is_changed_before_it_is_normalised_and_actions_at_the_end() -> None:
    steps, state = PolicySteps(POLICY), np.array([0.5, 1.0, 7.0], np.float32)
    prepared = steps.prepare({"state": state})
    sine = (0.02**2 + 0.05**2 - 0.04**2) / (2 * 0.02 * 0.05)
    known = [-0.5, (np.arcsin(sine) - 0.5) / 1.0, 7.0]
    want = [(x - m) / (s + 1e-6) for x, m, s in zip(known, NORM.mean_or_low, NORM.std_or_high, strict=True)]
    np.testing.assert_array_max_ulp(prepared.inputs["state"], np.array([*want, 0], np.float32), maxulp=1)
    np.testing.assert_allclose(prepared.state, known, rtol=1e-15)
    actions = steps.finish(np.zeros((2, 3), np.float32), prepared)
    absolute = [1.0 + known[0], 2.0 + known[1], 3.0]  # un-normalised zeros are the means
    row = [2 * (absolute[0] + 1 + 1) / 4, -2 * absolute[1], (absolute[2] + 1 + 1) / 4]
    np.testing.assert_allclose(actions, [row, row], rtol=1e-6)
    assert state.tolist() == [0.5, 1.0, 7.0], "the caller's state stays"


def test_no_steps_leave_bits_and_type() -> None:
    x = np.array([0.1, 0.2], np.float32)
    assert apply((), x) is x


def test_a_linkage_clips_what_it_cannot_reach() -> None:
    strokes = np.array([-0.25, 0.0, 0.5, 1.0, 100.0, -100.0])  # the first: the slider on the crank's axis
    angles = apply((replace(CRANK, dims=tuple(range(6))),), strokes)
    assert np.isfinite(angles).all() and angles[0] == -np.pi / 2 - 0.5 and (np.diff(angles[1:5]) >= 0).all()
    assert angles[4] == np.pi / 2 - 0.5 and angles[5] == -np.pi / 2 - 0.5


def edited(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    data = json.loads(json.dumps(POLICY.to_json()))
    owner = data
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = value
    return data


FORGED: list[tuple[tuple[Any, ...], Any, str, str]] = [
    (("prepare", 0, "factor"), [1.0] * 4, "policy.value", "4 factors for 3 numbers"),
    (("prepare", 0, "factor"), [], "policy.value", "0 factors for 3 numbers"),
    (("prepare", 0, "factor"), [float("inf")], "policy.field", "a finite number"),
    (("prepare", 0, "factor"), [1.0] * 5000, "policy.field", "a list of at most 4096 items"),
    (("prepare", 0, "offset"), 1.0, "policy.field", "unknown  offset"),
    (("prepare", 0, "step"), "scales", "policy.step", "nearest  scale"),
    (("prepare", 1, "dims"), [3], "policy.value", "names dims [3], not rising ones below 3"),
    (("prepare", 1, "dims"), [-1], "policy.value", "names dims [-1]"),
    (("prepare", 1, "dims"), [], "policy.value", "names dims []"),
    (("prepare", 1, "dims"), [1, 1], "policy.value", "names dims [1, 1]"),
    (("prepare", 1, "dims"), [2, 1], "policy.value", "names dims [2, 1]"),
    (("prepare", 1, "dims"), [True], "policy.field", "prepare[1].linkage.dims[0]"),
    (("prepare", 1, "full"), 0.5, "policy.value", "the range from 0.5 to 0.5 is empty"),
    (("prepare", 1, "high"), 0.01, "policy.value", "the range from 0.01 to 0.01 is empty"),
    (("prepare", 1, "crank"), 0.0, "policy.value", "has no length: arm 0.04, crank 0.0"),
    (("prepare", 1, "arm"), -1.0, "policy.value", "has no length"),
    (("prepare", 1, "arm"), float("nan"), "policy.field", "a finite number"),
    (("finish", 3, "high"), -1, "policy.value", "the range from -1.0 to -1.0 is empty"),
    (("finish", 3, "dims"), [0, 3], "policy.value", "names dims [0, 3]"),
    (("prepare",), [{"step": "scale", "factor": [1.0]}], "policy.value", "1 factors for 0 numbers"),
]


@pytest.mark.parametrize(("path", "value", "code", "message"), FORGED)
def test_forged_steps_are_refused(path: tuple[Any, ...], value: Any, code: str, message: str) -> None:
    with pytest.raises(FrtcError) as caught:
        Policy.from_json(edited(path, value))
    assert caught.value.code == code and message in str(caught.value)


def test_mutated_json_never_escapes_as_another_exception() -> None:
    original, refused = json.loads(json.dumps(POLICY.to_json())), 0
    for path in paths(original)[1:]:
        for mutant in mutants(path):
            try:
                steps = PolicySteps(Policy.from_json(edited(path, mutant)))
                steps.finish(np.zeros((2, 3), np.float32), steps.prepare({"state": np.zeros(3, np.float32)}))
            except FrtcError:
                refused += 1
    assert refused > 500


SHUFFLED: list[Callable[[dict[str, Any]], object]] = [
    lambda d: d["prepare"].append(d["prepare"].pop(0)),  # after the state was normalised
    lambda d: d["finish"].insert(0, d["finish"].pop()),  # before the slice
    lambda d: d["finish"].insert(2, d["finish"].pop()),  # between un-normalising and absolute
    lambda d: d["finish"].insert(1, d["finish"][1]),  # un-normalised twice
]


@pytest.mark.parametrize("change", SHUFFLED)
def test_steps_in_another_order_are_refused(change: Callable[[dict[str, Any]], object]) -> None:
    data = copy.deepcopy(json.loads(json.dumps(POLICY.to_json())))
    change(data)
    with pytest.raises(FrtcError, match="in this order") as caught:
        Policy.from_json(data)
    assert caught.value.code == "policy.value"


def test_too_many_steps_are_refused() -> None:
    with pytest.raises(FrtcError, match="17 vector steps, more than 16"):
        replace(POLICY, finish=(*POLICY.finish[:3], *[Scale((1.0,))] * 17))
    assert replace(POLICY, finish=(*POLICY.finish[:3], *[Scale((1.0,))] * 16)).action_steps


def test_numbers_that_leave_float32_are_refused() -> None:
    wide = replace(POLICY, prepare=(Scale((1e300,)), State(3, NORM, width=4)))
    with pytest.raises(FrtcError, match=r"state numbers \[0\] are too large") as caught:
        PolicySteps(wide).prepare({"state": np.ones(3, np.float32)})
    assert caught.value.code == "input.state_value"
    with pytest.raises(FrtcError, match=r"state numbers \[2\] are too large"):
        PolicySteps(POLICY).prepare({"state": np.array([0.0, 1.0, 1e300])})
    steps = PolicySteps(replace(POLICY, finish=(*POLICY.finish[:3], Scale((1e300,)))))
    with pytest.raises(FrtcError, match="the actions in robot units are not finite") as caught:
        steps.finish(np.ones((2, 3), np.float32), steps.prepare({"state": np.ones(3, np.float32)}))
    assert caught.value.code == "output.nonfinite"
