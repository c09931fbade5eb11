"""Plans of a tiny checkpoint in memory: every precision, no kernel compiled, faults planted in bytes or program.

The emulator and the interpreter need operations and weights only; what a file and cubins need is tested elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frtc import compiler, observation
from frtc.bisect import Departure, first_departure
from frtc.bisect_checkpoint import Interpreted
from frtc.codegen import build as codegen_build
from frtc.codegen.build import Built, build
from frtc.codegen.weights import pieces, share
from frtc.compiler import CompileOptions, families_for, open_model, optimise, silent, target_named
from frtc.kernels.dtypes import DTYPES
from frtc.lowering.interpret import run
from frtc.lowering.ir import Graph, Module, Node, Repeat, walk
from frtc.lowering.ir import Run as IrRun
from frtc.lowering.ops import add, mul
from frtc.models.synthetic import write_checkpoint
from frtc.passes.norm_readers import unnormed_of
from frtc.passes.pipeline import Options, run_passes
from frtc.passes.sites import sites_of, unnormed
from frtc.passes.standard import FRONT
from frtc.precision import RecordedScales, parameters
from frtc.runtime.plan import Program, WeightEntry
from frtc.runtime.plan_file import Plan
from frtc.runtime.policy_steps import PolicySteps
from frtc.scales import is_scale
from frtc.verify import Reference

Array = np.ndarray[Any, Any]
LARGEST = 448.0  # of e4m3
KINDS = ("bf16", "fp8", "rows", "w8a16")  # "rows": FP8, each row with a scale of its own


@dataclass(frozen=True, slots=True)
class Made:
    """A Plan, and what the second opinion on it is made from."""

    plan: Plan
    module: Module
    built: Built
    reference: Reference
    inputs: Mapping[str, Array]
    scales: RecordedScales | None

    def entry(self, name: str) -> WeightEntry:
        return next(w for w in self.plan.program.weights if w.name == name)

    def weight(self, name: str) -> Array:
        """In place, in memory of this Plan alone."""
        entry = self.entry(name)
        dtype = DTYPES[entry.dtype].numpy
        array: Array = np.ndarray(entry.stored_shape, dtype, self.plan.data, entry.offset)
        return array[..., : entry.shape[-1]] if entry.shape else array

    def copy(self, program: Program | None = None) -> Made:
        """The same in memory of its own."""
        data = memoryview(bytearray(self.plan.data))
        return replace(self, plan=replace(self.plan, data=data, program=program or self.plan.program))

    def departs(self, scales: RecordedScales | None = None) -> Departure | None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("frtc.bisect_checkpoint.rebuilt", lambda *about: (self.module, self.built))
            opinion = Interpreted(self.plan, self.reference, self.inputs, silent, scales or self.scales)
        return first_departure(self.plan, None, self.inputs, opinion, silent)


def before_norm(x: Node) -> Node | None:
    """What a product of the norm x reads where it makes up for it."""
    found = unnormed_of(x)
    if found is None or found.w is None:
        return found and found.s
    result: Node = mul(found.s, add(found.w, found.offset, dtype="f32"), dtype="f32")
    return result


class Maker:
    """One traced checkpoint, and a Plan of it for every kind that is asked for."""

    def __init__(self, folder: Path, target: str = "hopper") -> None:
        write_checkpoint(folder / "ck", "openpi", "tiny", seed=1)
        self.options = CompileOptions(precision="bf16", prompt=72, steps=3, horizon=4)
        self.opened = open_model(folder / "ck", self.options)
        self.target = target_named(target)
        self.traced = compiler.import_module(self.opened)
        policy = self.opened.policy(compiler.sizes_of(self.traced))
        steps = PolicySteps(policy, self.opened.files.tokenizer)
        seen = observation.seeded(steps) | {"prompt": "go"}
        self.policy = policy
        self.inputs = {name: array.copy() for name, array in steps.prepare(seen, draw=0).inputs.items()}
        self.scales = RecordedScales(self._absmax(), {})

    def _absmax(self) -> dict[str, Array]:
        """Of what every site reads, in the model as it is traced, by round."""
        front, _ = run_passes(self.traced, FRONT, Options(check=0))
        reference = Reference(self.opened, self.options, front)
        weights, env, found = reference.weights(front, "typed"), dict(self.inputs), dict[str, list[float]]()
        graphs, sites = {g.name: g for g in front.graphs}, sites_of(front)

        def play(program: str) -> None:
            here = [s for s in sites if s.program == program]
            g = graphs[program]
            seen = {s.name: s.x for s in here} | {
                unnormed(s.name): z for s in here if (z := before_norm(s.x)) is not None
            }
            whole = Graph(
                g.name, g.inputs, (*g.outputs, *((f"at {n}", x) for n, x in seen.items())), g.states, g.writes
            )
            values = run(whole, env, weights, "typed")
            env.update({name: values[name] for name, _ in g.outputs})
            for name in seen:
                largest = np.nanmax(np.abs(values[f"at {name}"].astype(np.float32)))
                found.setdefault(name, []).append(float(largest) / LARGEST)

        for step in front.schedule:
            if isinstance(step, IrRun):
                play(step.program)
            elif isinstance(step, Repeat):
                for k in range(step.count):
                    env[step.index] = np.array(k, np.int32)
                    for inner in step.body:
                        play(inner.program)  # type: ignore[union-attr]
            else:
                env[step.name] = env[step.source]  # type: ignore[union-attr]
        rounds = {name: s.rounds for s in sites for name in (s.name, unnormed(s.name))}
        return {name: np.array(v if rounds[name] else v[0], np.float32) for name, v in found.items()}

    def scale_leaves(self, made: Made) -> list[Node]:
        """Activation scales that weights of a Plan are made of, in the order in which its calls use them."""
        found: dict[Node, None] = {}
        for entry in made.plan.program.weights:
            found.update(dict.fromkeys(n for n in walk([made.built.expressions[entry.name]]) if is_scale(n)))
        return list(found)

    def make(self, kind: str, family: str | None = None) -> Made:
        static = kind == "fp8"
        options = replace(self.options, precision="fp8" if kind == "rows" else kind, family=family)
        scales = self.scales if static else None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiler, "import_module", lambda *a, **k: self.traced)
            module = optimise(self.opened, self.target, options, Options(check=0), silent, scales).module
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(codegen_build, "_compile", _no_kernels)
            built = build(module, self.target, families_for(self.target, options.family))
        program = replace(built.program, policy=self.policy.to_json())
        data = weights_of(program, built.expressions, parameters(self.opened.read, scales))
        recorded = {"calibration": {"scales": "static", "sites": dict(scales.sites)}} if scales else {}
        plan = Plan(Path("in memory"), program, "0" * 64, recorded, (), data, (), (), verified=True)
        return Made(plan, module, built, Reference(self.opened, options, self.traced), self.inputs, scales)


def _no_kernels(stages: list[Any], target: Any, done: Any) -> Any:
    from frtc.codegen.nvrtc import Job

    return {Job.of(stage, target): 0 for stage in stages}, (), {}


def weights_of(program: Program, expressions: Mapping[str, Node], lookup: Any) -> memoryview:
    data = bytearray(program.weights_nbytes)
    expressions, values = share(expressions, lookup)
    for entry in program.weights:
        dtype = DTYPES[entry.dtype].numpy
        stored = np.ndarray(entry.stored_shape or (1,), dtype, data, entry.offset)
        whole, row = stored[..., : entry.shape[-1]] if entry.shape else stored, 0
        for piece in pieces(expressions[entry.name], values):
            whole[row : row + len(piece)] = piece
            row += len(piece)
    return memoryview(data)
