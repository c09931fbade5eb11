"""Unmodified Hugging Face models and our Pi0.5 stages: the IR computes what the module computes, before and after
canonicalisation, and canonicalisation finds every large op in them."""

from __future__ import annotations

import functools
from collections import Counter

import pytest

from frtc.lowering.interpret import run
from frtc.lowering.ir import Graph, Module
from frtc.lowering.text import parse, show
from frtc.lowering.verify import verify
from frtc.passes.attention_sites import attention_sites
from frtc.passes.canonicalize import canonicalize
from frtc.passes.check import relative_error
from tests.lowering import tiny
from tests.lowering.tiny_data import OTHER, texts

WIDE = 1e-5  # ||y - eager|| / ||eager||, all in float32; measured: <= 6e-7
# The same where the module computes in bf16; measured: raw <= 7.5e-3, canonical <= 9.1e-3, widened <= 9.4e-3.
TYPED = 1.2e-2

FLOAT32 = {
    **{name: make for name, make in tiny.MAKERS.items() if not name.startswith("pi05") and not name.endswith("bf16")},
    **{f"pi05_{s}": lambda s=s: tiny.pi05_stage(s, tiny.torch.float32) for s in ("vision", "prefix", "denoise")},
}
BF16 = [name for name in tiny.MAKERS if name.endswith("bf16") or name.startswith("pi05")]

# Large ops that canonicalisation must find: layers x what one layer holds.
L, P = tiny.LAYERS, 3  # layers of the Hugging Face models, of tiny Pi0.5
GEMMA = {"rms_norm": 2 * L + 1, "rope": 2 * L, "attention": L, "gated_linear": L, "linear": 5 * L}
QWEN3 = GEMMA | {"rms_norm": 4 * L + 1}  # norms of q and k, too
SIGLIP = {"layer_norm": 2 * L + 2, "attention": L + 1, "gelu_tanh": L + 1, "linear": 6 * L + 6}  # + pooling head
COUNTS = {
    **dict.fromkeys(["gemma_sdpa", "gemma_eager", "gemma_bf16"], GEMMA),
    **dict.fromkeys(["qwen3_sdpa", "qwen3_eager", "qwen3_bf16"], QWEN3),
    **dict.fromkeys(["siglip_sdpa", "siglip_eager"], SIGLIP),
    "pi05_vision": {"layer_norm": 2 * L + 1, "attention": L, "gelu_tanh": L, "linear": 6 * L + 2},
    # only keys and values leave the last layer
    "pi05_prefix": {"rms_norm": 2 * P - 1, "rope": 2 * P - 1, "attention": P - 1, "gated_linear": P - 1},
    "pi05_denoise": {"ada_rms_norm": 2 * P + 1, "rope": 2 * P, "attention": P, "gated_linear": P},
}
# What else may be left: rotary tables, the embedding of time, masks by length, scaling, residuals, layout.
SMALL = set(
    "input weight const iota cast add mul div pow sin cos silu embedding reshape transpose slice concat "
    "broadcast".split()
)


@functools.cache
def _traced(name: str, float32: bool) -> tuple[tiny.Tiny, Graph]:
    model = (FLOAT32 if float32 else tiny.MAKERS)[name]()
    return model, model.graph()


def _canonical(graph: Graph) -> Graph:
    return attention_sites(canonicalize(Module("m", (graph,)))).graphs[0]


def _worst(model: tiny.Tiny, graph: Graph, mode: str) -> float:
    wanted, found = model.eager(), run(graph, model.feeds(), model.weights, mode)
    return max(relative_error(found[k][:, model.padding :], wanted[k][:, model.padding :]) for k in wanted)


@pytest.mark.parametrize("name", FLOAT32)
def test_raw_ir_equals_eager(name: str) -> None:
    model, graph = _traced(name, True)
    verify(graph)
    assert parse(show(graph)) == graph
    assert _worst(model, graph, "wide") < WIDE


@pytest.mark.parametrize("name", FLOAT32)
def test_canonical_ir_equals_eager(name: str) -> None:
    model, graph = _traced(name, True)
    assert _worst(model, _canonical(graph), "wide") < WIDE


@pytest.mark.parametrize("name", BF16)
def test_bf16_is_close_to_eager(name: str) -> None:
    model, graph = _traced(name, False)
    assert _worst(model, graph, "typed") < TYPED
    assert _worst(model, _canonical(graph), "typed") < TYPED


def _check_large_ops(name: str, graph: Graph) -> None:
    """Every large op of the model, and nothing of what they were made of."""
    counts, wanted = Counter(n.op for n in _canonical(graph).nodes), COUNTS[name]
    assert {op: counts[op] for op in wanted} == wanted
    assert set(counts) <= SMALL | set(wanted) | {"linear"}


@pytest.mark.parametrize("name", COUNTS)
def test_canonical_ir_holds_the_large_ops_and_nothing_of_their_parts(name: str) -> None:
    _check_large_ops(name, _traced(name, False)[1])


@pytest.mark.parametrize("name", texts(OTHER))
def test_large_ops_are_found_in_another_versions_spelling(name: str) -> None:
    _check_large_ops(name, parse(texts(OTHER)[name]))


@pytest.mark.parametrize("name", tiny.MAKERS)
def test_kept_texts_are_what_import_gives(name: str) -> None:
    """In canonical form: versions of torch differ in how they spell views."""
    _, graph = _traced(name, False)
    assert _canonical(parse(texts()[name])) == _canonical(graph), "run `python -m tests.lowering.tiny`"


def test_sources_are_named_without_paths() -> None:
    _, graph = _traced("gemma_sdpa", True)
    places = {n.loc for n in graph.nodes if n.op not in ("input", "weight", "const")}
    assert all(places) and not any("/site-packages" in p or p.startswith("/") for p in places)
    linear = next(n for n in graph.nodes if n.op == "linear")
    assert linear.loc.startswith("layers.0.self_attn.q_proj transformers/models/gemma/modeling_gemma.py:")
