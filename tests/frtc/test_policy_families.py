"""Pi0 and SmolVLA: their checkpoint folders give lerobot's own inputs and actions, and openpi's rules for Pi0."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tokenizers import Tokenizer, processors

from frtc.errors import FrtcError
from frtc.models.policies import PI0, PI05, SMOLVLA, PolicyFamily
from frtc.policy_files import Sizes, read_policy_files
from frtc.policy_options import PolicyOptions
from frtc.runtime.policy import Absolute, Images, Noise, Policy, Prompt, State, Tokens
from frtc.runtime.policy_steps import PolicySteps

FIXTURES = Path(__file__).parents[1] / "fixtures"
GEMMA_TOKENIZER = FIXTURES / "pi05_lerobot" / "checkpoint" / "tokenizer.json"


@dataclass(frozen=True)
class Case:
    family: PolicyFamily
    folder: str
    sizes: Sizes
    rows: int  # every so many rows of the pixels are in the fixture

    @property
    def path(self) -> Path:
        return FIXTURES / self.folder


PI0_CASE = Case(PI0, "pi0_lerobot", Sizes(112, 48, 1024, 10, 32, 32), 8)
SMOLVLA_CASE = Case(SMOLVLA, "smolvla_lerobot", Sizes(64, 48, 512, 10, 32, 32), 8)
BOTH = pytest.mark.parametrize("case", [PI0_CASE, SMOLVLA_CASE], ids=lambda case: case.family.name)
NAMES = pytest.mark.parametrize("name", ["pick", "edge"])


def steps_of(case: Case, side: str = "checkpoint") -> PolicySteps:
    options = PolicyOptions(tokenizer=case.path / "checkpoint" / "tokenizer.json")
    files = read_policy_files(case.path / side, case.family, options)
    return PolicySteps(Policy.from_json(json.loads(json.dumps(files.policy(case.sizes).to_json()))), files.tokenizer)


def observation(case: Case, name: str) -> dict[str, Any]:
    raw, told = load_file(case.path / "observations.safetensors"), json.loads((case.path / "fixture.json").read_text())
    cameras = {key.rpartition(".")[2]: raw[f"{name}.{key}"] for key in told["cases"][name]["cameras"]}
    text = {"prompt": told["cases"][name]["task"], "noise": raw[f"{name}.noise"]}
    return {**cameras, **text, "state": raw[f"{name}.observation.state"]}


def statistics(case: Case, feature: str) -> tuple[torch.Tensor, torch.Tensor]:
    (path,) = (case.path / "checkpoint").glob("policy_preprocessor_step_*_normalizer_processor.safetensors")
    tensors = load_file(path)
    return tuple(torch.from_numpy(tensors[f"{feature}.{name}"]) for name in ("mean", "std"))  # type: ignore[return-value]


@BOTH
@NAMES
def test_tokens_state_and_actions_are_lerobots(case: Case, name: str) -> None:
    """From raw observations to exactly lerobot's inputs; from its normalised actions to its robot units, to the bit."""
    expected, given = load_file(case.path / "expected.safetensors"), observation(case, name)
    steps = steps_of(case)
    prepared = steps.prepare(given)
    n, tokens = int(prepared.inputs["n"]), expected[f"{name}.tokens"]
    assert np.array_equal(prepared.inputs["tokens"][:n], tokens)
    assert (prepared.inputs["tokens"][n:] == steps.policy.find(Tokens).pad).all()
    mean, std = statistics(case, "observation.state")
    state = (torch.from_numpy(given["state"]) - mean) / (std + 1e-8)
    assert np.array_equal(prepared.inputs["state"], torch.nn.functional.pad(state, (0, 24)).numpy())
    assert prepared.inputs["state"][:8].any() and steps.policy.device_inputs()["state"] == ("f32", (32,))
    output = np.zeros((10, 32), np.float32)
    output[:, :7] = expected[f"{name}.actions_normalised"]
    assert np.array_equal(steps.finish(output, prepared), expected[f"{name}.actions"])


@BOTH
def test_pixels_are_lerobots(case: Case) -> None:
    images = steps_of(case).prepare(observation(case, "pick")).inputs["images"]
    rows = images.transpose(0, 3, 1, 2)[:, :, :: case.rows] * 2 - 1  # as the vision stage does
    np.testing.assert_allclose(rows, load_file(case.path / "expected.safetensors")["pick.pixels"], rtol=0, atol=1e-6)


@NAMES
def test_relative_actions_of_pi0_are_lerobots(name: str) -> None:
    steps = steps_of(PI0_CASE, "relative")
    assert steps.policy.find(Absolute) == Absolute((True,) * 6 + (False,))
    expected, prepared = load_file(PI0_CASE.path / "expected.safetensors"), steps.prepare(observation(PI0_CASE, name))
    output = np.zeros((10, 32), np.float32)
    output[:, :7] = expected[f"{name}.actions_normalised"]
    assert np.array_equal(steps.finish(output, prepared), expected[f"{name}.actions_relative"])


@BOTH
def test_lerobots_files_prove_everything(case: Case) -> None:
    files = read_policy_files(case.path / "checkpoint", case.family, PolicyOptions(strict=True))
    assert files.origin == "lerobot-0.6" and not files.assumed and files.told.prompt == Prompt("newline", "{prompt}")
    assert [c.role for c in files.cameras] == ["top", "left_wrist"]
    facts = {fact.name: fact.value for fact in files.facts}
    assert "state_in_prompt" not in facts, "there is nothing to say"
    at = "centred" if case is PI0_CASE else "at the bottom right"
    assert facts["pictures"] == f"torch_bilinear01, {at}, border 0"
    assert facts["text"] == "'{prompt}'; as given, ends with a newline"
    assert facts["normalisation"] == ["state lerobot_mean_std", "actions lerobot_mean_std"]
    empty = read_policy_files(
        case.path / "empty_camera",
        case.family,
        PolicyOptions(tokenizer=case.path / "checkpoint" / "tokenizer.json"),
    )
    assert empty.cameras == files.cameras


def test_smolvla_pads_left_and_top_and_its_prompt_has_no_bos() -> None:
    policy = steps_of(SMOLVLA_CASE).policy
    images, tokens = policy.find(Images), policy.find(Tokens)
    assert (images.resize, images.border, images.place) == ("torch_bilinear01", 0.0, "end")
    assert tokens.bos == -1 and tokens.pad == 2
    wide = np.full((16, 32, 3), 255, np.uint8)
    prepared = steps_of(SMOLVLA_CASE).prepare(observation(SMOLVLA_CASE, "pick") | {"top": wide})
    assert (prepared.inputs["images"][0, :32] == 0).all() and (prepared.inputs["images"][0, 32:] == 1).all()


def test_smolvla_is_the_same_in_every_lerobot_and_pi0_is_not() -> None:
    files = read_policy_files(SMOLVLA_CASE.path / "checkpoint", SMOLVLA, PolicyOptions(origin="lerobot-0.4"))
    assert files.policy(SMOLVLA_CASE.sizes).prepare == steps_of(SMOLVLA_CASE).policy.prepare
    old = read_policy_files(PI0_CASE.path / "checkpoint", PI0, PolicyOptions(origin="lerobot-0.4"))
    assert old.policy(PI0_CASE.sizes).find(Images).border == -1.0


def copied(case: Case, folder: Path, change: Callable[[Path], object]) -> Path:
    shutil.copytree(case.path / "checkpoint", folder / "ck", ignore=shutil.ignore_patterns("model.safetensors"))
    change(folder / "ck")
    return folder / "ck"


def config(**fields: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def bos_tokenizer(folder: Path) -> None:
    """A tokenizer that begins each text with a token."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    piece = tokenizer.id_to_token(1)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{piece} $A", special_tokens=[(piece, 1)])
    tokenizer.save(str(folder / "tokenizer.json"))


def other_tokenizer(folder: Path) -> None:
    shutil.copy(SMOLVLA_CASE.path / "checkpoint" / "tokenizer.json", folder)


def bare(folder: Path) -> None:
    for path in folder.glob("*.json"):
        if path.name != "tokenizer.json":
            path.unlink()


REFUSED = [
    (SMOLVLA_CASE, config(adapt_to_pi_aloha=True), {}, "policy.unsupported", "adapt_to_pi_aloha is True"),
    (SMOLVLA_CASE, config(use_delta_joint_actions_aloha=True), {}, "policy.unsupported", "use_delta_joint_actions"),
    (PI0_CASE, config(adapt_to_pi_aloha=True), {}, "policy.unsupported", "adapt_to_pi_aloha is True"),
    (SMOLVLA_CASE, config(resize_imgs_with_padding=None), {}, "policy.unsupported", "pictures of any size"),
    (SMOLVLA_CASE, config(resize_imgs_with_padding=[64, 32]), {}, "policy.features", "is not a square"),
    (SMOLVLA_CASE, config(resize_imgs_with_padding=[96, 96]), {}, "policy.features", "pictures of 96 pixels"),
    (SMOLVLA_CASE, bos_tokenizer, {}, "tokenizer.vocab", "adds 1 tokens of its own"),
    (SMOLVLA_CASE, bare, {}, "policy.origin", "smolvla is lerobot's, its files are not"),
    (SMOLVLA_CASE, config(), {"origin": "openpi"}, "policy.origin", "choices  lerobot-0.4, lerobot-0.6"),
    (SMOLVLA_CASE, config(), {"state_in_prompt": True}, "policy.prompt", "smolvla takes the state as numbers"),
    (PI0_CASE, config(), {"state_in_prompt": True}, "policy.prompt", "pi0 takes the state as numbers"),
    (PI0_CASE, config(), {"robot": "aloha"}, "policy.robot", "openpi's declaration, but the files are lerobot's"),
    (PI0_CASE, config(input_features={}), {}, "policy.cameras", "no file says which cameras"),
    (SMOLVLA_CASE, config(input_features={}), {}, "policy.cameras", "no file says which cameras"),
    (PI0_CASE, other_tokenizer, {}, "tokenizer.vocab", "the tokenizer has no piece <bos> and no <pad>"),
    (SMOLVLA_CASE, lambda f: (f / "tokenizer.json").unlink(), {}, "tokenizer.missing", "SmolVLM2-500M-Video-Instruct"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "edit", "options", "code", "message"), REFUSED)
def test_refused(
    tmp_path: Path,
    case: Case,
    edit: Callable[[Path], object],
    options: dict[str, Any],
    code: str,
    message: str,
) -> None:
    with pytest.raises(FrtcError) as caught:
        read_policy_files(copied(case, tmp_path, edit), case.family, PolicyOptions(**options)).policy(case.sizes)
    assert caught.value.code == code and message in str(caught.value)


def test_the_tokenizers_files_say_what_pads(tmp_path: Path) -> None:
    def pad_of(folder: Path) -> int:
        return read_policy_files(folder, SMOLVLA, PolicyOptions()).policy(SMOLVLA_CASE.sizes).find(Tokens).pad

    folder = copied(SMOLVLA_CASE, tmp_path, config())
    assert pad_of(folder) == 2, "the family's, as neither file says"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding(pad_id=0, pad_token=tokenizer.id_to_token(0))
    tokenizer.save(str(folder / "tokenizer.json"))
    assert pad_of(folder) == 0
    for said in (tokenizer.id_to_token(1), {"content": tokenizer.id_to_token(1), "lstrip": False}):
        (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": said}))
        assert pad_of(folder) == 1
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<nowhere>"}))
    with pytest.raises(FrtcError, match="has no piece <nowhere>"):
        pad_of(folder)


def test_a_module_of_another_form_is_refused() -> None:
    for case, width in ((PI0_CASE, 0), (replace(PI0_CASE, family=PI05, folder="pi05_lerobot"), 32)):
        files = read_policy_files(case.path / "checkpoint", case.family, PolicyOptions())
        with pytest.raises(FrtcError, match="its module has another form"):
            files.policy(replace(case.sizes, budget=72, state_width=width))
    files = read_policy_files(PI0_CASE.path / "checkpoint", PI0, PolicyOptions())
    with pytest.raises(FrtcError, match="state of 8 dimensions does not fit into the model's width 6"):
        files.policy(replace(PI0_CASE.sizes, state_width=6))
    assert files.policy(replace(PI0_CASE.sizes, state_width=16)).device_inputs()["state"] == ("f32", (16,))


STATS = {"mean": [0.1, -0.2, 0.3], "std": [1.0, 0.5, 2.0], "q01": [-1.0, -2.0, -3.0], "q99": [1.0, 2.0, 3.0]}


def openpi(folder: Path) -> Path:
    shutil.copy(GEMMA_TOKENIZER, folder / "tokenizer.json")
    (folder / "assets" / "lab").mkdir(parents=True)
    stats = {"norm_stats": {"state": STATS, "actions": STATS}}
    (folder / "assets" / "lab" / "norm_stats.json").write_text(json.dumps(stats))
    return folder


def test_pi0_of_openpi(tmp_path: Path) -> None:
    """Mean and deviation in float64, cleaned text and one newline, the state as numbers; nothing asked about it."""
    files = read_policy_files(openpi(tmp_path), PI0, PolicyOptions(views=1))
    assert [a.field for a in files.assumed] == ["actions"]
    policy = files.policy(replace(PI0_CASE.sizes, image=28, horizon=2))
    assert policy.find(Prompt) == Prompt("spaces", "{prompt}\n") and policy.find(Noise) == Noise(2, 32)
    assert policy.find(State).width == 32 and policy.find(Images).resize == "pil_bilinear"
    steps, state = PolicySteps(policy, files.tokenizer), np.array([0.5, -0.25, 1.0], np.float32)
    given = {"base": np.zeros((28, 28, 3), np.uint8), "state": state, "prompt": " put_the\nred cup "}
    prepared = steps.prepare(given)
    want = [np.float32((float(x) - m) / (s + 1e-6)) for x, m, s in zip(state, STATS["mean"], STATS["std"], strict=True)]
    assert prepared.inputs["state"].tolist() == [*map(float, want), *[0.0] * 29]
    tokenizer = Tokenizer.from_file(str(GEMMA_TOKENIZER))
    ids = [tokenizer.token_to_id("<bos>"), *tokenizer.encode("put the red cup\n", add_special_tokens=False).ids]
    assert prepared.inputs["tokens"].tolist() == ids + [0] * (48 - len(ids)) and prepared.inputs["n"] == len(ids)
    output = np.ones((2, 32), np.float32)
    want = [np.float32(1.0 * (s + 1e-6) + m) for m, s in zip(STATS["mean"], STATS["std"], strict=True)]
    assert steps.finish(output, prepared).tolist() == [list(map(float, want))] * 2


def test_pi0_says_no_to_its_state_in_the_prompt(tmp_path: Path) -> None:
    assert read_policy_files(openpi(tmp_path), PI0, PolicyOptions(state_in_prompt=False)).told.prompt.state_numbers == 0
    with pytest.raises(FrtcError, match="pi0 takes the state as numbers") as caught:
        read_policy_files(tmp_path, PI0, PolicyOptions(state_in_prompt=True))
    assert caught.value.code == "policy.prompt"
