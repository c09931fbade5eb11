"""Products with weights become `linear`, whose weight is [N, K]: from matmul, addmm, and convolution over patches.

A bias that was added to a rounded product joins it: one rounding instead of two, as torch's own linear does.
"""

from __future__ import annotations

from frtc.lowering.ir import Node
from frtc.lowering.ops import add, linear, matmul, mul, reshape, slice_, transpose
from frtc.lowering.pattern import Var, once
from frtc.passes.rewrite import Rules

x, w, bias = Var("x"), Var("w", const=True), Var("bias", const=True)
a, b = Var("a"), Var("b")


def _product(x: Node, w: Node, node: Node) -> Node | None:
    """x @ w, w [K, N] a weight"""
    return linear(x, transpose(w, perm=(-1, -2)), dtype=node.dtype) if w.t.rank == 2 else None


def _outer(a: Node, b: Node, node: Node) -> Node | None:
    """[..., M, 1] @ [..., 1, N]: one product for each result, as in tables of positions times frequencies"""
    out: Node | None = mul(a, b, dtype=node.dtype) if a.shape[-1] == 1 else None
    return out


def _biased(x: Node, w: Node, bias: Node, node: Node) -> Node | None:
    """A bias is one number per output; a table of positions, say, is not."""
    width = w.shape[0]
    if bias.t.size != width or bias.shape[-1:] != (width,) or not bias.t.is_float:
        return None
    out: Node = linear(x, w, reshape(bias, shape=(width,)), dtype=node.dtype)
    return out


def _patches(node: Node) -> Node | None:
    """A convolution whose windows do not overlap is a linear over patches; pixels that fill no window are dropped."""
    image, kernel, bias = node.args
    assert image is not None and kernel is not None
    out_channels, channels, high, wide = kernel.shape
    if node["stride"] != (high, wide) or node["padding"] != (0, 0):
        return None
    rows, columns = node.shape[-2:]
    lead = image.shape[:-3]
    image = slice_(image, axis=-2, start=0, stop=rows * high)
    image = slice_(image, axis=-1, start=0, stop=columns * wide)
    split = reshape(image, shape=(*lead, channels, rows, high, columns, wide))
    moved = transpose(split, perm=(-4, -2, -5, -3, -1))  # rows, columns, channels, high, wide
    size = channels * high * wide
    patches = reshape(moved, shape=(*lead, rows, columns, size))
    y = linear(patches, reshape(kernel, shape=(out_channels, size)), bias, dtype=node.dtype)
    return transpose(y, perm=(-1, -3, -2))  # type: ignore[no-any-return]


RULES = Rules(
    "linear",
    [
        (matmul(a, b), _outer),
        (matmul(x, w), _product),
        (add(once(linear(x, w)), bias), _biased),
        (frozenset({"conv2d"}), _patches),
    ],
)
