"""fold_linears: constant factors and linears move into the linear next to them.

    mul(linear(x, w, b), c)               -> linear(x, c w, c b)                 c a literal: the Euler step's dt
    linear(linear(x, w1, b1), w2, b2)     -> linear(x, w2 w1, w2 b1 + b2)        where that is not more work; b2 may
                                                                                 be an entry of a constant table
    a - linear(x, w, b)                   -> a + linear(x, -w, -b)
    mul(embedding(table, ids), c)         -> embedding(table, ids, scale=c)

The products are constant expressions: evaluated in float64 and rounded once. Only where nothing else reads the inner
value.
"""

from __future__ import annotations

from frtc.lowering.ir import Module, Node
from frtc.lowering.ops import add, const, embedding, index, linear, matmul, mul, sub
from frtc.lowering.pattern import Var, once
from frtc.lowering.pattern import literal as number
from frtc.passes.rewrite import Rules, rewrite


def _entry(b: Node) -> bool:
    """A constant, or one entry of a constant table (what depends on a round's number only)."""
    return b.is_const or (b.op == "index" and b.operands[0].is_const)


x, w, b, w2 = Var("x"), Var("w", const=True), Var("b", const=True), Var("w2", const=True)
b2 = Var("b2", where=_entry)
other, table, ids, scale = Var("other"), Var("table", const=True), Var("ids"), Var("scale")
factor = Var("factor", where=lambda n: number(n) is not None and n.shape == ())


def _scaled(node: Node, x: Node, w: Node, factor: Node, b: Node | None = None) -> Node:
    bias = None if b is None else mul(b, factor, dtype=b.dtype)
    result: Node = linear(x, mul(w, factor, dtype=w.dtype), bias, dtype=node.dtype)
    return result


def _negated(node: Node, other: Node, x: Node, w: Node, b: Node | None = None) -> Node:
    """The sum that is left can be the linear's residual."""
    product = node.operands[1]
    result: Node = add(other, _scaled(product, x, w, const(-1.0), b), dtype=node.dtype)
    return result


def _chained(node: Node, x: Node, w: Node, w2: Node, b: Node | None = None, b2: Node | None = None) -> Node | None:
    before = w.t.size + w2.t.size
    if w2.shape[0] * w.shape[1] > before:
        return None
    bias = b2
    if b is not None:
        moved = linear(b, w2, dtype="f32")
        bias = moved if b2 is None else _sum(moved, b2)
    result: Node = linear(x, matmul(w2, w, dtype=w2.dtype), bias, dtype=node.dtype)
    return result


def _sum(moved: Node, b: Node) -> Node:
    """moved + b, added to every entry of the table where b is one."""
    if b.is_const:
        return add(moved, b, dtype="f32")  # type: ignore[no-any-return]
    table, at = b.operands
    entry: Node = index(add(moved, table, dtype="f32"), at, loc=b.loc)
    return entry


def _scaled_rows(node: Node, table: Node, ids: Node, scale: float, factor: Node) -> Node:
    value = number(factor)
    assert value is not None
    result: Node = embedding(table, ids, scale=scale * value, dtype=node.dtype)
    return result


FACTORS = Rules(
    "fold_factor",
    [
        (mul(once(linear(x, w)), factor), lambda node, x, w, factor: _scaled(node, x, w, factor)),
        (mul(once(linear(x, w, b)), factor), lambda node, x, w, b, factor: _scaled(node, x, w, factor, b)),
        (sub(other, once(linear(x, w))), lambda node, other, x, w: _negated(node, other, x, w)),
        (sub(other, once(linear(x, w, b))), lambda node, other, x, w, b: _negated(node, other, x, w, b)),
        (mul(once(embedding(table, ids, scale=scale)), factor), _scaled_rows),
    ],
)
CHAINS = Rules(
    "fold_linear_into_linear",
    [
        (linear(once(linear(x, w)), w2), lambda node, x, w, w2: _chained(node, x, w, w2)),
        (linear(once(linear(x, w, b)), w2), lambda node, x, w, b, w2: _chained(node, x, w, w2, b)),
        (linear(once(linear(x, w)), w2, b2), lambda node, x, w, w2, b2: _chained(node, x, w, w2, None, b2)),
        (linear(once(linear(x, w, b)), w2, b2), lambda node, x, w, b, w2, b2: _chained(node, x, w, w2, b, b2)),
    ],
)


def fold_linears(module: Module) -> Module:
    return module.map(lambda graph: rewrite(graph, FACTORS, CHAINS))
