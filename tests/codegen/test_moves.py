"""No launch of a policy's programs only moves data: quantises, casts, copies or gives it another shape.

One launch is left, and it is none of a program: before the loop the noise becomes x_t, because the steps write over x_t
and a caller's input stays as it was handed over.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from frtc.codegen.emit import Emitted
from frtc.codegen.fusible import implements
from frtc.kernels.targets import load_targets
from frtc.lowering.ir import Module
from frtc.models import load_models
from frtc.passes.pipeline import Options, run_passes
from frtc.passes.precision import Precision
from frtc.passes.standard import pipeline
from frtc.trace import trace
from tests.codegen.emulated import built, module_of

MOVES = frozenset({"cast", "concat", "reshape", "transpose", "broadcast", "slice", "pad", "quantize", "write", "view"})
POLICIES = ("pi05", "pi0", "smolvla")
WAYS = (
    ("hopper", "fp8"),
    pytest.param("orin", "w8a16", marks=pytest.mark.full),
    pytest.param("hopper", "bf16", marks=pytest.mark.full),
    pytest.param("orin", "bf16", marks=pytest.mark.full),
)
BETWEEN_PROGRAMS = "let.x_t"


def only_moves(call: Emitted) -> bool:
    """A copy, an op that moves, or a pointwise program in which every step converts."""
    if call.site.op == "pointwise":
        return all(op == "cast" for op, *_ in call.site.attrs["expr"])
    return call.node is None or call.site.op in MOVES


@cache
def traced(policy: str) -> Module:
    model = load_models()[policy]
    config = model.tiny()
    return trace(policy, model.stages(config, torch.bfloat16, False), model.schedule(config))


@pytest.mark.parametrize(("target", "precision"), WAYS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_launch_computes(policy: str, target: str, precision: str) -> None:
    passes = pipeline(implements(load_targets()[target]), Precision(precision))
    module, _ = run_passes(traced(policy), passes, Options(check=0))
    emitted = built(module, target).emitted
    assert {call.site.op for calls in emitted.values() for call in calls} >= {"linear", "attention", "linear_rope_qkv"}
    assert {stage: moves for stage, calls in emitted.items() if (moves := list(filter(only_moves, calls)))} == {
        BETWEEN_PROGRAMS: list(emitted[BETWEEN_PROGRAMS])
    }


@pytest.mark.parametrize(
    ("line", "moves"),
    [
        ("%0 = cast(%x) : bf16[4,6]", True),
        ("%0 = view(%x, shape=[4,6], strides=[1,4]) : f32[4,6]", True),
        ("%0 = concat(%x, %x, axis=-1) : f32[4,12]", True),
        ("%0 = pointwise(%x, expr=[[cast, 0, f16], [cast, 1, f32]], results=[2], shape=[4,6]) : f32[4,6]", True),
        ("%0 = exp(%x) : f32[4,6]", False),
        ("%0 = pointwise(%x, expr=[[cast, 0, f16], [neg, 1]], results=[2], shape=[4,6]) : f32[4,6]", False),
    ],
)
def test_what_only_moves(line: str, moves: bool) -> None:
    module = module_of(f"graph g(x: f32[4,6]) {{\n{line}\nreturn y=%0\n}}")
    (calls,) = built(module).emitted.values()
    assert calls and all(only_moves(call) == moves for call in calls)
