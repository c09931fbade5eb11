"""The yardstick of an FP8 Plan: the same program, weights and scales in PyTorch, its products by torch._scaled_mm.

    yardstick = Yardstick(shape)                             # traced and optimised; needs the scales, not the Plan
    errors = yardstick.errors(plan, references, "cuda")      # of each reference, of each round's velocity

The weights are read from the Plan, so that what differs is how it computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bench.full_model import ARCH, Shape, checkpoint, options, scales_of
from frtc.compiler import open_model, optimise, target_named
from frtc.kernels.dtypes import DTYPES
from frtc.lowering.ir import Graph, Module, Repeat, Run, Type, fresh_nodes, tensor
from frtc.passes.pipeline import Options
from frtc.runtime.plan_file import Plan
from frtc.torch_run import TorchRun

if TYPE_CHECKING:
    from bench.gpu_model import Reference

Array = np.ndarray[Any, Any]


class Yardstick:
    """The optimised module of a shape, as the compiler makes it."""

    def __init__(self, shape: Shape) -> None:
        with fresh_nodes():
            opened = open_model(checkpoint(shape.policy, shape.size), options(shape))
            made = optimise(opened, target_named(ARCH), options(shape), Options(check=0), scales=scales_of(shape))
        self.module = made.module

    def errors(self, plan: Plan, references: Sequence[Reference], device: str) -> list[list[float]]:
        running = TorchRun(*stored(self.module, plan), device)
        running.constants.evaluate()
        found = [velocity_errors(running, reference) for reference in references]
        del running
        if device == "cuda":
            torch.cuda.empty_cache()
        return found


def stored(module: Module, plan: Plan) -> tuple[Module, Any]:
    """The module with weights that a lookup reads from the Plan."""
    entries = {entry.name: entry for entry in plan.program.weights}
    leaves = {name: tensor(name, Type(entry.dtype, entry.shape)) for name, entry in entries.items()}
    for node in (node for graph in module.graphs for node in graph.nodes if node.op == "weight"):
        assert node["name"] not in leaves or leaves[node["name"]].type == node.type, f"{node['name']} is another weight"
    weights = Graph("weights", (), tuple(leaves.items()))

    def lookup(name: str) -> Array:
        entry = entries[name]
        padded: Array = np.ndarray(entry.stored_shape, DTYPES[entry.dtype].numpy, plan.weights, entry.offset)
        return padded[..., : entry.shape[-1]] if entry.shape else padded

    return replace(module, weights=weights), lookup


def velocity_errors(running: TorchRun, reference: Reference) -> list[float]:
    """Every round from the reference's x_k, behind one whole inference."""
    (loop,) = (step for step in running.module.schedule if isinstance(step, Repeat))
    before: Mapping[str, Any] = running(reference.inputs)
    errors = []
    for k, x in enumerate(reference.xs[:-1]):
        values = {**before, loop.index: np.array(k, np.int32), reference.carried: x}
        for step in loop.body:
            assert isinstance(step, Run)
            values |= running.program(running.module.graph(step.program), values, k)
        errors.append(reference.error(k, values[reference.carried].float().cpu().numpy()))
    return errors
