"""Casts: those that lose nothing vanish into the ops that read them, those that round into the op that made the value.

An op computes in fp32 from operands in their storage type and rounds once. So `op(cast(x, f32))` is `op(x)`, and
`cast(op(x): f32, bf16)` is `op(x): bf16`: exactly, not nearly. Widening casts therefore move down past ops that only
move elements, to whoever reads them; narrowing casts move up, to whoever made the value.
"""

from __future__ import annotations

from frtc.kernels.dtypes import DTYPES
from frtc.lowering.ir import Node, Type, make
from frtc.lowering.ops import OPS, POINTWISE, cast, concat, iota
from frtc.lowering.pattern import Uses
from frtc.passes.rewrite import Rules

SMALL_FLOATS = frozenset({"bf16", "f16", "e4m3", "e5m2"})
_SMALL_INTS = {"u8", "i8", "bool"}
# Element type -> the types that hold all of its numbers.
_HELD_BY = {
    "bool": {"u8", "i8", "i32", "i64", "bf16", "f16", "f32", "f64"},
    "u8": {"i32", "i64", "bf16", "f16", "f32", "f64"},
    "i8": {"i32", "i64", "bf16", "f16", "f32", "f64"},
    "i32": {"i64", "f64"},
    "e4m3": {"bf16", "f16", "f32", "f64"},
    "e5m2": {"bf16", "f16", "f32", "f64"},
    "bf16": {"f32", "f64"},
    "f16": {"f32", "f64"},
    "f32": {"f64"},
}
# Ops that compute in fp32 whatever float types they read: their operands' widening casts say nothing.
ARITHMETIC = (POINTWISE - {"cast"}) | frozenset(
    "reduce_sum reduce_mean reduce_max softmax cumsum embedding linear gated_linear matmul conv2d rms_norm "
    "ada_rms_norm layer_norm rope attention".split()
)
_ROUNDS = frozenset(op for op in ARITHMETIC if "dtype" in OPS[op].attrs)
_MOVES = frozenset({"reshape", "transpose", "broadcast", "slice"})


def lossless(source: str, target: str) -> bool:
    """Does `target` hold every number of `source`?"""
    return source == target or target in _HELD_BY.get(source, ())


def bare(node: Node) -> Node:
    """`node` without casts that lose nothing."""
    while node.op == "cast" and node.args[0] is not None and lossless(node.args[0].dtype, node.dtype):
        node = node.args[0]
    return node


def _is_widened(node: Node | None) -> bool:
    """Is it a 16- or 8-bit float cast to f32?"""
    return node is not None and node.op == "cast" and node.dtype == "f32" and node.operands[0].dtype in SMALL_FLOATS


def _chain(node: Node) -> Node | None:
    """Two casts are one if the inner loses nothing; a cast to the same type is nothing; ranges come in any type."""
    (x,) = node.operands
    out: Node | None = None
    if x.dtype == node.dtype:
        out = x
    elif x.op == "cast" and lossless(x.operands[0].dtype, x.dtype):
        out = cast(x.operands[0], dtype=node.dtype)
    elif x.op == "iota" and node.dtype in ("i32", "i64", "f32", "f64") and x.shape[0] < 1 << 24:
        out = iota(size=x.shape[0], dtype=node.dtype)
    return out


def _absorb_operands(node: Node) -> Node | None:
    if not any(map(_is_widened, node.args)):
        return None
    if node.op == "attention" and not all(map(_is_widened, node.args[:3])):
        return None
    args = [a.operands[0] if a is not None and _is_widened(a) else a for a in node.args]
    return make(node.op, args, dict(node.attrs), node.type, node.loc)


def _absorb_result(node: Node, uses: Uses) -> Node | None:
    """The op stores what the cast would have stored, unless someone else reads the unrounded value."""
    (x,) = node.operands
    if x.op not in _ROUNDS or x.dtype != "f32" or node.dtype not in SMALL_FLOATS or uses.get(x, 1) != 1:
        return None
    return make(x.op, x.args, dict(x.attrs), Type(node.dtype, x.shape), x.loc)


def _narrows(node: Node) -> bool:
    return DTYPES[node.dtype].itemsize < DTYPES[node.operands[0].dtype].itemsize and node.dtype != "bool"


def _widen_later(node: Node) -> Node | None:
    """move(cast(x)) -> cast(move(x)) for casts that make elements larger."""
    casts = node.operands
    if any(a.op != "cast" or _narrows(a) or a.operands[0].t.dtype != casts[0].operands[0].dtype for a in casts):
        return None
    sources = [a.operands[0] for a in casts]
    if DTYPES[sources[0].dtype].itemsize == DTYPES[casts[0].dtype].itemsize:
        return None
    moved = make(node.op, sources, dict(node.attrs), Type(sources[0].dtype, node.shape), node.loc)
    out: Node = cast(moved, dtype=node.dtype)
    return out


def _narrow_earlier(node: Node, uses: Uses) -> Node | None:
    """cast(move(x)) -> move(cast(x)) for casts that make elements smaller. Not past a slice: more would be cast."""
    (x,) = node.operands
    if not _narrows(node) or x.op not in ("reshape", "transpose", "broadcast", "concat") or uses.get(x, 1) != 1:
        return None
    parts = [cast(a, dtype=node.dtype) for a in x.operands]
    if x.op == "concat":
        out: Node = concat(*parts, axis=x["axis"])
        return out
    return make(x.op, parts, dict(x.attrs), node.type, x.loc)


RULES = Rules(
    "casts",
    [
        (frozenset({"cast"}), _chain),
        (frozenset({"cast"}), _absorb_result),
        (frozenset({"cast"}), _narrow_earlier),
        (_MOVES | {"concat"}, _widen_later),
        (ARITHMETIC, _absorb_operands),
    ],
)
