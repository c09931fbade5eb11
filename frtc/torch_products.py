"""Products of matrices and attention in torch. Sums in fp32; on a GPU, FP8 by FP8 through torch's own scaled product.

Imports torch: only the compile side loads this file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from frtc.kernels.reference.linear import MOMENTS
from frtc.torch_ops import ACTIVATIONS, alone, cast, emit, norm_of, rope_qkv
from frtc.torch_tensors import TORCH, scalar, widen

WIDENED_AT_ONCE = 1 << 25  # elements of a weight held in fp32 at a time: 128 MB
TILE = 16  # FP8 products want sizes in multiples of it
FP8, SIXTEEN_BITS = TORCH["e4m3"], (TORCH["bf16"], TORCH["f16"])


def times_transposed(x: Tensor, w: Tensor) -> Tensor:
    """x [..., K] @ w [N, K].T in fp32 (float64 where an operand is), from operands as they are stored."""
    rows, lead = x.reshape(-1, x.shape[-1]), x.shape[:-1]
    if rows.is_cuda and x.dtype == w.dtype == FP8:
        y = fp8_product(rows, w)
    elif rows.is_cuda and rows.dtype in SIXTEEN_BITS and w.dtype in (rows.dtype, FP8):
        y = torch.mm(rows, w.to(rows.dtype).t(), out_dtype=torch.float32)  # a number of e4m3 is one of bf16 and f16
    else:
        y = _widened(widen(rows), w)
    return y.reshape(*lead, w.shape[0])


def _widened(x: Tensor, w: Tensor) -> Tensor:
    """Some rows of w at a time, so that a large weight in 16 bits needs little memory."""
    wide = torch.float64 if torch.float64 in (x.dtype, w.dtype) else torch.float32
    step = max(1, WIDENED_AT_ONCE // max(1, w.shape[1]))
    parts = [x.to(wide) @ part.to(wide).t() for part in torch.split(w, step)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def fp8_product(x: Tensor, w: Tensor) -> Tensor:
    """e4m3 [M, K] by e4m3 [N, K] -> f32 [M, N], padded with zeros where torch wants other sizes.

    NOTE: torch has it on the CPU too, some hundred times slower than the product of the same numbers in fp32.
    """
    (m, k), n = x.shape, w.shape[0]
    one = scalar(1.0, torch.float32, x.device)
    left, right = _padded(x, m, k), _padded(w, n, k)
    y = torch._scaled_mm(left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
    return y[:m, :n]


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    down, across = -rows % TILE, -columns % TILE
    bits = x.contiguous().view(torch.uint8)
    return (functional.pad(bits, (0, across, 0, down)) if down or across else bits).view(x.dtype)


def specified(y: Tensor, rows: Tensor | None) -> Tensor:
    """y with NaN in the rows (axis -2) that are unspecified: whatever reads one of them shows it."""
    if rows is None:
        return y
    known = torch.arange(y.shape[-2], device=y.device)[:, None] < rows
    return torch.where(known, y, scalar(math.nan, y.dtype, y.device))


def _sums(x: Tensor, w: Tensor, b: Tensor | None, alpha: Tensor | None, x_scale: Tensor | None) -> Tensor:
    y = times_transposed(x, w)
    y = y if x_scale is None else y * widen(x_scale)
    y = y if alpha is None else y * widen(alpha)
    return y if b is None else y + widen(b)


def factors_of(x_scale: Tensor | None, width: int, norm: str, eps: float) -> Tensor | None:
    """Factor of each row: x_scale itself, or 1 / sqrt(v + eps) of its moments, v mean square or variance."""
    if norm == "none" or x_scale is None:
        return x_scale
    found = x_scale.double().reshape(*x_scale.shape[:-1], -1, 2 if norm == "layer" else 1).sum(-2) / width
    variance = found[..., -1:] - (found[..., :1] ** 2 if norm == "layer" else 0.0)
    return torch.rsqrt(variance.clamp_min(0.0) + eps).to(x_scale.dtype)


def _linear(
    x: Tensor, w: Tensor, b: Tensor | None, residual: Tensor | None, gate: Tensor | None, rows: Tensor | None,
    alpha: Tensor | None, x_scale: Tensor | None, act: str,
) -> Tensor:  # fmt: skip
    y = ACTIVATIONS[act](_sums(x, w, b, alpha, x_scale))
    y = y if gate is None else widen(gate) * y
    return specified(y if residual is None else widen(residual) + y, rows)


def linear(
    x: Tensor, w: Tensor, b: Tensor | None = None, residual: Tensor | None = None, gate: Tensor | None = None,
    rows: Tensor | None = None, alpha: Tensor | None = None, x_scale: Tensor | None = None, inv: Tensor | None = None,
    *, act: str = "none", norm: str = "none", eps: float = 0.0, per_row: bool = False, staged: str = "bf16",
) -> Any:  # fmt: skip
    """residual + gate * act((x @ w.T) * x_scale * alpha + b); norm: x_scale has the moments of x's rows."""
    factors = factors_of(x_scale, x.shape[-1], norm, eps)
    return alone(emit(_linear(x, w, b, residual, gate, rows, alpha, factors, act), inv, per_row, staged=staged))


def gated_linear(
    x: Tensor, gate: Tensor, up: Tensor | None = None, rows: Tensor | None = None, alpha: Tensor | None = None,
    x_scale: Tensor | None = None, inv: Tensor | None = None, b: Tensor | None = None,
    *, act: str, norm: str = "none", eps: float = 0.0, per_row: bool = False, staged: str = "bf16",
) -> Any:  # fmt: skip
    """act(x @ gate.T) * (x @ up.T); without `up`, row 2i of `gate` is the gate's and row 2i + 1 up's, b [2F] too."""
    if up is None:
        both = _sums(x, gate, b, alpha, factors_of(x_scale, x.shape[-1], norm, eps))
        left, right = both[..., 0::2], both[..., 1::2]
    else:
        left, right = (_sums(x, w, None, None, x_scale) for w in (gate, up))
    return alone(emit(specified(ACTIVATIONS[act](left) * right, rows), inv, per_row, staged=staged))


def linear_rope_qkv(
    x: Tensor, w: Tensor, b: Tensor | None, cos: Tensor, sin: Tensor, rows: Tensor | None = None,
    alpha: Tensor | None = None, x_scale: Tensor | None = None,
    *, heads: int, kv_heads: int, norm: str = "none", eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k, v [H, S, D] of a projection whose rows of q and k are interleaved in each head; q and k are rotated."""
    y = specified(_sums(x, w, b, alpha, factors_of(x_scale, x.shape[-1], norm, eps)), rows)
    count = heads + 2 * kv_heads
    size, turned = y.shape[-1] // count, heads + kv_heads
    pairs = y[..., : turned * size].reshape(*y.shape[:-1], turned, size // 2, 2)
    halves = pairs.transpose(-1, -2).reshape(*y.shape[:-1], turned * size)
    straight = torch.cat([halves, y[..., turned * size :]], -1)
    return rope_qkv(straight, cos, sin, heads=heads, kv_heads=kv_heads)


def linear_norm(
    x: Tensor, w: Tensor, b: Tensor | None = None, residual: Tensor | None = None, gate: Tensor | None = None,
    rows: Tensor | None = None, alpha: Tensor | None = None, x_scale: Tensor | None = None,
    norm_w: Tensor | None = None, norm_b: Tensor | None = None, inv: Tensor | None = None,
    *, act: str = "none", kind: str, eps: float, offset: float = 0.0, per_row: bool = False,
    stored: str = "bf16",
) -> tuple[Tensor, ...]:  # fmt: skip
    """(s, y[, scale]): s = linear(...) rounded to `stored`, y = the norm of that s."""
    s = cast(_linear(x, w, b, residual, gate, rows, alpha, x_scale, act), stored)
    return s, *emit(norm_of(s, norm_w, norm_b, kind, eps, offset), inv, per_row)


def linear_moments(
    x: Tensor, w: Tensor, b: Tensor | None = None, residual: Tensor | None = None, gate: Tensor | None = None,
    rows: Tensor | None = None, alpha: Tensor | None = None, x_scale: Tensor | None = None,
    norm_w: Tensor | None = None, inv: Tensor | None = None,
    *, act: str = "none", norm: str, offset: float = 0.0, stored: str = "bf16",
) -> tuple[Tensor, ...]:  # fmt: skip
    """(s, moments, z): s = linear(...) rounded to `stored`, sums of each 32 of s, z = s * (offset + norm_w) * inv."""
    s = cast(_linear(x, w, b, residual, gate, rows, alpha, x_scale, act), stored)
    wide = widen(s)
    z = wide if norm_w is None else wide * (offset + widen(norm_w))
    parts = functional.pad(wide, (0, -wide.shape[-1] % MOMENTS)).reshape(*wide.shape[:-1], -1, MOMENTS)
    sums = [(parts**2).sum(-1)] if norm == "rms" else [parts.sum(-1), (parts**2).sum(-1)]
    return s, torch.stack(sums, -1).flatten(-2), *emit(z, inv, False)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    a, b = widen(a), widen(b)
    wide = torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32
    return a.to(wide) @ b.to(wide)


def conv2d(
    x: Tensor, w: Tensor, b: Tensor | None = None, *, stride: tuple[int, int], padding: tuple[int, int] = (0, 0)
) -> Tensor:
    """Cross-correlation, each output a product of rows: no library's shortcut."""
    images = widen(x).reshape(-1, *x.shape[-3:])
    windows = functional.unfold(images, tuple(w.shape[-2:]), padding=padding, stride=stride)  # [B, C h w, H' W']
    y = times_transposed(windows.transpose(-1, -2), w.reshape(w.shape[0], -1))
    y = (y if b is None else y + widen(b)).transpose(-1, -2)
    size = [(x.shape[i] + 2 * padding[i] - w.shape[i]) // stride[i] + 1 for i in (-2, -1)]
    return y.reshape(*x.shape[:-3], w.shape[0], *size)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, length: Tensor | None = None,
    inv: Tensor | None = None, *, scale: float, causal: bool = False, resume: int = -1, probs: str = "f32",
    per_row: bool = False, staged: str = "bf16",
) -> Any:  # fmt: skip
    """softmax(scale q k^T, over visible keys) v; what no query sees may hold anything. A row: all heads of a token."""
    heads, kv_heads, sk = q.shape[-3], k.shape[-3], k.shape[-2]
    groups = (*q.shape[:-3], kv_heads, heads // kv_heads, q.shape[-2])
    grouped = widen(q).reshape(*groups, q.shape[-1])
    keys, values = (widen(t).unsqueeze(-3) for t in (k, v))
    seen = _visible(q.shape[-2], sk, length, causal, resume, q.device)
    if mask is not None:
        masks = mask.expand(*q.shape[:-1], sk).reshape(*groups, sk)
        seen = masks if seen is None else masks & seen
    scores = (grouped @ keys.transpose(-1, -2)) * scale
    if seen is not None:
        scores = torch.where(seen, scores, scalar(-math.inf, scores.dtype, scores.device))
        values = torch.where(seen.any(-2)[..., None], values, scalar(0.0, values.dtype, values.device))
    top = scores.amax(-1, keepdim=True)
    powers = torch.exp(scores - torch.where(top.isfinite(), top, torch.zeros_like(top)))
    total = powers.sum(-1, keepdim=True)
    shares = powers / torch.where(total > 0, total, torch.ones_like(total))
    y = (shares if probs == "f32" else widen(cast(shares, probs))) @ values
    results = emit(y.flatten(-4, -3), inv, per_row, (-3, -1), staged)
    return (results[0], results[1].squeeze(-3)) if per_row else results[0]


def _visible(sq: int, sk: int, length: Tensor | None, causal: bool, resume: int, device: torch.device) -> Tensor | None:
    """[Sq or 1, Sk] bool: what length, resume and causality let a query see; None: everything."""
    j = torch.arange(sk, device=device)[None, :]
    seen = None
    if length is not None:
        seen = (j < length) | (j >= resume) if resume >= 0 else j < length
    if causal:
        before = j <= torch.arange(sq, device=device)[:, None] + sk - sq
        seen = before if seen is None else seen & before
    return seen


OPS: dict[str, Callable[..., Any]] = {
    "linear": linear,
    "gated_linear": gated_linear,
    "linear_rope_qkv": linear_rope_qkv,
    "linear_norm": linear_norm,
    "linear_moments": linear_moments,
    "matmul": matmul,
    "conv2d": conv2d,
    "attention": attention,
}
