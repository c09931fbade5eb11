"""How many launches one inference takes on every target: a change that adds some says so here."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from bench.sites import shallow
from frtc.codegen.emit import Emitter
from frtc.codegen.fusible import implements
from frtc.codegen.placement import place_module
from frtc.codegen.places import Place, new_place
from frtc.kernels.catalog import CATALOG
from frtc.kernels.targets import load_targets
from frtc.lowering.ir import Module, Node, Repeat, Run
from frtc.models import load_models
from frtc.passes.pipeline import Options, run_passes
from frtc.passes.precision import Precision
from frtc.passes.standard import pipeline
from frtc.runtime.plan import WEIGHTS
from frtc.trace import trace

TARGETS = load_targets()
LAYERS, STEPS = 2, 10
# Launches of Pi0.5 at its own widths, two layers in every stack: vision, prefix, once, ten steps.
LAUNCHES = {
    ("bf16", "baseline"): 201,
    ("w8a16", "baseline"): 201,
    ("fp8", "baseline"): 161,
    ("fp8", "native"): 146,
    ("bf16", "native"): 149,
}


@cache
def traced() -> Module:
    model = load_models()["pi05"]
    assert model.synthetic is not None
    config = replace(shallow(model.synthetic.sizes["full"](), LAYERS), views=2, prompt=48, horizon=50)
    return trace(model.name, model.stages(config, torch.bfloat16, False), model.schedule(config))


def launches(name: str, kind: str, family: str) -> int:
    target = TARGETS[name]
    families = target.families(family)
    precision = Precision(kind, static=kind == "fp8")
    module = run_passes(traced(), pipeline(implements(target, families), precision), Options(check=0))[0]
    loops = {s.body[0].program: s for s in module.schedule if isinstance(s, Repeat) and isinstance(s.body[0], Run)}
    placement, places, count = place_module(module), dict[str, Place](), 0

    def weight(node: Node) -> Place:
        return places.setdefault(node["name"], new_place(WEIGHTS, node.t))

    for graph in module.graphs:
        loop = loops.get(graph.name)
        emitter = Emitter(graph, placement, target, CATALOG, families, loop.index if loop else "", weight)
        calls = emitter.run()
        stages = [c.choice.kernel.stages(c.site, c.choice.config, target) for c in calls]
        count += sum(map(len, stages)) * (loop.count if loop else 1)
    return count


@pytest.mark.parametrize(
    ("name", "kind", "family"),
    [
        *((name, "bf16", "baseline") for name in TARGETS),
        ("thor", "fp8", "baseline"),
        ("rtx5090", "fp8", "baseline"),
        ("orin", "w8a16", "baseline"),
        ("hopper", "fp8", "native"),
        ("hopper", "bf16", "native"),
    ],
)
def test_launches_of_an_inference(name: str, kind: str, family: str) -> None:
    assert launches(name, kind, family) == LAUNCHES[kind, family]
