"""Layer norms from their formula: d = x - mean(x); d rsqrt(mean(d^2) + eps), then times w, then + b.

The first half is already an RMS norm of d (canonical_norm). Statistics are in fp32; roundings on the way disappear.
"""

from __future__ import annotations

from frtc.lowering.ir import Node
from frtc.lowering.ops import add, layer_norm, mul
from frtc.lowering.pattern import Var, once
from frtc.passes.canonical_norm import vector
from frtc.passes.rewrite import Rules


def _centred(node: Node) -> Node | None:
    """The RMS norm of x - mean(x) is the layer norm of x."""
    d, w = node.args[0], node.args[1]
    assert d is not None
    if node["inner"] != "f32" or node["offset"] != 0.0 or d.op != "sub":
        return None
    x, mean = d.operands
    if mean.op != "reduce_mean" or mean.operands != (x,) or mean["axes"] != (-1,) or x.shape != d.shape:
        return None
    y: Node = layer_norm(x, w, eps=node["eps"], dtype=node.dtype)
    return y


def _scaled(norm: Node, w: Node, node: Node) -> Node | None:
    """layer_norm(x) * w"""
    weight = vector(w, node.shape[-1])
    if weight is None or norm.shape != node.shape:
        return None
    y: Node = layer_norm(norm.args[0], weight, eps=norm["eps"], dtype=node.dtype)
    return y


def _biased(norm: Node, b: Node, node: Node) -> Node | None:
    """layer_norm(x, w) + b"""
    bias = vector(b, node.shape[-1])
    if bias is None or norm.shape != node.shape:
        return None
    y: Node = layer_norm(norm.args[0], norm.args[1], bias, eps=norm["eps"], dtype=node.dtype)
    return y


w, b = Var("w"), Var("b")
_BARE = once(Var("norm", where=lambda n: n.op == "layer_norm" and not n.operands[1:]))
_UNBIASED = once(Var("norm", where=lambda n: n.op == "layer_norm" and n.args[2] is None))

RULES = Rules(
    "layer_norm",
    [
        (frozenset({"rms_norm"}), _centred),
        (mul(_BARE, w), _scaled),
        (add(_UNBIASED, b), _biased),
    ],
)
