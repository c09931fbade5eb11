"""Activations and softmax from their formulas. Roundings of intermediates disappear; the result is rounded once.

silu        x sigmoid(x)
gelu_tanh   0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
gelu_erf    0.5 x (1 + erf(x / sqrt(2)))
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from frtc.lowering.ir import Node
from frtc.lowering.ops import (
    add,
    div,
    erf,
    exp,
    gelu_erf,
    gelu_tanh,
    mul,
    reduce_max,
    reduce_sum,
    sigmoid,
    silu,
    softmax,
    sub,
    tanh,
)
from frtc.lowering.pattern import Var
from frtc.passes.canonical_pointwise import number
from frtc.passes.rewrite import Rules

x = Var("x")


def near(constant: float) -> Var:
    """A literal within 1e-6 of `constant`, relatively."""

    def accepts(node: Any) -> bool:
        value = number(node) if isinstance(node, Node) else None
        return value is not None and math.isclose(value, constant, rel_tol=1e-6)

    return Var(f"near {constant}", where=accepts)


def _halved(inner: Any) -> list[Any]:
    """0.5 x (1 + inner), however associated"""
    one_plus = add(inner, 1)
    return [mul(mul(x, 0.5), one_plus), mul(mul(x, one_plus), 0.5), mul(x, mul(one_plus, 0.5))]


def _to(op: Callable[..., Node]) -> Callable[..., Node | None]:
    def replacement(x: Node, node: Node) -> Node | None:
        return op(x, dtype=node.dtype) if x.shape == node.shape else None

    return replacement


_ROOT = near(math.sqrt(2 / math.pi))
_SQUARE = mul(x, x)
_TANH = [
    tanh(mul(add(mul(mul(_SQUARE, x), near(0.044715)), x), _ROOT)),
    tanh(mul(mul(x, _ROOT), add(mul(_SQUARE, near(0.044715)), 1))),
    tanh(mul(mul(x, add(mul(_SQUARE, near(0.044715)), 1)), _ROOT)),
]
_ERF = [erf(div(x, near(math.sqrt(2)))), erf(mul(x, near(math.sqrt(0.5))))]

_axes = Var("axes", where=lambda axes: len(axes) == 1)
_POWERS = exp(sub(x, reduce_max(x, axes=_axes)))


def _softmax(x: Node, axes: tuple[int, ...], node: Node) -> Node:
    y: Node = softmax(x, axis=axes[0], dtype=node.dtype)
    return y


RULES = Rules(
    "activations",
    [
        (mul(x, sigmoid(x)), _to(silu)),
        *((pattern, _to(gelu_tanh)) for inner in _TANH for pattern in _halved(inner)),
        *((pattern, _to(gelu_erf)) for inner in _ERF for pattern in _halved(inner)),
        (div(_POWERS, reduce_sum(_POWERS, axes=_axes)), _softmax),
    ],
)
