"""References of the ops that move, select or count elements, and of the reductions along axes.

Axes are negative, counted from the end. Ops that only move elements return them in their storage type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from frtc.kernels.dtypes import DTYPES
from frtc.kernels.reference.floats import Array, as_float, is_float, widen
from frtc.kernels.reference.pointwise import exp_of


def reshape(x: Array, *, shape: Sequence[int]) -> Array:
    return x.reshape(tuple(shape))


def transpose(x: Array, *, perm: Sequence[int]) -> Array:
    """Axis i of the last len(perm) axes of the result is axis perm[i] (negative) of x; leading axes stay."""
    lead = range(x.ndim - len(perm))
    return np.transpose(x, (*lead, *(x.ndim + axis for axis in perm)))


def slice_(x: Array, *, axis: int, start: int, stop: int, step: int = 1) -> Array:
    """x[..., start:stop:step, ...] along one axis."""
    index: list[slice] = [slice(None)] * x.ndim
    index[axis] = slice(start, stop, step)
    return x[tuple(index)]


def concat(*parts: Array, axis: int) -> Array:
    return np.concatenate(parts, axis)


def broadcast(x: Array, *, shape: Sequence[int]) -> Array:
    return np.broadcast_to(x, tuple(shape))


def pad(x: Array, *, axis: int, before: int = 0, after: int = 0, value: float = 0) -> Array:
    """`before` and `after` elements of `value` around x along one axis."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (before, after)
    return np.pad(x, widths, constant_values=x.dtype.type(value))


def view(x: Array, *, shape: Sequence[int], strides: Sequence[int], offset: int = 0) -> Array:
    """Element i of the result is element offset + sum(i * strides) of x's storage, row-major."""
    flat = np.ascontiguousarray(x).reshape(-1)
    steps = tuple(step * x.itemsize for step in strides)
    return np.lib.stride_tricks.as_strided(flat[offset:], tuple(shape), steps, writeable=False)


def embedding(table: Array, ids: Array, *, scale: float = 1.0) -> Array:
    """Rows of table[V, D] by ids[...], times `scale`. An id outside the table is an error; kernels do not check."""
    rows = table[ids]
    if scale == 1.0:
        return rows
    scaled: Array = as_float(rows) * as_float(rows).dtype.type(scale)
    return scaled


def index(table: Array, i: Array) -> Array:
    """Entry `i` (integer scalar) of the leading axis of table[T, ...]."""
    entry: Array = table[int(i)]
    return entry


def read(state: Array) -> Array:
    """The value of this version of a state."""
    return state


def write(state: Array, value: Array, at: Array, *, axis: int) -> Array:
    """The next version of a state: `value` takes the place from index `at` on along `axis`. Never beyond its end."""
    start, extent = int(at), value.shape[axis] if value.ndim else 1
    assert not state.ndim or 0 <= start <= state.shape[axis] - extent, f"write at {start} leaves the state"
    after = state.copy()
    place: list[slice] = [slice(None)] * state.ndim
    if state.ndim:
        place[axis] = slice(start, start + extent)
    after[tuple(place)] = value
    return after


def iota(*, size: int, dtype: str = "i64") -> Array:
    """0, 1, ..., size - 1."""
    return np.arange(size, dtype=DTYPES[dtype].numpy)


def cumsum(x: Array, *, axis: int) -> Array:
    """Sum over all elements up to and including this one along `axis`; integers and booleans are counted in i64."""
    values = widen(x)
    return np.cumsum(values, axis=axis, dtype=values.dtype if is_float(values) else np.int64)


def argmax(x: Array, *, axis: int) -> Array:
    """Index of the first largest element along `axis`, which disappears."""
    return np.asarray(np.argmax(widen(x), axis=axis))


def _reduction(fn: Callable[..., Any], arithmetic: Callable[[Array], Array]) -> Callable[..., Array]:
    def apply(x: Array, *, axes: Sequence[int], keepdims: bool = True) -> Array:
        return np.asarray(fn(arithmetic(x), axis=tuple(axes), keepdims=keepdims))

    return apply


def softmax(x: Array, *, axis: int = -1) -> Array:
    """exp(x - max(x)) / sum(exp(x - max(x))) along `axis`"""
    values = as_float(x)
    powers = exp_of(values - values.max(axis, keepdims=True))
    y: Array = powers / powers.sum(axis, keepdims=True)
    return y


OPS: dict[str, Callable[..., Array]] = {
    "reshape": reshape,
    "transpose": transpose,
    "slice": slice_,
    "concat": concat,
    "broadcast": broadcast,
    "view": view,
    "read": read,
    "write": write,
    "pad": pad,
    "embedding": embedding,
    "index": index,
    "iota": iota,
    "cumsum": cumsum,
    "argmax": argmax,
    "reduce_sum": _reduction(np.sum, widen),
    "reduce_mean": _reduction(np.mean, as_float),
    "reduce_max": _reduction(np.max, widen),
    "reduce_any": _reduction(np.any, widen),
    "reduce_all": _reduction(np.all, widen),
    "softmax": softmax,
}
