"""The yardstick of an FP8 Plan: the model with the same scales in PyTorch, its products by torch._scaled_mm.

    yardstick = Yardstick(shape)                       # traced and optimised; needs the scales, not the Plan
    errors = yardstick.errors(references, "cuda")      # by reference and round, of the velocities

Optimised for kernels that run everywhere: every product reads what its norm has made, whatever the Plan's do. Its
weights are made anew from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bench.full_model import ARCH, Shape, checkpoint, options, scales_of
from frtc.codegen.weights import Lookup
from frtc.compiler import open_model, optimise, target_named
from frtc.lowering.ir import Module, Repeat, Run, fresh_nodes
from frtc.passes.pipeline import Options
from frtc.precision import parameters
from frtc.torch_run import TorchRun

if TYPE_CHECKING:
    from bench.gpu_model import Reference


class Yardstick:
    """The optimised module of a shape, and its parameters."""

    def __init__(self, shape: Shape) -> None:
        wanted, scales = replace(options(shape), family="baseline"), scales_of(shape)
        with fresh_nodes():
            opened = open_model(checkpoint(shape.policy, shape.size), wanted)
            made = optimise(opened, target_named(ARCH), wanted, Options(check=0), scales=scales)
        self.module, self.tensors = made.module, parameters(opened.read, scales)

    def errors(self, references: Sequence[Reference], device: str) -> list[list[float]]:
        rounds = Rounds(self.module, self.tensors, device)
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
