"""The interpreter's opinion of a Plan, call by call: the checkpoint through all passes again, run as typed.

Weights come from the checkpoint, static activation scales from a file of scales or from the Plan's evidence: never from
the Plan's own weights, which are a suspect.

Imports torch: only the compile side loads this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from frtc.codegen.build import Built, build
from frtc.compiler import Progress, families_for, optimise, target_named
from frtc.errors import FrtcError
from frtc.kernels.dtypes import DTYPES
from frtc.lowering.interpret import evaluate, stored
from frtc.lowering.ir import Module, Node, Type, walk
from frtc.passes.pipeline import Options
from frtc.passes.quantize import SCALE
from frtc.precision import ActivationScales
from frtc.recorded import recorded_scales, unreadable_scales
from frtc.runtime.plan import WEIGHTS, Call, Program, Ref
from frtc.runtime.plan_file import Plan
from frtc.scales import is_scale
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
        scales = scales or recorded_scales(plan)
        module, built = rebuilt(plan, reference, progress, scales)
        _require_scales(module, scales)
        self.graphs = {g.name: g for g in module.graphs}
        self.counters = {n["name"] for g in module.graphs for n in g.inputs} - _written(module) - set(inputs)
        self.weight_of, self.types = reference.weights(module, "typed", scales), _types(module)
        self.program = built.program
        self.held: dict[str, Array] = {}  # weights of the call at hand
        self.compared: set[tuple[Ref, Ref, int]] = set()
        self.emitted, self.env = built.emitted, dict(inputs)
        self.at: tuple[str, int] | None = None
        self.values: dict[Node, Any] = {}
        self.unread: dict[Node, int] = {}

    def weights(self, stage: str, index: int, call: Call, round: int) -> Iterator[tuple[str, Ref, Array]]:
        """Each part of a weight once, at the first call that reads it."""
        self.held = {}
        operands = self.program.stage(stage).calls[index].operands
        for theirs, ours in zip(call.operands, operands, strict=False):
            if theirs is None or ours is None or WEIGHTS not in (theirs.space, ours.space):
                continue
            place = (theirs, ours, round if theirs.step or ours.step else 0)
            if ours.space == WEIGHTS and place not in self.compared:
                self.compared.add(place)
                yield self._part(theirs, ours, round)

    def _part(self, theirs: Ref, ours: Ref, round: int) -> tuple[str, Ref, Array]:
        entry = next(w for w in self.program.weights if w.offset <= ours.offset < w.offset + w.nbytes)
        whole = np.zeros(entry.stored_shape, DTYPES[entry.dtype].numpy)
        unpadded = (..., slice(entry.shape[-1])) if entry.shape else ()
        whole[unpadded] = self._weight(entry.name)
        at = ours.offset + round * ours.step - entry.offset
        strides = [s * whole.itemsize for s in ours.strides]
        part = np.ndarray(ours.shape, whole.dtype, whole, at, strides)
        return entry.name, theirs, part if theirs.shape == ours.shape else np.full(theirs.shape, np.inf)

    def _weight(self, name: str) -> Array:
        """As the Plan should store it."""
        if name not in self.held:
            self.held[name] = stored(self.weight_of(name), self.types[name], "typed")
        return self.held[name]

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
            self.values[top] = evaluate(top, self.values, self.env, self._weight, "typed")
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


def _require_scales(module: Module, scales: ActivationScales | None) -> None:
    """Every activation scale that weights are made of is known, with one for each round."""
    for leaf in (n for n in walk([node for _, node in module.weights.outputs]) if is_scale(n)):
        site = leaf["key"].removeprefix(SCALE)
        try:
            found = None if scales is None else np.asarray(scales.of(site), np.float32).shape
        except (KeyError, TypeError, ValueError):
            found = None
        if found != leaf.shape:
            raise unreadable_scales(f"{site} has {'none' if found is None else found}, not {leaf.shape}")


def _outline(program: Program) -> list[tuple[str, list[str]]]:
    return [(stage.name, [call.op for call in stage.calls]) for stage in program.stages]


def _types(module: Module) -> dict[str, Type]:
    return {name: node.t for name, node in module.weights.outputs}


def _written(module: Module) -> set[str]:
    return {name for g in module.graphs for name, _ in (*g.outputs, *g.writes)}
