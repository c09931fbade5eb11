"""A runner that takes a module through codegen: kernels chosen, memory planned, and the emulator on the calls.

The kernels are chosen but not compiled: nothing that runs on the CPU depends on their code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np

from frtc.codegen.build import Built, build
from frtc.codegen.nvrtc import Cubin, Job
from frtc.codegen.weights import pieces
from frtc.kernels.dtypes import DTYPES
from frtc.kernels.targets import load_targets
from frtc.lowering.ir import Module
from frtc.runtime.emulator import Emulator
from frtc.runtime.plan import WeightEntry
from tests.truth.traced import Array, Lookup, loop_of


def not_compiled(jobs: Sequence[Job], workers: int | None = None, done: Any = None) -> list[Cubin]:
    return [Cubin(b"", "not_compiled") for _ in jobs]


def built_for(module: Module, target: str) -> Built:
    """With the families that are the target's where nobody asks."""
    there = load_targets()[target]
    with mock.patch("frtc.codegen.build.compile_all", not_compiled):
        return build(module, there, there.families())


def kernel_jobs(built: Built, name: str) -> list[Job]:
    """What would have been compiled for the target, each once, in an order of its own."""
    target = load_targets()[name]
    calls = [call for calls in built.emitted.values() for call in calls]
    stages = [stage for c in calls for stage in c.choice.kernel.stages(c.site, c.choice.config, target)]
    return sorted({Job.of(stage, target) for stage in stages}, key=lambda job: (job.source, job.entry))


@dataclass(frozen=True, slots=True)
class InMemory:
    """What the emulator needs of an open Plan."""

    program: Any
    weights: Array


def weights_of(built: Built, tensors: Lookup) -> Array:
    """The weights block, each weight evaluated in pieces as for the file."""
    block = np.zeros(built.program.weights_nbytes, np.uint8)
    for entry in built.program.weights:
        at = 0
        for piece in pieces(built.expressions[entry.name], tensors):
            _rows(block, entry)[at : at + len(piece)] = piece
            at += len(piece)
    return block


def _rows(block: Array, entry: WeightEntry) -> Array:
    """The weight in the block, without the padding of its rows; at least one axis."""
    dtype, stored = DTYPES[entry.dtype].numpy, entry.stored_shape or (1,)
    padded: Array = np.ndarray(stored, dtype, block.data, entry.offset)
    return padded[..., : entry.shape[-1]] if entry.shape else padded


class Emulated:
    """The runner. Scratch memory is poisoned before every stage."""

    target = "hopper"

    def __init__(self, module: Module, tensors: Lookup, inputs: Mapping[str, Array], mode: str) -> None:
        assert mode == "typed" or all(d != "bf16" for d in _types(module)), "the emulator runs a Plan as it is typed"
        self.loop = loop_of(module)
        shown = replace(module, outputs=(*module.outputs, ("v_t", "v_t")))
        built = built_for(shown, self.target)
        self.emulator = Emulator(InMemory(built.program, weights_of(built, tensors)), poison=True)  # type: ignore[arg-type]
        for name, value in inputs.items():
            self.emulator.set(name, value.astype(DTYPES[self.emulator.inputs[name].dtype].numpy))

    def inference(self) -> Mapping[str, Array]:
        self.emulator.run()
        return {"actions": self.emulator.get("actions")}

    def velocity(self, step: int, x: Array) -> Array:
        self.emulator.set("noise", x)
        self.emulator.run_stage("let.x_t")
        self.emulator.run_stage(self.loop.body[-1].program, step)  # type: ignore[union-attr]
        return self.emulator.get("v_t")


def _types(module: Module) -> set[str]:
    return {n.dtype for g in module.graphs for n in g.nodes if not isinstance(n.type, tuple)}
