"""References of the products of matrices. fp32 from operands in their storage type; who calls rounds the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from frtc.kernels.reference.floats import Array, widen
from frtc.kernels.reference.pointwise import ACTIVATIONS

WIDENED_AT_ONCE = 1 << 24  # elements of a weight held in fp32 at a time: 64 MB
SUMS_AT_ONCE = 1 << 13  # elements of a result summed at a time in float64: 64 KB


def linear(
    x: Array,
    w: Array,
    b: Array | None = None,
    residual: Array | None = None,
    gate: Array | None = None,
    rows: Array | None = None,
    *,
    act: str = "none",
) -> Array:
    """residual + gate * act(x @ w.T + b); x [..., K], w [N, K], b [N], residual [..., N], gate [N] or [..., N].

    Rows (axis -2) from `rows` on are unspecified. They are NaN here: whatever reads one of them shows it.
    """
    y = _times_transposed(x, w)
    y = y if b is None else y + widen(b)
    y = ACTIVATIONS[act](y)
    y = y if gate is None else widen(gate) * y
    return _specified(y if residual is None else widen(residual) + y, rows)


def gated_linear(x: Array, gate: Array, up: Array | None = None, rows: Array | None = None, *, act: str) -> Array:
    """act(x @ gate.T) * (x @ up.T); without `up`, `gate` is [2F, K] with row 2i of the gate and row 2i + 1 of up.

    Rows (axis -2) from `rows` on are unspecified: NaN here.
    """
    if up is None:
        both = _times_transposed(x, gate)
        return _specified(ACTIVATIONS[act](both[..., 0::2]) * both[..., 1::2], rows)
    return _specified(ACTIVATIONS[act](_times_transposed(x, gate)) * _times_transposed(x, up), rows)


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


OPS: dict[str, Callable[..., Any]] = {
    "linear": linear,
    "gated_linear": gated_linear,
    "matmul": matmul,
    "conv2d": conv2d,
}
