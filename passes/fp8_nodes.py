"""Products with weights in 8 bits, producers that store FP8, and views that keep a row's elements together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from frtc.kernels.reference import REFERENCES
from frtc.lowering.ir import Node, make
from frtc.lowering.ops import OPS, channel_scale, mul, reshape
from frtc.lowering.ops import quantize as stored_e4m3
from frtc.passes.sites import makes_up

EMITTERS = frozenset({name for name, op in OPS.items() if "inv" in op.operands})
VIEWS = frozenset({"reshape", "transpose", "view"})


def in_8_bits(product: Node, x: Node, x_scale: Node | None = None, scale: Node | None = None) -> Node:
    """The product of x with its weights in e4m3; alpha is a vector, or a table of them where `scale` is one.

    scale   f32 [] or [rounds]: what x is stored in multiples of, where x has one scale for all its rows
    """
    operands, args = OPS[product.op].operands, [x, *product.args[1:]]
    w = args[1]
    assert w is not None
    channel = channel_scale(w)
    args[1] = stored_e4m3(w, channel)
    alpha = channel
    if scale is not None:
        alpha = mul(scale if scale.shape == () else reshape(scale, shape=(*scale.shape, 1)), channel)
    args[operands.index("alpha")] = alpha
    if not makes_up(product):
        args[operands.index("x_scale")] = x_scale
    return make(product.op, args, dict(product.attrs), product.type, product.loc)


def with_alpha(product: Node, alpha: Node) -> Node:
    args = list(product.args)
    args[OPS[product.op].operands.index("alpha")] = alpha
    return make(product.op, args, dict(product.attrs), product.type, product.loc)


def alpha_of(product: Node) -> Node:
    alpha = product.args[OPS[product.op].operands.index("alpha")]
    assert alpha is not None
    return alpha


def emitted(producer: Node, inv: Node | None) -> Node:
    """The producer with its last result in FP8: stored times `inv`, or (None) with a scale for each row."""
    attrs, args = dict(producer.attrs), list(producer.args)
    if inv is None:
        attrs["per_row"] = True
    else:
        args[OPS[producer.op].operands.index("inv")] = inv
    return OPS[producer.op].build(args, {**attrs, "dtype": "e4m3"}, producer.loc)


def keeps_rows(producer: Node, views: Sequence[Node]) -> bool:
    """Whether the views lead from a result to the rows that share its scales, in their order."""
    types = producer.type if isinstance(producer.type, tuple) else (producer.t,)
    shape = types[-1].shape
    numbers = np.arange(types[-1].size).reshape(shape)
    rows = numbers.swapaxes(-2, -3) if producer.op == "attention" else numbers
    moved = numbers
    for view in views:
        moved = np.asarray(REFERENCES[view.op](moved, **dict(view.attrs)))
    heads = shape[-3] if producer.op == "attention" else 1
    return moved.shape[-1] == shape[-1] * heads and np.array_equal(moved.ravel(), rows.ravel())
