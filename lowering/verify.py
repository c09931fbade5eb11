"""The verifier: what a legal graph and a legal module are. Run after every pass.

A violation is a bug in frtc; it names the graph, the node, its location and the rule.
"""

from __future__ import annotations

from collections.abc import Iterator

from frtc.lowering.ir import Graph, Let, Module, Node, Repeat, Run, Step, Type, While, walk
from frtc.lowering.op import TypeMismatch, result_dtype
from frtc.lowering.ops import OPS

LEAVES = frozenset({"input", "state", "const", "weight", "tensor", "item"})


class Invalid(Exception):
    """The IR breaks one of its own rules."""


def verify(graph: Graph) -> None:
    """Raise Invalid unless every node has the type its rule infers and the states form single chains."""
    for problem in problems(graph):
        raise Invalid(f"graph {graph.name}: {problem}")


def problems(graph: Graph) -> Iterator[str]:
    names = [n["name"] for n in graph.inputs + graph.states]
    yield from (f"{name} is declared twice" for name in sorted({n for n in names if names.count(n) > 1}))
    outputs = [k for k, _ in graph.outputs]
    yield from (f"result {k} is returned twice" for k in sorted({k for k in outputs if outputs.count(k) > 1}))
    declared = set(graph.inputs) | set(graph.states)
    for node in graph.nodes:
        where = f"{node.op} at {node.loc or 'unknown'}"
        if node.op in ("input", "state") and node not in declared:
            yield f"{where}: {node['name']} is used but not declared"
        elif node.op not in OPS and node.op not in LEAVES:
            yield f"{where}: there is no such op"
        elif node.op in OPS:
            yield from (f"{where}: {p}" for p in _typing(node))
    yield from _states(graph)


def _typing(node: Node) -> Iterator[str]:
    row = OPS[node.op]
    attrs = dict(node.attrs)
    if "dtype" in row.attrs:
        attrs["dtype"] = result_dtype(node.type, attrs)
    try:
        inferred = row.infer([None if a is None else a.t for a in node.args], attrs)
    except (TypeMismatch, TypeError) as error:
        yield str(error)
        return
    if inferred != node.type:
        yield f"has type {node.type}, its rule gives {inferred}"


def _states(graph: Graph) -> Iterator[str]:
    """Each version of a state is written at most once, and the last version is what the graph declares as written."""
    last = dict(graph.writes)
    following: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op in ("read", "write") and base(node).op != "state":
            yield f"{node.op} at {node.loc or 'unknown'}: its first operand is not a state"
        if node.op == "write" and node.args[0] is not None:
            if node.args[0] in following:
                yield f"state {base(node)['name']}: one version is written twice"
            following[node.args[0]] = node
    for s in graph.states:
        end = s
        while end in following:
            end = following[end]
        if end is not s and last.get(s["name"]) is not end:
            yield f"state {s['name']}: its last version is not declared as written"
    for name in last:
        if name not in {s["name"] for s in graph.states}:
            yield f"state {name} is written but not declared"


def base(node: Node) -> Node:
    """The start of the chain of versions that `node` reads or writes."""
    while node.op in ("read", "write") and node.args[0] is not None:
        node = node.args[0]
    return node


def verify_module(module: Module) -> None:
    """Raise Invalid unless all graphs are legal, weights are defined, and the schedule feeds every program."""
    for graph in module.graphs:
        verify(graph)
    verify(module.weights)
    _verify_states(module)
    defined = {name: node.type for name, node in module.weights.outputs}
    for graph in module.graphs:
        for node in walk(graph.roots):
            if node.op == "weight" and defined.get(node["name"]) != node.type:
                found = defined.get(node["name"], "nothing")
                raise Invalid(f"graph {graph.name}: weight {node['name']} is {node.type}, its definition gives {found}")
            if node.op == "tensor":
                raise Invalid(f"graph {graph.name}: parameter {node['key']} outside the weights")
    if module.weights.inputs or any(n.op in ("input", "weight") for n in module.weights.nodes):
        raise Invalid("the weights depend on more than parameters and literals")
    _verify_schedule(module, module.schedule, {})


def _verify_states(module: Module) -> None:
    """A state has one type in all programs."""
    known: dict[str, tuple[str, Type]] = {}
    for graph in module.graphs:
        for node in graph.states:
            first, type = known.setdefault(node["name"], (graph.name, node.t))
            if type != node.t:
                raise Invalid(f"state {node['name']} is {node.t} in program {graph.name}, {type} in {first}")


def _verify_schedule(module: Module, steps: tuple[Step, ...], known: dict[str, Type]) -> None:
    for step in steps:
        if isinstance(step, Run):
            graphs = [g for g in module.graphs if g.name == step.program]
            if not graphs:
                raise Invalid(f"the schedule runs {step.program}, which the module does not have")
            for graph in graphs:
                for node in graph.inputs:
                    have = known.get(node["name"], node.t)
                    if have != node.t and len(graphs) == 1:
                        what = f"input {node['name']} is {node.t}, its producer gives {have}"
                        raise Invalid(f"graph {graph.name}: {what}")
            if len(graphs) == 1:
                known.update({k: n.t for k, n in graphs[0].outputs})
        elif isinstance(step, Let):
            if step.source in known:
                known[step.name] = known[step.source]
        elif isinstance(step, Repeat):
            known[step.index] = Type("i32", ())
            _verify_schedule(module, step.body, known)
        elif isinstance(step, While):
            _verify_schedule(module, step.body, known)
