"""fuse_residual_norm: a residual sum and the norm that reads it become one launch.

    s = x + r;         y = rms_norm(s)           -> (s, y) = residual_norm(x, r)
    s = x + gate * r;  y = ada_rms_norm(s, ..)   -> (s, y) = residual_norm(x, r, gate, ..)

After fuse_epilogues: where a linear can add the residual itself, that is cheaper, since s is then never read back for the
sum. What remains here are sums whose parts come from elsewhere. The sum is rounded to x's type in both forms.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from frtc.lowering.ir import Graph, Module, Node, item, rebuild
from frtc.lowering.ops import residual_norm
from frtc.passes.rewrite import Pass, count

KINDS = {"rms_norm": "rms", "layer_norm": "layer", "ada_rms_norm": "ada"}
Implements = Callable[[Node], bool]


def fuse_residual_norm(implements: Implements) -> Pass:
    return partial(_run, implements=implements)


def _run(module: Module, implements: Implements) -> Module:
    return module.map(lambda graph: _fuse(graph, implements))


def _fuse(graph: Graph, implements: Implements) -> Graph:
    norms: dict[Node, Node] = {}  # sum -> the first norm that reads it
    for node in graph.nodes:
        if node.op in KINDS and node.get("inner", "f32") == "f32":
            source = node.args[0]
            if source is not None and source.op == "add" and source.args[0] is not None and _sums(source):
                norms.setdefault(source, node)
    uses = graph.users()
    fused: dict[Node, Node] = {}
    done: dict[Node, Node] = {}

    def visit(old: Node, new: Node) -> Node:
        if old in norms:
            both = _both(old, new, norms[old], done, uses)
            if both is not None and implements(both):
                fused[old] = both
                new = item(both, 0)
                count("fuse_residual_norm")
        elif old.args and old.args[0] in fused and norms.get(old.args[0]) is old:
            new = item(fused[old.args[0]], 1)
        done[old] = new
        return new

    return rebuild(graph, visit)


def _sums(node: Node) -> bool:
    """Two values of the sum's own type and shape, neither of them constant."""
    return all(a.type == node.type and not a.is_const for a in node.operands)


def _both(old: Node, new: Node, norm: Node, done: dict[Node, Node], uses: dict[Node, int]) -> Node | None:
    """residual_norm for the sum `new` and its norm; None if the norm's vectors are computed after the sum."""
    vectors = [a if a is None or a.is_const else done.get(a) for a in norm.args[1:]]
    if any(v is None and a is not None for v, a in zip(vectors, norm.args[1:], strict=True)):
        return None
    x, r = new.operands
    gate = None
    gated = _gated(old.operands[1], uses) or _gated(old.operands[0], uses)
    if gated is not None:
        inner = done[gated]
        x = next(a for a in new.operands if a is not inner)
        r, gate = sorted(inner.operands, key=lambda a: a.type != new.type)
    result: Node = residual_norm(
        x,
        r,
        gate,
        *vectors,
        kind=KINDS[norm.op],
        eps=norm["eps"],
        offset=norm.get("offset", 0.0),
        dtype=norm.dtype,
        loc=norm.loc,
    )
    return result


def _gated(node: Node, uses: dict[Node, int]) -> Node | None:
    """`gate * r` that only the sum reads, the gate one value per column."""
    if node.op != "mul" or uses.get(node) != 1:
        return None
    shapes = sorted((len(a.shape) for a in node.operands), reverse=True)
    return node if shapes[0] > shapes[1] == 1 else None
