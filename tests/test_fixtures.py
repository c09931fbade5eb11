"""The foreign fixtures are complete, agree with themselves, and stay small. Needs neither torch nor lerobot."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file
from tokenizers import Tokenizer

FIXTURES = Path(__file__).parent / "fixtures"
GEMMA = Path(
    os.environ.get("FRTC_GEMMA_TOKENIZER", Path(__file__).parents[1] / ".cache/gemma-tokenizer/tokenizer.json")
)
TOP, WRIST, STATE = "observation.images.top", "observation.images.left_wrist", "observation.state"
STEPS, HORIZON, WIDTH, STATE_DIM, ACTION_DIM = 10, 10, 32, 8, 7
TENSORS_OF_A_CASE = {
    "x": (STEPS, HORIZON, WIDTH),
    "velocity": (STEPS, HORIZON, WIDTH),
    "velocity_bf16": (STEPS, HORIZON, WIDTH),
    "time": (STEPS,),
    "actions_normalised": (HORIZON, ACTION_DIM),
    "actions": (HORIZON, ACTION_DIM),
}


@dataclass(frozen=True, slots=True)
class Fixture:
    """What one set holds. `cases` and `frames`: the cameras of each case, height and width of what each sends."""

    name: str
    cases: Mapping[str, tuple[str, ...]]
    frames: Mapping[str, tuple[int, int]]
    tokens: Mapping[str, int]  # of each case's prompt
    stages: Mapping[str, tuple[int, ...]]
    tensors: int  # in the file of weights
    stored: frozenset[str]  # element types there
    tables: Mapping[str, int]  # width of each table with a row for each piece
    relative: bool = True
    bf16: tuple[float, float] = (5e-3, 1.6e-2)  # between these err lerobot's own bf16 velocities

    @property
    def folder(self) -> Path:
        return FIXTURES / f"{self.name}_lerobot"

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    def expected(self) -> dict[str, np.ndarray]:
        return load_file(self.folder / "expected.safetensors")

    def observations(self) -> dict[str, np.ndarray]:
        return load_file(self.folder / "observations.safetensors")

    def facts(self, case: str) -> dict:
        return json.loads((self.folder / "fixture.json").read_text(encoding="utf-8"))["cases"][case]

    def statistics(self, file: str) -> dict[str, np.ndarray]:
        """The tensors of the pipeline's only step that has a state file."""
        steps = json.loads((self.checkpoint / file).read_text())["steps"]
        (state_file,) = [step["state_file"] for step in steps if "state_file" in step]
        return load_file(self.checkpoint / state_file)


BOTH = {"pick": (TOP, WRIST), "edge": (TOP, WRIST)}
PALIGEMMA, EXPERT = "model.paligemma_with_expert.paligemma", "model.paligemma_with_expert.gemma_expert"
SMOLVLM = "model.vlm_with_expert.vlm"
GEMMA_TABLES = {f"{PALIGEMMA}.model.language_model.embed_tokens": 64, f"{PALIGEMMA}.lm_head": 64}
PI05 = Fixture(
    name="pi05",
    cases=BOTH | {"wrist_only": (WRIST,)},
    frames={TOP: (120, 160), WRIST: (96, 60)},
    tokens={"pick": 46, "edge": 51, "wrist_only": 45},
    stages={"pixels": (2, 3, 14, 112), "keys": (3, 174, 16), "values": (3, 174, 16), "prefix": (174, 64)},
    tensors=813 - 25 * 16 - 15 * 9 - 15 * 11,  # the full model less vision, prefix and expert layers
    stored=frozenset({"F32"}),
    tables=GEMMA_TABLES | {f"{EXPERT}.lm_head": 48},
    bf16=(5e-3, 1.5e-2),
)
PI0 = Fixture(
    name="pi0",
    cases=BOTH,
    frames={TOP: (90, 117), WRIST: (83, 50)},
    tokens={"pick": 9, "edge": 23},
    stages={"pixels": (2, 3, 14, 112), "keys": (3, 137, 16), "values": (3, 137, 16), "prefix": (137, 64)},
    tensors=778 - 26 * 16 - 15 * 9 - 15 * 9,
    stored=frozenset({"F32"}),
    tables=GEMMA_TABLES | {f"{EXPERT}.lm_head": 48},
)
SMOLVLA = Fixture(
    name="smolvla",
    cases=BOTH,
    frames={TOP: (75, 101), WRIST: (41, 30)},
    tokens={"pick": 7, "edge": 26},
    stages={"pixels": (2, 3, 8, 64), "keys": (4, 2, 16, 64), "values": (4, 2, 16, 64), "prefix": (16, 64)},
    tensors=500 - 10 * 16 - 12 * 9 - 12 * 9,
    stored=frozenset({"BF16", "F32"}),
    tables={f"{SMOLVLM}.model.text_model.embed_tokens": 64, f"{SMOLVLM}.lm_head": 64},
    relative=False,
)
SETS = (PI05, PI0, SMOLVLA)
each_set = pytest.mark.parametrize("fixture", SETS, ids=lambda fixture: fixture.name)
each_case = pytest.mark.parametrize(
    ("fixture", "case"),
    [pytest.param(fixture, case, id=f"{fixture.name}-{case}") for fixture in SETS for case in fixture.cases],
)


@each_set
def test_size_is_at_most_3_mb(fixture):
    assert sum(path.stat().st_size for path in fixture.folder.rglob("*") if path.is_file()) <= 3_000_000


@each_set
def test_observations_are_complete(fixture):
    wanted = {}
    for case, cameras in fixture.cases.items():
        wanted[f"{case}.{STATE}"] = ((STATE_DIM,), np.float32)
        wanted[f"{case}.noise"] = ((HORIZON, WIDTH), np.float32)
        wanted |= {f"{case}.{camera}": ((*fixture.frames[camera], 3), np.uint8) for camera in cameras}
    assert {name: (array.shape, array.dtype) for name, array in fixture.observations().items()} == wanted


@each_set
def test_results_are_complete_and_finite(fixture):
    of_a_case = TENSORS_OF_A_CASE | ({"actions_relative": (HORIZON, ACTION_DIM)} if fixture.relative else {})
    wanted = {f"{case}.{name}": shape for case in fixture.cases for name, shape in of_a_case.items()}
    wanted |= {f"pick.{name}": shape for name, shape in fixture.stages.items()}
    wanted |= {f"{case}.tokens": (count,) for case, count in fixture.tokens.items()}
    wanted["empty_camera.velocity"] = (STEPS, HORIZON, WIDTH)
    expected = fixture.expected()
    assert {name: array.shape for name, array in expected.items()} == wanted
    assert all(np.isfinite(array).all() and array.any() for array in expected.values())


@each_case
def test_trajectory_is_euler_from_noise_to_actions(fixture, case):
    expected, observations = fixture.expected(), fixture.observations()
    x, velocity = expected[f"{case}.x"], expected[f"{case}.velocity"]
    assert np.array_equal(x[0], observations[f"{case}.noise"])
    after = x - np.float32(1 / STEPS) * velocity
    np.testing.assert_allclose(x[1:], after[:-1], rtol=0, atol=1e-6)
    np.testing.assert_allclose(expected[f"{case}.actions_normalised"], after[-1, :, :ACTION_DIM], rtol=0, atol=1e-6)
    np.testing.assert_allclose(expected[f"{case}.time"], 1 - np.arange(STEPS) / STEPS, rtol=0, atol=1e-6)


@each_case
def test_actions_follow_from_the_saved_statistics(fixture, case):
    expected, stats = fixture.expected(), fixture.statistics("policy_postprocessor.json")
    normalised = expected[f"{case}.actions_normalised"]
    if fixture is PI05:
        low, high = stats["action.q01"], stats["action.q99"]
        actions = (normalised + 1) / 2 * (high - low) + low
    else:
        actions = normalised * stats["action.std"] + stats["action.mean"]
    np.testing.assert_allclose(expected[f"{case}.actions"], actions, rtol=0, atol=1e-5)


@pytest.mark.parametrize("fixture", [fixture for fixture in SETS if fixture.relative], ids=lambda fixture: fixture.name)
def test_relative_actions_add_the_raw_state_but_for_the_gripper(fixture):
    expected, observations = fixture.expected(), fixture.observations()
    for case in fixture.cases:
        moved = expected[f"{case}.actions_relative"] - expected[f"{case}.actions"]
        gripper_stays = observations[f"{case}.{STATE}"][:ACTION_DIM] * np.array([1, 1, 1, 1, 1, 1, 0])
        np.testing.assert_allclose(moved, np.broadcast_to(gripper_stays, moved.shape), rtol=0, atol=1e-5)


@each_case
def test_small_tokenizer_gives_the_stored_ids(fixture, case):
    tokenizer = Tokenizer.from_file(str(fixture.checkpoint / "tokenizer.json"))
    assert tokenizer.get_vocab_size() <= 1000
    assert tokenizer.encode(fixture.facts(case)["prompt"]).ids == fixture.expected()[f"{case}.tokens"].tolist()


@pytest.mark.parametrize("case", PI05.cases)
def test_prompt_holds_the_bins_of_the_normalised_state(case):
    stats, facts = PI05.statistics("policy_preprocessor.json"), PI05.facts(case)
    low, high = stats[f"{STATE}.q01"], stats[f"{STATE}.q99"]
    normalised = 2 * (PI05.observations()[f"{case}.{STATE}"] - low) / (high - low) - 1
    bins = np.digitize(normalised, np.linspace(-1, 1, 257)[:-1]) - 1
    cleaned = facts["task"].strip().replace("_", " ").replace("\n", " ")
    assert facts["prompt"] == f"Task: {cleaned}, State: {' '.join(map(str, bins))};\nAction: "


@pytest.mark.parametrize("fixture", (PI0, SMOLVLA), ids=lambda fixture: fixture.name)
def test_prompt_is_the_task_as_it_is_with_one_newline_more_only_where_none_ends_it(fixture):
    tasks = {case: fixture.facts(case)["task"] for case in fixture.cases}
    assert not tasks["pick"].endswith("\n") and tasks["edge"].endswith("\n")
    assert fixture.facts("pick")["prompt"] == tasks["pick"] + "\n"
    assert fixture.facts("edge")["prompt"] == tasks["edge"]


@each_case
def test_serving_precision_errs_by_half_to_one_and_a_half_percent(fixture, case):
    expected = fixture.expected()
    wanted, found = expected[f"{case}.velocity"], expected[f"{case}.velocity_bf16"]
    norms = np.linalg.norm((found - wanted).reshape(STEPS, -1), axis=1)
    errors = norms / np.linalg.norm(wanted.reshape(STEPS, -1), axis=1)
    np.testing.assert_allclose(fixture.facts(case)["bf16_error"], errors, rtol=1e-2)
    low, high = fixture.bf16
    assert errors.min() > low and errors.max() < high


@each_set
def test_camera_that_never_sends_changes_nothing(fixture):
    expected = fixture.expected()
    np.testing.assert_allclose(expected["empty_camera.velocity"], expected["pick.velocity"], rtol=0, atol=3e-6)


@each_set
def test_checkpoint_has_the_layout_that_lerobot_saves(fixture):
    config = json.loads((fixture.checkpoint / "config.json").read_text())
    assert (config["type"], list(config["input_features"])) == (fixture.name, [TOP, WRIST, STATE])
    pieces = Tokenizer.from_file(str(fixture.checkpoint / "tokenizer.json")).get_vocab_size()
    with safe_open(fixture.checkpoint / "model.safetensors", "np") as file:
        weights = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        assert len(weights) == fixture.tensors
        assert all(name.startswith("model.") for name in weights)
        assert {entry.get_dtype() for entry in weights.values()} == fixture.stored
        for name, width in fixture.tables.items():
            assert weights[f"{name}.weight"].get_shape() == [pieces, width]
        wide = [name for name, entry in weights.items() if entry.get_dtype() == "F32"]
        assert all(file.get_tensor(name).std() > 0 for name in wide)


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
