"""The order of a program's nodes where it writes states: a version is read before the next one takes its place.

A state has one home. `read` is that home, without a copy, unless its value is still wanted after the next write.
"""

from __future__ import annotations

from frtc.lowering.ir import Graph, Node

# Their result is, or may be, memory of their operands.
ALIASES = frozenset({"view", "item", "index", "concat", "reshape"})


def in_order(graph: Graph) -> list[Node]:
    """The graph's nodes, operands first, every read of a version ahead of the write that replaces it."""
    nodes = graph.nodes
    reads: dict[Node | None, list[Node]] = {}
    for node in nodes:
        if node.op == "read":
            reads.setdefault(node.args[0], []).append(node)
    order: dict[Node, None] = {}
    for node in nodes:
        if node.op == "write":
            order.update(dict.fromkeys(reads.get(node.args[0], ())))
        order[node] = None
    return list(order)


def outlived(graph: Graph) -> frozenset[Node]:
    """Reads whose value something wants when the next version is already being written."""
    order = {node: i for i, node in enumerate(in_order(graph))}
    written = {node.args[0]: i for node, i in order.items() if node.op == "write"}
    ends = dict.fromkeys((node for _, node in graph.outputs), len(order))
    found = set()
    for read in (node for node in order if node.op == "read" and node.args[0] in written):
        same = aliases(graph, read)
        last = max((i for node, i in order.items() if any(a in same for a in node.operands)), default=0)
        last = max([last, *(ends.get(node, 0) for node in same)])
        if last >= written[read.args[0]]:
            found.add(read)
    return frozenset(found)


def aliases(graph: Graph, node: Node) -> set[Node]:
    """`node` and everything that may lie in its memory."""
    same = {node}
    for other in graph.nodes:
        if other.op in ALIASES and any(a in same for a in other.operands):
            same.add(other)
    return same
