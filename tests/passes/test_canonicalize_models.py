"""canonicalize and attention_sites on whole models: foreign ones, unmodified, and ours, as the lowering writes them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from frtc.lowering.interpret import run
from frtc.lowering.ir import Graph, walk
from frtc.lowering.text import parse, show
from frtc.lowering.verify import verify
from frtc.passes.attention_sites import attention_sites
from frtc.passes.canonicalize import canonicalize
from frtc.passes.check import TYPED, WIDE, random_tensor, relative_error
from tests.passes.expect import as_module, plain

DATA = Path(__file__).parent.parent / "lowering" / "data"
LAYERS = 2  # of the foreign models; Pi0.5 has 3

GEMMA = {"rms_norm": 2 * LAYERS + 1, "rope": 2 * LAYERS, "attention": LAYERS, "gated_linear": LAYERS}
QWEN3 = {"rms_norm": 4 * LAYERS + 1, "rope": 2 * LAYERS, "attention": LAYERS, "gated_linear": LAYERS}
SIGLIP = {"layer_norm": 2 * LAYERS + 2, "attention": LAYERS + 1, "gelu_tanh": LAYERS + 1}  # and the pooling head
COUNTS = {
    "gemma_sdpa": GEMMA,
    "gemma_eager": GEMMA,
    "gemma_bf16": GEMMA,
    "qwen3_sdpa": QWEN3,
    "qwen3_eager": QWEN3,
    "qwen3_bf16": QWEN3,
    "siglip_sdpa": SIGLIP,
    "siglip_eager": SIGLIP,
    "pi05_vision": {"layer_norm": 5, "attention": 2, "gelu_tanh": 2, "linear": 14},
    # the last layer gives keys and values only: no second norm, no query, no attention, no MLP
    "pi05_prefix": {"rms_norm": 5, "rope": 5, "attention": 2, "gated_linear": 2, "linear": 2 * 5 + 2},
    "pi05_denoise": {"ada_rms_norm": 7, "rms_norm": 0, "rope": 6, "attention": 3, "gated_linear": 3},
}
# What front ends write in place of the ops above. In constants (rope's frequencies) and weights they may stay.
LEFTOVERS = frozenset("pow rsqrt sqrt exp tanh erf sigmoid softmax matmul conv2d reduce_mean reduce_sum where".split())


@pytest.fixture(scope="module", params=sorted(COUNTS))
def model(request: pytest.FixtureRequest) -> tuple[str, Graph, Graph]:
    """name, the graph as lowered, and after both passes"""
    text = (DATA / f"{request.param}.ir").read_text()
    module = attention_sites(canonicalize(as_module(text)))
    return request.param, parse(text), module.graphs[0]


def test_counts(model: tuple[str, Graph, Graph]) -> None:
    name, _, after = model
    verify(after)
    assert {op: after.count(op) for op in COUNTS[name]} == COUNTS[name]


def test_no_leftovers(model: tuple[str, Graph, Graph]) -> None:
    _, _, after = model
    assert [n.op for n in after.nodes if n.op in LEFTOVERS and not n.is_const] == []


def test_no_mask_is_left_that_follows_from_the_graph(model: tuple[str, Graph, Graph]) -> None:
    """Causal masks, prompt lengths and holes become attributes; Qwen3's padding mask is an input and stays one."""
    name, _, after = model
    sites = Counter(
        (n["causal"], n.args[3] is not None, n.args[4] is not None, n["resume"])
        for n in after.nodes
        if n.op == "attention"
    )
    wanted = {
        "gemma": (True, False, False, -1),
        "qwen3": (True, True, False, -1),
        "siglip": (False, False, False, -1),
        "pi05_vision": (False, False, False, -1),
        "pi05_prefix": (False, False, True, -1),
        "pi05_denoise": (False, False, True, 560),
    }
    family = name if name.startswith("pi05") else name.split("_")[0]
    assert set(sites) == {wanted[family]}


def test_same_results(model: tuple[str, Graph, Graph]) -> None:
    """Before and after, on seeded inputs, within the runner's own limits."""
    _, before, after = model
    coarsest = max(TYPED[n.t.dtype] for n in before.nodes if n.t.is_float)
    inputs = {n["name"]: random_tensor(n["name"], n.t) for n in before.inputs}
    if "valid" in inputs:  # the first token is valid: a query that sees no key has no defined result
        inputs["valid"] = np.array([[1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 0]])
    types = {n["name"]: n.t for n in walk(before.roots) if n.op == "weight"}

    def weights(key: str) -> np.ndarray:
        return random_tensor(key, types[key])

    for mode in ("wide", "typed"):
        old, new = run(before, inputs, weights, mode), run(after, inputs, weights, mode)
        for key in old:
            assert relative_error(new[key], old[key]) <= (WIDE if mode == "wide" else coarsest), (mode, key)


def test_a_second_run_changes_nothing(model: tuple[str, Graph, Graph]) -> None:
    _, _, after = model
    module = as_module(show(after))
    assert plain(attention_sites(canonicalize(module))) == plain(module)


def test_front_ends_meet() -> None:
    """Hugging Face's eager and SDPA spellings are the same graph afterwards."""
    for family in ("gemma", "qwen3", "siglip"):
        eager, sdpa = (
            plain(attention_sites(canonicalize(as_module((DATA / f"{family}_{kind}.ir").read_text()))))
            for kind in ("eager", "sdpa")
        )
        rename = f"{family}_eager", f"{family}_sdpa"
        assert eager.replace(*rename) == sdpa.replace(*rename)
