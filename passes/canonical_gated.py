"""act(x @ gate.T) * (x @ up.T) becomes one `gated_linear`; also where gate and up are the halves of one weight.

The roundings of the two products and of the activation disappear; the result is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

from frtc.lowering.ir import Node
from frtc.lowering.ops import gated_linear, gelu_erf, gelu_tanh, linear, mul, silu, slice_
from frtc.lowering.pattern import Var, once
from frtc.passes.rewrite import Rules

x, gate, up, w = Var("x"), Var("gate", const=True), Var("up", const=True), Var("w", const=True)
a, b, c, d = Var("a"), Var("b"), Var("c"), Var("d")
ACTIVATIONS = {"gelu_tanh": gelu_tanh, "gelu_erf": gelu_erf, "silu": silu}


def _gated(act: str) -> Callable[..., Node | None]:
    def replacement(x: Node, gate: Node, up: Node, node: Node) -> Node | None:
        if gate.t != up.t:
            return None
        y: Node = gated_linear(x, gate, up, act=act, dtype=node.dtype)
        return y

    return replacement


def _halves(act: str) -> Callable[..., Node | None]:
    def replacement(x: Node, w: Node, a: int, b: int, c: int, d: int, node: Node) -> Node | None:
        gate, up = slice_(w, axis=-2, start=a, stop=b), slice_(w, axis=-2, start=c, stop=d)
        return _gated(act)(x, gate, up, node)

    return replacement


def _half(product: object, start: Var, stop: Var) -> object:
    return slice_(product, axis=-1, start=start, stop=stop)


RULES = Rules(
    "gated_linear",
    [
        *(
            (mul(once(op(once(linear(x, gate)))), once(linear(x, up))), _gated(name))
            for name, op in ACTIVATIONS.items()
        ),
        *(
            (mul(once(op(once(_half(linear(x, w), a, b)))), once(_half(linear(x, w), c, d))), _halves(name))
            for name, op in ACTIVATIONS.items()
        ),
    ],
)
