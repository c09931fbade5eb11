"""Several traced programs become one Module: shared states, shared weights, one schedule.

    lower_programs("policy", stages, schedule, keys, tensors)

A program is whatever has the fields of `Traceable`; a model's stage records do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from frtc.lowering.from_torch import constants, export, mutated, translate
from frtc.lowering.ir import Graph, Module, Node, Step, tensor


class Traceable(Protocol):
    """One program to trace.

    scope      prefix of its weights' and states' names ("" for none)
    args       example inputs of module.forward, nested as it wants them; tensors only
    inputs     one name per tensor of args, in the order of torch.utils._pytree
    outputs    one name per tensor that forward returns
    """

    @property
    def name(self) -> str: ...
    @property
    def module(self) -> nn.Module: ...
    @property
    def scope(self) -> str: ...
    @property
    def args(self) -> tuple[Any, ...]: ...
    @property
    def inputs(self) -> Sequence[str]: ...
    @property
    def outputs(self) -> Sequence[str]: ...


def lower_programs(
    name: str,
    programs: Iterable[Traceable],
    schedule: tuple[Step, ...] = (),
    progress: Callable[[str], None] = lambda program: None,
) -> Module:
    """The raw IR of a model. A buffer that any program changes is a state of all of them.

    progress   called with each program's name before it is traced
    """
    exported = []
    for p in programs:
        progress(p.name)
        exported.append((p, export(p.module, p.args, p.name)))
    states = {_join(p.scope, s) for p, program in exported for s in mutated(program)}
    graphs, literals = [], dict[str, Node]()
    for p, program in exported:
        own = {s.removeprefix(f"{p.scope}." if p.scope else "") for s in states}
        graphs.append(translate(program, p.inputs, p.outputs, p.name, scope=p.scope, states=own))
        literals |= constants(program, p.scope)
    return Module(name, tuple(graphs), define_weights(graphs, literals), schedule)


def define_weights(graphs: Iterable[Graph], literals: Mapping[str, Node] | None = None) -> Graph:
    """The weights graph: each weight that is read is the model's parameter of that name, or its literal.

    No layout of any checkpoint is in it: who evaluates it looks a parameter up, in whatever float type that is stored.
    """
    wanted = {n["name"]: n.t for g in graphs for n in g.nodes if n.op == "weight"}
    known = literals or {}
    return Graph("weights", (), tuple((name, known.get(name) or tensor(name, wanted[name])) for name in sorted(wanted)))


def _join(scope: str, name: str) -> str:
    return f"{scope}.{name}" if scope else name
