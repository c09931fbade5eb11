"""merge_linears: linears that read one value become one GEMM over their stacked weights.

    linear(x, q), linear(x, k), linear(x, v) -> slices of linear(x, concat(q, k, v))

x is read once and two launches go. Linears with an epilogue stay alone, and so do those whose weights are not constant.
Parts that lead to one attention are stacked in its operands' order, whatever order the model computes them in.
"""

from __future__ import annotations

from itertools import accumulate

from frtc.lowering.ir import Graph, Module, Node, rebuild
from frtc.lowering.ops import SHAPE, cast, concat, const, linear, slice_
from frtc.passes.rewrite import count

TRANSPARENT = SHAPE | {"rope", "rms_norm", "concat"}


def merge_linears(module: Module) -> Module:
    return module.map(_merge)


def _merge(graph: Graph) -> Graph:
    groups: dict[tuple[Node, str, str], list[Node]] = {}
    for node in graph.nodes:
        if _plain(node):
            x, w = node.operands[:2]
            groups.setdefault((x, w.dtype, node.dtype), []).append(node)
    ranks = _attention_ranks(graph)
    stacked = [sorted(g, key=lambda n: ranks.get(n, 3)) for g in groups.values() if len(g) > 1]
    member = {n: g for g in stacked for n in g}
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


def _attention_ranks(graph: Graph) -> dict[Node, int]:
    """Which operand of an attention (q 0, k 1, v 2) a value becomes, perhaps through views, norms and rotation."""
    ranks: dict[Node, int] = {}
    for node in reversed(graph.nodes):
        if node.op == "attention":
            for i, a in enumerate(node.args[:3]):
                if a is not None:
                    ranks.setdefault(a, i)
        elif node in ranks and node.op in TRANSPARENT:
            for a in node.operands if node.op == "concat" else node.operands[:1]:
                ranks.setdefault(a, ranks[node])
    return ranks


def _plain(node: Node) -> bool:
    """A linear with constant weights, perhaps a bias, and no other epilogue."""
    if node.op != "linear" or node.is_const or node["act"] != "none" or node.args[3] or node.args[4]:
        return False
    w, b = node.args[1], node.args[2]
    return w is not None and w.is_const and (b is None or b.is_const)


def _stack(x: Node, group: list[Node]) -> Node:
    weights = concat(*(n.args[1] for n in group), axis=-2)
    biases = [n.args[2] for n in group]
    known = {b.dtype for b in biases if b is not None}
    bias = None
    if known:
        dtype = known.pop() if len(known) == 1 else "f32"
        parts = [const(0.0, dtype, n.shape[-1:]) if b is None else b for n, b in zip(group, biases, strict=True)]
        bias = concat(*(b if b.dtype == dtype else cast(b, dtype=dtype) for b in parts), axis=-1)
    result: Node = linear(x, weights, bias, dtype=group[0].dtype, loc=group[0].loc)
    return result
