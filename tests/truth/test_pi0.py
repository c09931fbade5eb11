"""Pi0 through all passes and codegen: what leaves the loop, what folds, what is launched, on every target."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch

from bench.full_model import STATIC, Shape
from bench.sites import LAYERS, shallow, uses
from frtc.codegen.build import Built
from frtc.codegen.fusible import implements
from frtc.codegen.nvrtc import compile_all
from frtc.explain import FUSED, LAUNCH, explain
from frtc.kernels.catalog import CATALOG
from frtc.kernels.targets import load_targets
from frtc.lowering.ir import Graph, Module, fresh_nodes
from frtc.lowering.text import parse_module, show_module
from frtc.models import pi, pi0
from frtc.models.pi import PiConfig
from frtc.passes.standard import pipeline
from frtc.runtime.plan import STATE
from frtc.trace import trace
from tests.truth.emulated import built_for, kernel_jobs
from tests.truth.traced import optimised

TARGETS, BASELINE = load_targets(), ("baseline",)


@cache
def traced() -> Module:
    return trace("pi0", pi0.stages(pi0.tiny(), torch.bfloat16), pi.schedule(pi0.tiny()))


@cache
def final(target: str = "hopper") -> Module:
    return optimised(traced(), target)


@cache
def built(target: str = "hopper") -> Built:
    return built_for(final(target), target)


# --- what the passes achieve --------------------------------------------------------------------------------------


def test_the_state_leaves_the_loop() -> None:
    """All that depends on the state alone runs once; the loop has no row for it."""
    once, loop = final().graph("denoise.once"), final().graph("denoise")
    assert "state" in {n["name"] for n in once.inputs}
    assert "state" not in {n["name"] for n in loop.inputs}
    assert rows_of_products(loop) == {pi0.tiny().horizon}
    assert rows_of_products(once) == {1}


def rows_of_products(graph: Graph) -> set[int]:
    products = ("linear", "linear_norm", "linear_rope_qkv", "gated_linear")
    operands = [n.operands[0] for n in graph.nodes if n.op in products and not n.is_const]
    return {x.shape[-2] for x in operands if x.t.rank == 2}


def test_the_states_last_layer_makes_keys_and_values_only() -> None:
    layers, once = pi0.tiny().expert.layers, final().graph("denoise.once")
    assert once.count("attention") == once.count("gated_linear") == layers - 1
    matrices = [n for n in once.nodes if n.op == "weight" and n.t.rank == 2]
    last = [n.shape[0] for n in matrices if f"layers.{layers - 1}." in n["name"]]
    assert last == [2 * pi0.tiny().expert.head_dim]


def test_actions_and_time_meet_in_one_product() -> None:
    """action_in and the half of mlp_in that reads it are one matrix; the half that reads the time a bias per step."""
    loop, width = final().graph("denoise"), pi0.tiny().expert.width
    (first,) = [n for n in loop.nodes if n.op == "linear" and n.args[0] is not None and n.args[0].op == "input"]
    weight, bias = first.args[1:3]
    assert weight is not None and weight.shape == (width, pi0.tiny().action_width) and first["act"] == "silu"
    assert bias is not None and bias.op == "index" and bias.operands[0].shape == (pi0.tiny().steps, width)
    assert not {"sin", "cos", "mul"} & {n.op for n in loop.nodes}


def test_the_euler_step_is_the_last_products_epilogue() -> None:
    ((_, last),) = final().graph("denoise").outputs
    assert last.op == "linear" and last.args[3] is not None and last.args[3].op == "input"


def test_actions_see_the_valid_prefix_the_state_and_themselves() -> None:
    """[prefix, up to its length | padding | state | actions], the state's own row without the last part; no mask."""
    c = pi0.tiny()
    prefix = c.image_tokens + c.prompt
    for program, rows in (("denoise.once", 1), ("denoise", 1 + c.horizon)):
        for node in final().graph(program).nodes:
            if node.op == "attention":
                assert (node.args[3], node["resume"], node["causal"]) == (None, prefix, False)
                assert node.args[4] is not None and node.operands[1].shape[-2] == prefix + rows


def test_keys_of_prefix_state_and_actions_are_one_buffer() -> None:
    """The prefix, the state and each step write their rows of it; the loop copies nothing."""
    calls = built().emitted["denoise"]
    assert all(call.node is not None for call in calls)
    keys = [call.operands[1] for call in calls if call.site.op == "attention"]
    own = [call.operands[1] for call in built().emitted["denoise.once"] if call.site.op == "attention"]
    for whole, part in zip(keys, own, strict=False):
        assert whole is not None and part is not None and whole.buffer is part.buffer
        assert whole.buffer.space == STATE and whole.strided.offset == part.strided.offset


def test_explain_says_what_became_of_the_time_mlp() -> None:
    target, text = TARGETS["hopper"], show_module(traced())
    with fresh_nodes():
        found = explain(parse_module(text), pipeline(implements(target)), target, BASELINE)
    assert sum(found.counts().values()) == len(found.nodes)
    by_module = {fate.loc.split(" ")[0]: fate for fate in found.nodes if fate.op == "linear"}
    assert (by_module["action_in"].outcome, by_module["action_in"].rules) == (FUSED, ("fold_linear_into_linear",))
    assert (by_module["mlp_in"].outcome, by_module["mlp_in"].rules[0]) == (LAUNCH, "split_linears")


# --- launches -----------------------------------------------------------------------------------------------------


def expected_calls(c: PiConfig, fp8: bool = False, deferred: bool = False) -> dict[str, Counter[str]]:
    """What every layer costs, whatever the sizes; the last layer of prefix and state makes keys and values only.

    With FP8 the products of few rows make the norms behind them. deferred: there are kernels that make up for norms:
    for all of a step, whose first and last products are fp32; elsewhere not for the first, in 16 bits for none of
    vision's.
    """
    v, p, e = c.vision.layers, c.prefix.layers - 1, c.expert.layers
    vision = Counter({"linear": 4 * v + 2, "layer_norm": 2 * v + 1, "attention": v, "pointwise": 1})  # pixels
    block = {"linear_rope_qkv": 1, "attention": 1, "gated_linear": 1}
    many, few = {**block, "linear": 2, "rms_norm": 2}, {**block, "linear_norm": 2}  # rows
    few = few if fp8 else many
    last = {"rms_norm": 1, "linear_rope_qkv": 1}  # of few rows: the first norm
    prefix = Counter(last) + Counter({"embedding": 1, "pointwise": 1})  # how many rows are valid
    once = Counter(last) + Counter({"linear": 1, "pointwise": 3})  # two rotations by the prompt's length
    denoise = Counter({"linear": 3, "rms_norm": 1})  # actions in and out, one between
    for total, layers, ops in ((prefix, p, many), (once, e - 1, few), (denoise, e, few)):
        total.update({op: layers * n for op, n in ops.items()})
    if deferred:
        vision = made_up_for(vision, 2 * v - 1 if fp8 else 0, "layer_norm")
        prefix, once, denoise = (
            made_up_for(prefix, 2 * p),
            made_up_for(once, 2 * e - 2),
            made_up_for(denoise, 2 * e + 1),
        )
    stages = {"vision": vision, "prefix": prefix, "denoise.once": once, "denoise": denoise}
    return stages | {"let.x_t": Counter({"copy": 1})}


def made_up_for(calls: Counter[str], norms: int, op: str = "rms_norm") -> Counter[str]:
    """The same with so many norms left to the products that read them: those in front give moments as well."""
    fused = min(norms, calls["linear_norm"])
    gone = {"linear_norm": fused, "linear": norms - fused, op: norms - fused}
    return calls - Counter(gone) + Counter({"linear_moments": norms})


@pytest.mark.parametrize("name", TARGETS)
def test_calls_on_every_target(name: str) -> None:
    found = {
        stage: Counter("copy" if call.node is None else call.site.op for call in calls)
        for stage, calls in built(name).emitted.items()
    }
    assert found == expected_calls(pi0.tiny(), deferred=makes_up(name))


def makes_up(target: str) -> bool:
    """Whether the family that is the target's by itself has kernels that give moments: the baseline's are of fp32."""
    own = {k.family for k in CATALOG.kernels_for("linear_moments")} - {"baseline"}
    return not own.isdisjoint(TARGETS[target].families())


def test_calls_in_fp8_where_norms_are_deferred() -> None:
    """Vision's as well, the last one too: its projector is FP8. Of few layers at full size."""
    found: dict[str, Counter[str]] = {}
    for use in uses(Shape("pi0", precision=STATIC), families=TARGETS["hopper"].families()):
        found.setdefault(use.stage, Counter())[use.site.op] += 1
    expected = expected_calls(shallow(pi0.full(), LAYERS), fp8=True, deferred=True)
    assert found == {stage: ops for stage, ops in expected.items() if stage != "let.x_t"}


def test_launches_of_one_inference() -> None:
    """bf16 baseline at most 2,000, FP8 at most 1,400 (docs/design.md, section 10)."""
    rounds = {"denoise": pi0.full().steps}
    calls = [
        {stage: sum(ops.values()) * rounds.get(stage, 1) for stage, ops in expected_calls(pi0.full(), fp8).items()}
        for fp8 in (False, True)
    ]
    assert calls[1] == {"vision": 193, "prefix": 123, "denoise.once": 91, "denoise": 940, "let.x_t": 1}
    assert [sum(stages.values()) for stages in calls] == [1742, 1348]


@pytest.mark.parametrize("name", TARGETS)
def test_compiles_for_every_target(name: str) -> None:
    """Each sixth kernel of the small model; those of the full sizes: tests/kernels/test_cubins.py."""
    jobs = kernel_jobs(built(name), name)[::6]
    assert jobs and all(cubin.sm == TARGETS[name].sm for cubin in compile_all(jobs))


@pytest.mark.full
@pytest.mark.parametrize("name", TARGETS)
def test_all_kernels_compile_for_every_target(name: str) -> None:
    assert all(cubin.sm == TARGETS[name].sm for cubin in compile_all(kernel_jobs(built(name), name)))
