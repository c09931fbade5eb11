"""fuse_rope_linear: the rotation of q and k moves into the epilogue of the projection that makes them.

    rope_qkv(linear(x, w, b), cos, sin)  ->  linear_rope_qkv(x, pairs(w), pairs(b), cos, sin)

Elements i and i + D/2 of a head turn together, so `pairs` puts their rows of w side by side: they are neighbours among
the accumulators of one thread. The projection is no longer rounded before it turns, and never stored.
"""

from __future__ import annotations

from functools import partial

from frtc.lowering.ir import Module, Node
from frtc.lowering.ops import OPS, concat, linear_rope_qkv, reshape, slice_, transpose
from frtc.lowering.pattern import Var, once
from frtc.passes.rewrite import Implements, Pass, Rules, rewrite
from frtc.passes.tables import entry_of, table_of

product = Var("product", where=lambda n: isinstance(n, Node) and n.op == "linear" and not n.is_const)
cos, sin, heads, kv_heads = Var("cos"), Var("sin"), Var("heads"), Var("kv_heads")


def _turned(node: Node, product: Node, cos: Node, sin: Node, heads: int, kv_heads: int) -> Node | None:
    """A bare linear with constant weights, which may make up for a norm; its rows count the rows of the result."""
    x, w, b, residual, gate, rows, alpha, x_scale, inv = product.args
    assert w is not None
    norm = product["norm"]
    bare = product["act"] == "none" and residual is gate is alpha is inv is None and (norm != "none" or x_scale is None)
    if not bare or not w.is_const or not (b is None or b.shape == w.shape[:1]):
        return None
    size = w.shape[0] // (heads + 2 * kv_heads)
    if b is not None and (b := _turned_bias(b, heads + kv_heads, size)) is None:
        return None
    types = node.type
    assert isinstance(types, tuple)
    result: Node = linear_rope_qkv(
        x, pairs(w, heads + kv_heads, size), b, cos, sin, rows, None, x_scale, heads=heads, kv_heads=kv_heads,
        norm=norm, eps=product["eps"], dtype=types[0].dtype, loc=product.loc,
    )  # fmt: skip
    return result


def _turned_bias(b: Node, heads: int, size: int) -> Node | None:
    """The constant in the order of `pairs`; or each row of a table, of which it is the one of a round."""
    found = table_of(b)
    if found is None:
        return None
    table, round = found
    if round is None:
        turned = reshape(pairs(reshape(b, shape=(*b.shape, 1)), heads, size), shape=b.shape)
    else:
        turned = transpose(pairs(transpose(table, perm=(-1, -2)), heads, size), perm=(-1, -2))
    return entry_of(turned, round)


def pairs(w: Node, heads: int, size: int) -> Node:
    """w [N, K] with row i + size / 2 right behind row i, inside each of the first `heads` groups of `size` rows."""
    rows, inner = w.shape
    turned = heads * size
    halves = reshape(slice_(w, axis=-2, start=0, stop=turned), shape=(heads, 2, size // 2, inner))
    each = (slice_(halves, axis=-3, start=i, stop=i + 1) for i in (0, 1))
    beside = concat(*(reshape(half, shape=(turned // 2, 1, inner)) for half in each), axis=-2)
    result: Node = concat(reshape(beside, shape=(turned, inner)), slice_(w, axis=-2, start=turned, stop=rows), axis=-2)
    return result


RULES = Rules("fuse_rope_linear", [(OPS["rope_qkv"](once(product), cos, sin, heads=heads, kv_heads=kv_heads), _turned)])


def fuse_rope_linear(implements: Implements) -> Pass:
    """The pass for a target whose kernels run the nodes that `implements` accepts."""
    return partial(_run, implements=implements)


def _run(module: Module, implements: Implements) -> Module:
    return module.map(lambda graph: rewrite(graph, RULES, allow=implements))
