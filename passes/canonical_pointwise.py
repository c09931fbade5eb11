"""Algebra of pointwise ops: neutral elements, powers, signs. What follows may assume one spelling of each.

All of it is exact, except that x**3 and a / sqrt(b) round their fp32 intermediates elsewhere (1e-7 relative).
"""

from __future__ import annotations

import math

from frtc.lowering.ir import Node
from frtc.lowering.ops import (
    OPS,
    add,
    broadcast,
    cast,
    const,
    div,
    mul,
    neg,
    pow_,
    reduce_mean,
    reduce_sum,
    rsqrt,
    sqrt,
    sub,
)
from frtc.lowering.pattern import Var, literal
from frtc.passes.canonical_cast import lossless
from frtc.passes.rewrite import Rules

x, a, b, c, axes = Var("x"), Var("a"), Var("b"), Var("c"), Var("axes")


def fit(value: Node, like: Node) -> Node:
    """`value` in the type of `like`: what is left of an op that turned out to do nothing else."""
    value = value if value.dtype == like.dtype else cast(value, dtype=like.dtype)
    return value if value.shape == like.shape else broadcast(value, shape=like.shape)


def fit_result(x: Node, node: Node) -> Node:
    """x op neutral -> x, cast if the op rounded or widened"""
    return fit(x, node)


def number(node: Node) -> float | int | None:
    """The number that a literal holds in every element; None for anything else, truth values included."""
    value = literal(node)
    return None if isinstance(value, bool) else value


def _literal_right(node: Node) -> Node | None:
    left, right = node.operands
    if literal(left) is None or literal(right) is not None:
        return None
    row = OPS[node.op]
    out: Node = row(right, left, dtype=node.dtype) if "dtype" in row.attrs else row(right, left)
    return out


def _power(node: Node) -> Node | None:
    base, exponent = node.operands
    value, dtype, out = number(exponent), node.dtype, None
    if not base.t.is_float or exponent.t.rank != 0:
        return None
    if value == 2:
        out = mul(base, base, dtype=dtype)
    elif value == 3 and base.dtype != "f64":
        out = mul(mul(base, base, dtype="f32"), base, dtype=dtype)
    elif value == 0.5:
        out = sqrt(base, dtype=dtype)
    elif value == -0.5:
        out = rsqrt(base, dtype=dtype)
    return out


def _minus_literal(node: Node) -> Node | None:
    """x - c -> x + (-c)"""
    left, right = node.operands
    value = number(right)
    if value is None or number(left) is not None or (not right.t.is_float and right.dtype not in ("i32", "i64")):
        return None
    out: Node = add(left, const(-value, right.dtype, right.shape), dtype=node.dtype)
    return out


def _divided(node: Node) -> Node | None:
    """x / c -> x * (1/c) where 1/c is exact: powers of two. Other divisors stay."""
    left, right = node.operands
    value = number(right)
    if not value or not left.t.is_float or not math.isfinite(value) or abs(math.frexp(value)[0]) != 0.5:
        return None
    out: Node = mul(left, const(1.0 / value, "f32", right.shape), dtype=node.dtype)
    return out


def _signs(node: Node) -> Node | None:
    """-(-x) -> x; a + (-b) -> a - b: where the inner negation rounded nothing."""
    for i, inner in enumerate(node.operands):
        if inner.op != "neg" or not inner.t.is_float or not lossless(inner.operands[0].dtype, inner.dtype):
            continue
        value = inner.operands[0]
        return fit(value, node) if node.op == "neg" else sub(node.operands[1 - i], value, dtype=node.dtype)
    return None


def _mean(x: Node, axes: tuple[int, ...], c: Node, node: Node) -> Node | None:
    """sum / N and sum * (1/N), N the number of elements summed"""
    n, value = math.prod(x.shape[a] for a in axes), number(c)
    if value is None or not math.isclose(value / n if node.op == "div" else value * n, 1.0, rel_tol=1e-6):
        return None
    out: Node = reduce_mean(x, axes=axes, dtype=node.dtype)
    return out


def _inverse_root(a: Node, b: Node, node: Node) -> Node | None:
    """a / sqrt(b)"""
    if "f64" in (a.dtype, b.dtype) or not b.t.is_float:
        return None
    alone = number(a) == 1 and b.shape == node.shape
    out: Node = rsqrt(b, dtype=node.dtype) if alone else mul(a, rsqrt(b, dtype="f32"), dtype=node.dtype)
    return out


RULES = Rules(
    "algebra",
    [
        (frozenset(n for n, row in OPS.items() if row.commutes), _literal_right),
        (mul(x, 1), fit_result),
        (div(x, 1), fit_result),
        (add(x, 0), fit_result),
        (sub(x, 0), fit_result),
        (pow_(x, 1), fit_result),
        (mul(x, -1), lambda x, node: neg(x, dtype=node.dtype) if x.shape == node.shape else None),
        (frozenset({"neg", "add"}), _signs),
        (frozenset({"pow"}), _power),
        (frozenset({"sub"}), _minus_literal),
        (frozenset({"div"}), _divided),
        (div(a, sqrt(b)), _inverse_root),
        (div(reduce_sum(x, axes=axes), c), _mean),
        (mul(reduce_sum(x, axes=axes), c), _mean),
    ],
)
