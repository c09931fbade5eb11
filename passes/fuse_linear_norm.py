"""fuse_linear_norm: a linear and the norm that reads its result become one launch.

    s = linear(x, w, ..);  y = ada_rms_norm(s, ..)   -> (s, y) = linear_norm(x, w, .., kind=ada)

The norm is made from the same rounded s, which other readers take, such as the residual stream. With few rows the last
block makes it; where a kernel keeps all blocks on SMs at once they meet and share the rows, many of them too. Other
sites no kernel accepts. After fuse_epilogues and fuse_residual_norm: the linear then has its residual, no sum stands
between it and the norm. Before results are stored in FP8, which this op can do as the norm could.
"""

from __future__ import annotations

from functools import partial

from frtc.lowering.ir import Graph, Module, Node, item, make
from frtc.lowering.ops import OPS, linear_norm
from frtc.passes.norm_readers import KINDS, bare, in_order, norms_of
from frtc.passes.rewrite import Implements, Pass, count

NORM_VECTORS = 2  # norm_w and norm_b; an RMS norm has the first alone


def fuse_linear_norm(implements: Implements) -> Pass:
    return partial(_run, implements=implements)


def _run(module: Module, implements: Implements) -> Module:
    return module.map(lambda graph: _fuse(graph, implements))


def _fuse(graph: Graph, implements: Implements) -> Graph:
    norms = norms_of(graph, bare)
    fused: dict[Node, Node] = {}
    done: dict[Node, Node] = {}
    for old in in_order(graph.roots, norms):
        args = tuple(None if a is None else done[a] for a in old.args)
        new = old if args == old.args else make(old.op, args, dict(old.attrs), old.type, old.loc)
        if old in norms:
            both = _both(new, norms[old], done)
            if implements(both):
                fused[old] = both
                new = item(both, 0)
                count("fuse_linear_norm")
        elif old.args and old.args[0] in fused and norms[old.args[0]] is old:
            new = item(fused[old.args[0]], 1)
        done[old] = new
    return graph.replace(done)


def _both(product: Node, norm: Node, done: dict[Node, Node]) -> Node:
    """linear_norm for a linear with its new operands and the norm of its result."""
    inv = OPS["linear"].operands.index("inv")
    vectors = [None if a is None else done[a] for a in norm.args[1 : OPS[norm.op].operands.index("inv")]]
    result: Node = linear_norm(
        *product.args[:inv],
        *vectors,
        *(None for _ in range(NORM_VECTORS - len(vectors))),
        act=product["act"],
        kind=KINDS[norm.op],
        eps=norm["eps"],
        offset=norm.get("offset", 0.0),
        stored=product.dtype,
        dtype=norm.dtype,
        loc=norm.loc,
    )
    return result
