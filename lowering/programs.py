"""Several traced programs become one Module: shared states, shared weights, one schedule.

    lower_programs("policy", stages, schedule, keys, tensors)

A program is whatever has the fields of `Traceable`; a model's stage records do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from frtc.errors import FrtcError, nearest
from frtc.lowering import ir
from frtc.lowering.aten import cast
from frtc.lowering.from_torch import constants, export, mutated, translate
from frtc.lowering.ir import Graph, Module, Node, Step, Type


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
    keys: Mapping[str, str] | None = None,
    tensors: Mapping[str, Type] | None = None,
) -> Module:
    """The raw IR of a model. A buffer that any program changes is a state of all of them.

    keys       weight name -> its key in the checkpoint (absent: keys are the weights' names)
    tensors    key -> type in the file (absent: the file holds what the module declares)
    """
    exported = [(p, export(p.module, p.args, p.name)) for p in programs]
    states = {_join(p.scope, s) for p, program in exported for s in mutated(program)}
    graphs, literals = [], dict[str, Node]()
    for p, program in exported:
        own = {s.removeprefix(f"{p.scope}." if p.scope else "") for s in states}
        graphs.append(translate(program, p.inputs, p.outputs, p.name, scope=p.scope, states=own))
        literals |= constants(program, p.scope)
    return Module(name, tuple(graphs), define_weights(graphs, keys, tensors, literals), schedule)


def define_weights(
    graphs: Iterable[Graph],
    keys: Mapping[str, str] | None = None,
    tensors: Mapping[str, Type] | None = None,
    literals: Mapping[str, Node] | None = None,
) -> Graph:
    """The weights graph: each weight that is read is one checkpoint tensor, cast to the weight's element type."""
    wanted = {n["name"]: n.t for g in graphs for n in g.nodes if n.op == "weight"}
    outputs = []
    for name in sorted(wanted):
        leaf = (literals or {}).get(name)
        outputs.append((name, leaf if leaf is not None else _definition(name, wanted[name], keys, tensors)))
    return Graph("weights", (), tuple(outputs))


def _definition(name: str, type: Type, keys: Mapping[str, str] | None, tensors: Mapping[str, Type] | None) -> Node:
    if keys is not None and name not in keys:
        rows = [("nearest", near)] if (near := nearest(name, keys)) else []
        raise FrtcError("lowering.weight", f"no checkpoint tensor is mapped to weight {name} : {type}", rows)
    key = name if keys is None else keys[name]
    stored = type if tensors is None else tensors.get(key)
    if stored is None or stored.shape != type.shape:
        found = stored or "absent"
        raise FrtcError("lowering.weight", f"weight {name} wants {type}, checkpoint tensor {key} is {found}")
    return cast(ir.tensor(key, stored), type.dtype)


def _join(scope: str, name: str) -> str:
    return f"{scope}.{name}" if scope else name
