"""The foreign fixtures are complete, agree with themselves, and stay small. Needs neither torch nor lerobot."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

FIXTURES = Path(__file__).parent / "fixtures"
POLICY = FIXTURES / "pi05_lerobot"
CHECKPOINT = POLICY / "checkpoint"
GEMMA = Path(
    os.environ.get("FRTC_GEMMA_TOKENIZER", Path(__file__).parents[1] / ".cache/gemma-tokenizer/tokenizer.json")
)
CASES = ("pick", "edge", "wrist_only")
TOP, WRIST, STATE = "observation.images.top", "observation.images.left_wrist", "observation.state"
STEPS, HORIZON, WIDTH, STATE_DIM, ACTION_DIM = 10, 10, 32, 8, 7
TENSORS_OF_A_CASE = {
    "x": (STEPS, HORIZON, WIDTH),
    "velocity": (STEPS, HORIZON, WIDTH),
    "velocity_bf16": (STEPS, HORIZON, WIDTH),
    "time": (STEPS,),
    "actions_normalised": (HORIZON, ACTION_DIM),
    "actions": (HORIZON, ACTION_DIM),
    "actions_relative": (HORIZON, ACTION_DIM),
}
STAGES = {
    "pick.pixels": (2, 3, 14, 112),
    "pick.keys": (3, 174, 16),
    "pick.values": (3, 174, 16),
    "pick.prefix": (174, 64),
}
TOKENS = {"pick": 46, "edge": 51, "wrist_only": 45}


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    return load_file(POLICY / "expected.safetensors")


@pytest.fixture(scope="module")
def observations() -> dict[str, np.ndarray]:
    return load_file(POLICY / "observations.safetensors")


@pytest.fixture(scope="module")
def report() -> dict[str, dict]:
    return json.loads((POLICY / "fixture.json").read_text(encoding="utf-8"))


def statistics(file: str) -> dict[str, np.ndarray]:
    """The tensors of the pipeline's only step that has a state file."""
    (state_file,) = [
        step["state_file"] for step in json.loads((CHECKPOINT / file).read_text())["steps"] if "state_file" in step
    ]
    return load_file(CHECKPOINT / state_file)


def test_size_in_all_is_at_most_3_mb():
    assert sum(path.stat().st_size for path in FIXTURES.rglob("*") if path.is_file()) <= 3_000_000


def test_observations_are_complete(observations):
    wanted = {}
    for case in CASES:
        wanted[f"{case}.{STATE}"] = ((STATE_DIM,), np.float32)
        wanted[f"{case}.noise"] = ((HORIZON, WIDTH), np.float32)
        wanted[f"{case}.{WRIST}"] = ((96, 60, 3), np.uint8)
        if case != "wrist_only":
            wanted[f"{case}.{TOP}"] = ((120, 160, 3), np.uint8)
    assert {name: (array.shape, array.dtype) for name, array in observations.items()} == wanted


def test_results_are_complete_and_finite(expected):
    wanted = {f"{case}.{name}": shape for case in CASES for name, shape in TENSORS_OF_A_CASE.items()} | STAGES
    wanted |= {f"{case}.tokens": (count,) for case, count in TOKENS.items()}
    wanted["empty_camera.velocity"] = (STEPS, HORIZON, WIDTH)
    assert {name: array.shape for name, array in expected.items()} == wanted
    assert all(np.isfinite(array).all() and array.any() for array in expected.values())


@pytest.mark.parametrize("case", CASES)
def test_trajectory_is_euler_from_noise_to_actions(case, expected, observations):
    x, velocity = expected[f"{case}.x"], expected[f"{case}.velocity"]
    assert np.array_equal(x[0], observations[f"{case}.noise"])
    after = x - np.float32(1 / STEPS) * velocity
    np.testing.assert_allclose(x[1:], after[:-1], rtol=0, atol=1e-6)
    np.testing.assert_allclose(expected[f"{case}.actions_normalised"], after[-1, :, :ACTION_DIM], rtol=0, atol=1e-6)
    np.testing.assert_allclose(expected[f"{case}.time"], 1 - np.arange(STEPS) / STEPS, rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_actions_follow_from_the_saved_statistics(case, expected, observations):
    stats = statistics("policy_postprocessor.json")
    low, high = stats["action.q01"], stats["action.q99"]
    actions = (expected[f"{case}.actions_normalised"] + 1) / 2 * (high - low) + low
    np.testing.assert_allclose(expected[f"{case}.actions"], actions, rtol=0, atol=1e-5)
    moved = expected[f"{case}.actions_relative"] - expected[f"{case}.actions"]
    gripper_stays = observations[f"{case}.{STATE}"][:ACTION_DIM] * np.array([1, 1, 1, 1, 1, 1, 0])
    np.testing.assert_allclose(moved, np.broadcast_to(gripper_stays, moved.shape), rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_small_tokenizer_gives_the_stored_ids(case, expected, report):
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    assert tokenizer.get_vocab_size() <= 1000
    assert tokenizer.encode(report["cases"][case]["prompt"]).ids == expected[f"{case}.tokens"].tolist()


@pytest.mark.parametrize("case", CASES)
def test_prompt_holds_the_bins_of_the_normalised_state(case, observations, report):
    stats = statistics("policy_preprocessor.json")
    low, high = stats[f"{STATE}.q01"], stats[f"{STATE}.q99"]
    normalised = 2 * (observations[f"{case}.{STATE}"] - low) / (high - low) - 1
    bins = np.digitize(normalised, np.linspace(-1, 1, 257)[:-1]) - 1
    facts = report["cases"][case]
    cleaned = facts["task"].strip().replace("_", " ").replace("\n", " ")
    assert facts["prompt"] == f"Task: {cleaned}, State: {' '.join(map(str, bins))};\nAction: "


def test_serving_precision_errs_by_half_to_one_and_a_half_percent(expected, report):
    for case in CASES:
        wanted, found = expected[f"{case}.velocity"], expected[f"{case}.velocity_bf16"]
        norms = np.linalg.norm((found - wanted).reshape(STEPS, -1), axis=1)
        errors = norms / np.linalg.norm(wanted.reshape(STEPS, -1), axis=1)
        np.testing.assert_allclose(report["cases"][case]["bf16_error"], errors, rtol=1e-2)
        assert errors.min() > 5e-3 and errors.max() < 1.5e-2


def test_camera_that_never_sends_changes_nothing(expected):
    np.testing.assert_allclose(expected["empty_camera.velocity"], expected["pick.velocity"], rtol=0, atol=1e-6)


def test_checkpoint_has_the_layout_that_lerobot_saves():
    weights = load_file(CHECKPOINT / "model.safetensors")
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert (config["type"], list(config["input_features"])) == ("pi05", [TOP, WRIST, STATE])
    assert all(name.startswith("model.") for name in weights)
    assert len(weights) == 813 - 25 * 16 - 15 * 9 - 15 * 11  # the full model less vision, prefix and expert layers
    assert {array.dtype for array in weights.values()} == {np.dtype(np.float32)}
    pieces = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")).get_vocab_size()
    paligemma, expert = "model.paligemma_with_expert.paligemma", "model.paligemma_with_expert.gemma_expert"
    assert weights[f"{paligemma}.model.language_model.embed_tokens.weight"].shape == (pieces, 64)
    assert weights[f"{paligemma}.lm_head.weight"].shape == (pieces, 64)
    assert weights[f"{expert}.lm_head.weight"].shape == (pieces, 48)
    assert all(array.std() > 0 for array in weights.values())


@pytest.mark.skipif(not GEMMA.exists(), reason="the whole Gemma tokenizer is not there (FRTC_GEMMA_TOKENIZER)")
def test_gemma_tokenizer_gives_the_stored_ids():
    tokenizer = Tokenizer.from_file(str(GEMMA))
    newline = tokenizer.encode("\n", add_special_tokens=False).ids
    for row in gemma_prompts():
        text = row["text"]
        apart = row["kind"] == "openpi_no_state"
        ids = tokenizer.encode(text.removesuffix("\n")).ids + newline if apart else tokenizer.encode(text).ids
        assert ids == row["ids"], row["prompt"]


def test_gemma_prompts_are_twenty_of_three_kinds():
    rows = gemma_prompts()
    assert len(rows) == len({row["prompt"] for row in rows}) == 20
    assert {row["kind"] for row in rows} == {"lerobot", "openpi", "openpi_no_state"}
    assert all(row["ids"][0] == 2 and 108 in row["ids"] for row in rows)


def gemma_prompts() -> list[dict]:
    return json.loads((FIXTURES / "gemma_prompts.json").read_text(encoding="utf-8"))["prompts"]
