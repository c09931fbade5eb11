"""ATen products, convolutions, attention and norms."""

from __future__ import annotations

import math
from collections.abc import Sequence

from frtc.lowering import ops
from frtc.lowering.aten import Call, Lowering, Scalar, Unsupported, broadcast, number, reshape
from frtc.lowering.aten_create import ATEN as CREATE
from frtc.lowering.aten_shape import transpose
from frtc.lowering.ir import Node


def linear(c: Call, x: Node, w: Node, b: Node | None = None) -> Node:
    node: Node = ops.linear(x, w, b, dtype=c.dtype)
    return node


def matmul(c: Call, a: Node, b: Node) -> Node:
    """Vectors count as one row or one column, which the result loses again."""
    rows = reshape(a, (1, *a.shape)) if len(a.shape) == 1 else a
    columns = reshape(b, (*b.shape, 1)) if len(b.shape) == 1 else b
    return reshape(ops.matmul(rows, columns, dtype=c.dtype), c.shape)


def addmm(c: Call, x: Node, a: Node, b: Node, beta: Scalar = 1, alpha: Scalar = 1) -> Node:
    """beta * x + alpha * a @ b, rounded once"""
    inner = "f64" if c.dtype == "f64" else "f32"
    product = ops.matmul(a, b, dtype=inner)
    if alpha != 1:
        product = ops.mul(product, number(float(alpha), inner), dtype=inner)
    if beta != 1:
        x = ops.mul(x, number(float(beta), inner), dtype=inner)
    node: Node = ops.add(product, x, dtype=c.dtype)
    return node


def conv2d(
    c: Call,
    x: Node,
    w: Node,
    b: Node | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] | str = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Node:
    if groups != 1 or set(dilation) != {1}:
        raise Unsupported(f"convolution with groups={groups}, dilation={list(dilation)}")
    if isinstance(padding, str):
        if padding != "valid" and w.shape[-2:] != (1, 1):
            raise Unsupported(f"convolution with padding {padding!r}")
        padding = (0, 0)
    steps, around = ((v[0], v[-1]) for v in (stride, padding))
    node: Node = ops.conv2d(x, w, b, stride=steps, padding=around, dtype=c.dtype)
    return node


def attention(
    c: Call,
    q: Node,
    k: Node,
    v: Node,
    attn_mask: Node | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Node:
    """softmax(scale q k^T, over visible keys) v. torch's causal mask starts at the first key, ours ends at the last."""
    if dropout_p > 0:
        raise Unsupported(f"attention with dropout {dropout_p}; call .eval() on the module")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    batch = ops.broadcast_shapes(q.shape[:-3], k.shape[:-3])
    if not enable_gqa and k.shape[-3:-2] != q.shape[-3:-2]:
        raise Unsupported(f"{q.shape[-3]} query heads over {k.shape[-3]} key heads without enable_gqa")
    q, k, v = (broadcast(x, (*batch, *x.shape[-3:])) for x in (q, k, v))
    causal = is_causal and q.shape[-2] == k.shape[-2]
    if is_causal and not causal:
        attn_mask = _causal_mask(q.shape[-2], k.shape[-2])
    if attn_mask is not None and attn_mask.dtype != "bool":
        return _biased(c, q, k, v, attn_mask, scale)
    node: Node = ops.attention(q, k, v, attn_mask, scale=scale, causal=causal, dtype=c.dtype)
    return node


def _causal_mask(queries: int, keys: int) -> Node:
    everything = ops.const(True, "bool", (queries, keys))
    mask = CREATE["tril.default"](Call((everything.t,)), everything)
    assert isinstance(mask, Node)
    return mask


def _biased(c: Call, q: Node, k: Node, v: Node, bias: Node, scale: float) -> Node:
    """softmax(scale q k^T + bias) v: an additive mask, written out in float32."""
    groups = q.shape[-3] // k.shape[-3]
    k, v = (_repeated(x, groups) for x in (k, v))
    scores = ops.matmul(q, transpose(c, k, -1, -2), dtype="f32")
    scores = ops.add(ops.mul(scores, number(scale, "f32"), dtype="f32"), bias, dtype="f32")
    node: Node = ops.matmul(ops.softmax(scores, dtype="f32"), v, dtype=c.dtype)
    return node


def _repeated(x: Node, times: int) -> Node:
    """Each head `times` times in a row: x [..., H, S, D] -> [..., H * times, S, D]"""
    *batch, heads, rows, size = x.shape
    if times == 1:
        return x
    apart = broadcast(reshape(x, (*batch, heads, 1, rows, size)), (*batch, heads, times, rows, size))
    return reshape(apart, (*batch, heads * times, rows, size))


def layer_norm(
    c: Call, x: Node, shape: Sequence[int], w: Node | None = None, b: Node | None = None, eps: float = 1e-5, *_: object
) -> Node:
    _last_axis_only(shape)
    node: Node = ops.layer_norm(x, w, b, eps=float(eps), dtype=c.dtype)
    return node


def rms_norm(c: Call, x: Node, shape: Sequence[int], w: Node | None = None, eps: float | None = None) -> Node:
    """Without eps torch takes the machine epsilon of the arithmetic type, float32."""
    _last_axis_only(shape)
    node: Node = ops.rms_norm(x, w, eps=2.0**-23 if eps is None else float(eps), dtype=c.dtype)
    return node


def _last_axis_only(shape: Sequence[int]) -> None:
    if len(shape) != 1:
        raise Unsupported(f"norm over the last {len(shape)} axes")


ATEN: dict[str, Lowering] = {
    "linear.default": linear,
    **{f"{name}.default": matmul for name in ("matmul", "mm", "bmm", "mv", "dot")},
    **{f"{name}.default": addmm for name in ("addmm", "baddbmm")},
    "conv2d.default": conv2d,
    "conv2d.padding": conv2d,
    "scaled_dot_product_attention.default": attention,
    "layer_norm.default": layer_norm,
    "rms_norm.default": rms_norm,
}
