"""ATen ops that make tensors from numbers: filled tensors, ranges, triangles."""

from __future__ import annotations

from frtc.lowering import ops
from frtc.lowering.aten import Call, Lowering, Scalar, Unsupported, cast, number
from frtc.lowering.ir import Node


def _filled(value: Scalar) -> Lowering:
    def lower(c: Call, *_: object, **__: object) -> Node:
        return ops.const(value, c.dtype, c.shape)

    return lower


def full(c: Call, x: object, value: Scalar, *_: object, **__: object) -> Node:
    """`value` everywhere; x is the shape, or a tensor that is only asked for it"""
    return ops.const(value, c.dtype, c.shape)


def new_full(c: Call, x: Node, shape: object, value: Scalar, **_: object) -> Node:
    return ops.const(value, c.dtype, c.shape)


def scalar_tensor(c: Call, value: Scalar, **_: object) -> Node:
    return ops.const(value, c.dtype)


def arange(c: Call, start: Scalar, stop: Scalar | None = None, step: Scalar = 1, **_: object) -> Node:
    """start + step * iota; a single number is the end"""
    if stop is None:
        start = 0
    count = ops.iota(size=c.shape[0], dtype=c.dtype)
    if step != 1:
        count = ops.mul(count, number(step, c.dtype), dtype=c.dtype)
    node: Node = count if start == 0 else ops.add(count, number(start, c.dtype), dtype=c.dtype)
    return node


def linspace(c: Call, start: float, stop: float, steps: int, **_: object) -> Node:
    """start + i * (stop - start) / (steps - 1), in float32 (float64 for a float64 result)"""
    if steps == 1:
        return ops.const(start, c.dtype, (1,))
    inner = "f64" if c.dtype == "f64" else "f32"
    grown = ops.mul(ops.iota(size=steps, dtype=inner), number((stop - start) / (steps - 1), inner), dtype=inner)
    node: Node = ops.add(grown, number(float(start), inner), dtype=c.dtype)
    return node


def _triangle(keep_below: bool) -> Lowering:
    """x on one side of a diagonal, zero on the other: column - row <= diagonal (tril) or >= diagonal (triu)"""

    def lower(c: Call, x: Node, diagonal: int = 0) -> Node:
        rows, columns = c.shape[-2:]
        row = ops.reshape(ops.iota(size=rows, dtype="i32"), shape=(rows, 1))
        distance = ops.sub(ops.iota(size=columns, dtype="i32"), row, dtype="i32")
        edge = number(diagonal, "i32")
        inside = ops.le(distance, edge) if keep_below else ops.ge(distance, edge)
        if c.dtype == "bool":
            node: Node = ops.and_(x, inside)
            return node
        kept: Node = ops.where(inside, x, number(0, c.dtype), dtype=c.dtype)
        return kept

    return lower


def fill(c: Call, x: Node, value: Node | Scalar) -> Node:
    if isinstance(value, Node):
        node: Node = ops.broadcast(cast(value, c.dtype), shape=c.shape)
        return node
    return ops.const(value, c.dtype, c.shape)


def empty(c: Call, *_: object, **__: object) -> Node:
    raise Unsupported("uninitialised memory has no value; use zeros")


ATEN: dict[str, Lowering] = {
    **{f"{name}.default": _filled(0) for name in ("zeros", "new_zeros", "zeros_like", "zero")},
    **{f"{name}.default": _filled(1) for name in ("ones", "new_ones", "ones_like")},
    **{f"{name}.default": full for name in ("full", "full_like")},
    "new_full.default": new_full,
    "scalar_tensor.default": scalar_tensor,
    **{f"arange.{kind}": arange for kind in ("default", "start", "start_step")},
    "linspace.default": linspace,
    "tril.default": _triangle(keep_below=True),
    "triu.default": _triangle(keep_below=False),
    **{f"fill.{kind}": fill for kind in ("Scalar", "Tensor")},
    **{name: empty for name in ("empty.memory_format", "empty_like.default", "new_empty.default")},
}
