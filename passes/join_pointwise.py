"""join_pointwise: pointwise ops beside each other that read the same operands become one with several results.

    cos(mul(p, f)), sin(mul(p, f))  ->  pointwise(p, f; expr, results=[3, 4])

One launch instead of several; operands are loaded once, equal steps computed once. The members have one shape, and one
of them reads all that the others read. They wait for the same launches and inputs: nothing is delayed, none depends on
another, and no two joint ops can come to wait for each other. A value that its loop carries stays by itself: where it
overwrites the one of the round before, it has to come last.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from frtc.kernels.reference.pointwise import read_by
from frtc.lowering.ir import Graph, Module, Node, Type, item, rebuild
from frtc.lowering.ops import POINTWISE
from frtc.lowering.pointwise import joint, program
from frtc.passes.fuse_pointwise import MAX_STEPS
from frtc.passes.rewrite import Implements, Pass, record

FREE = frozenset({"view", "item"})  # no launch
EXACT = frozenset({"const", "cast"})  # steps that no product is left in
SUMS = frozenset({"add", "sub", "mod", "gelu_tanh"})  # steps that begin with a sum


def join_pointwise(implements: Implements) -> Pass:
    return partial(_run, implements=implements)


def _run(module: Module, implements: Implements) -> Module:
    return module.map(lambda graph: _settled(graph, implements))


def _settled(graph: Graph, implements: Implements) -> Graph:
    """One group after the other: what waited for two launches may wait for one then."""
    while (group := next(_groups(graph, implements), None)) is not None:
        fused = joint(group)
        results = {node: item(fused, i) for i, node in enumerate(group)}
        graph = rebuild(graph, lambda old, new, results=results: results.get(old, new))  # type: ignore[misc]
        for node in group[1:]:  # one launch less for each
            record("join_pointwise", node, fused)
    return graph


def _groups(graph: Graph, implements: Implements) -> Iterator[list[Node]]:
    """Ops that one launch computes, each in the order of the graph."""
    waits, carried = _waits(graph), _carried(graph)
    order = {node: i for i, node in enumerate(graph.nodes)}
    alike: dict[tuple[Any, ...], list[Node]] = {}
    for node in order:
        if node.op in POINTWISE and isinstance(node.type, Type) and not node.is_const and node not in carried:
            alike.setdefault((node.shape, waits[node]), []).append(node)
    for nodes in alike.values():
        read = {node: frozenset(program(node).operands) for node in nodes} if len(nodes) > 1 else {}
        groups: list[list[Node]] = []
        for node in sorted(read, key=lambda n: -len(read[n])):  # the first of a group reads all that the others read
            fits = (g for g in groups if read[node] <= read[g[0]] and _runs([*g, node], implements))
            if (group := next(fits, None)) is not None:
                group.append(node)
            else:
                groups.append([node])
        yield from (sorted(group, key=order.__getitem__) for group in groups if len(group) > 1)


def _waits(graph: Graph) -> dict[Node, int]:
    """A bit for each launch and input that must be there before the node's own launch."""
    waits: dict[Node, int] = {}
    known: dict[Node, int] = {}
    for i, node in enumerate(graph.nodes):
        waits[node] = 0
        for a in node.operands:
            waits[node] |= known[a]
        known[node] = waits[node] | (0 if node.is_const or node.op in FREE else 1 << i)
    return waits


def _carried(graph: Graph) -> set[Node]:
    """Values that take the place of an input of the same name."""
    inputs, found = {n["name"] for n in graph.inputs}, set()
    for node in (n for name, n in graph.outputs if name in inputs):
        while node.op in FREE and node.args[0] is not None:
            node = node.args[0]
        found.add(node)
    return found


def _runs(nodes: list[Node], implements: Implements) -> bool:
    """Whether a kernel computes them at once, with the roundings that each has alone."""
    fused = joint(nodes)
    return len(fused["expr"]) <= MAX_STEPS and _keeps_sums(fused) and implements(fused)


def _keeps_sums(fused: Node) -> bool:
    """A product may be rounded together with the sum that reads it (fma), unless something else reads it, too: the
    readers of a step in front of a sum serve the same results as the step, so that each result finds it as alone."""
    first, steps = len(fused.operands), fused["expr"]
    serves = [{i for i, r in enumerate(fused["results"]) if r == v} for v in range(first + len(steps))]
    readers: list[list[int]] = [[] for _ in serves]
    for at in reversed(range(len(steps))):
        for a in read_by(steps[at]):
            serves[a] |= serves[first + at]
            readers[a].append(first + at)
    for at, step in enumerate(steps, first):
        before_sum = step[0] not in EXACT and any(steps[r - first][0] in SUMS for r in readers[at])
        if before_sum and any(serves[r] != serves[at] for r in readers[at]):
            return False
    return True
