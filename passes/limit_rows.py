"""limit_rows: rows that nothing reads are not computed, such as those of the padding behind a prompt.

    attention(q, k, v, length=n), nothing else reads k   ->   k = linear(x, w, rows=n)

Attention reads keys and values before its length (and from `resume` on) only, and a query where its result is read.
From there the need goes backwards through all that treats each row alone, and across programs: what a program returns
is needed as the programs that take it say. Whatever else reads a value reads all of it. Before layout: a reshape or a
transpose says where an axis goes, a view does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import reduce

from frtc.lowering.ir import Graph, Let, Module, Node, Repeat, Step, While, make, rebuild, walk
from frtc.lowering.ops import OPS
from frtc.passes.rewrite import count
from frtc.passes.row_needs import Need, Needs, Rows, either, reads
from frtc.passes.scalars import Scalars


def limit_rows(module: Module) -> Module:
    scalars = Scalars(module)
    return replace(module, graphs=tuple(_limited(g, needs, scalars) for g, needs in _needs(module, scalars)))


def returned_rows(module: Module) -> dict[tuple[str, str], Rows]:
    """(program, result) -> what is read of it, where that is not all of it in every variant."""
    found: dict[tuple[str, str], list[Need]] = {}
    for graph, needs in _needs(module, Scalars(module)):
        for name, node in graph.outputs:
            found.setdefault((graph.name, name), []).append(needs[node])
    both = {key: reduce(either, needs) for key, needs in found.items()}
    return {key: need for key, need in both.items() if need is not None}


def _limited(graph: Graph, needs: Needs, scalars: Scalars) -> Graph:
    lengths = [n.args[4] for n in graph.nodes if n.op == "attention"]
    local = {scalars.of(n): n for n in lengths if n is not None}  # as this program spells them

    def visit(old: Node, new: Node) -> Node:
        need = needs.get(old)
        if new.op not in ("linear", "gated_linear") or need is None or need.axis != -2 or need.resume >= 0:
            return new
        length, last = local.get(need.length, need.length), OPS[new.op].operands.index("rows")
        if new.args[last] is not None or not {n for n in walk([length]) if n.op == "input"} <= set(graph.inputs):
            return new
        count("limit_rows")
        return make(new.op, (*new.args[:last], length, *new.args[last + 1 :]), dict(new.attrs), new.type, new.loc)

    return rebuild(graph, visit)


def _needs(module: Module, scalars: Scalars) -> list[tuple[Graph, Needs]]:
    """What is read of each value, program by program, readers before those they read from."""
    kept = {source for _, source in module.outputs} | set(_read_by(module.schedule))
    order = [*sorted({g.name for g in module.graphs} - set(scalars.runs)), *reversed(scalars.runs)]
    done: dict[Graph, Needs] = {}
    for program in order:
        results = {g: _of_results(g, module, kept, done) for g in module.graphs if g.name == program}
        done |= {g: _needs_of(g, wanted, scalars) for g, wanted in results.items()}
    return [(graph, done[graph]) for graph in module.graphs]


def _read_by(steps: tuple[Step, ...]) -> Iterator[str]:
    """Names that the schedule itself reads."""
    for step in steps:
        if isinstance(step, Repeat | While):
            yield from _read_by(step.body)
        if isinstance(step, Let | While):
            yield step.source if isinstance(step, Let) else step.condition


def _of_results(graph: Graph, module: Module, kept: set[str], done: dict[Graph, Needs]) -> dict[str, Need]:
    """Of each result; all where someone outside reads it, or a program of the next round, whose needs are not known."""
    found: dict[str, Need] = {}
    for name, node in graph.outputs:
        readers = [(g, n) for g in module.graphs for n in g.inputs if n["name"] == name and n.shape == node.shape]
        needs = [done[g][n] if g in done else None for g, n in readers if g not in done or n in done[g]]
        found[name] = None if name in kept or not needs else reduce(either, needs)
    return found


def _needs_of(graph: Graph, results: dict[str, Need], scalars: Scalars) -> Needs:
    needs: Needs = {node: None for _, node in graph.writes}
    for name, node in graph.outputs:
        needs[node] = either(needs.get(node, results[name]), results[name])
    for node in reversed(graph.nodes):
        for operand, need in zip(node.args, reads(node, needs[node], scalars), strict=True):
            if operand is not None:
                needs[operand] = either(needs.get(operand, need), need)
    return needs
