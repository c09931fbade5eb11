"""References of the elementwise ops, with NumPy's broadcasting.

fp32 goes through NumPy. float64, which is what constants are folded in, goes through the C library one element at a
time: NumPy picks its float64 loops by processor, and their last bits differ from machine to machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from frtc.kernels.dtypes import DTYPES, round_to
from frtc.kernels.reference.floats import Array, as_float, is_float, together, widen

Reference = Callable[..., Any]


def _libm(numpy_fn: Callable[..., Array], c_fn: Callable[..., float]) -> Callable[..., Array]:
    """`numpy_fn` for fp32, `c_fn` for float64. Where C refuses (poles, overflow) NumPy's answer is exact."""

    def scalar(*xs: float) -> float:
        try:
            return c_fn(*xs)
        except (ValueError, OverflowError):
            return float(numpy_fn(*(np.float64(x) for x in xs)))

    def apply(*xs: Array) -> Array:
        with np.errstate(all="ignore"):
            if xs[0].dtype != np.float64:
                return numpy_fn(*xs)
            grids = np.broadcast_arrays(*xs)
            flat = map(scalar, *(grid.ravel().tolist() for grid in grids))
            return np.fromiter(flat, np.float64, grids[0].size).reshape(grids[0].shape)

    return apply


def _erf_f32(x: Array) -> Array:
    """NumPy has no erf: the C library's, rounded to fp32."""
    return np.fromiter(map(math.erf, x.ravel().tolist()), np.float64, x.size).reshape(x.shape).astype(np.float32)


exp_of = _libm(np.exp, math.exp)
log_of = _libm(np.log, math.log)
tanh_of = _libm(np.tanh, math.tanh)
sin_of = _libm(np.sin, math.sin)
cos_of = _libm(np.cos, math.cos)
pow_of = _libm(np.power, math.pow)
erf_of = _libm(_erf_f32, math.erf)


def sigmoid_of(x: Array) -> Array:
    with np.errstate(over="ignore"):
        y: Array = 1 / (1 + exp_of(-x))
        return y


def silu_of(x: Array) -> Array:
    y: Array = x * sigmoid_of(x)
    return y


def gelu_tanh_of(x: Array) -> Array:
    number = x.dtype.type
    inner = number(math.sqrt(2 / math.pi)) * (x + number(0.044715) * x * x * x)
    y: Array = number(0.5) * x * (1 + tanh_of(inner))
    return y


def gelu_erf_of(x: Array) -> Array:
    y: Array = x.dtype.type(0.5) * x * (1 + erf_of(x * x.dtype.type(math.sqrt(0.5))))
    return y


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "none": lambda x: x,
    "gelu_tanh": gelu_tanh_of,
    "gelu_erf": gelu_erf_of,
    "silu": silu_of,
}


def _unary(fn: Callable[[Array], Array]) -> Reference:
    """One float operand: integers become fp32."""

    def apply(x: Array | float) -> Array:
        (x,) = together(x)
        with np.errstate(all="ignore"):
            return fn(as_float(x))

    return apply


def _binary(fn: Callable[[Array, Array], Array]) -> Reference:
    """Two operands in their common type; integers stay integers."""

    def apply(a: Array | float, b: Array | float) -> Array:
        with np.errstate(all="ignore"):
            return fn(*together(a, b))

    return apply


def _keep(fn: Callable[[Array], Array]) -> Reference:
    """One operand; integers stay integers."""

    def apply(x: Array | float) -> Array:
        return fn(*together(x))

    return apply


def divide(a: Array, b: Array) -> Array:
    return np.divide(as_float(a), as_float(b))


def power(a: Array, b: Array) -> Array:
    return pow_of(a, b) if is_float(a) else np.power(a, b)


def where(condition: Array, a: Array | float, b: Array | float) -> Array:
    return np.where(condition, *together(a, b))


def cast(x: Array | float, *, dtype: str) -> Array:
    """To a float type the value stays as it is (who calls rounds); to an integer it is truncated; to bool, x != 0."""
    target = DTYPES[dtype]
    values = widen(np.asarray(x))
    if target.kind == "bool":
        return np.not_equal(values, 0)
    if target.kind == "int":
        return (np.trunc(values) if is_float(values) else values).astype(target.numpy)
    return as_float(values)


def pointwise(
    *operands: Array,
    expr: Sequence[Sequence[Any]],
    results: Sequence[int],
    shape: Sequence[int],
    others: Sequence[str] = (),
) -> Array | tuple[Array, ...]:
    """A fused program: steps (op, argument, ...), argument i being operand i or step i - operands.

    ("const", value) is a number, ("cast", argument, dtype) rounds to a float type as well. Results are values by
    number, broadcast to `shape`; a single one comes alone. Who calls rounds, also those of element types `others`.
    """
    known: list[Any] = list(operands)
    for op, *arguments in expr:
        if op == "const":
            known.append(arguments[0])
        elif op == "cast":
            known.append(round_to(cast(known[arguments[0]], dtype=arguments[1]), arguments[1]))
        else:
            known.append(OPS[op](*(known[i] for i in arguments)))
    found = tuple(np.broadcast_to(together(known[i])[0], tuple(shape)) for i in results)
    return found if len(found) > 1 else found[0]


def read_by(step: Sequence[Any]) -> Sequence[int]:
    """The numbers of the values that a step of such a program reads."""
    op, *arguments = step
    return () if op == "const" else arguments[:1] if op == "cast" else arguments


OPS: dict[str, Reference] = {
    "add": _binary(np.add),
    "sub": _binary(np.subtract),
    "mul": _binary(np.multiply),
    "div": _binary(divide),
    "pow": _binary(power),
    "floor_div": _binary(np.floor_divide),
    "mod": _binary(np.mod),
    "minimum": _binary(np.minimum),
    "maximum": _binary(np.maximum),
    "neg": _keep(np.negative),
    "abs": _keep(np.abs),
    "exp": _unary(exp_of),
    "log": _unary(log_of),
    "tanh": _unary(tanh_of),
    "erf": _unary(erf_of),
    "sin": _unary(sin_of),
    "cos": _unary(cos_of),
    "sqrt": _unary(np.sqrt),
    "rsqrt": _unary(lambda x: 1 / np.sqrt(x)),
    "floor": _unary(np.floor),
    "sigmoid": _unary(sigmoid_of),
    "silu": _unary(silu_of),
    "gelu_tanh": _unary(gelu_tanh_of),
    "gelu_erf": _unary(gelu_erf_of),
    "eq": _binary(np.equal),
    "ne": _binary(np.not_equal),
    "lt": _binary(np.less),
    "le": _binary(np.less_equal),
    "gt": _binary(np.greater),
    "ge": _binary(np.greater_equal),
    "and": np.logical_and,
    "or": np.logical_or,
    "not": np.logical_not,
    "where": where,
    "cast": cast,
    "pointwise": pointwise,
}
