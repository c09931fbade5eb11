"""hoist: what does not change from round to round leaves the loop.

    repeat 10 k { run denoise }   ->   run denoise.once; repeat 10 k { run denoise }

A value is loop-invariant if it depends neither on the step number, nor on a value that the loop writes, nor on a state.
Views of inputs stay (they cost nothing), and so do constants.
"""

from __future__ import annotations

from dataclasses import replace

from frtc.lowering.ir import Graph, Module, Node, Repeat, Run, Step, input_, rebuild
from frtc.lowering.ops import SHAPE
from frtc.passes.rewrite import count


def hoist(module: Module) -> Module:
    graphs = list(module.graphs)
    schedule = _hoist_steps(module.schedule, graphs)
    return replace(module, graphs=tuple(graphs), schedule=schedule)


def _hoist_steps(steps: tuple[Step, ...], graphs: list[Graph]) -> tuple[Step, ...]:
    result: list[Step] = []
    for step in steps:
        if isinstance(step, Repeat):
            step = replace(step, body=_hoist_steps(step.body, graphs))
            programs = [s.program for s in step.body if isinstance(s, Run)]
            changing = {step.index} | {k for g in graphs if g.name in programs for k, _ in g.outputs}
            for name in programs:
                if any(_split(graphs, g, changing) for g in [g for g in graphs if g.name == name]):
                    result.append(Run(f"{name}.once"))
        result.append(step)
    return tuple(result)


def _split(graphs: list[Graph], graph: Graph, changing: set[str]) -> bool:
    """Move what is invariant in `graph` to a new graph in front of it; false if there is nothing to move."""
    invariant = _invariant(graph, changing)
    moved = [n for n in _boundary(graph, invariant) if not _is_view_of_input(n)]
    if not moved:
        return False
    names = {n: f"{graph.name}.h{i}" for i, n in enumerate(moved)}
    fresh = {n: input_(name, n.t) for n, name in names.items()}
    rest = rebuild(graph, lambda old, new: fresh.get(old, new))
    used = {n for n in rest.nodes if n.op == "input"}
    inputs = tuple(n for n in graph.inputs if n in used) + tuple(fresh.values())
    once = Graph(f"{graph.name}.once", (), tuple((names[n], n) for n in moved), variant=graph.variant)
    once = replace(once, inputs=tuple(n for n in graph.inputs if n in set(once.nodes)))
    at = graphs.index(graph)
    graphs[at : at + 1] = [once, replace(rest, inputs=inputs)]
    for _ in moved:
        count("hoist")
    return True


def _invariant(graph: Graph, changing: set[str]) -> set[Node]:
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op == "input":
            steady = node["name"] not in changing
        else:
            steady = not node.is_const and node.op != "state" and all(a in found or a.is_const for a in node.operands)
        if steady:
            found.add(node)
    return found


def _boundary(graph: Graph, invariant: set[Node]) -> list[Node]:
    """Invariant values that something outside the invariant part reads."""
    read = {a for n in graph.nodes if n not in invariant for a in n.operands} | set(graph.roots)
    return [n for n in graph.nodes if n in invariant and n in read and n.op != "input"]


def _is_view_of_input(node: Node) -> bool:
    while node.op in SHAPE and node.args[0] is not None:
        node = node.args[0]
    return node.op == "input"
