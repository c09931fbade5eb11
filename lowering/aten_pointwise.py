"""Elementwise ATen ops: arithmetic, comparisons, logic, activations, casts."""

from __future__ import annotations

from frtc.kernels.dtypes import is_float
from frtc.lowering import ops
from frtc.lowering.aten import Call, Lowering, Scalar, Unsupported, cast, identity, operands
from frtc.lowering.ir import Node
from frtc.lowering.op import Op

Operand = Node | Scalar


def _unary(row: Op) -> Lowering:
    def lower(c: Call, x: Node) -> Node:
        node: Node = row(x, dtype=c.dtype)
        return node

    return lower


def _binary(row: Op) -> Lowering:
    def lower(c: Call, a: Operand, b: Operand) -> Node:
        node: Node = row(*operands(c.dtype, a, b), dtype=c.dtype)
        return node

    return lower


def _compare(row: Op) -> Lowering:
    def lower(c: Call, a: Operand, b: Operand) -> Node:
        common = ops.promote(*(x.t for x in (a, b) if isinstance(x, Node)))
        node: Node = row(*operands(common, a, b))
        return node

    return lower


def _logical(row: Op) -> Lowering:
    """On booleans; other operands are compared with zero first."""

    def lower(c: Call, *xs: Operand) -> Node:
        node: Node = row(*(cast(x, "bool") for x in operands("bool", *xs)))
        return node

    return lower


def _bitwise(row: Op) -> Lowering:
    """On booleans it is the logical op; the IR has no other bits."""

    def lower(c: Call, *xs: Operand) -> Node:
        if c.dtype != "bool":
            raise Unsupported(f"bit arithmetic on {c.dtype}")
        return _logical(row)(c, *xs)  # type: ignore[return-value]

    return lower


def add(c: Call, a: Operand, b: Operand, alpha: Scalar = 1) -> Node:
    """a + alpha * b"""
    node: Node = ops.add(*operands(c.dtype, a, _scaled(c, b, alpha)), dtype=c.dtype)
    return node


def sub(c: Call, a: Operand, b: Operand, alpha: Scalar = 1) -> Node:
    """a - alpha * b"""
    node: Node = ops.sub(*operands(c.dtype, a, _scaled(c, b, alpha)), dtype=c.dtype)
    return node


def rsub(c: Call, a: Operand, b: Operand, alpha: Scalar = 1) -> Node:
    """b - alpha * a"""
    return sub(c, b, a, alpha)


def _scaled(c: Call, x: Operand, alpha: Scalar) -> Operand:
    """alpha * x, not rounded to 16 bits"""
    if alpha == 1:
        return x
    inner = c.dtype if not is_float(c.dtype) or c.dtype == "f64" else "f32"
    node: Node = ops.mul(*operands(inner, x, alpha), dtype=inner)
    return node


def div(c: Call, a: Operand, b: Operand, rounding_mode: str | None = None) -> Node:
    """a / b, in f32 where both are integers; "floor" rounds down"""
    if rounding_mode == "floor":
        return floor_divide(c, a, b)
    if rounding_mode is not None:
        raise Unsupported(f"rounding mode {rounding_mode}")
    node: Node = ops.div(*operands(c.dtype, a, b), dtype=c.dtype)
    return node


def floor_divide(c: Call, a: Operand, b: Operand) -> Node:
    """The largest integer <= a / b"""
    node: Node = ops.floor_div(*operands(c.dtype, a, b), dtype=c.dtype)
    return node


def square(c: Call, x: Node) -> Node:
    node: Node = ops.mul(x, x, dtype=c.dtype)
    return node


def reciprocal(c: Call, x: Node) -> Node:
    node: Node = ops.div(*operands(c.dtype, 1.0, x), dtype=c.dtype)
    return node


def addcmul(c: Call, x: Node, a: Node, b: Node, value: Scalar = 1) -> Node:
    """x + value * a * b"""
    inner = "f64" if c.dtype == "f64" else "f32"
    product = ops.mul(*operands(inner, a, b), dtype=inner)
    node: Node = ops.add(*operands(c.dtype, x, _scaled(c, product, value)), dtype=c.dtype)
    return node


def clamp(c: Call, x: Node, low: Operand | None = None, high: Operand | None = None) -> Node:
    """min(max(x, low), high), absent bounds dropped"""
    if low is not None:
        x = ops.maximum(*operands(c.dtype, x, low), dtype=c.dtype)
    if high is not None:
        x = ops.minimum(*operands(c.dtype, x, high), dtype=c.dtype)
    return x


def relu(c: Call, x: Node) -> Node:
    return clamp(c, x, 0)


def gelu(c: Call, x: Node, approximate: str = "none") -> Node:
    row = ops.gelu_tanh if approximate == "tanh" else ops.gelu_erf
    node: Node = row(x, dtype=c.dtype)
    return node


def where(c: Call, condition: Node, a: Operand, b: Operand) -> Node:
    """a where condition, else b"""
    node: Node = ops.where(cast(condition, "bool"), *operands(c.dtype, a, b), dtype=c.dtype)
    return node


def masked_fill(c: Call, x: Node, mask: Node, value: Operand) -> Node:
    """value where mask, else x"""
    return where(c, mask, value, x)


def dropout(c: Call, x: Node, p: float, train: bool) -> Node:
    if train and p > 0:
        raise Unsupported("dropout in training mode; call .eval() on the module")
    return x


UNARY = ["neg", "abs", "exp", "log", "tanh", "erf", "sin", "cos", "sqrt", "rsqrt", "floor", "sigmoid", "silu"]
COMPARE = ["eq", "ne", "lt", "le", "gt", "ge"]

ATEN: dict[str, Lowering] = {
    **{f"{name}.default": _unary(ops.OPS[name]) for name in UNARY},
    **{f"{name}.{kind}": _compare(ops.OPS[name]) for name in COMPARE for kind in ("Tensor", "Scalar")},
    "add.Tensor": add,
    "sub.Tensor": sub,
    **{f"rsub.{kind}": rsub for kind in ("Tensor", "Scalar")},
    "mul.Tensor": _binary(ops.mul),
    **{f"div.{kind}": div for kind in ("Tensor", "Tensor_mode")},
    "floor_divide.default": floor_divide,
    **{f"remainder.{kind}": _binary(ops.mod) for kind in ("Tensor", "Scalar", "Scalar_Tensor")},
    **{f"pow.{kind}": _binary(ops.pow_) for kind in ("Tensor_Tensor", "Tensor_Scalar", "Scalar")},
    "maximum.default": _binary(ops.maximum),
    "minimum.default": _binary(ops.minimum),
    "addcmul.default": addcmul,
    "square.default": square,
    "reciprocal.default": reciprocal,
    **{f"clamp.{kind}": clamp for kind in ("default", "Tensor")},
    **{f"clamp_min.{kind}": clamp for kind in ("default", "Tensor")},
    **{f"clamp_max.{kind}": lambda c, x, high: clamp(c, x, None, high) for kind in ("default", "Tensor")},
    "relu.default": relu,
    "gelu.default": gelu,
    **{f"where.{kind}": where for kind in ("self", "ScalarOther", "ScalarSelf", "Scalar")},
    **{f"masked_fill.{kind}": masked_fill for kind in ("Scalar", "Tensor")},
    "logical_and.default": _logical(ops.and_),
    "logical_or.default": _logical(ops.or_),
    "logical_not.default": _logical(ops.not_),
    "logical_xor.default": _logical(ops.ne),
    **{name: _bitwise(ops.and_) for name in ("bitwise_and.Tensor", "__and__.Tensor")},
    **{name: _bitwise(ops.or_) for name in ("bitwise_or.Tensor", "__or__.Tensor")},
    "bitwise_not.default": _bitwise(ops.not_),
    "dropout.default": dropout,
    **{f"{name}.default": identity for name in ("_to_copy", "type_as", "clone", "detach", "alias", "contiguous")},
    **{f"to.{kind}": identity for kind in ("dtype", "device")},
}
