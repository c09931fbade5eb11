"""Attention from matmul, softmax, matmul; scales, repeated key heads and packed query rows taken into it.

Scores are no longer rounded to 16 bits before and after they are scaled and masked, as eager code in 16 bits does: the
softmax reads them in fp32, like every fused attention. Probabilities that are stored in 16 bits before they meet the
values stay so (`probs`).
"""

from __future__ import annotations

from frtc.lowering.ir import Node, make
from frtc.lowering.ops import and_, attention, not_, reshape, transpose
from frtc.passes.canonical_cast import bare
from frtc.passes.canonical_mask import BLOCKED, visible
from frtc.passes.canonical_pointwise import number
from frtc.passes.rewrite import Rules


def _scores(node: Node) -> tuple[Node, Node | None, float] | None:
    """(product q k^T, condition for visible keys, scale) of the scores that a softmax reads."""
    mask: Node | None = None
    scale = 1.0
    while node.op != "matmul":
        step = _unmasked(node)
        if step is not None:
            node, more = step
            mask = more if mask is None else and_(mask, more)
        elif (scaled := _unscaled(node)) is not None:
            node, scale = scaled[0], scale * scaled[1]
        else:
            return None
    return node, mask, scale


def _unmasked(node: Node) -> tuple[Node, Node] | None:
    """(scores, condition) of scores + mask, where(c, scores, -huge) and where(c, -huge, scores)"""
    if node.op == "add":
        for scores, mask in (node.operands, node.operands[::-1]):
            condition = visible(mask) if number(mask) is None else None  # the same number everywhere hides nothing
            if condition is not None and scores.shape == node.shape:
                return scores, condition
    if node.op == "where":
        condition, a, b = node.operands
        for scores, other, seen in ((a, b, condition), (b, a, not_(condition))):
            value = number(other)
            if value is not None and value <= BLOCKED and scores.shape == node.shape:
                return scores, seen
    return None


def _unscaled(node: Node) -> tuple[Node, float] | None:
    """(x, c) of x * c and x / c, c a positive literal; (x, 1) of a cast between floats"""
    if node.op == "cast" and node.operands[0].t.is_float:
        return node.operands[0], 1.0
    if node.op not in ("mul", "div"):
        return None
    x, c = node.operands
    value = number(c)
    if value is None or value <= 0 or x.shape != node.shape or number(x) is not None:
        return None
    return x, float(value) if node.op == "mul" else 1.0 / value


def _eager(node: Node) -> Node | None:
    """softmax(scores) v"""
    p, v = (bare(a) for a in node.operands)
    if p.op != "softmax" or p["axis"] != -1 or (found := _scores(p.operands[0])) is None:
        return None
    product, mask, scale = found
    q, k = product.operands[0], transpose(product.operands[1], perm=(-1, -2))
    if q.t.rank == k.t.rank == v.t.rank == 2:  # one head without an axis of its own
        q, k, v = (reshape(x, shape=(1, *x.shape)) for x in (q, k, v))
    if q.t.rank < 3 or not q.t.rank == k.t.rank == v.t.rank or q.shape[:-3] != k.shape[:-3]:
        return None
    if k.shape[:-1] != v.shape[:-1] or k.shape[-3] not in (1, q.shape[-3]):
        return None
    probs = p.dtype if p.dtype in ("bf16", "f16") else "f32"
    y: Node = attention(q, k, v, mask, scale=scale, probs=probs, dtype=node.dtype)
    return y if y.shape == node.shape else reshape(y, shape=node.shape)


def _seen(node: Node) -> Node | None:
    """A mask that lets everything pass is no mask; one broadcast over heads or queries stays as small as it is."""
    mask = node.args[3]
    if mask is None:
        return None
    if mask.op == "const" and mask.get("value") is True:
        smaller = None
    elif mask.op == "broadcast":
        smaller = mask.operands[0]
    else:
        return None
    args = [*node.args[:3], smaller, *node.args[4:]]
    return make(node.op, args, dict(node.attrs), node.type, node.loc)


RULES = Rules("attention", [(frozenset({"matmul"}), _eager), (frozenset({"attention"}), _seen)])
