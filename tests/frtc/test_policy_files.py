"""Policies read from checkpoint folders: lerobot's own files and results, openpi folders made here, and refusals."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from frtc.errors import FrtcError, UsageError
from frtc.models.policies import PI05
from frtc.policy_files import PolicyFiles, Sizes, read_policy_files
from frtc.policy_options import PolicyOptions, action_mask, mask_text
from frtc.runtime.policy import Absolute, Images, Policy, Prompt, Slice, Tokens
from frtc.runtime.policy_steps import PolicySteps
from frtc.runtime.prompt import prompt_text
from frtc.runtime.tokenize import TokenStep

FIXTURES = Path(__file__).parents[1] / "fixtures"
LEROBOT = FIXTURES / "pi05_lerobot"
TOKENIZER = LEROBOT / "checkpoint" / "tokenizer.json"
GEMMA = Path(os.environ.get("FRTC_GEMMA_TOKENIZER", ".cache/gemma-tokenizer/tokenizer.json"))
SIZES = Sizes(image=112, budget=72, vocab=1024, horizon=10, action_width=32)
TOP, WRIST = "observation.images.top", "observation.images.left_wrist"
CASES = json.loads((LEROBOT / "fixture.json").read_text())["cases"]
RAW, EXPECTED = load_file(LEROBOT / "observations.safetensors"), load_file(LEROBOT / "expected.safetensors")


def observation(case: str) -> dict[str, Any]:
    cameras = {key.rpartition(".")[2]: RAW[f"{case}.{key}"] for key in CASES[case]["cameras"]}
    return {
        **cameras,
        "state": RAW[f"{case}.observation.state"],
        "noise": RAW[f"{case}.noise"],
        "prompt": CASES[case]["task"],
    }


def lerobot_steps(case: str, side: str = "checkpoint") -> PolicySteps:
    cameras = tuple((key.rpartition(".")[2], key) for key in CASES[case]["cameras"])
    files = read_policy_files(LEROBOT / side, PI05, PolicyOptions(camera=cameras, tokenizer=TOKENIZER))
    return PolicySteps(Policy.from_json(json.loads(json.dumps(files.policy(SIZES).to_json()))), files.tokenizer)


@pytest.mark.parametrize("case", CASES)
def test_lerobot_tokens_and_actions(case: str) -> None:
    """From raw observations to exactly lerobot's tokens; from its normalised actions to its robot units, to the bit."""
    for side, want in (("checkpoint", "actions"), ("relative", "actions_relative")):
        steps = lerobot_steps(case, side)
        prepared = steps.prepare(observation(case))
        n, tokens = int(prepared.inputs["n"]), EXPECTED[f"{case}.tokens"]
        assert np.array_equal(prepared.inputs["tokens"][:n], tokens) and not prepared.inputs["tokens"][n:].any()
        assert np.array_equal(prepared.inputs["noise"], EXPECTED[f"{case}.x"][0])
        output = np.zeros((10, 32), np.float32)
        output[:, :7] = EXPECTED[f"{case}.actions_normalised"]
        assert np.array_equal(steps.finish(output, prepared), EXPECTED[f"{case}.{want}"])


def test_lerobot_pixels() -> None:
    images = lerobot_steps("pick").prepare(observation("pick")).inputs["images"]
    assert images.shape == (2, 112, 112, 3) and images.dtype == np.float32
    rows = images.transpose(0, 3, 1, 2)[:, :, ::8] * 2 - 1  # as the vision stage does
    np.testing.assert_allclose(rows, EXPECTED["pick.pixels"], rtol=0, atol=1e-6)


def test_lerobot_files_prove_everything() -> None:
    files = read_policy_files(LEROBOT / "checkpoint", PI05, PolicyOptions(strict=True))
    assert files.origin == "lerobot-0.6" and not files.assumed
    assert [(c.role, c.source) for c in files.cameras] == [("top", TOP), ("left_wrist", WRIST)]
    sources = {fact.name: (fact.value, fact.source) for fact in files.facts}
    assert sources["cameras"] == (["top", "left_wrist"], "config.json: input_features")
    assert sources["actions"] == ("absolute", "policy_preprocessor.json, policy_postprocessor.json")
    assert sources["state_in_prompt"] == (True, f"policy_preprocessor.json: {PI05.lerobot_state_step}")
    relative = read_policy_files(LEROBOT / "relative", PI05, PolicyOptions(tokenizer=TOKENIZER)).policy(SIZES)
    assert relative.find(Absolute) == Absolute((True,) * 6 + (False,))


@pytest.mark.parametrize(
    ("names", "kept"),
    [([f"j{i}" for i in range(7)], True), (["j0"], False), ([*"abcdef", "a\x1b[2J"], False), ([*"abcdef", ""], False),
     ([*"abcdef", 7], False), ("abcdefg", False), (None, False)],
)  # fmt: skip
def test_names_of_actions(names: Any, kept: bool, tmp_path: Path) -> None:
    """For reports: one for each, and such as a terminal prints as they stand; else none. A forged Plan is refused."""

    def named(pipeline: dict[str, Any]) -> None:
        step = next(s for s in pipeline["steps"] if s["registry_name"] == "relative_actions_processor")
        step["config"]["action_names"] = names

    folder = changed_lerobot(tmp_path, edit_json("policy_preprocessor.json", named))
    policy = read_policy_files(folder, PI05, PolicyOptions(tokenizer=TOKENIZER)).policy(SIZES)
    cut = policy.find(Slice)
    assert cut is not None and cut.names == (tuple(names) if kept else ())
    assert Policy.from_json(json.loads(json.dumps(policy.to_json()))) == policy
    if not kept and isinstance(names, list) and isinstance(names[-1], str):
        data = policy.to_json()
        next(step for step in data["finish"] if step["step"] == "slice")["names"] = names
        with pytest.raises(FrtcError, match=r"slice\.names") as caught:
            Policy.from_json(data)
        assert caught.value.code == "policy.value"


def test_lerobot_empty_cameras_are_left_out() -> None:
    files = read_policy_files(LEROBOT / "empty_camera", PI05, PolicyOptions(tokenizer=TOKENIZER))
    assert [c.source for c in files.cameras] == [TOP, WRIST]


def changed_lerobot(folder: Path, edit: Callable[[Path], object]) -> Path:
    shutil.copytree(LEROBOT / "checkpoint", folder / "ck", ignore=shutil.ignore_patterns("model.safetensors"))
    edit(folder / "ck")
    return folder / "ck"


def edit_json(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        data = json.loads((folder / name).read_text())
        change(data)
        (folder / name).write_text(json.dumps(data))

    return edit


def test_lerobot_04_assumes_its_version_and_pads_the_state(tmp_path: Path) -> None:
    folder = changed_lerobot(tmp_path, edit_json("config.json", lambda c: c.pop("use_relative_actions")))
    files = read_policy_files(folder, PI05, PolicyOptions())
    assert [(a.field, a.value, a.option) for a in files.assumed] == [
        ("origin", "lerobot-0.4", "--origin lerobot-0.4 or lerobot-0.6")
    ]
    policy = files.policy(SIZES)
    assert policy.find(Images).border == -1.0 and policy.find(Prompt).state_numbers == 32
    with pytest.raises(UsageError, match="--strict, and 1 values are assumed") as caught:
        read_policy_files(folder, PI05, PolicyOptions(strict=True))
    assert caught.value.code == "policy.assumed"
    confirmed = read_policy_files(folder, PI05, PolicyOptions(origin="lerobot-0.4", strict=True)).policy(SIZES)
    assert confirmed.prepare == policy.prepare and not confirmed.assumed


def test_lerobot_prompt_without_the_state(tmp_path: Path) -> None:
    """What the pipeline does decides: no cleaning without the state step, a newline only by the newline step."""
    folder = changed_lerobot(tmp_path, pre(lambda steps: steps.pop(4)))
    assert read_policy_files(folder, PI05, PolicyOptions()).told.prompt == Prompt("none", "{prompt}")
    pre(lambda steps: steps.insert(0, {"registry_name": "pi0_new_line_processor"}))(folder)
    assert read_policy_files(folder, PI05, PolicyOptions()).told.prompt == Prompt("newline", "{prompt}")
    assert read_policy_files(folder, PI05, PolicyOptions(state_in_prompt=False)).told.prompt == Prompt(
        "spaces", PI05.plain
    )


def test_renamed_cameras_take_the_robots_names(tmp_path: Path) -> None:
    rename = {"observation.images.front": TOP}
    edit = edit_json("policy_preprocessor.json", lambda p: p["steps"][0]["config"].update(rename_map=rename))
    assert [c.role for c in read_policy_files(changed_lerobot(tmp_path, edit), PI05, PolicyOptions()).cameras] == [
        "front",
        "left_wrist",
    ]


STATS = {"mean": [0.1, 0.2, 0.3], "std": [1.0, 1.0, 2.0], "q01": [-1.0, -2.0, -3.0], "q99": [1.0, 2.0, 3.0]}


def openpi(folder: Path, stats: dict[str, Any] | None = None, assets: tuple[str, ...] = ("droid",)) -> Path:
    shutil.copy(TOKENIZER, folder / "tokenizer.json")
    (folder / "config.json").write_text(json.dumps({"action_dim": 32, "action_horizon": 10}))
    for asset in assets:
        (folder / "assets" / asset).mkdir(parents=True)
        found = {"norm_stats": {"state": STATS, "actions": STATS} | (stats or {})}
        (folder / "assets" / asset / "norm_stats.json").write_text(json.dumps(found))
    return folder


def test_openpi_bare(tmp_path: Path) -> None:
    """Nothing but the folder: what changes motion is assumed and named, with the option that confirms it."""
    files = read_policy_files(openpi(tmp_path), PI05, PolicyOptions())
    assert {a.field: (a.value, a.option) for a in files.assumed} == {
        "cameras": ("base, left_wrist, right_wrist", "--robot NAME, --views N, or --camera ROLE=KEY for each"),
        "actions": ("absolute", "--robot NAME, or --actions absolute, or delta[:MASK]"),
        "state_in_prompt": ("True", "--state-in-prompt yes or no"),
    }
    policy = files.policy(SIZES)
    assert policy.assumed == files.assumed and policy.find(Absolute) is None
    assert policy.find(Images).resize == "pil_bilinear" and policy.device_inputs()["images"] == ("u8", (3, 112, 112, 3))
    assert policy.find(Prompt) == Prompt("spaces", "Task: {prompt}, State: {state};\nAction: ", 3)
    assert policy.find(Tokens).bos == 2 and policy.find(Tokens).pad == 0
    assert str(tmp_path) not in json.dumps(policy.to_json()), "the Plan's program holds no path"


def test_openpi_with_everything_said(tmp_path: Path) -> None:
    options = PolicyOptions(views=2, actions="delta:2,-1", state_in_prompt=False, strict=True, pixel="bgr8")
    policy = read_policy_files(openpi(tmp_path), PI05, options).policy(SIZES)
    assert not policy.assumed and policy.find(Absolute) == Absolute((True, True, False))
    assert [c.role for c in policy.find(Images).cameras] == ["base", "left_wrist"]
    assert policy.find(Prompt) == Prompt("spaces", "{prompt}\n", 0)
    named = PolicyOptions(camera=(("hand", "right_wrist_0_rgb"), ("front", "base_0_rgb")))
    cameras = read_policy_files(tmp_path, PI05, named).cameras
    assert [(c.role, c.source) for c in cameras] == [("front", "base_0_rgb"), ("hand", "right_wrist_0_rgb")], (
        "model order"
    )


def test_openpi_padded_statistics(tmp_path: Path) -> None:
    padded = {name: [*values, 0.0, 0.0] for name, values in STATS.items()}
    files = read_policy_files(openpi(tmp_path, {"state": padded}), PI05, PolicyOptions())
    assert files.told.state.dim == 3 and "state_dim" in [a.field for a in files.assumed]
    said = read_policy_files(tmp_path, PI05, PolicyOptions(state_dim=2))
    assert said.told.state.dim == 2 and "state_dim" not in [a.field for a in said.assumed]
    with pytest.raises(FrtcError) as caught:
        read_policy_files(tmp_path, PI05, PolicyOptions(state_dim=5))
    assert caught.value.code == "statistics.constant"


def test_constant_statistics_may_be_kept(tmp_path: Path) -> None:
    folder = openpi(tmp_path, {"state": {**STATS, "q99": [1.0, -2.0, 3.0]}})
    assert (
        read_policy_files(folder, PI05, PolicyOptions(constant_statistics=True)).told.state.norm.std_or_high[1] == -2.0
    )


CONSTANT = {**STATS, "q99": [1.0, -2.0, 3.0]}
BAD_OPENPI = [
    ({"state": None}, {}, "statistics.missing", "has no statistics of state"),
    ({"actions": {"mean": [0.0], "std": [1.0]}}, {}, "statistics.missing", "actions has no q01 and no q99"),
    ({"state": {**STATS, "q01": []}}, {}, "statistics.missing", "state has no q01"),
    ({"state": CONSTANT}, {}, "statistics.constant", "state never moved in 1 of 3 dimensions: [1]"),
    ({"state": {**STATS, "q99": [1.0, -9.0, 3.0]}}, {}, "statistics.value", "q99 of state is below q01 in dimension 1"),
    ({"state": {**STATS, "q99": [1.0, float("nan"), 3.0]}}, {}, "statistics.value", "state[1]: not a finite number"),
    ({"state": {**STATS, "q99": [1.0, 2.0]}}, {}, "statistics.value", "statistics of state have different lengths"),
    ({"state": {**STATS, "q99": [1.0, 10**400, 3.0]}}, {}, "statistics.value", "norm_stats.state.q99 is not a list"),
    ({"state": {**STATS, "q99": "high"}}, {}, "statistics.value", "norm_stats.state.q99 is not a list of numbers"),
    ({}, {"views": 4}, "policy.cameras", "--views 4, but the checkpoint has 3"),
    ({}, {"views": 0}, "policy.cameras", "--views 0, but the checkpoint has 3"),
    ({}, {"camera": (("a", "base_0_rgb"),), "views": 2}, "policy.cameras", "--views 2, but 1 cameras are given"),
    ({}, {"camera": (("a", "base_1_rgb"),)}, "policy.cameras", "nearest  base_0_rgb"),
    ({}, {"camera": (("a", "base_0_rgb"), ("a", "left_wrist_0_rgb"))}, "policy.cameras", "a role or a key twice"),
    ({}, {"actions": "relative"}, "policy.actions", "--actions relative is not understood"),
    ({}, {"actions": "delta:6,x"}, "policy.actions", "absolute, delta, delta:MASK"),
    ({}, {"actions": "delta:3,-1"}, "policy.actions", "4 actions are relative to a state of 3 numbers"),
    ({}, {"origin": "lerobot-0.6"}, "policy.origin", "but the files are openpi's"),
    ({}, {"origin": "openvla"}, "policy.origin", "choices  openpi, lerobot-0.4, lerobot-0.6"),
    ({}, {"asset": "trossen"}, "policy.asset", "choices  droid"),
    ({}, {"state_dim": 9}, "policy.dims", "state_dim 9, but the statistics have 3 dimensions"),
    ({}, {"tokenizer": Path("absent.json")}, "tokenizer.missing", "looked for  absent.json"),
]  # fmt: skip


@pytest.mark.parametrize(("stats", "options", "code", "message"), BAD_OPENPI)
def test_bad_openpi(tmp_path: Path, stats: dict[str, Any], options: dict[str, Any], code: str, message: str) -> None:
    with pytest.raises(FrtcError) as caught:
        read_policy_files(openpi(tmp_path, stats), PI05, PolicyOptions(**options))
    assert caught.value.code == code and message in str(caught.value)


def test_several_assets_are_a_required_choice(tmp_path: Path) -> None:
    folder = openpi(tmp_path, assets=("trossen", "physical-intelligence/libero"))
    with pytest.raises(UsageError, match="holds 2 statistics assets") as caught:
        read_policy_files(folder, PI05, PolicyOptions())
    assert caught.value.code == "policy.asset" and "physical-intelligence/libero, trossen" in str(caught.value)
    asset = read_policy_files(folder, PI05, PolicyOptions(asset="physical-intelligence/libero"))
    assert ("asset", "physical-intelligence/libero") in [(fact.name, fact.value) for fact in asset.facts]


def test_no_assets_lists_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(FrtcError, match="no normalisation statistics") as caught:
        read_policy_files(openpi(tmp_path, assets=()), PI05, PolicyOptions())
    assert caught.value.code == "statistics.missing" and "<asset>/norm_stats.json" in str(caught.value)


def test_no_tokenizer_lists_where_it_looked(tmp_path: Path) -> None:
    (openpi(tmp_path) / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match="no tokenizer") as caught:
        read_policy_files(tmp_path, PI05, PolicyOptions())
    assert caught.value.code == "tokenizer.missing" and str(tmp_path / "tokenizer.json") in str(caught.value)


PRE, STATE = "policy_preprocessor.json", "policy_preprocessor_step_3_normalizer_processor.safetensors"
Q01, Q99 = "observation.state.q01", "observation.state.q99"


def state_file(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / STATE)
        change(tensors)
        save_file(tensors, folder / STATE)

    return edit


def config(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return edit_json("config.json", change)


def pre(change: Callable[[list[dict[str, Any]]], object]) -> Callable[[Path], None]:
    return edit_json(PRE, lambda data: change(data["steps"]))


def norm_map(**modes: str) -> Callable[[Path], None]:
    return pre(lambda steps: steps[3]["config"]["norm_map"].update(modes))


BAD_LEROBOT = [
    (lambda f: (f / PRE).unlink(), "statistics.missing", f"the checkpoint has no {PRE}"),
    (lambda f: (f / STATE).unlink(), "statistics.missing", "the statistics file of normalizer_processor is not"),
    (lambda f: (f / STATE).write_bytes(b"\x80\x04"), "checkpoint.format", "is not a safetensors file"),
    (pre(lambda s: s[3].pop("state_file")), "statistics.missing", "names no statistics file"),
    (pre(lambda s: s[3].update(state_file="../x")), "statistics.missing", "names no statistics file"),
    (pre(lambda s: s.pop(3)), "statistics.missing", f"{PRE} has no normalizer_processor"),
    (pre(lambda s: s.append({"registry_name": "blur"})), "policy.pipeline", "a step of unknown meaning: blur"),
    (pre(lambda s: s.append(s[3])), "policy.pipeline", "has the step normalizer_processor twice"),
    (pre(lambda s: s.append("blur")), "policy.pipeline", "has no list of steps"),
    (pre(lambda s: s[2]["config"].update(enabled=True)), "policy.pipeline", "only one of the pipelines"),
    (pre(lambda s: s[5]["config"].update(padding_side="left")), "policy.unsupported", "pads the prompt on the left"),
    (norm_map(STATE="COS"), "policy.unsupported", "STATE is normalised by COS"),
    (norm_map(VISUAL="MEAN_STD"), "policy.unsupported", "normalises camera pictures"),
    (
        state_file(lambda t: [t.pop(k) for k in list(t) if "state" in k]),
        "statistics.missing",
        "no statistics of observ",
    ),
    (state_file(lambda t: t.clear()), "statistics.missing", "an empty file"),
    (state_file(lambda t: t.pop(Q99)), "statistics.missing", "observation.state has no q99"),
    (state_file(lambda t: t[Q99].__setitem__(2, t[Q01][2])), "statistics.constant", "in 1 of 8 dimensions: [2]"),
    (state_file(lambda t: t.update({Q01: np.zeros(32, np.float32)})), "statistics.value", "has 8 dimensions"),
    (state_file(lambda t: t[Q01].fill(np.nan)), "checkpoint.nonfinite", "holds NaN"),
    (config(lambda c: c.update(input_features={})), "policy.cameras", "no file says which cameras"),
    (config(lambda c: c.update(image_resolution=[224, 256])), "policy.features", "not a square"),
    (config(lambda c: c["output_features"].clear()), "policy.features", "how long action is"),
    (lambda f: (f / "config.json").write_text("{"), "checkpoint.json", "config.json is not JSON"),
]


@pytest.mark.parametrize(("edit", "code", "message"), BAD_LEROBOT)
def test_bad_lerobot(tmp_path: Path, edit: Callable[[Path], object], code: str, message: str) -> None:
    with pytest.raises(FrtcError) as caught:
        read_policy_files(changed_lerobot(tmp_path, edit), PI05, PolicyOptions())
    assert caught.value.code == code and message in str(caught.value)


BAD_OPTIONS = [
    ({"camera": (("base", "observation.images.wrist"),)}, "policy.cameras", f"nearest  {WRIST}"),
    ({"origin": "openpi"}, "policy.origin", "but the files are lerobot's"),
    ({"state_dim": 7}, "policy.dims", "state_dim 7, but config.json says 8"),
]


@pytest.mark.parametrize(("options", "code", "message"), BAD_OPTIONS)
def test_bad_options_for_lerobot(options: dict[str, Any], code: str, message: str) -> None:
    with pytest.raises(FrtcError) as caught:
        read_policy_files(LEROBOT / "checkpoint", PI05, PolicyOptions(**options))
    assert caught.value.code == code and message in str(caught.value)


BAD_SIZES = [
    (Sizes(224, 72, 1024, 10, 32), "policy.features", "pictures of 112 pixels, the model takes 224"),
    (Sizes(112, 72, 100, 10, 32), "tokenizer.vocab", "the model 100 embeddings"),
    (Sizes(112, 72, 1024, 10, 4), "statistics.value", "action of 7 dimensions does not fit"),
]


@pytest.mark.parametrize(("sizes", "code", "message"), BAD_SIZES)
def test_bad_sizes(sizes: Sizes, code: str, message: str) -> None:
    files: PolicyFiles = read_policy_files(LEROBOT / "checkpoint", PI05, PolicyOptions())
    with pytest.raises(FrtcError, match=message) as caught:
        files.policy(sizes)
    assert caught.value.code == code


def test_action_masks() -> None:
    for option in ("absolute", "delta:3", "delta:6,-1,6,-1", "delta:-2,1"):
        assert mask_text(action_mask(option, 14)) == option
    assert mask_text((False, False)) == "absolute"
    assert action_mask("absolute", 7) == () and action_mask("delta", 3) == (True,) * 3
    assert action_mask("delta:6,-1,1", 14) == (True,) * 6 + (False, True)


GEMMA_PROMPTS = json.loads((FIXTURES / "gemma_prompts.json").read_text())["prompts"]


def gemma_text(row: dict[str, Any]) -> str:
    shown = row["kind"] != "openpi_no_state"
    step = Prompt("spaces", PI05.with_state if shown else PI05.plain, len(row["state"]))
    return prompt_text(step, row["prompt"], np.array(row["state"], np.float32))


def test_prompts_are_written_as_the_origins_write_them() -> None:
    assert [gemma_text(row) for row in GEMMA_PROMPTS] == [row["text"] for row in GEMMA_PROMPTS]


@pytest.mark.skipif(not GEMMA.is_file(), reason="the whole Gemma tokenizer (36 MB) is not here")
def test_ids_under_the_whole_gemma_tokenizer() -> None:
    data = GEMMA.read_bytes()
    step = TokenStep(Tokens(200, 2, 0, 257152, hashlib.sha256(data).hexdigest()), data)
    for row in GEMMA_PROMPTS:
        ids = np.full(200, -1, np.int32)
        n = step.run(gemma_text(row), ids)
        assert ids[:n].tolist() == row["ids"], row["prompt"]
