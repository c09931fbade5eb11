"""References of the normalisations and of rotary position embedding. All along the last axis, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from frtc.kernels.dtypes import round_to
from frtc.kernels.reference.emit import emit
from frtc.kernels.reference.floats import Array, name_of, widen


def _mean_square(x: Array) -> Array:
    """Over the last axis, kept."""
    mean: Array = np.mean(x * x, axis=-1, keepdims=True)
    return mean


def _rms(x: Array, eps: float) -> Array:
    y: Array = x * (1 / np.sqrt(_mean_square(x) + x.dtype.type(eps)))
    return y


def rms_norm(
    x: Array,
    w: Array | None = None,
    inv: Array | None = None,
    *,
    eps: float,
    offset: float = 0.0,
    inner: str = "f32",
    per_row: bool = False,
) -> Any:
    """x * rsqrt(mean(x^2) + eps) * (offset + w); w[N]. The normalised x is rounded to `inner` before w meets it."""
    y = _rms(widen(x), eps)
    y = y if inner == "f32" else widen(round_to(y, inner))
    return emit(y if w is None else y * (y.dtype.type(offset) + widen(w)), inv, per_row)


def ada_rms_norm(
    x: Array, scale: Array, shift: Array, inv: Array | None = None, *, eps: float, per_row: bool = False
) -> Any:
    """x * rsqrt(mean(x^2) + eps) * (1 + scale) + shift; scale and shift [N] or [..., N]."""
    return emit(normed(x, scale, shift, "ada", eps), inv, per_row)


def layer_norm(
    x: Array,
    w: Array | None = None,
    b: Array | None = None,
    inv: Array | None = None,
    *,
    eps: float,
    per_row: bool = False,
) -> Any:
    """(x - mean) * rsqrt(var + eps) * w + b; var is the mean square of x - mean."""
    return emit(normed(x, w, b, "layer", eps), inv, per_row)


def normed(x: Array, w: Array | None, b: Array | None, kind: str, eps: float, offset: float = 0.0) -> Array:
    """The norm of a kind ("rms", "ada": w is scale and b is shift, "layer"), as numbers."""
    values = widen(x)
    if kind == "rms":
        y = _rms(values, eps)
        return y if w is None else y * (y.dtype.type(offset) + widen(w))
    if kind == "ada":
        assert w is not None and b is not None, "an adaptive norm has scale and shift"
        adapted: Array = _rms(values, eps) * (1 + widen(w)) + widen(b)
        return adapted
    y = _rms(values - np.mean(values, axis=-1, keepdims=True), eps)
    y = y if w is None else y * widen(w)
    return y if b is None else y + widen(b)


def residual_norm(
    x: Array,
    r: Array,
    gate: Array | None = None,
    w: Array | None = None,
    b: Array | None = None,
    inv: Array | None = None,
    *,
    kind: str,
    eps: float,
    offset: float = 0.0,
    per_row: bool = False,
) -> tuple[Array, ...]:
    """(s, y): s = x + gate * r rounded to x's type, y = the norm of that s; with its scale where `per_row`."""
    step = widen(r) if gate is None else widen(gate) * widen(r)
    s = widen(round_to(widen(x) + step, name_of(x)))
    y = emit(normed(s, w, b, kind, eps, offset), inv, per_row)
    return (s, *y) if per_row else (s, y)


def rope(x: Array, cos: Array, sin: Array, *, pairing: str = "half") -> Array:
    """Rotates pairs of x[..., S, D] by the angles of cos, sin [S, D/2].

    half: the pair of element i is i + D/2; interleaved: the pair of element 2i is 2i + 1.
    """
    values, c, s = widen(x), widen(cos), widen(sin)
    half = values.shape[-1] // 2
    interleaved = pairing == "interleaved"
    a, b = (values[..., 0::2], values[..., 1::2]) if interleaved else (values[..., :half], values[..., half:])
    first, second = a * c - b * s, b * c + a * s
    if interleaved:
        return np.stack([first, second], axis=-1).reshape(values.shape)
    return np.concatenate([first, second], axis=-1)


def rotated_pairs(x: Array, cos: Array, sin: Array) -> Array:
    """Neighbours (2i, 2i + 1) of x [..., S, D] rotated by the angles of cos, sin [S, D/2], laid out as halves."""
    turned = rope(x, cos, sin, pairing="interleaved")
    return np.concatenate([turned[..., 0::2], turned[..., 1::2]], axis=-1)


def rope_qkv(
    x: Array, cos: Array, sin: Array, *, heads: int, kv_heads: int, pairing: str = "half"
) -> tuple[Array, Array, Array]:
    """Splits x[..., S, (heads + 2 kv_heads) D] into q, k, v [..., H, S, D] and rotates q and k."""
    count = heads + 2 * kv_heads
    split = widen(x).reshape(*x.shape[:-1], count, x.shape[-1] // count).swapaxes(-2, -3)
    q, k, v = np.split(split, [heads, heads + kv_heads], axis=-3)
    return rope(q, cos, sin, pairing=pairing), rope(k, cos, sin, pairing=pairing), v


OPS: dict[str, Callable[..., Any]] = {
    "rms_norm": rms_norm,
    "ada_rms_norm": ada_rms_norm,
    "layer_norm": layer_norm,
    "residual_norm": residual_norm,
    "rope": rope,
    "rope_qkv": rope_qkv,
}
