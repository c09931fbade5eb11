"""What each ONNX op means, as IR.

A row is a function of a Call (the result types) and the operands, None where an optional one is absent; attributes come
by name. Most rows are the lowerings of the ATen ops that mean the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import numpy_helper

from frtc.kernels.dtypes import DTYPES
from frtc.lowering import ops
from frtc.lowering.aten import Call, Result, Unsupported, broadcast, cast, load, negative, number, operands
from frtc.lowering.aten_shape import cut
from frtc.lowering.interpret import run
from frtc.lowering.ir import Graph, Node
from frtc.lowering.op import Op

ATEN = load()
NAMES = {dtype.numpy: name for name, dtype in DTYPES.items()}

Row = Callable[..., Result]


def array_literal(array: np.ndarray[Any, Any]) -> Node:
    dtype = NAMES[array.dtype]
    if array.size == 1:
        return ops.const(array.reshape(-1)[0].item(), dtype, array.shape)
    return ops.literal(np.ascontiguousarray(array).tobytes(), dtype, array.shape)


def _numbers(node: Node | None) -> list[int] | None:
    """The integers in a value that does not depend on the inputs."""
    if node is None:
        return None
    try:
        found = run(Graph("shape", (), (("out", node),)), {})["out"]
    except (KeyError, AssertionError):
        raise Unsupported("axes or bounds that depend on the data") from None
    return [int(n) for n in found.reshape(-1)]


def _pointwise(row: Op) -> Row:
    def lower(c: Call, *xs: Node, **_: object) -> Node:
        node: Node = row(*xs, dtype=c.dtype)
        return node

    return lower


def _reduce(row: Op) -> Row:
    """Axes are an operand, or an attribute in old files; none means all."""

    def lower(c: Call, x: Node, axes: Node | Sequence[int] | None = None, keepdims: int = 1, **_: object) -> Node:
        given = _numbers(axes) if isinstance(axes, Node) or axes is None else list(axes)
        found = sorted(negative(a, len(x.shape)) for a in (given or range(len(x.shape))))
        node: Node = row(x, axes=tuple(found), keepdims=bool(keepdims), dtype=c.dtype)
        return node

    return lower


def _where(c: Call, condition: Node, a: Node, b: Node) -> Node:
    node: Node = ops.where(condition, a, b, dtype=c.dtype)
    return node


def _gelu(c: Call, x: Node, approximate: str = "none") -> Result:
    return ATEN["gelu.default"](c, x, approximate=approximate)


def _clip(c: Call, x: Node, low: Node | None = None, high: Node | None = None) -> Result:
    return ATEN["clamp.default"](c, x, low, high)


def _softmax(c: Call, x: Node, axis: int = -1) -> Result:
    return ATEN["softmax.int"](c, x, axis)


def _gemm(
    c: Call,
    a: Node,
    b: Node,
    bias: Node | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,  # as ONNX spells it
    transB: int = 0,
) -> Result:
    """alpha * a @ b + beta * bias; the usual linear layer where b is transposed"""
    a = ops.transpose(a, perm=(-1, -2)) if transA else a
    plain = alpha == beta == 1.0 and (bias is None or len(bias.shape) == 1)
    if transB and plain:
        return ATEN["linear.default"](c, a, b, bias)
    b = ops.transpose(b, perm=(-1, -2)) if transB else b
    if bias is None:
        product: Node = ops.matmul(a, b, dtype=c.dtype)
        return product if alpha == 1.0 else ops.mul(product, number(alpha, "f32"), dtype=c.dtype)
    return ATEN["addmm.default"](c, bias, a, b, beta=beta, alpha=alpha)


def _attention(
    c: Call,
    q: Node,
    k: Node,
    v: Node,
    mask: Node | None = None,
    past_k: Node | None = None,
    past_v: Node | None = None,
    *,
    is_causal: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    **_: object,
) -> Result:
    """Heads as an axis of their own; query heads may share key heads."""
    if past_k is not None or past_v is not None or softcap or len(q.shape) != 4:
        raise Unsupported("attention with a cache, a soft-cap, or heads inside the last axis")
    attention = ATEN["scaled_dot_product_attention.default"]
    return attention(c, q, k, v, mask, is_causal=bool(is_causal), scale=scale, enable_gqa=True)


def _norm(row: str) -> Row:
    def lower(
        c: Call, x: Node, w: Node, b: Node | None = None, axis: int = -1, epsilon: float = 1e-5, **_: object
    ) -> Result:
        shape = x.shape[axis:]
        vectors = (w, b) if row == "layer_norm.default" else (w,)
        return ATEN[row](c, x, shape, *vectors, epsilon)

    return lower


def _gather(c: Call, x: Node, ids: Node, axis: int = 0) -> Result:
    """Entries of one axis; a row of a table is an embedding."""
    if axis in (0, -len(x.shape)) and len(x.shape) == 2:
        return ATEN["embedding.default"](c, x, ids)
    return ATEN["index.Tensor"](c, x, [None] * (axis % len(x.shape)) + [ids])


def _slice(c: Call, x: Node, starts: Node, stops: Node, axes: Node | None = None, steps: Node | None = None) -> Result:
    first, last = _numbers(starts) or [], _numbers(stops) or []
    along, strides = _numbers(axes) or range(len(first)), _numbers(steps) or [1] * len(first)
    for start, stop, axis, step in zip(first, last, along, strides, strict=True):
        if step < 0:
            raise Unsupported("a slice that runs backwards")
        begin, end, _ = slice(start, stop).indices(x.shape[axis])
        x = cut(x, negative(axis, len(x.shape)), begin, max(begin, end), step)
    return x


def _split(c: Call, x: Node, sizes: Node | None = None, axis: int = 0, **_: object) -> Result:
    return ATEN["split_with_sizes.default"](c, x, None, axis)


def _shape(c: Call, x: Node, start: int = 0, end: int | None = None) -> Node:
    return array_literal(np.array(x.shape[start:end], np.int64))


def _range(c: Call, start: Node, stop: Node, step: Node) -> Result:
    values = _numbers(start), _numbers(stop), _numbers(step)
    return ATEN["arange.start_step"](c, *(v[0] for v in values if v))


def _conv(c: Call, x: Node, w: Node, b: Node | None = None, **attrs: Any) -> Result:
    pads = attrs.get("pads", [0, 0, 0, 0])
    if pads[:2] != pads[2:] or attrs.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise Unsupported("convolution with uneven padding")
    group, dilation = attrs.get("group", 1), attrs.get("dilations", [1, 1])
    return ATEN["conv2d.default"](c, x, w, b, attrs.get("strides", [1, 1]), pads[:2], dilation, group)


def _concat(c: Call, *xs: Node, axis: int) -> Result:
    return ATEN["cat.default"](c, xs, axis)


def _transpose(c: Call, x: Node, perm: Sequence[int] | None = None) -> Result:
    return ATEN["permute.default"](c, x, perm or range(len(x.shape))[::-1])


def _cast(c: Call, x: Node, *_: object, **__: object) -> Node:
    return cast(x, c.dtype)


def _filled(c: Call, shape: Node, value: Any = None) -> Node:
    return ops.const(0.0 if value is None else numpy_helper.to_array(value).item(), c.dtype, c.shape)


def _compare(row: Op) -> Row:
    return lambda c, a, b: row(*operands(ops.promote(a.t, b.t), a, b))


_POINTWISE = {
    "Add": ops.add, "Sub": ops.sub, "Mul": ops.mul, "Div": ops.div, "Pow": ops.pow_, "Max": ops.maximum,
    "Min": ops.minimum, "Neg": ops.neg, "Abs": ops.abs_, "Exp": ops.exp, "Log": ops.log, "Tanh": ops.tanh,
    "Erf": ops.erf, "Sin": ops.sin, "Cos": ops.cos, "Sqrt": ops.sqrt, "Floor": ops.floor, "Sigmoid": ops.sigmoid,
    "Swish": ops.silu,
}  # fmt: skip
_COMPARE = {"Equal": ops.eq, "Less": ops.lt, "LessOrEqual": ops.le, "Greater": ops.gt, "GreaterOrEqual": ops.ge}
_LOGICAL = {"And": "logical_and.default", "Or": "logical_or.default", "Not": "logical_not.default"}
_VIEWS = ("Reshape", "Unsqueeze", "Squeeze", "Flatten")

TABLE: dict[str, Row] = {
    "Constant": lambda c: (),
    **{name: _pointwise(row) for name, row in _POINTWISE.items()},
    **{name: _compare(row) for name, row in _COMPARE.items()},
    **{name: ATEN[row] for name, row in _LOGICAL.items()},
    **{name: (lambda c, x, *_, **__: ATEN["view.default"](c, x)) for name in _VIEWS},
    **{f"Reduce{n}": _reduce(ops.OPS[f"reduce_{n.lower()}"]) for n in ("Mean", "Sum", "Max")},
    "Reciprocal": ATEN["reciprocal.default"],
    "Relu": ATEN["relu.default"],
    "Gelu": _gelu,
    "Clip": _clip,
    "Where": _where,
    "Cast": _cast,
    "CastLike": _cast,
    "Identity": _cast,
    "Softmax": _softmax,
    "MatMul": ATEN["matmul.default"],
    "Gemm": _gemm,
    "Conv": _conv,
    "Attention": _attention,
    "LayerNormalization": _norm("layer_norm.default"),
    "RMSNormalization": _norm("rms_norm.default"),
    "Gather": _gather,
    "Concat": _concat,
    "Split": _split,
    "Slice": _slice,
    "Transpose": _transpose,
    "Expand": lambda c, x, shape: broadcast(x, c.shape),
    "Shape": _shape,
    "Range": _range,
    "ConstantOfShape": _filled,
}
