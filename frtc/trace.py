"""Trace a model's stages and compose them into one IR module.

Imports torch: only the compile side loads this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from frtc.lowering import ops
from frtc.lowering.ir import Graph, Let, Module, Node, Repeat, Run, Step, Type, input_, rebuild
from frtc.lowering.programs import lower_programs
from frtc.models import stages as model_stages
from frtc.models.stages import Schedule, Stage

INDEX = "step"  # the counter of a schedule's repeat


def trace(
    name: str,
    stages: Mapping[str, Stage],
    schedule: Schedule,
    progress: Callable[[str], None] = lambda stage: None,
) -> Module:
    """The raw module of a model; the leaves of its weights are the model's parameters.

    progress   called with each stage's name before it is traced
    """
    module = lower_programs(name, stages.values(), progress=progress)
    steps = tuple(step for s in schedule.steps for step in _steps(s))
    tables = {s.stage: s.tables for s in schedule.steps if isinstance(s, model_stages.Repeat)}
    graphs = tuple(_with_tables(g, tables.get(g.name, {})) for g in module.graphs)
    return replace(module, graphs=graphs, schedule=steps, outputs=tuple(schedule.outputs.items()))


def _steps(step: model_stages.Run | model_stages.Repeat) -> list[Step]:
    if isinstance(step, model_stages.Run):
        return [Run(step.stage)]
    carried: list[Step] = [Let(value, source) for value, source in step.carry.items()]
    return [*carried, Repeat(step.count, INDEX, (Run(step.stage),))]


def _with_tables(graph: Graph, tables: Mapping[str, tuple[float, ...]]) -> Graph:
    """Inputs that a repeat takes from tables become the table's entry of this round."""
    if not tables:
        return graph
    counter = input_(INDEX, Type("i32", ()))
    entries = {n: _entry(n, tables[n["name"]], counter) for n in graph.inputs if n["name"] in tables}
    changed = rebuild(graph, lambda old, new: entries.get(old, new))
    inputs = tuple(n for n in graph.inputs if n not in entries)
    return Graph(graph.name, (*inputs, counter), changed.outputs, graph.states, changed.writes, graph.variant)


def _entry(node: Node, values: tuple[float, ...], counter: Node) -> Node:
    data: Any = np.asarray(values, np.float32)
    entry: Node = ops.index(ops.literal(data.tobytes(), "f32", data.shape), counter)
    return entry if node.dtype == "f32" else ops.cast(entry, dtype=node.dtype)
