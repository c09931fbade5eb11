"""Random architectures through trace, all passes and a runner: as the eager model, at the same launches per layer."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from frtc.lowering.ir import Graph, Module, Node
from frtc.lowering.ops import POINTWISE
from frtc.models import pi
from frtc.models.pi import Pi, PiConfig
from frtc.passes.check import relative_error
from frtc.trace import trace
from tests.models.truth import KINDS
from tests.truth.architectures import draw, random_inputs, random_model
from tests.truth.emulated import Emulated
from tests.truth.traced import Answer, Array, Runner, Subject, ask, optimised

STAGE_BAR, LOOP_BAR = 1e-5, 1e-4  # relative, float32: each result of each stage, and end to end (docs/design.md, 9)
PLAN_BAR = 4e-3  # a Plan's emulated calls against the module as typed: both use the same references
FEW, MANY = range(6), range(6, 70)  # of each kind
FEW_PLANS = (1, 3, 4)  # odd sizes, one row, several heads
# Moves no data, or only its address, once the memory is planned.
FREE = frozenset("input const weight item view index reshape concat".split())


def subject_of(kind: str, number: int, dtype: torch.dtype = torch.float32) -> tuple[Subject, dict[str, Array]]:
    """The traced architecture, and every named result as the eager model has it."""
    config = draw(kind, number)
    model, inputs = random_model(kind, config, number), random_inputs(config, number)
    state = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    module = trace(kind, KINDS[kind].stages(config, dtype, True), pi.schedule(config))
    expected, x, velocity = eager(model, {name: torch.from_numpy(value) for name, value in inputs.items()})
    return Subject(module, state.__getitem__, inputs, x, velocity), expected


def eager(model: Pi, inputs: dict[str, Tensor]) -> tuple[dict[str, Array], Array, Array]:
    """(results by name, x that enters each step, velocity of each step)"""
    with torch.no_grad():
        image_tokens = model.vision(inputs["images"])
        kv = model.prefix(image_tokens, inputs["tokens"], inputs["n"])
        seen = (inputs["n"], inputs["state"], kv) if "state" in inputs else (inputs["n"], kv)
        xs, velocities = [inputs["noise"]], []
        for time in model.config.times:
            x, v = model.denoise(xs[-1], torch.tensor(time), *seen)
            xs, velocities = [*xs, x], [*velocities, v]
    results = {"image_tokens": image_tokens, "actions": xs[-1]}
    results |= {f"{kind}.{i}": part for i, pair in enumerate(kv) for kind, part in zip("kv", pair, strict=True)}
    return {k: v.numpy() for k, v in results.items()}, torch.stack(xs[:-1]).numpy(), torch.stack(velocities).numpy()


def check(kind: str, number: int) -> None:
    """Every stage within the bar, and what each layer costs."""
    one, expected = subject_of(kind, number)
    module = optimised(one.module, "hopper")
    found = ask(one, module, "wide")
    valid = len(expected["image_tokens"]) + int(one.inputs["n"])  # no query reads what stands behind it
    for name, value in expected.items():
        rows = np.s_[:, :valid] if name.startswith(("k.", "v.")) else np.s_[:]
        bar = LOOP_BAR if name == "actions" else STAGE_BAR
        near = relative_error(found.env[name][rows], value[rows]) <= bar
        assert near or (name == "actions" and nearer(found.actions, value, exactly(one).actions, bar)), name
    for k, (v, w) in enumerate(zip(found.velocity, one.velocity, strict=True)):
        near = relative_error(v, w) <= STAGE_BAR
        assert near or nearer(v, w, exactly(one).velocity[k], STAGE_BAR), f"velocity of step {k}"
    counted = launches(module)
    for name, ops in expected_launches(draw(kind, number)).items():
        assert counted[name] == ops, name


def exactly(one: Subject) -> Answer:
    """The traced module before any pass, in float64."""
    return ask(one, one.module, "exact")


def nearer(found: Array, eager: Array, exact: Array, bar: float) -> bool:
    """Some random architectures are ill-conditioned, and eager float32 errs by more than the bar: then float64 decides.

    Within the bar of it, or within four times what eager errs.
    """
    return relative_error(found, exact) <= max(bar, 4 * relative_error(eager, exact))


def check_plan(kind: str, number: int, runner: Runner) -> None:
    """The same module in bf16, as typed, through codegen: nothing but the order of additions may differ."""
    one, _ = subject_of(kind, number, torch.bfloat16)
    module = optimised(one.module, "hopper")
    typed, found = ask(one, module), ask(one, module, "typed", runner)
    assert relative_error(found.actions, typed.actions) <= PLAN_BAR
    for k, (v, w) in enumerate(zip(found.velocity, typed.velocity, strict=True)):
        assert relative_error(v, w) <= PLAN_BAR, f"velocity of step {k}"


def launches(module: Module) -> dict[str, Counter[str]]:
    """Nodes that cost a launch, by program and op; pointwise ones together."""
    return {g.name: Counter("pointwise" if n.op in POINTWISE else n.op for n in _costly(g)) for g in module.graphs}


def _costly(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if n.op not in FREE and not n.is_const]


def expected_launches(config: PiConfig) -> dict[str, Counter[str]]:
    """What every layer costs, whatever the sizes; the last layer of prefix and state makes keys and values only."""
    v, p, e = config.vision.layers, config.prefix.layers - 1, config.expert.layers
    norm = "rms_norm" if config.state_width else "ada_rms_norm"
    vision = {"linear": 4 * v + 2, "layer_norm": 2 * v + 1, "attention": v}
    vision |= {"pointwise": 1}  # pixels
    denoise = {"linear": 3 * e + 2, norm: 2 * e + 1, "attention": e, "gated_linear": e, "rope_qkv": e}
    denoise |= {"pointwise": 1}  # the Euler step, apart where the velocity is a result
    if not config.state_width:
        stages = {"vision": vision, "prefix": _keys(p) | {"embedding": 1, "pointwise": 1}, "denoise": denoise}
        return {name: Counter(ops) for name, ops in stages.items()}
    once = _keys(e - 1) + Counter({"linear": 1, "pointwise": 3})  # two rotations by the prompt's length
    stages = {"vision": vision, "prefix": _keys(p) | {"embedding": 1, "pointwise": 1}, "denoise.once": once}
    return {name: Counter(ops) for name, ops in (stages | {"denoise": denoise | {"linear": 3 * e + 3}}).items()}


def _keys(layers: int) -> Counter[str]:
    """Plain layers, and one more that makes keys and values only."""
    block = {"linear": 3, "rms_norm": 2, "attention": 1, "gated_linear": 1, "rope_qkv": 1}
    return Counter({"linear": 1, "rms_norm": 1, "rope_qkv": 1}) + Counter({op: layers * n for op, n in block.items()})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", FEW)
def test_architecture(kind: str, number: int) -> None:
    check(kind, number)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", FEW_PLANS)
def test_emulated_plan(kind: str, number: int) -> None:
    check_plan(kind, number, Emulated)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", MANY)
def test_many_architectures(kind: str, number: int) -> None:
    check(kind, number)
    check_plan(kind, number, Emulated)
