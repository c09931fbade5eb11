"""References of the products of matrices. fp32 from operands in their storage type; who calls rounds the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from frtc.kernels.dtypes import round_to
from frtc.kernels.reference.emit import LARGEST, SMALLEST_ROW, emit, scaled
from frtc.kernels.reference.floats import Array, widen
from frtc.kernels.reference.norm import normed, rotated_pairs
from frtc.kernels.reference.pointwise import ACTIVATIONS

WIDENED_AT_ONCE = 1 << 24  # elements of a weight held in fp32 at a time: 64 MB
MEASURED_ROWS = 128
MOMENTS = 32  # elements of a row that one of its moments is of
SUMS_AT_ONCE = 1 << 13  # elements of a result summed at a time in float64: 64 KB


def linear(
    x: Array,
    w: Array,
    b: Array | None = None,
    residual: Array | None = None,
    gate: Array | None = None,
    rows: Array | None = None,
    alpha: Array | None = None,
    x_scale: Array | None = None,
    inv: Array | None = None,
    *,
    act: str = "none",
    norm: str = "none",
    eps: float = 0.0,
    per_row: bool = False,
    staged: str = "bf16",
) -> Any:
    """residual + gate * act(x_scale * alpha * (x @ w.T) + b); x [..., K], w [N, K], b [N], residual [..., N], gate [N]
    or [..., N], x_scale [..., 1], alpha [N] or []. norm: x_scale has moments (linear_moments) of x's rows.

    Rows (axis -2) from `rows` on are unspecified. They are NaN here: whatever reads one of them shows it.
    """
    factors = factors_of(x_scale, x.shape[-1], norm, eps)
    return emit(_linear(x, w, b, residual, gate, rows, alpha, factors, act), inv, per_row, staged=staged)


def factors_of(x_scale: Array | None, width: int, norm: str, eps: float) -> Array | None:
    """Factor of each row: x_scale itself, or 1 / sqrt(v + eps) of its moments, v mean square or variance."""
    if norm == "none" or x_scale is None:
        return x_scale
    found = x_scale.astype(np.float64).reshape(*x_scale.shape[:-1], -1, 2 if norm == "layer" else 1).sum(-2) / width
    variance = found[..., -1:] - (found[..., :1] ** 2 if norm == "layer" else 0.0)
    return np.asarray(1.0 / np.sqrt(np.maximum(variance, 0.0) + eps), x_scale.dtype)


def _linear(
    x: Array,
    w: Array,
    b: Array | None,
    residual: Array | None,
    gate: Array | None,
    rows: Array | None,
    alpha: Array | None,
    x_scale: Array | None,
    act: str,
) -> Array:
    y = scaled(_times_transposed(x, w), alpha, x_scale)
    y = y if b is None else y + widen(b)
    y = ACTIVATIONS[act](y)
    y = y if gate is None else widen(gate) * y
    return _specified(y if residual is None else widen(residual) + y, rows)


def gated_linear(
    x: Array,
    gate: Array,
    up: Array | None = None,
    rows: Array | None = None,
    alpha: Array | None = None,
    x_scale: Array | None = None,
    inv: Array | None = None,
    b: Array | None = None,
    *,
    act: str,
    norm: str = "none",
    eps: float = 0.0,
    per_row: bool = False,
    staged: str = "bf16",
) -> Any:
    """act(x @ gate.T) * (x @ up.T); without `up`, `gate` is [2F, K] with row 2i of the gate and row 2i + 1 of up, and
    the products may be scaled and shifted: x_scale and norm as in linear, alpha [2F] in the order of the rows or [],
    b [2F].

    Rows (axis -2) from `rows` on are unspecified: NaN here.
    """
    if up is None:
        both = scaled(_times_transposed(x, gate), alpha, factors_of(x_scale, x.shape[-1], norm, eps))
        both = both if b is None else both + widen(b)
        y = ACTIVATIONS[act](both[..., 0::2]) * both[..., 1::2]
    else:
        y = ACTIVATIONS[act](_times_transposed(x, gate)) * _times_transposed(x, up)
    return emit(_specified(y, rows), inv, per_row, staged=staged)


def linear_rope_qkv(
    x: Array,
    w: Array,
    b: Array | None = None,
    cos: Array | None = None,
    sin: Array | None = None,
    rows: Array | None = None,
    alpha: Array | None = None,
    x_scale: Array | None = None,
    *,
    heads: int,
    kv_heads: int,
    norm: str = "none",
    eps: float = 0.0,
) -> tuple[Array, Array, Array]:
    """q [heads, S, D], k and v [kv_heads, S, D] of x [S, K]; q and k rotated by cos, sin [S, D/2] ("half" pairing).

    Rows 2i and 2i + 1 of w (and b, alpha) inside each head of q and k make elements i and i + D/2; v's are in order.
    """
    assert cos is not None and sin is not None
    y = _linear(x, w, b, None, None, rows, alpha, factors_of(x_scale, x.shape[-1], norm, eps), "none")
    count = heads + 2 * kv_heads
    split = y.reshape(*y.shape[:-1], count, y.shape[-1] // count).swapaxes(-2, -3)
    turned = rotated_pairs(split[..., : heads + kv_heads, :, :], cos, sin)
    return turned[..., :heads, :, :], turned[..., heads:, :, :], split[..., heads + kv_heads :, :, :]


def linear_norm(
    x: Array,
    w: Array,
    b: Array | None = None,
    residual: Array | None = None,
    gate: Array | None = None,
    rows: Array | None = None,
    alpha: Array | None = None,
    x_scale: Array | None = None,
    norm_w: Array | None = None,
    norm_b: Array | None = None,
    inv: Array | None = None,
    *,
    act: str = "none",
    kind: str,
    eps: float,
    offset: float = 0.0,
    per_row: bool = False,
    stored: str = "bf16",
) -> tuple[Array, ...]:
    """(s, y): s = linear(..) rounded to `stored`, y = the norm of that s; with its scale where `per_row`.

    kind, offset, norm_w and norm_b are those of residual_norm.
    """
    s = _linear(x, w, b, residual, gate, rows, alpha, x_scale, act)
    s = s if stored == "f32" else widen(round_to(s, stored))
    y = emit(normed(s, norm_w, norm_b, kind, eps, offset), inv, per_row)
    return (s, *y) if per_row else (s, y)


def linear_moments(
    x: Array,
    w: Array,
    b: Array | None = None,
    residual: Array | None = None,
    gate: Array | None = None,
    rows: Array | None = None,
    alpha: Array | None = None,
    x_scale: Array | None = None,
    norm_w: Array | None = None,
    inv: Array | None = None,
    *,
    act: str = "none",
    norm: str,
    offset: float = 0.0,
    stored: str = "bf16",
) -> tuple[Array, Array, Array]:
    """(s, moments, z): s = linear(..) rounded to `stored`, z = s * (offset + norm_w) * inv, each factor where given;
    moments [..., P] of s: the sum of squares of each 32 elements, or [..., 2 P], its sum in front of it ("layer").
    """
    s = _linear(x, w, b, residual, gate, rows, alpha, x_scale, act)
    s = s if stored == "f32" else widen(round_to(s, stored))
    z = s if norm_w is None else s * (np.asarray(offset, s.dtype) + widen(norm_w))
    missing = -s.shape[-1] % MOMENTS
    parts = np.pad(s, [(0, 0)] * (s.ndim - 1) + [(0, missing)]).reshape(*s.shape[:-1], -1, MOMENTS)
    sums = [np.sum(parts**2, -1)] if norm == "rms" else [np.sum(parts, -1), np.sum(parts**2, -1)]
    return s, np.stack(sums, -1).reshape(*s.shape[:-1], -1), emit(z, inv, False)


def _specified(y: Array, rows: Array | None) -> Array:
    """y with NaN in the rows that are unspecified."""
    if rows is None:
        return y
    y = np.array(y)
    y[..., max(0, int(rows)) :, :] = np.nan
    return y


def matmul(a: Array, b: Array) -> Array:
    """a [..., M, K] @ b [..., K, N]."""
    a, b = widen(a), widen(b)
    if np.float64 in (a.dtype, b.dtype):
        return _in_order(a, b)
    y: Array = np.matmul(a, b)
    return y


def conv2d(
    x: Array, w: Array, b: Array | None = None, *, stride: tuple[int, int], padding: tuple[int, int] = (0, 0)
) -> Array:
    """Cross-correlation: x [..., C, H, W], w [O, C, h, w], b [O] -> [..., O, H', W']. Each output is a row product."""
    x = np.pad(x, [(0, 0)] * (x.ndim - 2) + [(n, n) for n in padding])
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[-2:], (-2, -1))
    windows = windows[..., :: stride[0], :: stride[1], :, :]  # [..., C, H', W', h, w]
    rows = np.moveaxis(windows, -5, -3)  # [..., H', W', C, h, w]
    y = _times_transposed(rows.reshape(*rows.shape[:-3], -1), w.reshape(w.shape[0], -1))
    y = y if b is None else y + widen(b)
    return np.moveaxis(y, -1, -3)


def _times_transposed(x: Array, w: Array) -> Array:
    """x [..., K] @ w [N, K].T. Some rows of w at a time, so that a large weight in bf16 needs little memory."""
    x = widen(x)
    if np.float64 in (x.dtype, w.dtype):
        return _in_order(x, widen(w).T)
    n, k = w.shape
    y = np.empty((*x.shape[:-1], n), np.float32)
    rows = max(1, WIDENED_AT_ONCE // max(1, k))
    for first in range(0, n, rows):
        y[..., first : first + rows] = x @ widen(w[first : first + rows]).T
    return y


def _in_order(a: Array, b: Array) -> Array:
    """a @ b in float64, one k after the other: a fold has the same bits on every machine, which no BLAS promises.

    Some columns at a time, so that the sums stay in the cache; which ones does not change a bit.
    """
    a, b = a.astype(np.float64, copy=False), b.astype(np.float64, copy=False)
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), *a.shape[-2:-1], b.shape[-1])
    y: Array = np.empty(shape)
    columns = max(64, SUMS_AT_ONCE // max(1, y.size // max(1, shape[-1])))
    for first in range(0, shape[-1], columns):
        rows = b[..., first : first + columns]
        rows = np.ascontiguousarray(rows) if a.ndim > 1 else rows
        sums = np.zeros((*shape[:-1], rows.shape[-1]))
        products = np.empty_like(sums)
        for k in range(a.shape[-1]):
            left, right = (a[..., k, None], rows[..., k, None, :]) if a.ndim > 1 else (a[k], rows[k])
            np.multiply(left, right, out=products)
            sums += products
        y[..., first : first + columns] = sums
    return y


def quantize(w: Array, scale: Array) -> Array:
    """w [N, K] / scale [N] in fp32: stored as e4m3, a weight in FP8."""
    y: Array = w.astype(np.float32) / scale.astype(np.float32)[:, None]
    return y


def channel_scale(w: Array) -> Array:
    """f32 [N]: what each row of w [N, K] is divided by before it is stored as e4m3.

    A row's largest magnitude / 448, or the whole tensor's in every entry: whichever leaves less squared error, measured
    on MEASURED_ROWS rows or a few more, evenly spread.
    """
    most = np.zeros(len(w), np.float32)
    for rows in _some_rows(w):
        most[rows] = np.max(np.abs(w[rows].astype(np.float32)), axis=-1, initial=0.0)
    each = np.maximum(most, np.float32(SMALLEST_ROW)) / np.float32(LARGEST)
    whole = np.full_like(each, np.max(each, initial=0.0))
    some = slice(None, None, max(1, len(w) // MEASURED_ROWS))
    return each if _squared_error(w[some], each[some]) <= _squared_error(w[some], whole[some]) else whole


def _squared_error(w: Array, scale: Array) -> float:
    """Of w [N, K] stored as e4m3 with a scale for each row."""
    total = 0.0
    for rows in _some_rows(w):
        values, s = w[rows].astype(np.float32), scale[rows, None]
        total += float(np.sum((round_to(values / s, "e4m3").astype(np.float32) * s - values) ** 2, dtype=np.float64))
    return total


def _some_rows(w: Array) -> Iterator[slice]:
    step = max(1, SUMS_AT_ONCE * 32 // max(1, w.shape[-1]))
    return (slice(first, first + step) for first in range(0, len(w), step))


OPS: dict[str, Callable[..., Any]] = {
    "linear": linear,
    "gated_linear": gated_linear,
    "linear_rope_qkv": linear_rope_qkv,
    "linear_norm": linear_norm,
    "linear_moments": linear_moments,
    "matmul": matmul,
    "conv2d": conv2d,
    "quantize": quantize,
    "channel_scale": channel_scale,
}
