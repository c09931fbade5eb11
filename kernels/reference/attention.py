"""The reference of attention. One head and some rows at a time, so that large shapes need little memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from frtc.kernels.dtypes import round_to
from frtc.kernels.reference.emit import emit
from frtc.kernels.reference.floats import Array, widen

SCORES_AT_ONCE = 1 << 22  # elements of a block of rows times all keys: 16 MB in fp32


def attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    length: Array | None = None,
    inv: Array | None = None,
    *,
    scale: float,
    causal: bool = False,
    resume: int = -1,
    probs: str = "f32",
    per_row: bool = False,
    staged: str = "bf16",
) -> Any:
    """softmax(scale q k^T, over visible keys) v; q [..., Hq, Sq, D], k [..., Hkv, Sk, D], v [..., Hkv, Sk, Dv].

    Query head h reads key head h // (Hq / Hkv). Key j is visible to query i iff mask[..., i, j] where given, and
    (length absent, or j < length, or 0 <= resume <= j), and (not causal, or j <= i + Sk - Sq). Probabilities are
    rounded to `probs` before they meet v ("f32": not rounded). A query that sees no key yields zeros; a key that no
    query of its head group sees may hold anything, NaN too. `per_row`: all heads of a token share a scale [..., Sq, 1].
    """
    *lead, heads, sq, _ = q.shape
    sk, group = k.shape[-2], heads // k.shape[-3]
    masks = None if mask is None else np.broadcast_to(mask, (*lead, heads, sq, sk))
    out = np.empty((*lead, heads, sq, v.shape[-1]), np.result_type(widen(q[..., :0]), widen(v[..., :0])))
    rows = max(1, SCORES_AT_ONCE // max(1, sk))
    for at in np.ndindex(*lead, heads):
        of_keys = (*at[:-1], at[-1] // group)
        keys, values = widen(k[of_keys]), widen(v[of_keys])
        for first in range(0, sq, rows):
            block = slice(first, min(first + rows, sq))
            seen = _visible(np.arange(block.start, block.stop), sq, sk, length, causal, resume)
            seen = seen if masks is None else seen & masks[(*at, block)]
            out[(*at, block)] = _rows(widen(q[(*at, block)]), keys, values, seen, scale, probs)
    if not per_row:
        return emit(out, inv, per_row)
    y, scales = emit(out, None, per_row, (-3, -1), staged)
    return y, scales[..., 0, :, :]


def _visible(i: Array, sq: int, sk: int, length: Array | None, causal: bool, resume: int) -> Array:
    """[rows or 1, Sk] bool: what length, resume and causality let the queries `i` see."""
    j = np.arange(sk)
    seen = np.ones((1, sk), np.bool_)
    if length is not None:
        seen = seen & ((j < int(length)) | ((j >= resume) if resume >= 0 else np.False_))
    return seen & (j <= i[:, None] + sk - sq) if causal else seen


def _rows(q: Array, k: Array, v: Array, seen: Array, scale: float, probs: str) -> Array:
    """One head: q [rows, D], k [Sk, D], v [Sk, Dv], seen broadcastable to [rows, Sk] -> [rows, Dv]."""
    used = seen.any(axis=0)
    if not used.any():
        return np.zeros((len(q), v.shape[-1]), v.dtype)
    k, v, seen = k[used], v[used], seen[:, used]
    scores = np.where(seen, (q @ k.T) * q.dtype.type(scale), -np.inf)
    top = np.max(scores, axis=-1, keepdims=True)
    powers = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = np.sum(powers, axis=-1, keepdims=True)
    shares = powers / np.where(total > 0, total, 1)
    y: Array = (shares if probs == "f32" else widen(round_to(shares, probs))) @ v
    return y


OPS: dict[str, Callable[..., Any]] = {"attention": attention}
