"""hoist: what does not change from round to round leaves the loop.

    repeat 10 k { run denoise }   ->   run denoise.once; repeat 10 k { run denoise }

A value is loop-invariant if it depends neither on the step number, nor on a value that the loop writes, nor on a state.
Views of inputs stay (they cost nothing), and so do constants.
"""

from __future__ import annotations

from dataclasses import replace

from frtc.lowering.ir import Graph, Let, Module, Node, Repeat, Run, Step, While, input_, rebuild
from frtc.lowering.ops import SHAPE
from frtc.passes.rewrite import count


def hoist(module: Module) -> Module:
    graphs = list(module.graphs)
    schedule = _hoist_steps(module.schedule, graphs, _runs(module.schedule))
    return replace(module, graphs=tuple(graphs), schedule=schedule)


def _hoist_steps(steps: tuple[Step, ...], graphs: list[Graph], runs: list[str]) -> tuple[Step, ...]:
    """A program that the schedule runs in several places stays whole: each place would need its own first part."""
    result: list[Step] = []
    for step in steps:
        if isinstance(step, Repeat):
            step = replace(step, body=_hoist_steps(step.body, graphs, runs))
            changing = written(step, graphs)
            for name in [s.program for s in step.body if isinstance(s, Run) and runs.count(s.program) <= 1]:
                variants = [g for g in graphs if g.name == name]
                if any(_moved(g, changing) for g in variants):
                    for graph in variants:
                        _split(graphs, graph, _moved(graph, changing))
                    result.append(Run(f"{name}.once"))
        result.append(step)
    return tuple(result)


def _runs(steps: tuple[Step, ...]) -> list[str]:
    """The program of every run in the schedule."""
    nested = (_runs(s.body) if isinstance(s, Repeat | While) else [s.program] for s in steps if not isinstance(s, Let))
    return [program for programs in nested for program in programs]


def written(step: Step, graphs: list[Graph]) -> set[str]:
    """What a step writes into the environment, at any depth."""
    if isinstance(step, Run):
        return {k for g in graphs if g.name == step.program for k, _ in g.outputs}
    if isinstance(step, Let):
        return {step.name}
    counter = {step.index} if isinstance(step, Repeat) else set()
    return counter.union(*(written(s, graphs) for s in step.body))


def _moved(graph: Graph, changing: set[str]) -> list[Node]:
    """Invariant values that leave the loop."""
    return [n for n in _boundary(graph, _invariant(graph, changing)) if not _is_view_of_input(n)]


def _split(graphs: list[Graph], graph: Graph, moved: list[Node]) -> None:
    """Compute `moved` in a new graph in front of `graph`."""
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
