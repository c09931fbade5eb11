"""merge_linears: linears that read one value become one GEMM over their stacked weights.

    linear(x, q), linear(x, k), linear(x, v) -> slices of linear(x, concat(q, k, v))

x is read once and two launches go. Linears with an epilogue stay alone, and so do those whose weights are not constant.
"""

from __future__ import annotations

from itertools import accumulate

from frtc.lowering.ir import Graph, Module, Node, rebuild
from frtc.lowering.ops import concat, const, linear, slice_
from frtc.passes.rewrite import count


def merge_linears(module: Module) -> Module:
    return module.map(_merge)


def _merge(graph: Graph) -> Graph:
    groups: dict[tuple[Node, str, str], list[Node]] = {}
    for node in graph.nodes:
        if _plain(node):
            x, w = node.operands[:2]
            groups.setdefault((x, w.dtype, node.dtype), []).append(node)
    member = {n: g for g in groups.values() if len(g) > 1 for n in g}
    merged: dict[Node, Node] = {}  # first of a group -> the merged linear

    def visit(old: Node, new: Node) -> Node:
        group = member.get(old)
        if group is None:
            return new
        if group[0] not in merged:
            assert new.args[0] is not None
            merged[group[0]] = _stack(new.args[0], group)
            count("merge_linears")
        ends = list(accumulate(n.shape[-1] for n in group))
        at = group.index(old)
        result: Node = slice_(merged[group[0]], axis=-1, start=ends[at] - old.shape[-1], stop=ends[at], loc=old.loc)
        return result

    return rebuild(graph, visit)


def _plain(node: Node) -> bool:
    """A linear with constant weights, perhaps a bias, and no other epilogue."""
    if node.op != "linear" or node.is_const or node["act"] != "none" or node.args[3] or node.args[4]:
        return False
    w, b = node.args[1], node.args[2]
    return w is not None and w.is_const and (b is None or b.is_const)


def _stack(x: Node, group: list[Node]) -> Node:
    weights = concat(*(n.args[1] for n in group), axis=-2)
    biases = [n.args[2] for n in group]
    known = next((b.dtype for b in biases if b is not None), None)
    bias = None
    if known is not None:
        parts = [b if b is not None else const(0.0, known, n.shape[-1:]) for n, b in zip(group, biases, strict=True)]
        bias = concat(*parts, axis=-1)
    result: Node = linear(x, weights, bias, dtype=group[0].dtype, loc=group[0].loc)
    return result
