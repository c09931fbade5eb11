"""A static KV cache as states: prefill and 16 greedy steps inside the interpreter equal eager Hugging Face."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from frtc.lowering.interpret import evaluate_weights, run, run_module
from frtc.lowering.ir import Module, Repeat, Run
from frtc.lowering.programs import lower_programs
from frtc.lowering.text import parse_module, show_module
from frtc.lowering.verify import verify_module
from frtc.passes.attention_sites import attention_sites
from frtc.passes.canonicalize import canonicalize
from tests.lowering import generator
from tests.lowering.tiny import array

SCHEDULE = (Run("prefill"), Repeat(generator.STEPS, "step", (Run("decode"),)))


@pytest.fixture(scope="module")
def model() -> generator.GemmaForCausalLM:
    return generator.language_model()


@pytest.fixture(scope="module")
def module(model: generator.GemmaForCausalLM) -> Module:
    return lower_programs("gemma", generator.programs(generator.Generator(model)), SCHEDULE)


@pytest.fixture(scope="module")
def eager(model: generator.GemmaForCausalLM) -> tuple[list[int], list[np.ndarray]]:
    """Tokens and logits without any cache: the whole text again for each token."""
    ids, tokens, logits = generator.prompt(), [], []
    with torch.no_grad():
        for _ in range(generator.STEPS + 1):
            logits.append(array(model(input_ids=ids, use_cache=False).logits[:, -1]))
            tokens.append(int(logits[-1].argmax()))
            ids = torch.cat([ids, torch.tensor([tokens[-1:]])], dim=1)
    return tokens, logits


def test_states_and_their_order(module: Module) -> None:
    verify_module(module)
    assert parse_module(show_module(module)) == module
    for graph in module.graphs:
        names = {n["name"] for n in graph.states}
        caches = {f"{kind}_{i}" for kind in ("keys", "values", "length") for i in range(2)}
        assert names == caches | {"said", "count"}
        assert {name for name, _ in graph.writes} == names
        in_place = [n for n in graph.nodes if n.op == "write" and n["axis"] == -2]
        assert len(in_place) == 4 and all(n.args[1].shape[2] == graph.inputs[0].shape[1] for n in in_place)


@pytest.mark.parametrize("form", ["raw", "canonical"])
def test_greedy_steps_equal_eager(
    module: Module, model: generator.GemmaForCausalLM, eager: tuple[list[int], list[np.ndarray]], form: str
) -> None:
    tokens, _ = eager
    assert len(set(tokens)) > 4, "a text that repeats one token proves little"
    if form == "canonical":
        module = attention_sites(canonicalize(module))
        verify_module(module)
        assert [g.count("attention") for g in module.graphs] == [2, 2]
        assert [g.count("rms_norm") for g in module.graphs] == [5, 5]
    weights = evaluate_weights(module, lambda key: array(model.get_parameter(key.removeprefix("model."))))
    out = run_module(module, {"prompt": generator.prompt().numpy()}, weights.__getitem__)
    assert out["said"][0].tolist() == tokens
    assert out["length_0"] == out["length_1"] == generator.PROMPT + generator.STEPS
    assert out["count"] == generator.STEPS + 1


def test_logits_of_each_step(
    module: Module, model: generator.GemmaForCausalLM, eager: tuple[list[int], list[np.ndarray]]
) -> None:
    weights = evaluate_weights(module, lambda key: array(model.get_parameter(key.removeprefix("model."))))
    env = {n["name"]: np.zeros(n.shape, np.float32 if n.t.is_float else np.int64) for n in module.graphs[0].states}
    env["prompt"] = generator.prompt().numpy()
    for step, wanted in enumerate(eager[1]):
        env |= run(module.graph("prefill" if step == 0 else "decode"), env, weights.__getitem__)
        np.testing.assert_allclose(env["logits"], wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())
