"""The interpreter's opinion of a Plan, call by call: the checkpoint through all passes again, run as typed.

Weights come from the checkpoint, static activation scales from a file of scales or from the Plan's evidence: never from
the Plan's own weights, which are a suspect.

Imports torch: only the compile side loads this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from frtc.codegen.build import Built, build
from frtc.compiler import Progress, families_for, optimise, target_named
from frtc.errors import FrtcError
from frtc.lowering.interpret import evaluate
from frtc.lowering.ir import Module, Node
from frtc.passes.pipeline import Options
from frtc.precision import ActivationScales, RecordedScales
from frtc.runtime.plan import Call, Program
from frtc.runtime.plan_file import Plan
from frtc.verify import Reference

Array = np.ndarray[Any, Any]


class Interpreted:
    """Evaluates one node after the other from the Plan's own values; calls that only copy have no opinion."""

    def __init__(
        self,
        plan: Plan,
        reference: Reference,
        inputs: Mapping[str, Array],
        progress: Progress,
        scales: ActivationScales | None = None,
    ) -> None:
        scales = scales or _recorded(plan)
        module, built = rebuilt(plan, reference, progress, scales)
        self.graphs = {g.name: g for g in module.graphs}
        self.counters = {n["name"] for g in module.graphs for n in g.inputs} - _written(module) - set(inputs)
        self.weights = reference.weights(module, "typed", scales)
        self.emitted, self.env = built.emitted, dict(inputs)
        self.at: tuple[str, int] | None = None
        self.values: dict[Node, Any] = {}
        self.unread: dict[Node, int] = {}

    def expect(self, stage: str, index: int, call: Call, round: int) -> list[Array] | None:
        self._enter(stage, round)
        node = self.emitted[stage][index].node
        if node is None:
            return None
        value = self._value(node)
        return list(value) if isinstance(value, tuple) else [value]

    def take(self, stage: str, index: int, call: Call, round: int, found: Sequence[Array]) -> None:
        node = self.emitted[stage][index].node
        if node is not None:
            self.values[node] = tuple(found) if isinstance(node.type, tuple) else found[0]

    def _enter(self, stage: str, round: int) -> None:
        """Of the program before, what programs after it read; then the values of this one."""
        if self.at == (stage, round):
            return
        if self.at is not None and self.at[0] in self.graphs:
            left = self.graphs[self.at[0]]
            self.env |= {name: self._value(node) for name, node in (*left.outputs, *left.writes)}
        self.at, self.values = (stage, round), {}
        self.env |= {name: np.array(round, np.int32) for name in self.counters}
        if stage in self.graphs:
            self.unread = self.graphs[stage].users()
            return
        name = stage.partition(".")[2]  # a `let`: the carried value before its first round
        source = self.emitted[stage][0].operands[0]
        if source is not None and source.buffer.slot:
            self.env[name] = self.env[source.buffer.slot]

    def _value(self, node: Node) -> Any:
        """From its operands' values, which are the Plan's where a call made them. A value goes with its last reader."""
        stack = [node]
        while stack:
            top = stack[-1]
            missing = [a for a in top.operands if a not in self.values]
            if top in self.values or missing:
                stack = stack[:-1] if top in self.values else stack + missing
                continue
            self.values[top] = evaluate(top, self.values, self.env, self.weights, "typed")
            for a in top.operands:
                self.unread[a] -= 1
                if not self.unread[a]:
                    self.values.pop(a, None)
        return self.values[node]


def rebuilt(
    plan: Plan, reference: Reference, progress: Progress, scales: ActivationScales | None = None
) -> tuple[Module, Built]:
    """The module and program that this frtc makes of the checkpoint; they must be the Plan's."""
    target = target_named(plan.program.target.name)
    module = optimise(reference.opened, target, reference.options, Options(), progress, scales).module
    built = build(module, target, families_for(target, reference.options.family))
    if _outline(built.program) != _outline(plan.program):
        hint = "verify with the frtc that compiled it, or compile it again"
        raise FrtcError("verify.program", "this frtc makes another program of the checkpoint", hint=hint)
    return module, built


def _recorded(plan: Plan) -> ActivationScales | None:
    try:
        return RecordedScales.of_evidence(plan.evidence)
    except (KeyError, TypeError, AttributeError):  # evidence is not validated when a Plan opens
        hint = "name the calibration that it was compiled with: --scales FILE"
        raise FrtcError(
            "plan.damaged", "the Plan's record of its activation scales cannot be read", hint=hint
        ) from None


def _outline(program: Program) -> list[tuple[str, list[str]]]:
    return [(stage.name, [call.op for call in stage.calls]) for stage in program.stages]


def _written(module: Module) -> set[str]:
    return {name for g in module.graphs for name, _ in (*g.outputs, *g.writes)}
