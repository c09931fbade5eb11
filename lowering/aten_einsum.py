"""torch.einsum of one or two operands, as one matmul between permutations."""

from __future__ import annotations

import math
from collections.abc import Sequence

from frtc.lowering import ops
from frtc.lowering.aten import Call, Lowering, Unsupported, reshape
from frtc.lowering.aten_shape import permute
from frtc.lowering.ir import Node


def einsum(c: Call, equation: str, xs: Sequence[Node], path: object = None) -> Node:
    """Letters in both operands and in the result are batch axes, letters in both that vanish are summed over."""
    left, arrow, out = equation.replace(" ", "").partition("->")
    labels = left.split(",")
    if not arrow or "." in equation or any(len(set(n)) != len(n) for n in (*labels, out)):
        raise Unsupported(f"einsum {equation!r}: without ->, with ..., or with a letter twice in one operand")
    if len(xs) > 2:
        raise Unsupported(f"einsum {equation!r}: more than two operands")
    extents = {n: e for name, x in zip(labels, xs, strict=True) for n, e in zip(name, x.shape, strict=True)}
    if len(xs) == 1:
        return _ordered(c, *_summed(xs[0], labels[0], out), out)
    a, of_a = _summed(xs[0], labels[0], out + labels[1])
    b, of_b = _summed(xs[1], labels[1], out + labels[0])
    batch = "".join(n for n in of_a if n in of_b and n in out)
    inner = "".join(n for n in of_a if n in of_b and n not in out)
    rows, columns = ("".join(n for n in name if n not in batch + inner) for name in (of_a, of_b))

    def grouped(x: Node, name: str, *groups: str) -> Node:
        sizes = tuple(math.prod(extents[n] for n in group) for group in groups)
        return reshape(_ordered(c, x, name, "".join(groups)), (*(extents[n] for n in batch), *sizes[1:]))

    product = ops.matmul(grouped(a, of_a, batch, rows, inner), grouped(b, of_b, batch, inner, columns), dtype=c.dtype)
    found = batch + rows + columns
    return _ordered(c, reshape(product, tuple(extents[n] for n in found)), found, out)


def _summed(x: Node, name: str, kept: str) -> tuple[Node, str]:
    """x without the axes that nothing else names."""
    axes = tuple(i - len(name) for i, n in enumerate(name) if n not in kept)
    if not axes:
        return x, name
    return ops.reduce_sum(x, axes=axes, keepdims=False), "".join(n for n in name if n in kept)


def _ordered(c: Call, x: Node, name: str, wanted: str) -> Node:
    return permute(c, x, [name.index(n) for n in wanted])


ATEN: dict[str, Lowering] = {"einsum.default": einsum}
