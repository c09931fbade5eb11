"""The policy record (JSON both ways, refusals) and its interpreter on a tiny policy."""

from __future__ import annotations

import copy
import ctypes
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from frtc.errors import FrtcError
from frtc.runtime.noise import normal
from frtc.runtime.policy import (
    Absolute,
    Assumption,
    Camera,
    Images,
    Noise,
    Norm,
    Policy,
    Prompt,
    Slice,
    State,
    Tokens,
    Unnormalise,
)  # fmt: skip
from frtc.runtime.policy_steps import PolicySteps
from frtc.runtime.prompt import PromptStep, bins, prompt_text
from frtc.runtime.steps_vector import Normaliser, StateStep
from frtc.runtime.tokenize import TokenStep


def tokenizer_bytes(cut: bool = False) -> bytes:
    """One token per character, and a file that would cut and pad if it were let."""
    pieces = ["<pad>", "<eos>", "<bos>", *map(chr, range(32, 127)), "\n"]
    made = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<eos>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if cut:
        made.enable_truncation(5)
        made.enable_padding(length=50, pad_id=7)
    return bytes(made.to_str(), "utf-8")


TOKENIZER = tokenizer_bytes(cut=True)
RANGE = Norm("openpi_range", (-1.0, 0.0, 2.0), (1.0, 4.0, 3.0), 1e-6)
POLICY = Policy(
    prepare=(
        Images(
            (Camera("base", "base_0_rgb"), Camera("wrist", "left_wrist_0_rgb", "chw", "bgr8")), 16, "pil_bilinear", 0.0
        ),
        State(3, RANGE, width=8),
        Prompt("spaces", "Task: {prompt}, State: {state};\nAction: ", 3),
        Tokens(64, 2, 0, 128, hashlib.sha256(TOKENIZER).hexdigest()),
        Noise(5, 8),
    ),
    finish=(Slice(4, 3), Unnormalise(RANGE), Absolute((True, False, True))),
    assumed=(Assumption("actions", "absolute", "no file says", "--actions"),),
)
STATE = np.array([0.0, 4.0, 2.25], np.float32)
OBSERVATION = {"base": np.full((20, 30, 3), 9, np.uint8), "wrist": np.full((3, 8, 8), 200, np.uint8), "state": STATE,
               "prompt": " pick_up\nit "}  # fmt: skip


def text_of(tokens: np.ndarray) -> str:
    tokenizer = Tokenizer.from_buffer(TOKENIZER)
    return "".join(tokenizer.id_to_token(int(i)) for i in tokens)


def test_json_round_trip() -> None:
    text = json.dumps(POLICY.to_json())
    assert Policy.from_json(json.loads(text)) == POLICY
    assert json.dumps(Policy.from_json(json.loads(text)).to_json()) == text


def edited(edit: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    data = json.loads(json.dumps(POLICY.to_json()))
    edit(data)
    return data


REFUSED = [
    (lambda d: d.update(schema="frtc.policy/2"), "policy.version", "'frtc.policy/2'"),
    (lambda d: d.update(later=1), "policy.field", "unknown  later"),
    (lambda d: d.pop("assumed"), "policy.field", "missing  assumed"),
    (lambda d: d["prepare"][0].update(step="image"), "policy.step", "nearest  images"),
    (lambda d: d["prepare"][1].update(clip=True), "policy.field", "prepare[1].state does not have the fields"),
    (lambda d: d["prepare"][4].update(horizon=True), "policy.field", "prepare[4].noise.horizon has no valid value"),
    (lambda d: d["prepare"][4].update(horizon=10**9), "policy.value", "noise 1000000000 is not in 1..4096"),
    (lambda d: d["prepare"][0].update(resize="nearest"), "policy.field", "torch_bilinear or torch_bilinear01"),
    (lambda d: d["prepare"][0].update(border=300), "policy.value", "border 300.0 is not a byte"),
    (lambda d: d["prepare"][0]["cameras"][1].update(role="base"), "policy.value", "camera roles ['base', 'base']"),
    (lambda d: d["prepare"][0]["cameras"][1].update(role="state"), "policy.value", "apart from state, prompt, noise"),
    (lambda d: d["prepare"][0]["cameras"][1].update(role="a\nb"), "policy.value", "16 different printable names"),
    (lambda d: d["prepare"][1]["norm"].update(mean_or_low=[1, 2]), "policy.value", "3 dims, its statistics 2 and 3"),
    (lambda d: d["prepare"][1]["norm"].update(mean_or_low=[1, 2, float("nan")]), "policy.field", "a finite number"),
    (lambda d: d["prepare"].reverse(), "policy.value", "in this order"),
    (lambda d: d["prepare"].pop(1), "policy.value", "numbers in the prompt do not hold the state"),
    (lambda d: d["prepare"][2].update(template="hi"), "policy.value", "does not hold {prompt} once"),
    (lambda d: d["prepare"][3].update(tokenizer="no"), "policy.value", "no SHA-256"),
    (lambda d: d["prepare"][3].update(pad=128), "policy.value", "not below the vocabulary"),
    (lambda d: d["finish"][0].update(dim=9), "policy.value", "larger than noise"),
    (lambda d: d["finish"][2].update(mask=[1, 0, 1]), "policy.field", "mask[0] has no valid value"),
    (lambda d: d["finish"][2].update(mask=[True] * 4), "policy.value", "4 absolute dims"),
    (lambda d: d["finish"].pop(0), "policy.value", "finish does not begin with slice"),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "code", "message"), REFUSED)
def test_refused_json(edit: Callable[[dict[str, Any]], object], code: str, message: str) -> None:
    with pytest.raises(FrtcError) as caught:
        Policy.from_json(edited(edit))
    assert caught.value.code == code and message in str(caught.value)


def mutants(value: Any) -> list[Any]:
    return [None, -1, 2**70, 0.5, float("inf"), "", "x" * 300, [], {}, [[]], True, {"step": []}, [value], -(2**63)]


def paths(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here, *(p for key, item in items for p in paths(item, (*here, key)))]


def test_mutated_json_never_escapes_as_another_exception() -> None:
    original, refused = POLICY.to_json(), 0
    original = json.loads(json.dumps(original))
    for path in paths(original)[1:]:
        for mutant in mutants(path):
            data = copy.deepcopy(original)
            owner = data
            for key in path[:-1]:
                owner = owner[key]
            owner[path[-1]] = mutant
            try:
                Policy.from_json(data).device_inputs()
            except FrtcError:
                refused += 1
    assert refused > 1000
    for odd in (None, [], "x", 3, {"schema": ["frtc.policy/1"]}):
        with pytest.raises(FrtcError):
            Policy.from_json(odd)


def test_prepare_and_finish() -> None:
    steps = PolicySteps(POLICY, TOKENIZER, seed=11)
    prepared = steps.prepare(OBSERVATION)
    inputs = {name: (array.dtype, array.shape) for name, array in prepared.inputs.items()}
    want = {"images": ("u1", (2, 16, 16, 3)), "state": ("f4", (8,)), "tokens": ("i4", (64,)), "n": ("i4", ()),
            "noise": ("f4", (5, 8))}  # fmt: skip
    assert inputs == {name: (np.dtype(dtype), shape) for name, (dtype, shape) in want.items()}
    assert (prepared.inputs["images"][0, 3:13] == 9).all() and not prepared.inputs["images"][0, :3].any()
    n, tokens = int(prepared.inputs["n"]), prepared.inputs["tokens"]
    assert (
        tokens[0] == 2
        and text_of(tokens[1:n]) == "Task: pick up it, State: 127 255 63;\nAction: "
        and not tokens[n:].any()
    )
    low, high = np.array(RANGE.mean_or_low), np.array(RANGE.std_or_high)
    normalised = (STATE.astype(np.float64) - low) / (high - low + 1e-6) * 2 - 1
    np.testing.assert_array_equal(prepared.inputs["state"], [*normalised.astype(np.float32), 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(prepared.inputs["noise"], normal(11, 0, (5, 8)))

    output = np.linspace(-1, 1, 40, dtype=np.float32).reshape(5, 8)
    want = (output[:4, :3].astype(np.float64) + 1) / 2 * (high - low + 1e-6) + low + STATE * np.array([1, 0, 1])
    actions = steps.finish(output, prepared)
    assert actions.dtype == np.float32 and actions.shape == (4, 3)
    np.testing.assert_allclose(actions, want, rtol=1e-7, atol=1e-7)


def test_nothing_of_the_last_observation_stays() -> None:
    steps = PolicySteps(POLICY, TOKENIZER)
    steps.prepare(OBSERVATION | {"prompt": "a much longer one", "base": np.full((9, 9, 3), 7, np.uint8)})
    again = {k: v.copy() for k, v in steps.prepare(OBSERVATION, draw=3).inputs.items()}
    fresh = PolicySteps(POLICY, TOKENIZER).prepare(OBSERVATION, draw=3).inputs
    assert all(np.array_equal(again[name], fresh[name]) for name in fresh)


def test_inputs_are_made_where_they_are_wanted() -> None:
    """All of them, whatever was there."""
    wanted = PolicySteps(POLICY, TOKENIZER).prepare(OBSERVATION, draw=3).inputs
    steps, into = PolicySteps(POLICY, TOKENIZER), {name: np.full_like(array, 77) for name, array in wanted.items()}
    for _ in range(2):
        prepared = steps.prepare(OBSERVATION, 3, None, into)
        assert prepared.inputs is into and all(np.array_equal(into[name], wanted[name]) for name in wanted)
        for array in into.values():
            array.fill(55)
    assert not any(array.any() for array in steps.inputs.values())


@pytest.mark.parametrize("bad", [1.5, "7", -1, 1 << 64, np.float32(2), True])
def test_draws_and_seeds_are_whole_numbers(bad: Any) -> None:
    """Refused, and the next draw is the one that it would have been."""
    steps, plain = PolicySteps(POLICY, TOKENIZER, seed=5), PolicySteps(POLICY, TOKENIZER, seed=np.int64(5))  # type: ignore[arg-type]
    for draw in (None, np.uint64(3)):
        assert steps.prepare(OBSERVATION, draw).draw == plain.prepare(OBSERVATION, draw).draw  # type: ignore[arg-type]
        with pytest.raises(FrtcError, match=r"the draw of the noise is .*, not a whole number") as caught:
            steps.prepare(OBSERVATION, bad)
        assert caught.value.code == "input.noise"
    again, wanted = steps.prepare(OBSERVATION), plain.prepare(OBSERVATION)
    assert again.draw == wanted.draw == 4 and np.array_equal(again.inputs["noise"], wanted.inputs["noise"])
    with pytest.raises(FrtcError, match="the seed of the noise is"):
        PolicySteps(POLICY, TOKENIZER, seed=bad)


def test_noise_drawn_ahead_is_the_same() -> None:
    """While the device works; whichever draw comes then, and whatever was done to the buffers."""
    ahead, plain = PolicySteps(POLICY, TOKENIZER, seed=5), PolicySteps(POLICY, TOKENIZER, seed=5)
    for draw in (None, None, 0, 0, None, 7, 3, None):
        found, wanted = (steps.prepare(OBSERVATION, draw=draw) for steps in (ahead, plain))
        assert found.draw == wanted.draw and np.array_equal(found.inputs["noise"], wanted.inputs["noise"])
        found.inputs["noise"][...] = np.nan
        ahead.draw_ahead()
        assert len(ahead.draws) <= 2 and (ahead.seed, ahead.draw) in ahead.draws
    ahead.seed = plain.seed = 6
    found, wanted = (steps.prepare(OBSERVATION) for steps in (ahead, plain))
    assert np.array_equal(found.inputs["noise"], wanted.inputs["noise"])


def test_a_rehearsal_changes_nothing() -> None:
    """Neither what was prepared nor what will be; frames and the caller's own observation are not touched."""
    rehearsed, plain = PolicySteps(POLICY, TOKENIZER, seed=5), PolicySteps(POLICY, TOKENIZER, seed=5)
    into = {name: np.zeros_like(array) for name, array in plain.inputs.items()}
    given, last = np.ones((5, 8), np.float32), (1 << 64) - 1
    for more, draw in (({}, None), ({"prompt": "it"}, 9), ({"state": STATE / 2}, None), ({"noise": given}, None),
                       ({"prompt": "it"}, last), ({}, 0), ({}, None)):  # fmt: skip
        seen = OBSERVATION | {"state": STATE.copy()} | more
        found, wanted = rehearsed.prepare(seen, draw, into=into), plain.prepare(seen, draw)
        seen["state"][:], seen["base"] = np.nan, None
        rehearsed.rehearse()
        assert found.draw == wanted.draw and rehearsed.draw == plain.draw
        assert (rehearsed.seed, rehearsed.draw) in rehearsed.draws
        for name, array in wanted.inputs.items():
            assert np.array_equal(found.inputs[name], array), name
        output = np.ones((5, 8), np.float32)
        assert np.array_equal(rehearsed.finish(output, found), plain.finish(output, wanted))


def test_a_rehearsal_does_what_an_inference_will() -> None:
    """It tokenises, although the text is the last one, and runs every other step but that of images: into the arrays
    here, as an inference of the same state and prompt would with the next noise. That is drawn first: to draw pushes
    out of the caches what the rest left there."""
    steps, done = PolicySteps(POLICY, TOKENIZER), list[str]()
    into = {name: np.zeros_like(array) for name, array in steps.inputs.items()}
    steps.prepare(OBSERVATION, into=into)
    assert steps.tokens and steps.vector and steps.text and steps.images
    for name, step, method in (("tokens", steps.tokens, "_ids"), ("state", steps.vector, "normalise"),
                               ("prompt", steps.text, "text"), ("images", steps.images, "run"),
                               ("noise", steps, "_drawn")):  # fmt: skip
        setattr(step, method, noted(name, getattr(step, method), done))
    steps.rehearse()
    assert done == ["noise", "state", "prompt", "tokens", "noise"]  # that was drawn
    assert all(np.array_equal(steps.inputs[name], into[name]) for name in ("state", "tokens", "n"))
    assert np.array_equal(steps.inputs["noise"], steps.prepare(OBSERVATION, into=into).inputs["noise"])


def noted(name: str, function: Callable[..., Any], done: list[str]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        done.append(name)
        return function(*arguments)

    return call


def test_noise_by_draw_or_given() -> None:
    steps, given = PolicySteps(POLICY, TOKENIZER, seed=4), np.ones((5, 8), np.float32)
    assert [steps.prepare(OBSERVATION).draw for _ in range(2)] == [0, 1]
    with pytest.raises(FrtcError, match="the observation holds noise, and draw 0 asks for another") as caught:
        steps.prepare(OBSERVATION | {"noise": given}, draw=0)
    assert caught.value.code == "input.noise"
    assert steps.prepare(OBSERVATION, draw=9).draw == 9 and steps.prepare(OBSERVATION).draw == 10
    prepared = steps.prepare(OBSERVATION | {"noise": given})
    assert prepared.draw is None and np.array_equal(prepared.inputs["noise"], given)
    assert steps.prepare(OBSERVATION).draw == 11


def test_the_observed_state_may_change_afterwards() -> None:
    steps, state = PolicySteps(POLICY, TOKENIZER), STATE.copy()
    prepared = steps.prepare(OBSERVATION | {"state": state})
    before = steps.finish(np.zeros((5, 8), np.float32), prepared)
    state[:] = 1e6
    assert np.array_equal(steps.finish(np.zeros((5, 8), np.float32), prepared), before)


class Elsewhere:
    """What a tensor on a GPU does."""

    def __array__(self, *_: object, **__: object) -> np.ndarray[Any, Any]:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


HOSTILE = [
    ({"base": None}, {"base"}, "input.camera_missing", "the observation lacks base"),
    ({}, {"state"}, "input.state_missing", "the observation lacks state"),
    ({}, {"prompt"}, "input.prompt_missing", "the observation lacks prompt"),
    ({"left_wrist": OBSERVATION["wrist"]}, set(), "input.unknown", "the Plan takes no left_wrist"),
    ({"left_wrist": OBSERVATION["wrist"]}, {"wrist"}, "input.camera_missing", "nearest  wrist: left_wrist"),
    ({"wants": 0}, set(), "input.unknown", "wants  base, wrist, state, prompt, noise"),
    ({"state": [0, 1, 2]}, set(), "input.state_dtype", "the state is int64, not floating point"),
    ({"state": [[0.0], [1.0, 2.0]]}, set(), "input.state_dtype", "the state, a list, becomes no NumPy array"),
    ({"state": Elsewhere()}, set(), "input.state_dtype", "can't convert cuda:0 device type tensor to numpy"),
    ({"state": np.ma.array([0.0, 1, 2], mask=[1, 0, 0])}, set(), "input.masked", "the state is a masked array"),
    ({"wrist": np.ma.array(OBSERVATION["wrist"])}, set(), "input.masked", "image wrist is a masked array"),
    ({"noise": np.ma.array(np.zeros((5, 8), np.float32))}, set(), "input.masked", "the noise is a masked array"),
    ({"state": np.zeros(32, np.float32)}, set(), "input.state_shape", "the state has the shape [32], not [3]"),
    ({"state": np.array([0, np.nan, np.inf])}, set(), "input.state_value", "state numbers [1, 2] are not finite"),
    ({"prompt": b"pick"}, set(), "input.prompt_type", "the prompt is a bytes, not a str"),
    ({"prompt": "\ud800"}, set(), "input.prompt_type", "the prompt is not valid Unicode"),
    ({"prompt": "x" * 60}, set(), "prompt.too_long", "the prompt has 96 tokens, the Plan holds 64"),
    ({"noise": np.zeros((5, 7), np.float32)}, set(), "input.noise", "the noise is float32[5, 7], not float32[5, 8]"),
    ({"noise": np.zeros((5, 8))}, set(), "input.noise", "the noise is float64[5, 8], not float32[5, 8]"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "drop", "code", "message"), HOSTILE)
def test_hostile_observations(change: dict[str, Any], drop: set[str], code: str, message: str) -> None:
    observation = {k: v for k, v in {**OBSERVATION, **change}.items() if k not in drop}
    with pytest.raises(FrtcError) as caught:
        PolicySteps(POLICY, TOKENIZER).prepare(observation)
    assert caught.value.code == code and message in str(caught.value)


def test_a_prompt_too_long_names_the_option() -> None:
    with pytest.raises(FrtcError, match=re.escape("96 tokens")) as caught:
        PolicySteps(POLICY, TOKENIZER).prepare(OBSERVATION | {"prompt": "x" * 60})
    assert "--prompt-tokens 96" in caught.value.hint
    fits = PolicySteps(POLICY, TOKENIZER).prepare(OBSERVATION | {"prompt": "x" * 28})
    assert fits.inputs["n"] == 64, "a prompt of exactly the budget is taken"


@pytest.mark.parametrize(("output", "code"), [(np.zeros((3, 8), np.float32), "output.shape"),
                                              (np.full((5, 8), np.nan, np.float32), "output.nonfinite")])  # fmt: skip
def test_hostile_outputs(output: np.ndarray, code: str) -> None:
    steps = PolicySteps(POLICY, TOKENIZER)
    with pytest.raises(FrtcError) as caught:
        steps.finish(output, steps.prepare(OBSERVATION))
    assert caught.value.code == code


def test_hostile_tokenizers() -> None:
    for data in (None, b"", TOKENIZER + b" "):
        with pytest.raises(FrtcError) as caught:
            PolicySteps(POLICY, data)
        assert caught.value.code == "tokenizer.hash"
    bad, small = b"\x0a not json", replace(POLICY.prepare[3], vocab=40)
    named = replace(POLICY.prepare[3], tokenizer=hashlib.sha256(bad).hexdigest())
    with pytest.raises(FrtcError, match=r"tokenizer cannot be read") as caught:
        PolicySteps(replace(POLICY, prepare=(*POLICY.prepare[:3], named, POLICY.prepare[4])), bad)
    assert caught.value.code == "tokenizer.unreadable"
    steps = PolicySteps(replace(POLICY, prepare=(*POLICY.prepare[:3], small, POLICY.prepare[4])), TOKENIZER)
    with pytest.raises(FrtcError, match="not among the model's 40 embeddings") as caught:
        steps.prepare(OBSERVATION)
    assert caught.value.code == "tokenizer.vocab"


def test_state_bins() -> None:
    """digitize(x, linspace(-1, 1, 257)[:-1]) - 1, as both origins have it."""
    x = np.concatenate(
        [
            [-7, -1.0000001, -1, -0.9921876, -0.9921875, 0, 0.9921874, 1, 9],
            np.random.default_rng(0).uniform(-1.2, 1.2, 999),
        ]
    )
    for state in (x, x.astype(np.float32)):
        wanted = np.digitize(state, np.linspace(-1, 1, 257)[:-1]) - 1
        assert bins(state) == [str(number) for number in wanted]
    assert bins(x[:9]) == ["-1", "-1", "0", "0", "1", "128", "254", "255", "255"]


def test_prompt_forms() -> None:
    state = np.array([-2.0, 0.0], np.float32)
    assert prompt_text(Prompt("spaces", "{prompt}\n"), " a_b\nc ", None) == "a b c\n"
    assert (
        prompt_text(Prompt("newline", "{prompt}"), "a_b", None)
        == "a_b\n"
        == prompt_text(Prompt("newline", "{prompt}"), "a_b\n", None)
    )
    assert prompt_text(Prompt("none", "{prompt}:{state}", 4), "{state}", state) == "{state}:-1 128 128 128", (
        "padded with zeros"
    )


FORMULAS = {  # rule -> (normalise, un-normalise) of x with a, b, eps; the sources' own expressions
    "openpi_mean_std": (lambda x, a, b, e: (x - a) / (b + e), lambda y, a, b, e: y * (b + e) + a),
    "openpi_range": (lambda x, a, b, e: (x - a) / (b - a + e) * 2.0 - 1.0,
                     lambda y, a, b, e: (y + 1.0) / 2.0 * (b - a + e) + a),
    "lerobot_mean_std": (lambda x, a, b, e: (x - a) / (b + e), lambda y, a, b, e: y * b + a),
    "lerobot_range": (lambda x, a, b, e: 2.0 * (x - a) / (b - a) - 1.0,
                      lambda y, a, b, e: (y + 1.0) * (b - a) / 2.0 + a),
}  # fmt: skip


@pytest.mark.parametrize("rule", FORMULAS)
def test_normalisation_has_the_bits_of_the_origin(rule: str) -> None:
    dtype, eps = (np.float32, 1e-8) if rule.startswith("lerobot") else (np.float64, 1e-6)
    rng = np.random.default_rng(1)
    low = rng.normal(size=50).astype(np.float32)
    high, x = (low + rng.uniform(0.1, 3, 50)).astype(np.float32), rng.normal(size=50).astype(np.float32)
    norm = Normaliser(Norm(rule, tuple(low.tolist()), tuple(high.tolist()), eps))  # type: ignore[arg-type]
    a, b, e = low.astype(dtype), high.astype(dtype), dtype(eps)
    for found, formula in zip((norm.normalise(x), norm.unnormalise(x)), FORMULAS[rule], strict=True):
        assert found.dtype == dtype
        assert np.array_equal(found, formula(x.astype(dtype), a, b, e))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rule", FORMULAS)
def test_states_of_any_size(rule: str) -> None:
    """Large ones are looked at closely, with the same result; what leaves float32 is an error, and no warning."""
    norm = Norm(rule, (-1.0, 0.0, 2.0), (1.0, 4.0, 2.5), 1e-6)  # type: ignore[arg-type]
    step, plain = StateStep(State(3, norm), ()), Normaliser(norm)
    assert step.ordinary > 1e12
    for size in (0.0, 1.0, 1e11, 1e15, 1e16, 1e25):
        for dtype in (np.float32, np.float64):
            state = np.array([-size, size, 0.25], dtype)
            kept, normalised = step.run(state)
            assert kept is not state and np.array_equal(kept, state) and kept.dtype == dtype
            assert np.array_equal(normalised, plain.normalise(state)) and normalised.dtype == plain.dtype
    for bad, message in (
        (np.nan, "numbers [1] are not finite"),
        (np.inf, "numbers [1] are not finite"),
        (-1e300, "[1]"),
    ):
        with pytest.raises(FrtcError, match=re.escape(message)) as caught:
            step.run(np.array([0.0, bad, 0.25]))
        assert caught.value.code == "input.state_value"
    tiny = StateStep(State(1, Norm("lerobot_mean_std", (0.0,), (1e-30,), 1e-38)), ())
    assert tiny.ordinary < 0  # what is ordinary elsewhere leaves float32 here
    with pytest.raises(FrtcError, match="too large once normalised"):
        tiny.run(np.array([1e10]))


def test_a_prompt_is_cleaned_when_it_changes() -> None:
    """Whatever came before: other instructions, other states, a str of another class."""
    step, one, other = Prompt("spaces", "{prompt}: {state};", 3), np.zeros(2), np.array([0.5, -1.0])
    kept = PromptStep(step)
    for prompt, state in (("a_b", one), ("a_b", other), ("{state}", other), (np.str_("a_b"), one), ("a_b", other)):
        assert kept.text(prompt, state) == prompt_text(step, prompt, state)
    with pytest.raises(FrtcError, match="half of a surrogate pair"):
        kept.text("\udfff", one)
    assert kept.text("a_b", one) == "a b: 128 128 128;"


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the allocator does not say what is in use")
def test_prompts_are_not_kept() -> None:
    """Each inference brings another one where it shows the state: memory stays as it is."""
    pieces = ["<pad>", "<eos>", "<bos>", *map(chr, range(32, 127))]
    made = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<eos>"))
    data = bytes(made.to_str(), "utf-8")
    step, tokens = TokenStep(Tokens(128, 2, 0, 128, hashlib.sha256(data).hexdigest()), data), np.zeros(128, np.int32)
    for i in range(600):
        if i == 100:
            before = in_use()
        assert step.run(f"{i:04d} " * 20, tokens) == 101
    assert in_use() - before < 100_000  # 200 bytes a prompt, whose tokens alone are 400


def in_use() -> int:
    """Bytes that the C allocator has given out."""

    class Info(ctypes.Structure):
        _fields_ = [(f"f{i}", ctypes.c_size_t) for i in range(10)]

    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Info
    return int(mallinfo().f7)  # uordblks


def test_an_interrupted_prompt_is_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the next inference tokenises is what it was given, not what stood there before."""
    step = PromptStep(Prompt("none", "{prompt}"))
    assert step.text("left", None) == "left"
    with monkeypatch.context() as during:
        during.setattr(PromptStep, "_parts", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step.text("right", None)
    assert [step.text(prompt, None) for prompt in ("right", "left")] == ["right", "left"]


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_draws_begin_again_behind_the_last() -> None:
    steps, last = PolicySteps(POLICY, TOKENIZER), (1 << 64) - 1
    assert [steps.prepare(OBSERVATION, draw).draw for draw in (last, None, None)] == [last, 0, 1]


def test_a_constant_range_follows_the_origin() -> None:
    lerobot = Normaliser(Norm("lerobot_range", (0.5,), (0.5,), 1e-8))
    assert lerobot.normalise(np.array([0.5], np.float32)) == -1
    assert abs(lerobot.unnormalise(np.array([3.0], np.float32))[0] - 0.5) < 1e-6
    openpi = Normaliser(Norm("openpi_range", (0.5,), (0.5,), 1e-6))
    np.testing.assert_allclose(openpi.normalise(np.array([0.5 + 1e-6])), [1.0], rtol=1e-9)
