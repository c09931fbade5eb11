"""Observations that are no robot's are refused, naming camera, sample and value; recordings are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from frtc.dataset import Wanted
from frtc.dataset_trust import ALIKE, FLAT, correlation, deviation, pixels, require_trust, trust
from frtc.errors import FrtcError
from frtc.runtime.policy import Camera
from tests.frtc.made_datasets import SIZES, recording

FRONT, WRIST = SIZES
WANTED = Wanted((Camera("front", FRONT), Camera("wrist", WRIST)), 4, True)
MADE = recording()
NOISE = np.random.default_rng(0)


def observations(n: int = 4) -> list[dict[str, Any]]:
    pictures = {"front": MADE.pictures[FRONT], "wrist": MADE.pictures[WRIST]}
    return [{**{k: v[i] for k, v in pictures.items()}, "state": MADE.state[i], "prompt": "go"} for i in range(n)]


def with_picture(sample: int, role: str, picture: Any) -> list[dict[str, Any]]:
    found = observations()
    found[sample][role] = picture.astype(np.uint8)
    return found


def test_recordings_are_trusted() -> None:
    assert trust(observations(), WANTED) == [] and require_trust(observations(), WANTED) == []
    assert trust(iter(observations(1)), WANTED) == []


def noise(height: int, width: int) -> Any:
    return NOISE.integers(0, 256, (height, width, 3))


@pytest.mark.parametrize(
    "picture, what",
    [
        (np.zeros((32, 48, 3)), "one colour"),
        (np.full((32, 48, 3), 255), "one colour"),
        (np.broadcast_to(np.array([200, 30, 90]), (32, 48, 3)), "one colour"),  # constant, its channels differ
        (128 + NOISE.integers(0, 2, (32, 48, 3)), "one colour"),  # rounding of a codec
        (noise(32, 48), "noise"),
        (np.repeat(noise(32, 48)[..., :1], 3, axis=2), "noise"),  # grey noise
        (np.clip(NOISE.normal(128, 20, (32, 48, 3)), 0, 255), "noise"),
    ],
)
def test_blank_and_random_pictures(picture: Any, what: str) -> None:
    taken = pixels(picture.astype(np.uint8))
    (finding,) = trust(with_picture(2, "wrist", picture), WANTED)
    assert (finding.camera, finding.sample) == ("wrist", 2) and what in finding.what
    measured = deviation(taken) if what == "one colour" else correlation(taken)
    assert finding.measured == measured and finding.measured <= finding.bound


@pytest.mark.parametrize(
    "picture",
    [
        MADE.pictures[FRONT][0] // 16,  # dark
        np.clip(MADE.pictures[FRONT][0] + NOISE.normal(0, 20, (32, 48, 3)), 0, 255),  # a sensor's noise on top
        np.pad(MADE.pictures[FRONT][0][:16], ((0, 16), (0, 0), (0, 0))),  # half of it black
    ],
)
def test_poor_pictures_of_a_camera_are_trusted(picture: Any) -> None:
    assert trust(with_picture(0, "front", picture), WANTED) == []


def test_what_the_measures_are() -> None:
    ramp = np.broadcast_to(np.arange(100.0, dtype=np.float32)[:, None, None], (100, 100, 3))
    assert deviation(ramp) == pytest.approx(28.866, abs=1e-3) and correlation(ramp) == pytest.approx(1.0, abs=1e-2)
    board = np.broadcast_to((np.indices((8, 8)).sum(0) % 2 * 255.0)[..., None], (8, 8, 3)).astype(np.float32)
    assert correlation(board) == pytest.approx(-1.0) and deviation(board) == 127.5
    assert FLAT < 2 and 0.3 < ALIKE < 0.7


def test_states_that_never_move() -> None:
    still = [{**seen, "state": MADE.state[0]} for seen in observations()]
    (finding,) = trust(still, WANTED)
    assert (finding.camera, finding.sample) == ("state", None) and "the same in all 4 samples" in finding.what
    (finding,) = trust([{**observations(1)[0], "state": np.zeros(4, np.float32)}], WANTED)
    assert "zero" in finding.what
    moves = [{**seen, "state": np.float32([0, 0, 0, i])} for i, seen in enumerate(observations())]
    assert trust(moves, WANTED) == []  # one joint is enough


def test_identical_observations() -> None:
    findings = trust(observations(1) * 3, WANTED)
    assert [f.camera for f in findings] == ["", "state"] and str(findings[0]).startswith(
        "observations: all 3 are identical"
    )
    twice = [*observations(3), observations(1)[0]]
    assert trust(twice, WANTED) == []


def test_float_pictures_are_measured_in_the_same_unit() -> None:
    wanted = Wanted((Camera("front", FRONT, "chw", "bgr01"),), None, False)
    picture = (MADE.pictures[FRONT][0] / np.float32(255)).transpose(2, 0, 1)
    assert trust([{"front": picture.astype(np.float32)}], wanted) == []
    (finding,) = trust([{"front": np.full((3, 32, 48), 0.5, np.float32)}], wanted)
    assert finding.measured == pytest.approx(0.0, abs=1e-4)


def test_the_error_names_camera_sample_value_and_option() -> None:
    seen = with_picture(1, "front", noise(32, 48))
    seen[3]["wrist"] = np.zeros((48, 32, 3), np.uint8)
    with pytest.raises(FrtcError) as fault:
        require_trust(seen, WANTED)
    text = str(fault.value)
    assert fault.value.code == "calibrate.synthetic" and fault.value.exit_code == 4
    assert "camera front, sample 1" in text and "camera wrist, sample 3" in text and "--allow-synthetic" in text
    assert f"{trust(seen, WANTED)[0].measured:.3g}" in text
    allowed = require_trust(seen, WANTED, allow_synthetic=True)
    assert [(f.camera, f.sample) for f in allowed] == [("front", 1), ("wrist", 3)]


def test_a_long_list_is_cut() -> None:
    blank = [{**seen, "front": np.zeros((4, 4, 3), np.uint8), "wrist": noise(9, 9).astype(np.uint8)}
             for seen in observations(12)]  # fmt: skip
    with pytest.raises(FrtcError) as fault:
        require_trust(blank, WANTED)
    assert fault.value.rows[-1] == ("and", "16 more")
