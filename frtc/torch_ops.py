"""What every op means, in torch: the NumPy references of kernels/reference again, for a GPU or a quick CPU.

Operands come in the order of the op's row, None where an optional one is absent; attributes come by name. Arithmetic is
in fp32 from operands in their storage type (float64 where an operand is float64); who calls rounds each result once.
Products of matrices and attention are in frtc/torch_products.py.

Imports torch: only the compile side loads this file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from frtc.lowering.ir import Type
from frtc.torch_tensors import Number, as_float, bitwise, scalar, stored, together, widen

Op = Callable[..., Any]

LARGEST, SMALLEST_ROW = 448.0, 1e-30  # of e4m3; the maximum of a row of zeros


# --- pointwise ----------------------------------------------------------------------------------------------------


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def gelu_erf(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x, "gelu_tanh": gelu_tanh, "gelu_erf": gelu_erf, "silu": silu,
}  # fmt: skip


def _unary(fn: Callable[[Tensor], Tensor]) -> Op:
    return lambda x: fn(as_float(*together(x)))


def _binary(fn: Callable[[Tensor, Tensor], Tensor]) -> Op:
    return lambda a, b: fn(*together(a, b))


def where(condition: Tensor, a: Tensor | Number, b: Tensor | Number) -> Tensor:
    left, right = together(a, b)
    return torch.where(condition, left, right)


def cast(x: Tensor, dtype: str) -> Tensor:
    """In element type `dtype`: floats are rounded, or truncated to an integer."""
    return x != 0 if dtype == "bool" else stored(widen(x), Type(dtype, tuple(x.shape)))


def pointwise(
    *operands: Tensor,
    expr: Sequence[Sequence[Any]],
    results: Sequence[int],
    shape: Sequence[int],
    others: Sequence[str] = (),
) -> Tensor | tuple[Tensor, ...]:
    """A fused program: steps (op, argument, ...), argument i being operand i or step i - operands. Who calls rounds."""
    known: list[Any] = list(operands)
    for op, *arguments in expr:
        if op == "const":
            known.append(arguments[0])
        elif op == "cast":
            known.append(cast(together(known[arguments[0]])[0], arguments[1]))
        else:
            known.append(OPS[op](*(known[i] for i in arguments)))
    found = tuple(together(known[i])[0].expand(tuple(shape)) for i in results)
    return found if len(found) > 1 else found[0]


POINTWISE: dict[str, Op] = {
    "add": _binary(torch.add),
    "sub": _binary(torch.sub),
    "mul": _binary(torch.mul),
    "div": lambda a, b: torch.div(*(as_float(x) for x in together(a, b))),
    "pow": _binary(torch.pow),
    "floor_div": _binary(torch.floor_divide),
    "mod": _binary(torch.remainder),
    "minimum": _binary(torch.minimum),
    "maximum": _binary(torch.maximum),
    "neg": lambda x: -together(x)[0],
    "abs": lambda x: together(x)[0].abs(),
    "exp": _unary(torch.exp),
    "log": _unary(torch.log),
    "tanh": _unary(torch.tanh),
    "erf": _unary(torch.erf),
    "sin": _unary(torch.sin),
    "cos": _unary(torch.cos),
    "sqrt": _unary(torch.sqrt),
    "rsqrt": _unary(lambda x: 1 / torch.sqrt(x)),
    "floor": _unary(torch.floor),
    "sigmoid": _unary(torch.sigmoid),
    "silu": _unary(silu),
    "gelu_tanh": _unary(gelu_tanh),
    "gelu_erf": _unary(gelu_erf),
    "eq": _binary(torch.eq),
    "ne": _binary(torch.ne),
    "lt": _binary(torch.lt),
    "le": _binary(torch.le),
    "gt": _binary(torch.gt),
    "ge": _binary(torch.ge),
    "and": torch.logical_and,
    "or": torch.logical_or,
    "not": torch.logical_not,
    "where": where,
    "pointwise": pointwise,
}


# --- shape, lookups, states, reductions ----------------------------------------------------------------------------


def transpose(x: Tensor, *, perm: Sequence[int]) -> Tensor:
    return x.permute(*range(x.ndim - len(perm)), *(x.ndim + axis for axis in perm))


def slice_(x: Tensor, *, axis: int, start: int, stop: int, step: int = 1) -> Tensor:
    index = [slice(None)] * x.ndim
    index[axis] = slice(start, stop, step)
    return x[tuple(index)]


def pad(x: Tensor, *, axis: int, before: int, after: int, value: float = 0.0) -> Tensor:
    sides = [x.new_full((*x.shape[:axis], count, *x.shape[x.ndim + axis + 1 :]), value) for count in (before, after)]
    return torch.cat([sides[0], x, sides[1]], axis)


def view(x: Tensor, *, shape: Sequence[int], strides: Sequence[int], offset: int = 0) -> Tensor:
    flat = x.contiguous()
    return torch.as_strided(flat, tuple(shape), tuple(strides), flat.storage_offset() + offset)


def embedding(table: Tensor, ids: Tensor, *, scale: float = 1.0) -> Tensor:
    rows = bitwise(lambda t: t[ids.long()])(table)
    return rows if scale == 1.0 else as_float(rows) * scale


def index(table: Tensor, i: Tensor) -> Tensor:
    """By a gather: the number of the entry may lie on the device."""
    return bitwise(lambda t: torch.index_select(t, 0, i.long().reshape(1))[0])(table)


def write(state: Tensor, value: Tensor, at: Tensor, *, axis: int) -> Tensor:
    if not state.ndim:
        return value
    rows = at.long() + torch.arange(value.shape[axis], device=state.device)
    return bitwise(lambda s, v: s.index_copy(axis % s.ndim, rows, v))(state, value)


def _reduction(fn: Callable[..., Tensor], arithmetic: Callable[[Tensor], Tensor]) -> Op:
    return lambda x, *, axes, keepdims=True: fn(arithmetic(x), dim=tuple(axes), keepdim=keepdims)


MOVES: dict[str, Op] = {
    "reshape": lambda x, *, shape: x.reshape(tuple(shape)),
    "transpose": transpose,
    "slice": slice_,
    "concat": lambda *parts, axis: bitwise(lambda *xs: torch.cat(xs, axis))(*parts),
    "broadcast": lambda x, *, shape: x.expand(tuple(shape)),
    "view": view,
    "read": lambda state: state,
    "write": write,
    "pad": pad,
    "embedding": embedding,
    "index": index,
    "cumsum": lambda x, *, axis: torch.cumsum(widen(x), axis),
    "argmax": lambda x, *, axis: torch.argmax(widen(x), axis),
    "reduce_sum": _reduction(torch.sum, widen),
    "reduce_mean": _reduction(torch.mean, as_float),
    "reduce_max": _reduction(torch.amax, widen),
    "reduce_any": _reduction(torch.any, lambda x: x),
    "reduce_all": _reduction(torch.all, lambda x: x),
    "softmax": lambda x, *, axis=-1: torch.softmax(as_float(x), axis),
}


# --- norms, positions, storage in FP8 ------------------------------------------------------------------------------


def emit(
    y: Tensor, inv: Tensor | None, per_row: bool, axes: tuple[int, ...] = (-1,), staged: str = "f32"
) -> tuple[Tensor, ...]:
    """(y,), or (y * inv,), or (y * (448 / m), m / 448) with m the largest magnitude along `axes` of y."""
    if inv is not None:
        return (y * widen(inv),)
    if not per_row:
        return (y,)
    y = widen(cast(y, staged))
    most = y.abs().amax(axes, keepdim=True).clamp(min=SMALLEST_ROW)
    largest = scalar(LARGEST, most.dtype, most.device)  # a tensor: torch divides by a number with its reciprocal
    return y * (largest / most), most / largest


def _rms(x: Tensor, eps: float) -> Tensor:
    return x * (1 / torch.sqrt((x * x).mean(-1, keepdim=True) + eps))


def alone(results: tuple[Tensor, ...]) -> Any:
    return results if len(results) > 1 else results[0]


def _rms_norm(x: Tensor, w: Tensor | None, eps: float, offset: float = 0.0, inner: str = "f32") -> Tensor:
    y = _rms(widen(x), eps)
    y = y if inner == "f32" else widen(cast(y, inner))
    return y if w is None else y * (offset + widen(w))


def _ada_rms_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    return _rms(widen(x), eps) * (1 + widen(scale)) + widen(shift)


def _layer_norm(x: Tensor, w: Tensor | None, b: Tensor | None, eps: float) -> Tensor:
    values = widen(x)
    y = _rms(values - values.mean(-1, keepdim=True), eps)
    y = y if w is None else y * widen(w)
    return y if b is None else y + widen(b)


def norm_of(s: Tensor, w: Tensor | None, b: Tensor | None, kind: str, eps: float, offset: float) -> Tensor:
    """The norm of kind "rms", "layer" or "ada" (w is scale and b is shift)."""
    if kind == "rms":
        return _rms_norm(s, w, eps, offset)
    if kind == "layer":
        return _layer_norm(s, w, b, eps)
    assert w is not None and b is not None, "an adaptive norm has scale and shift"
    return _ada_rms_norm(s, w, b, eps)


def rms_norm(
    x: Tensor, w: Tensor | None = None, inv: Tensor | None = None, *, per_row: bool = False, **attrs: Any
) -> Any:
    return alone(emit(_rms_norm(x, w, **attrs), inv, per_row))


def ada_rms_norm(
    x: Tensor, scale: Tensor, shift: Tensor, inv: Tensor | None = None, *, eps: float, per_row: bool = False
) -> Any:
    return alone(emit(_ada_rms_norm(x, scale, shift, eps), inv, per_row))


def layer_norm(
    x: Tensor, w: Tensor | None = None, b: Tensor | None = None, inv: Tensor | None = None,
    *, eps: float, per_row: bool = False,
) -> Any:  # fmt: skip
    return alone(emit(_layer_norm(x, w, b, eps), inv, per_row))


def residual_norm(
    x: Tensor, r: Tensor, gate: Tensor | None = None, w: Tensor | None = None, b: Tensor | None = None,
    inv: Tensor | None = None, *, kind: str, eps: float, offset: float = 0.0, per_row: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(s, y[, scale]): s = x + gate * r rounded to x's type, y = the norm of that s."""
    step = widen(r) if gate is None else widen(gate) * widen(r)
    s = (widen(x) + step).to(x.dtype)
    return s, *emit(norm_of(s, w, b, kind, eps, offset), inv, per_row)


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, pairing: str = "half") -> Tensor:
    values, c, s = widen(x), widen(cos), widen(sin)
    half = values.shape[-1] // 2
    interleaved = pairing == "interleaved"
    a, b = (values[..., 0::2], values[..., 1::2]) if interleaved else (values[..., :half], values[..., half:])
    first, second = a * c - b * s, b * c + a * s
    if interleaved:
        return torch.stack([first, second], -1).reshape(values.shape)
    return torch.cat([first, second], -1)


def rope_qkv(
    x: Tensor, cos: Tensor, sin: Tensor, *, heads: int, kv_heads: int, pairing: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits x[..., S, (heads + 2 kv_heads) D] into q, k, v [..., H, S, D] and rotates q and k."""
    count = heads + 2 * kv_heads
    split = widen(x).reshape(*x.shape[:-1], count, x.shape[-1] // count).transpose(-2, -3)
    q, k, v = torch.split(split, [heads, kv_heads, kv_heads], -3)
    return rope(q, cos, sin, pairing=pairing), rope(k, cos, sin, pairing=pairing), v


NORMS: dict[str, Op] = {
    "rms_norm": rms_norm,
    "ada_rms_norm": ada_rms_norm,
    "layer_norm": layer_norm,
    "residual_norm": residual_norm,
    "rope": rope,
    "rope_qkv": rope_qkv,
}

OPS: dict[str, Op] = POINTWISE | MOVES | NORMS
