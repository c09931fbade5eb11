"""SmolVLA as IR after all passes and as a Plan: lerobot's answers, what its attentions became, what a layer costs."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from bench.full_model import STATIC, Shape
from bench.sites import LAYERS, shallow, uses
from frtc.codegen.build import Built
from frtc.codegen.nvrtc import compile_all
from frtc.kernels.targets import load_targets
from frtc.lowering.ir import Module, Node
from frtc.models import smolvla
from frtc.models.smolvla_config import SmolVlaConfig, full, tiny
from frtc.passes.check import relative_error
from frtc.passes.pipeline import Options
from frtc.trace import trace
from tests.models.mutants_smolvla import MUTANTS
from tests.models.smolvla_truth import CASES, FOLDER
from tests.models.truth import arrays
from tests.truth.emulated import Emulated, built_for, kernel_jobs
from tests.truth.test_pi0 import made_up_for, makes_up
from tests.truth.traced import Answer, Array, Interpreted, Runner, Subject, ask, fixture, imported, optimised

STEP_BAR, LOOP_BAR, SERVING_BAR, PLAN_BAR = 1e-5, 1e-4, 2e-2, 4e-3  # docs/design.md, section 9
TARGETS = load_targets()
FEW_ROWS = 64  # up to which a product makes the norm behind it (kernels/smxx_finish_gemm.py)


@cache
def answer(name: str, precision: str, target: str = "hopper", runner: Runner = Interpreted) -> Answer:
    one = fixture("smolvla", name, precision)
    return ask(one, optimised(one.module, target), "wide" if precision == "f32" else "typed", runner)


def step_errors(found: Array, reference: Array) -> list[float]:
    return [relative_error(v, w) for v, w in zip(found, reference, strict=True)]


def loop_error(found: Array, one: Subject) -> float:
    return relative_error(found - one.x[0], one.actions - one.x[0])


@pytest.mark.parametrize("target", ["", "hopper"])
@pytest.mark.parametrize("name", CASES)
def test_widened(name: str, target: str) -> None:
    one, found = fixture("smolvla", name, "f32"), answer(name, "f32", target)
    assert len(found.velocity) == len(one.x) == 10
    assert max(step_errors(found.velocity, one.velocity)) <= STEP_BAR
    assert loop_error(found.actions, one) <= LOOP_BAR


def test_prefix_widened() -> None:
    """Keys and values of each layer as lerobot has them; valid rows, the state first."""
    expected, env = arrays(FOLDER / "expected.safetensors"), answer("pick", "f32").env
    valid = len(env["image_tokens"]) + int(env["n"])
    rows = [*range(1, 1 + valid), 0]
    for layer in range(4):
        assert relative_error(env[f"k.{layer}"][:, rows], expected["pick.keys"][layer]) <= STEP_BAR
        assert relative_error(env[f"v.{layer}"][:, rows], expected["pick.values"][layer]) <= STEP_BAR


@pytest.mark.parametrize("runner", [Interpreted, Emulated])
@pytest.mark.parametrize("name", CASES)
def test_serving_precision(name: str, runner: Runner) -> None:
    """bf16 with its fp32 islands, as IR and as a Plan: within 2e-2, and 1.5 times what it costs lerobot."""
    one, found = fixture("smolvla", name, "bf16"), answer(name, "bf16", "hopper", runner)
    bar = min(SERVING_BAR, 1.5 * max(CASES[name]["bf16_error"]))
    errors = step_errors(found.velocity, one.velocity)
    assert max(errors) <= bar
    assert loop_error(found.actions, one) <= bar
    assert min(errors) > 1e-4, "this ran in float32"


@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_the_module(name: str) -> None:
    """The emulated calls against the interpreter: nothing but the order of additions may differ."""
    typed, plan = answer(name, "bf16"), answer(name, "bf16", "hopper", Emulated)
    assert relative_error(plan.actions, typed.actions) <= PLAN_BAR
    assert max(step_errors(plan.velocity, typed.velocity)) <= PLAN_BAR


SEEN_IN_THE_IR = ("causal_one_more", "causal_one_less", "state_seen_by_all", "cross_not_restarting", "self_restarting")


@pytest.mark.parametrize("mutant", SEEN_IN_THE_IR)
def test_mutant_fails(mutant: str) -> None:
    """What the passes make of masks and positions hides no mistake in them. (All mutants: tests/models.)"""
    one = fixture("smolvla", "pick", "f32")
    with MUTANTS[mutant]():
        _, wrong = imported.__wrapped__("smolvla", tuple(CASES["pick"]["cameras"]), "f32")
    assert wrong != one.module
    found = ask(one, optimised(wrong, "hopper"), "wide")
    assert max(step_errors(found.velocity, one.velocity)) > 2 * STEP_BAR


def test_every_pass_keeps_the_meaning() -> None:
    """FRTC_CHECK=2: the module before and after each pass, run on random inputs, widened and as typed."""
    optimised(fixture("smolvla", "pick", "bf16").module, "hopper", Options(check=2))


# --- launches -----------------------------------------------------------------------------------------------------


@cache
def traced() -> Module:
    return trace("smolvla", smolvla.stages(tiny()), smolvla.schedule(tiny()))


def expected_calls(
    c: SmolVlaConfig, fused: bool = True, fp8: bool = False, deferred: bool = False
) -> dict[str, Counter[str]]:
    """What every layer costs, whatever the sizes; the last prefix layer makes keys and values only.

    fused      rotations are part of the product before them: 16 bits only
    fp8        norms of few rows are, too
    deferred   products make up for norms: for all of a step; not in front of the first product of vision and prefix, or
               of patches that change places, and in 16 bits for none of vision's
    """
    v, p, e, x = c.vision.layers, c.prefix.layers - 1, c.expert.layers, sum(c.cross)
    vision = Counter({"linear": 4 * v + 2, "layer_norm": 2 * v + 1, "attention": v})
    vision += Counter({"pointwise": 2})  # pictures to patches, positions
    block = {"attention": 1, "gated_linear": 1}
    prefix = Counter({op: p * n for op, n in block.items()}) + products(p + 1, 2 * p, c.rows, fused, fp8)
    prefix += Counter({"linear": 1, "embedding": 1, "pointwise": 2})  # state; rows, rotation by the prompt's length
    once = {"linear": 2 * x, "pointwise": 2}
    denoise = Counter({op: e * n for op, n in block.items()}) + products(e, 2 * e, c.horizon, fused, fp8)
    denoise += Counter({"linear": 3})
    if deferred:
        vision = made_up_for(vision, 2 * v - 1 if fp8 else 0, "layer_norm")
        prefix, denoise = made_up_for(prefix, 2 * p), made_up_for(denoise, 2 * e + 1)
    stages = {"vision": vision, "prefix": prefix, "denoise.once": once, "denoise": denoise, "let.x_t": {"copy": 1}}
    return {name: Counter(ops) for name, ops in stages.items()}


def products(turned: int, before_norms: int, rows: int, fused: bool, fp8: bool) -> Counter[str]:
    """Projections whose heads turn, and products with a norm behind them, all of `rows` rows; and the first norm."""
    few = fp8 and rows <= FEW_ROWS
    norms = {"linear_norm": before_norms} if few else {"linear": before_norms, "rms_norm": before_norms}
    turns = {"linear_rope_qkv": turned} if fused else {"linear": turned, "rope_qkv": turned}
    return Counter(norms) + Counter(turns) + Counter({"rms_norm": 1})


def counted_calls(built: Built) -> dict[str, Counter[str]]:
    return {
        stage: Counter("copy" if call.node is None else call.site.op for call in calls)
        for stage, calls in built.emitted.items()
    }


@pytest.mark.parametrize("name", TARGETS)
def test_calls_on_every_target(name: str) -> None:
    """Every target has kernels for every op: nothing is copied between layers."""
    expected = expected_calls(tiny(), deferred=makes_up(name))
    assert counted_calls(built_for(optimised(traced(), name), name)) == expected


def test_calls_in_fp8_where_norms_are_deferred() -> None:
    """Vision's as well, but for the last, whose rows change places behind it. Of few layers at full size."""
    found: dict[str, Counter[str]] = {}
    for use in uses(Shape("smolvla", precision=STATIC), families=TARGETS["hopper"].families()):
        found.setdefault(use.stage, Counter())[use.site.op] += 1
    expected = expected_calls(shallow(full(), LAYERS), fp8=True, deferred=True)
    assert found == {stage: ops for stage, ops in expected.items() if stage != "let.x_t"}


def test_launches_of_one_inference() -> None:
    """bf16 baseline at most 2,000 (docs/design.md, section 10)."""
    rounds = {"denoise": full().steps}
    calls = {stage: sum(ops.values()) * rounds.get(stage, 1) for stage, ops in expected_calls(full(), fp8=True).items()}
    assert calls == {"vision": 89, "prefix": 111, "denoise.once": 18, "denoise": 840, "let.x_t": 1}
    assert sum(calls.values()) == 1059


@pytest.mark.parametrize("name", TARGETS)
def test_compiles_for_every_target(name: str) -> None:
    """Each sixth kernel of the small model; those of the full sizes: tests/kernels/test_cubins.py."""
    jobs = kernel_jobs(built_for(optimised(traced(), name), name), name)[::6]
    assert jobs and all(cubin.sm == TARGETS[name].sm for cubin in compile_all(jobs))


@pytest.mark.full
@pytest.mark.parametrize("name", TARGETS)
def test_all_kernels_compile_for_every_target(name: str) -> None:
    assert all(
        cubin.sm == TARGETS[name].sm
        for cubin in compile_all(kernel_jobs(built_for(optimised(traced(), name), name), name))
    )


# --- attentions ---------------------------------------------------------------------------------------------------


def attentions(program: str) -> list[Node]:
    return [n for n in optimised(traced(), "hopper").graph(program).nodes if n.op == "attention"]


def test_no_attention_of_the_loop_reads_a_mask() -> None:
    """Self-attention: the valid prefix, then the actions so far. Cross-attention: the valid prefix."""
    rows = tiny().rows
    kinds = [(n["causal"], n["resume"], n.args[3] is None, n.args[4] is not None) for n in attentions("denoise")]
    assert kinds == [(True, rows, True, True), (False, -1, True, True)] * 2


def test_the_mask_of_the_prefix_does_not_depend_on_the_prompt() -> None:
    """How many rows count is a length; what only the state may see is a constant."""
    masks = [(n.args[3], n.args[4], n["resume"]) for n in attentions("prefix")]
    assert len(masks) == tiny().prefix.layers - 1
    assert all(mask is not None and mask.op == "weight" and length is not None for mask, length, _ in masks)
    assert len({mask for mask, *_ in masks}) == 1


def test_vision_is_unmasked() -> None:
    assert all(n.args[3] is None and n.args[4] is None and not n["causal"] for n in attentions("vision"))
