"""The yardstick of an FP8 Plan: the same program, weights and scales in PyTorch, its products by torch._scaled_mm.

    yardstick = Yardstick(shape)                             # traced and optimised; needs the scales, not the Plan
    errors = yardstick.errors(plan, references, "cuda")      # by reference and round, of the velocities

The weights are read from the Plan, so that what differs is how it computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bench.full_model import ARCH, Shape, checkpoint, options, scales_of
from frtc.codegen.weights import Array, Lookup
from frtc.compiler import open_model, optimise, target_named
from frtc.kernels.dtypes import DTYPES
from frtc.lowering.ir import Graph, Module, Repeat, Run, Type, fresh_nodes, tensor
from frtc.passes.pipeline import Options
from frtc.precision import parameters
from frtc.runtime.plan_file import Plan
from frtc.torch_run import TorchRun

if TYPE_CHECKING:
    from bench.gpu_model import Reference


class Yardstick:
    """The optimised module of a shape, as the compiler makes it."""

    def __init__(self, shape: Shape) -> None:
        with fresh_nodes():
            opened = open_model(checkpoint(shape.policy, shape.size), options(shape))
            made = optimise(opened, target_named(ARCH), options(shape), Options(check=0), scales=scales_of(shape))
        self.module = made.module

    def errors(self, plan: Plan, references: Sequence[Reference], device: str) -> list[list[float]]:
        rounds = Rounds(*stored(self.module, plan), device)
        rounds.running.constants.evaluate()
        found = [rounds.errors(reference) for reference in references]
        del rounds
        if device == "cuda":
            torch.cuda.empty_cache()
        return found


def stage_errors(shape: Shape, references: Sequence[Reference], device: str) -> dict[str, list[list[float]]]:
    """As `Yardstick.errors` with only one stage in FP8, by that stage: whose products cost the accuracy."""
    opened, scales = open_model(checkpoint(shape.policy, shape.size), options(shape)), scales_of(shape)
    found = {}
    for stage in opened.model.stages(opened.config, torch.bfloat16, False):
        wanted = replace(options(shape), precision="bf16", stages=((stage, "fp8"),))
        with fresh_nodes():
            made = optimise(opened, target_named(ARCH), wanted, Options(check=0), scales=scales)
            rounds = Rounds(made.module, parameters(opened.read, scales), device)
        rounds.running.constants.evaluate()
        found[stage] = [rounds.errors(reference) for reference in references]
    return found


def stored(module: Module, plan: Plan) -> tuple[Module, Lookup]:
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


class Rounds:
    """A module in PyTorch whose loop is entered where a reference stood."""

    def __init__(self, module: Module, tensors: Lookup, device: str) -> None:
        at, loop = next((i, step) for i, step in enumerate(module.schedule) if isinstance(step, Repeat))
        self.loop, self.programs = loop, [module.graph(step.program) for step in loop.body if isinstance(step, Run)]
        self.running = TorchRun(replace(module, schedule=module.schedule[:at], outputs=()), tensors, device)

    def errors(self, reference: Reference, rounds: Sequence[int] = ()) -> list[float]:
        """Of the velocities of these rounds (all, where none are named), each from the reference's x_k."""
        before = self.running(reference.inputs)
        found = []
        for k in rounds or range(len(reference.xs) - 1):
            values: dict[str, Any] = {**before, self.loop.index: np.array(k, np.int32)}
            values[reference.carried] = reference.xs[k]
            for program in self.programs:
                values |= self.running.program(program, values, k)
            found.append(reference.error(k, values[reference.carried].float().cpu().numpy()))
        return found
