"""RMS norms from their formulas. Statistics are in fp32; a rounding before the weight is kept as `inner`.

rms_norm      x rsqrt(mean(x^2) + eps), then times w or 1 + w, before or after the cast to the result's type
ada_rms_norm  rms_norm times 1 + scale, then + shift; both are computed, not weights
"""

from __future__ import annotations

from frtc.lowering.ir import Node
from frtc.lowering.ops import ada_rms_norm, add, mul, reduce_mean, reshape, rms_norm, rsqrt
from frtc.lowering.pattern import Var, once
from frtc.passes.canonical_cast import bare
from frtc.passes.canonical_pointwise import number
from frtc.passes.rewrite import Rules


def _plain(x: Node, eps: Node, node: Node) -> Node | None:
    value = number(eps)
    if value is None or x.shape != node.shape:
        return None
    y: Node = rms_norm(x, eps=float(value), dtype=node.dtype)
    return y


def vector(v: Node, width: int) -> Node | None:
    """`v` as [width], if it is one number per channel."""
    if v.t.size != width or v.shape[-1:] != (width,) or not v.t.is_float:
        return None
    return v if v.t.rank == 1 else reshape(v, shape=(width,))


def _above_one(w: Node) -> Node | None:
    """v where w = 1 + v in fp32. A sum that was rounded to 16 bits is a weight of its own."""
    w = bare(w)
    if w.op == "add" and w.dtype == "f32":
        for this, other in (w.operands, w.operands[::-1]):
            if number(this) == 1:
                return other
    return None


def _inner(norm: Node) -> str:
    """Where the weight comes after the cast, the normalised value was rounded before it."""
    return "f32" if norm.dtype in ("f32", "f64") else norm.dtype


def _weighted(norm: Node, w: Node, node: Node) -> Node | None:
    v = _above_one(w)
    weight = vector(w if v is None else v, node.shape[-1])
    if weight is None or norm.shape != node.shape:
        return None
    offset = 0.0 if v is None else 1.0
    y: Node = rms_norm(norm.args[0], weight, eps=norm["eps"], offset=offset, inner=_inner(norm), dtype=node.dtype)
    return y


def _factored(x: Node, eps: Node, w: Node, node: Node) -> Node | None:
    """x * (rsqrt(mean(x^2) + eps) * w)"""
    value = number(eps)
    if value is None or x.shape != node.shape:
        return None
    return _weighted(rms_norm(x, eps=float(value), dtype="f32"), w, node)


def _shifted(norm: Node, shift: Node, node: Node) -> Node | None:
    """rms_norm(x, scale, offset=1) + shift, one number each per channel"""
    scale = norm.args[1]
    shift_vector = vector(shift, node.shape[-1])
    if scale is None or scale.is_const or shift_vector is None or norm["offset"] != 1.0 or norm["inner"] != "f32":
        return None
    y: Node = ada_rms_norm(norm.args[0], scale, shift_vector, eps=norm["eps"], dtype=node.dtype)
    return y


def _shifted_rows(norm: Node, w: Node, shift: Node, node: Node) -> Node | None:
    """rms_norm(x) * (1 + scale) + shift, with a scale and a shift for each row"""
    scale = _above_one(w)
    if scale is None or scale.is_const or scale.shape != shift.shape or _inner(norm) != "f32":
        return None
    if norm.shape != node.shape:
        return None
    y: Node = ada_rms_norm(norm.args[0], scale, shift, eps=norm["eps"], dtype=node.dtype)
    return y


def _norm(weighted: bool) -> Var:
    """An RMS norm with (or without) a weight"""
    return Var("norm", where=lambda n: n.op == "rms_norm" and (n.args[1] is not None) == weighted)


x, w, shift, eps = Var("x"), Var("w"), Var("shift"), Var("eps")
_ROOT = rsqrt(add(reduce_mean(mul(x, x), axes=(-1,)), eps))
_RMS, _WEIGHTED = once(_norm(weighted=False)), once(_norm(weighted=True))

RULES = (
    Rules(
        "rms_norm",
        [
            (mul(x, _ROOT), _plain),
            (mul(x, mul(_ROOT, w)), _factored),
            (mul(_norm(weighted=False), Var("w", const=True)), _weighted),  # two weights on one value: two norms
            (mul(_RMS, w), _weighted),
        ],
    ),
    Rules(
        "ada_rms_norm",
        [
            (add(_WEIGHTED, shift), _shifted),
            (add(mul(_RMS, w), shift), _shifted_rows),
        ],
    ),
)
