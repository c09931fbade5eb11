"""fuse_residual_norm: a residual sum and the norm that reads it become one launch.

    s = x + r;         y = rms_norm(s)           -> (s, y) = residual_norm(x, r)
    s = x + gate * r;  y = ada_rms_norm(s, ..)   -> (s, y) = residual_norm(x, r, gate, ..)

After fuse_epilogues: where a linear can add the residual itself, that is cheaper, since s is then never read back for
the sum. What remains here are sums whose parts come from elsewhere. The sum is rounded to x's type in both forms.
"""

from __future__ import annotations

from functools import partial

from frtc.lowering.ir import Graph, Module, Node, item, make
from frtc.lowering.ops import residual_norm
from frtc.passes.norm_readers import KINDS, in_order, norms_of
from frtc.passes.rewrite import Implements, Pass, count


def fuse_residual_norm(implements: Implements) -> Pass:
    return partial(_run, implements=implements)


def _run(module: Module, implements: Implements) -> Module:
    return module.map(lambda graph: _fuse(graph, implements))


def _fuse(graph: Graph, implements: Implements) -> Graph:
    norms = norms_of(graph, _sums)
    uses = graph.users()
    fused: dict[Node, Node] = {}
    done: dict[Node, Node] = {}
    for old in in_order(graph.roots, norms):
        args = tuple(None if a is None else done[a] for a in old.args)
        new = old if args == old.args else make(old.op, args, dict(old.attrs), old.type, old.loc)
        if old in norms:
            both = _both(old, new, norms[old], done, uses)
            if implements(both):
                fused[old] = both
                new = item(both, 0)
                count("fuse_residual_norm")
        elif old.args and old.args[0] in fused and norms[old.args[0]] is old:
            new = item(fused[old.args[0]], 1)
        done[old] = new
    return graph.replace(done)


def _sums(node: Node) -> bool:
    """A sum of two values of its own type and shape, neither of them constant."""
    return node.op == "add" and all(a.type == node.type and not a.is_const for a in node.operands)


def _both(old: Node, new: Node, norm: Node, done: dict[Node, Node], uses: dict[Node, int]) -> Node:
    """residual_norm for the sum `new`, which was `old`, and its norm."""
    x, r = new.operands
    gate = None
    gated = _gated(old.operands[1], uses) or _gated(old.operands[0], uses)
    if gated is not None:
        inner = done[gated]
        x = next(a for a in new.operands if a is not inner)
        gate, r = sorted(inner.operands, key=lambda a: a.t.rank)
    result: Node = residual_norm(
        x,
        r,
        gate,
        *(None if a is None else done[a] for a in norm.args[1:]),
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
    gate, r = sorted(node.operands, key=lambda a: a.t.rank)
    return node if r.shape == node.shape and gate.shape == r.shape[-1:] != r.shape else None
