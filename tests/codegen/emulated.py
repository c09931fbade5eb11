"""A module built without the CUDA compiler and run by the emulator: what its Plan would compute, on the CPU.

built = agree(module_of("graph g(x: bf16[4,8]) {...}"))    # what the interpreter computes, too; torch is not needed
assert copies(built, "g") == []
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import dedent
from typing import Any
from unittest import mock

import numpy as np

from frtc.codegen import build as building
from frtc.codegen.build import Built, build
from frtc.codegen.nvrtc import Cubin, Job
from frtc.codegen.weights import pieces
from frtc.kernels.dtypes import DTYPES, round_to
from frtc.kernels.targets import load_targets
from frtc.lowering.interpret import evaluate_weights, run_module
from frtc.lowering.ir import Graph, Module, Run, Type, tensor, walk
from frtc.lowering.text import parse, parse_module
from frtc.passes.check import random_tensor, relative_error
from frtc.probe import read
from frtc.results import results_of
from frtc.runtime.emulator import Emulator
from frtc.runtime.manifest import File, Manifest
from frtc.runtime.plan import Program, Ref, unrolled
from frtc.runtime.validate import check_manifest

Array = np.ndarray[Any, Any]
Lookup = Callable[[str], Array]


@contextmanager
def no_compiler() -> Iterator[None]:
    """Kernels are chosen, nothing is compiled: every cubin is empty."""

    def named(jobs: Sequence[Job], **_: object) -> list[Cubin]:
        return [Cubin(b"", f"kernel_{i}") for i in range(len(jobs))]

    with mock.patch.object(building, "compile_all", named):
        yield


def built(module: Module, target: str = "hopper", families: tuple[str, ...] = ("baseline",)) -> Built:
    """Built without the compiler; the Program passes the checks that every Plan passes when it opens."""
    with no_compiler():
        result = build(module, load_targets()[target], families)
    files = tuple(File(name, 0) for name in result.cubins)
    check_manifest(Manifest(result.program, files, ()))
    return result


@dataclass(frozen=True, slots=True)
class InMemory:
    """What the emulator needs of a Plan."""

    program: Program
    weights: memoryview


def in_memory(result: Built, tensors: Lookup) -> InMemory:
    """The weights block as the Plan writer lays it out."""
    block = np.zeros(result.program.weights_nbytes, np.uint8)
    for entry in result.program.weights:
        values = np.concatenate(list(pieces(result.expressions[entry.name], tensors)))
        home = np.ndarray(entry.stored_shape, values.dtype, block, entry.offset)
        home[(..., slice(0, entry.shape[-1])) if entry.shape else ...] = values.reshape(entry.shape)
    return InMemory(result.program, memoryview(block))


class Emulated:
    """A module ready to run on its inputs. Stale scratch memory reads as NaN."""

    def __init__(self, module: Module, tensors: Lookup, inputs: Mapping[str, Array], target: str = "hopper") -> None:
        self.built = built(module, target)
        self.emulator = Emulator(in_memory(self.built, tensors), poison=True)  # type: ignore[arg-type]
        self.places: dict[str, dict[str, Ref]] = {
            stage: {name: _ref(data) for name, data in found.items()}
            for stage, found in results_of(module, self.built).items()
        }
        for name, slot in self.emulator.inputs.items():
            self.emulator.set(name, np.asarray(inputs[name]).astype(DTYPES[slot.dtype].numpy).reshape(slot.shape))

    def inference(self) -> Mapping[str, Array]:
        env: dict[str, Array] = {}
        for stage, round in unrolled(self.built.program.schedule):
            env |= self.run_stage(stage, round)
        return env | {name: self.emulator.get(name) for name in self.emulator.outputs}

    def run_stage(self, stage: str, round: int = 0) -> dict[str, Array]:
        """The named results of one run of a program."""
        self.emulator.run_stage(stage, round)
        return {name: read(self.emulator, ref, round) for name, ref in self.places[stage].items()}


def _ref(data: Mapping[str, Any]) -> Ref:
    return Ref(**{**data, "shape": tuple(data["shape"]), "strides": tuple(data["strides"])})


def copies(result: Built, stage: str) -> list[str]:
    """What a stage only moves: the names of its copies."""
    return [call.name for call in result.emitted[stage] if call.node is None]


def ops(result: Built, stage: str) -> list[str]:
    """The ops that a stage launches, copies left out."""
    return [call.site.op for call in result.emitted[stage] if call.node is not None]


# ---- modules from text ----------------------------------------------------------------------------------------------


def module_of(text: str) -> Module:
    """The module that `text` shows. A graph alone becomes one that runs it once and returns its results; its weights
    are parameters of the same name."""
    text = dedent(text).strip()
    if text.startswith("module"):
        return parse_module(text)
    graph = parse(text)
    weights = sorted((n for n in walk(graph.roots) if n.op == "weight"), key=lambda n: str(n["name"]))
    leaves = Graph("weights", (), tuple((str(n["name"]), tensor(n["name"], n.t)) for n in weights))
    return Module("test", (graph,), leaves, (Run(graph.name),), tuple((k, k) for k, _ in graph.outputs))


def agree(module: Module, runs: int = 1, target: str = "hopper", exact: bool = True) -> Built:
    """The built module computes what the interpreter does, run after run: states live on. Returns what was built."""
    inputs = {name: stored(name, type) for name, type in module.inputs.items()}
    types = {n["key"]: n.t for n in walk(module.weights.roots) if n.op == "tensor"}

    def tensors(key: str) -> Array:
        return stored(key, types[key])

    running = Emulated(module, tensors, inputs, target=target)
    env: dict[str, Array] = dict(inputs)
    weights = evaluate_weights(module, tensors)
    states = {s["name"] for g in module.graphs for s in g.states}
    for _ in range(runs):
        env = run_module(module, {**inputs, **{k: env[k] for k in states if k in env}}, weights.__getitem__)
        found = running.inference()
        for outside, _ in module.outputs:
            wanted = env[outside]
            assert found[outside].dtype == wanted.dtype and found[outside].shape == wanted.shape, outside
            error = relative_error(found[outside].astype(np.float64), wanted.astype(np.float64))
            assert error <= (0.0 if exact else 1e-6), f"{outside} differs by {error:.1e}"
    return running.built


def stored(name: str, type: Type) -> Array:
    """Seeded values in the type's own dtype."""
    values = random_tensor(name, type)
    return round_to(values, type.dtype) if type.is_float else values
