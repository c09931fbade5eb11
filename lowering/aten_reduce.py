"""ATen ops that combine elements along axes."""

from __future__ import annotations

from collections.abc import Sequence

from frtc.kernels.dtypes import is_float
from frtc.lowering import ops
from frtc.lowering.aten import Call, Lowering, Scalar, Unsupported, cast, negative, number, reshape
from frtc.lowering.ir import Node
from frtc.lowering.op import Op

Axes = int | Sequence[int] | None


def _axes(x: Node, dim: Axes) -> tuple[int, ...]:
    """Axes counted from the end, in order; none given means all."""
    rank = len(x.shape)
    given = range(rank) if dim is None else (dim,) if isinstance(dim, int) else dim or range(rank)
    return tuple(sorted(negative(a, rank) for a in given))


def _reduction(row: Op) -> Lowering:
    def lower(c: Call, x: Node, dim: Axes = None, keepdim: bool = False, **_: object) -> Node:
        if not x.shape:
            return cast(x, c.dtype)
        node: Node = row(x, axes=_axes(x, dim), keepdims=keepdim, dtype=c.dtype)
        return node

    return lower


def _logical(row: Op) -> Lowering:
    def lower(c: Call, x: Node, dim: Axes = None, keepdim: bool = False) -> Node:
        node: Node = row(cast(x, "bool"), axes=_axes(x, dim), keepdims=keepdim)
        return node

    return lower


def minimum(c: Call, x: Node, dim: Axes = None, keepdim: bool = False) -> Node:
    """The least element, as -max(-x)"""
    if not is_float(c.dtype):
        raise Unsupported(f"minimum over {c.dtype}")
    node: Node = ops.neg(ops.reduce_max(ops.neg(x), axes=_axes(x, dim), keepdims=keepdim))
    return node


def max_dim(c: Call, x: Node, dim: int, keepdim: bool = False) -> tuple[Node, Node]:
    """The largest elements along one axis and where they are"""
    largest: Node = ops.reduce_max(x, axes=_axes(x, dim), keepdims=keepdim)
    return largest, argmax(c, x, dim, keepdim)


def argmax(c: Call, x: Node, dim: int | None = None, keepdim: bool = False) -> Node:
    """Index of the first largest element; without an axis, in the flattened tensor"""
    along = ops.reshape(x, shape=(x.t.size,)) if dim is None else x
    axis = -1 if dim is None else negative(dim, len(x.shape))
    return reshape(ops.argmax(along, axis=axis), c.types[-1].shape)


def variance(c: Call, x: Node, dim: Axes = None, *, correction: Scalar | None = None, keepdim: bool = False) -> Node:
    """sum((x - mean)^2) / (n - correction)"""
    axes, inner = _axes(x, dim), "f64" if c.dtype == "f64" else "f32"
    count = 1
    for a in axes:
        count *= x.shape[a]
    away = ops.sub(x, ops.reduce_mean(x, axes=axes, dtype=inner), dtype=inner)
    total = ops.reduce_sum(ops.mul(away, away), axes=axes, keepdims=keepdim)
    node: Node = ops.div(total, number(float(count - (1 if correction is None else correction)), inner), dtype=c.dtype)
    return node


def variance_dim(c: Call, x: Node, dim: Axes, unbiased: bool = True, keepdim: bool = False) -> Node:
    return variance(c, x, dim, correction=int(unbiased), keepdim=keepdim)


def vector_norm(c: Call, x: Node, order: Scalar = 2, dim: Axes = None, keepdim: bool = False, **_: object) -> Node:
    """sqrt(sum(x^2))"""
    if order != 2:
        raise Unsupported(f"norm of order {order}")
    inner = "f64" if c.dtype == "f64" else "f32"
    total = ops.reduce_sum(ops.mul(x, x, dtype=inner), axes=_axes(x, dim), keepdims=keepdim)
    node: Node = ops.sqrt(total, dtype=c.dtype)
    return node


def cumsum(c: Call, x: Node, dim: int, **_: object) -> Node:
    node: Node = ops.cumsum(x, axis=negative(dim, len(x.shape)), dtype=c.dtype)
    return node


def softmax(c: Call, x: Node, dim: int, *_: object, **__: object) -> Node:
    node: Node = ops.softmax(x, axis=negative(dim, len(x.shape)), dtype=c.dtype)
    return node


ATEN: dict[str, Lowering] = {
    **{f"mean.{kind}": _reduction(ops.reduce_mean) for kind in ("dim", "default")},
    **{f"sum.{kind}": _reduction(ops.reduce_sum) for kind in ("dim_IntList", "default")},
    **{f"{name}.default": _reduction(ops.reduce_max) for name in ("amax", "max")},
    **{f"{name}.default": minimum for name in ("amin", "min")},
    "max.dim": max_dim,
    "argmax.default": argmax,
    **{f"any.{kind}": _logical(ops.reduce_any) for kind in ("default", "dim", "dims")},
    **{f"all.{kind}": _logical(ops.reduce_all) for kind in ("default", "dim", "dims")},
    "var.correction": variance,
    "var.dim": variance_dim,
    "linalg_vector_norm.default": vector_norm,
    "cumsum.default": cumsum,
    "softmax.int": softmax,
}
