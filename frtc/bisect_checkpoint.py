"""The interpreter's opinion of a Plan, call by call: the checkpoint through all passes again, run as typed.

Imports torch: only the compile side loads this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from frtc.codegen.build import Built, build
from frtc.compiler import Progress, families_for, optimise, target_named
from frtc.precision import RecordedScales
from frtc.errors import FrtcError
from frtc.lowering.interpret import run
from frtc.lowering.ir import Graph, Module, Node
from frtc.passes.pipeline import Options
from frtc.runtime.plan import Call, Program
from frtc.runtime.plan_file import Plan
from frtc.verify import Reference

Array = np.ndarray[Any, Any]


class Interpreted:
    """Evaluates one program at a time; calls that only copy have no opinion."""

    def __init__(self, plan: Plan, reference: Reference, inputs: Mapping[str, Array], progress: Progress) -> None:
        module, built = rebuilt(plan, reference, progress)
        self.graphs = {g.name: g for g in module.graphs}
        self.counters = {n["name"] for g in module.graphs for n in g.inputs} - _written(module) - set(inputs)
        self.weights = reference.weights(module, "typed")
        self.emitted, self.env = built.emitted, dict(inputs)
        self.at: tuple[str, int] | None = None
        self.values: dict[str, Array] = {}

    def __call__(self, stage: str, index: int, call: Call, round: int) -> list[Array] | None:
        if stage not in self.graphs:  # a `let`: the carried value before its first round
            name = stage.partition(".")[2]
            source = self.emitted[stage][0].operands[0]
            self.env[name] = (
                self.env[source.buffer.slot] if source is not None and source.buffer.slot else self.env[name]
            )
            return None
        if self.at != (stage, round):
            self._evaluate(stage, round)
        node = self.emitted[stage][index].node
        if node is None:
            return None
        many = len(node.type) if isinstance(node.type, tuple) else 1
        results = [self.values.get(f"{index}.{i}") for i in range(many)]
        return [r for r in results if r is not None] if all(r is not None for r in results) else None

    def _evaluate(self, stage: str, round: int) -> None:
        """All nodes of the program that calls stand for, and its results for the programs after it."""
        graph, self.at = self.graphs[stage], (stage, round)
        wanted: list[tuple[str, Node]] = []
        items = {(n.args[0], n["index"]): n for n in graph.nodes if n.op == "item"}
        for i, call in enumerate(self.emitted[stage]):
            if call.node is not None and isinstance(call.node.type, tuple):
                found = [(f"{i}.{k}", items.get((call.node, k))) for k in range(len(call.node.type))]
                wanted += [(key, node) for key, node in found if node is not None]
            elif call.node is not None:
                wanted.append((f"{i}.0", call.node))
        whole = Graph(graph.name, graph.inputs, (*graph.outputs, *wanted), graph.states, graph.writes)
        env = self.env | {name: np.array(round, np.int32) for name in self.counters}
        values = run(whole, env, self.weights, "typed")
        self.env |= {name: values[name] for name, _ in graph.outputs}
        self.values = {key: values[key] for key, _ in wanted}


def rebuilt(plan: Plan, reference: Reference, progress: Progress) -> tuple[Module, Built]:
    """The module and program that this frtc makes of the checkpoint; they must be the Plan's."""
    target = target_named(plan.program.target.name)
    scales = RecordedScales.of_evidence(plan.evidence)
    module = optimise(reference.opened, target, reference.options, Options(), progress, scales).module
    built = build(module, target, families_for(target, reference.options.family))
    if _outline(built.program) != _outline(plan.program):
        hint = "verify with the frtc that compiled it, or compile it again"
        raise FrtcError("verify.program", "this frtc makes another program of the checkpoint", hint=hint)
    return module, built


def _outline(program: Program) -> list[tuple[str, list[str]]]:
    return [(stage.name, [call.op for call in stage.calls]) for stage in program.stages]


def _written(module: Module) -> set[str]:
    return {name for g in module.graphs for name, _ in (*g.outputs, *g.writes)}
