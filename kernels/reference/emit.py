"""How a producer stores its result in FP8: with a scale that is given, or with one for each row that it finds itself.

A result and its scale mean `y * scale`. Rounding to e4m3 (to nearest even, saturating at +-448) is what storing does.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from frtc.kernels.dtypes import round_to
from frtc.kernels.reference.floats import Array, widen

LARGEST = 448.0  # of e4m3
SMALLEST_ROW = 1e-30  # a row of zeros has this maximum, so that its scale is a number


def emit(y: Array, inv: Array | None, per_row: bool, axes: tuple[int, ...] = (-1,), staged: str = "f32") -> Any:
    """y, or y * inv, or (y * (448 / m), m / 448) with m the largest magnitude along `axes` of y.

    inv      [] the reciprocal of the scale
    staged   type that y is rounded to before a row's maximum is known ("f32": none)
    """
    if inv is not None:
        return y * widen(inv)
    if not per_row:
        return y
    y = widen(round_to(y, staged)) if staged != "f32" else y
    most = np.maximum(np.max(np.abs(y), axis=axes, keepdims=True), y.dtype.type(SMALLEST_ROW))
    largest = y.dtype.type(LARGEST)
    return y * (largest / most), most / largest


def scaled(y: Array, alpha: Array | None, x_scale: Array | None) -> Array:
    """Sums of products of stored elements as numbers: y * x_scale * alpha; x_scale [..., 1], alpha [N] or []."""
    y = y if x_scale is None else y * widen(x_scale)
    return y if alpha is None else y * widen(alpha)
