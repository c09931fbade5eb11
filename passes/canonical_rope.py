"""Rotary position embedding from its spellings: rotate-half, halves apart, and interleaved pairs.

    half          x cos + [-x2, x1] sin with tables [S, D]      [x1 cos - x2 sin, x2 cos + x1 sin] with tables [S, D/2]
    interleaved   the same with x1, x2 the even and odd elements

Full-width tables are halved only where their two halves are provably the same values (`sliced` returns the same node).
Products that the source rounded to 16 bits are no longer rounded; the tables keep the type that the source gave them.
"""

from __future__ import annotations

from collections.abc import Callable

from frtc.lowering.ir import Node
from frtc.lowering.ops import add, concat, mul, neg, reshape, rope, sub
from frtc.lowering.pattern import Var
from frtc.passes.canonical_cast import bare
from frtc.passes.canonical_chains import normal
from frtc.passes.canonical_slice import rejoined, sliced
from frtc.passes.rewrite import Rules

x, c, s, r = Var("x"), Var("c"), Var("s"), Var("r")
x1, x2 = Var("x1"), Var("x2")


def _rows(table: Node) -> Node:
    """The table without leading unit axes, [S, D/2] if it is one for all heads."""
    shape = table.shape
    while len(shape) > 2 and shape[0] == 1:
        shape = shape[1:]
    out: Node = table if shape == table.shape else reshape(table, shape=shape)
    return out


def _built(x: Node, cos: Node, sin: Node, node: Node, pairing: str) -> Node | None:
    """rope(x, cos, sin) if the tables fit x [..., S, D]"""
    half = (*node.shape[:-1], node.shape[-1] // 2)
    cos, sin = _rows(bare(cos)), _rows(bare(sin))
    for table in (cos, sin):
        lead = len(half) - table.t.rank
        if lead < 0 or table.t.rank < 1 or table.shape[-1] != half[-1] or not table.t.is_float:
            return None
        if any(n not in (1, m) for n, m in zip(table.shape, half[lead:], strict=True)):
            return None
    if x.shape != node.shape or not x.t.is_float:
        return None
    y: Node = rope(x, cos, sin, pairing=pairing, dtype=node.dtype)
    return y


def _halved(table: Node, pairing: str) -> Node | None:
    """The half-width table of one that repeats each of its values."""
    width = table.shape[-1] if table.t.rank else 0
    if width < 2 or width % 2:
        return None
    if pairing == "half":
        a, b = sliced(table, 0, width // 2), sliced(table, width // 2, width)
    else:
        a, b = sliced(table, 0, width, 2), sliced(table, 1, width, 2)
    return a if a is b else None


def _flat(pair: Node) -> Node:
    return normal(reshape(pair, shape=pair.shape[:-1]))


def _rotated(r: Node) -> tuple[Node, str] | None:
    """(x, pairing) where r holds -x2 where x has x1, and x1 where x has x2."""
    r = bare(r)
    pairing = "half" if r.op == "concat" else "interleaved"
    joint = r if r.op == "concat" else r.operands[0] if r.op == "reshape" else None
    if joint is None or joint.op != "concat" or joint["axis"] != -1 or len(joint.operands) != 2:
        return None
    minus, plus = joint.operands
    if pairing == "interleaved":
        if joint.shape != (*r.shape[:-1], r.shape[-1] // 2, 2):
            return None
        minus, plus = _flat(minus), _flat(plus)
    minus = bare(minus)
    if minus.op == "reshape" and minus.operands[0].op == "neg":
        minus = neg(normal(reshape(minus.operands[0].operands[0], shape=minus.shape)))
    if minus.op != "neg":
        return None
    whole = rejoined(plus, minus.operands[0], pairing)
    return None if whole is None else (whole, pairing)


def _rotate_half(x: Node, c: Node, r: Node, s: Node, node: Node) -> Node | None:
    found = _rotated(r)
    if found is None or found[0] is not bare(x):
        return None
    cos, sin = _halved(c, found[1]), _halved(s, found[1])
    return None if cos is None or sin is None else _built(found[0], cos, sin, node, found[1])


def _apart(pairing: str) -> Callable[..., Node | None]:
    def replacement(x1: Node, x2: Node, c: Node, s: Node, node: Node) -> Node | None:
        whole = rejoined(x1, x2, pairing)
        return None if whole is None else _built(whole, c, s, node, pairing)

    return replacement


_FIRST, _SECOND = sub(mul(x1, c), mul(x2, s)), add(mul(x2, c), mul(x1, s))
_PAIRS = concat(reshape(_FIRST, shape=Var("to_pairs")), reshape(_SECOND, shape=Var("to_pairs")), axis=-1)

RULES = Rules(
    "rope",
    [
        (add(mul(x, c), mul(r, s)), _rotate_half),
        (concat(_FIRST, _SECOND, axis=-1), _apart("half")),
        (reshape(_PAIRS, shape=Var("to_rows")), _apart("interleaved")),
    ],
)
