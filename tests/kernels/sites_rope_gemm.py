"""Sites of linear_rope_qkv that kernels are judged on: the policies' layers, and awkward ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frtc.kernels.dtypes import DTYPES
from frtc.kernels.spec import Operand, Site
from tests.kernels.harness import fresh

packed = Operand.packed
COS, SIN, ROWS, ALPHA, X_SCALE = 3, 4, 5, 6, 7  # places of operands
CHUNK = 50  # rows of a cache behind the prefix


def rope_qkv(
    m: int,
    heads: int,
    kv_heads: int,
    d: int,
    k: int,
    dtype: str = "bf16",
    x: str = "",
    w: str = "",
    bias: str = "",
    angles: str = "f32",
    alpha: str = "",
    x_scale: bool = False,
    rows: bool = False,
    behind: int = CHUNK,
    gap: int = 0,
) -> Site:
    """k and v in slices of caches with `behind` more rows a head; `gap` elements between rows of q, k and v.

    x, w     element types where they are not `dtype`       alpha   "each" column its own, "one" for all
    """
    n = (heads + 2 * kv_heads) * d
    factors = {"": None, "one": packed("f32"), "each": packed("f32", n)}[alpha]
    operands = (
        packed(x or dtype, m, k), packed(w or x or dtype, n, k), packed(bias, n) if bias else None,
        packed(angles, m, d // 2), packed(angles, m, d // 2), packed("i32") if rows else None, factors,
        packed("f32", m, 1) if x_scale else None,
    )  # fmt: skip
    q = Operand(dtype, (heads, m, d), (m * (d + gap), d + gap, 1))
    cache = Operand(dtype, (kv_heads, m, d), ((m + behind) * (d + gap), d + gap, 1))
    return Site("linear_rope_qkv", operands, (q, cache, cache), {"heads": heads, "kv_heads": kv_heads})


def real_sites() -> list[Site]:
    """Pi0.5 and Pi0 (2 and 3 views, whole and last layers, the state, the chunk), SmolVLA (queries alone, too)."""
    return [
        *(rope_qkv(m, heads, 1, 256, 2048, rows=True) for m in (560, 712, 968) for heads in (8, 0)),
        *(rope_qkv(m, 8, 1, 256, 1024) for m in (1, 10, 50)), rope_qkv(1, 0, 1, 256, 1024),
        *(rope_qkv(m, heads, 5, 64, 960, rows=True) for m in (113, 177) for heads in (15, 0)),
        rope_qkv(50, 15, 5, 64, 720), rope_qkv(50, 15, 0, 64, 720),
    ]  # fmt: skip


def fp8_sites() -> list[Site]:
    """The same layers in FP8, with a scale for all rows and with one for each, and with weights in FP8 alone."""
    static, dynamic = {"x": "e4m3", "alpha": "each"}, {"x": "e4m3", "alpha": "each", "x_scale": True}
    weights = {"w": "e4m3", "alpha": "each"}
    return [
        rope_qkv(m, heads, 1, 256, k, rows=rows, **about)
        for about in (static, dynamic, weights)
        for m, heads, k, rows in ((560, 8, 2048, True), (560, 0, 2048, True), (50, 8, 1024, False))
    ] + [rope_qkv(113, 15, 5, 64, 960, rows=True, **about) for about in (static, dynamic, weights)]


def awkward_sites() -> list[Site]:
    """Few and odd rows, heads of 16 and 80, every type, gaps between rows that no vector spans, one factor for all."""
    return [
        rope_qkv(7, 8, 1, 256, 1024, bias="bf16"), rope_qkv(561, 8, 1, 256, 256, bias="f32"),
        rope_qkv(33, 3, 2, 16, 200, bias="f32", gap=16), rope_qkv(50, 4, 4, 80, 333 // 8 * 8, "f16", bias="f16"),
        rope_qkv(7, 2, 1, 32, 1000, angles="bf16", gap=3),
        rope_qkv(20, 2, 2, 64, 512, "f16", angles="f16", alpha="one"),
        rope_qkv(61, 2, 1, 128, 512, x="e4m3", alpha="one", bias="f32", x_scale=True),
        rope_qkv(61, 2, 1, 128, 512, "f16", w="e4m3", alpha="each", bias="f16", x_scale=True, gap=5),
        rope_qkv(7, 0, 3, 32, 512, x="e4m3", alpha="each"),
    ]  # fmt: skip


def inputs(site: Site, generator: np.random.Generator) -> list[NDArray[Any] | None]:
    """Operands in order, all rows counted; the product is about N(0, 2), by alpha where w is e4m3."""
    x, w = site.operands[:2]
    assert x is not None and w is not None
    scale = 0.2 / math.sqrt(x.shape[-1])
    of_w, of_alpha = (1.0, scale) if w.dtype == "e4m3" else (scale, 1.0)
    values = [
        None if o is None or o.dtype == "i32" else fresh(o, generator, of_w if place == 1 else 1.0)
        for place, o in enumerate(site.operands)
    ]
    angles = generator.uniform(-np.pi, np.pi, site.operands[COS].shape)  # type: ignore[union-attr]
    dtype = DTYPES[site.operands[COS].dtype].numpy  # type: ignore[union-attr]
    values[COS], values[SIN] = np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)
    for place, size in ((ALPHA, of_alpha), (X_SCALE, 1.0)):
        if (factor := site.operands[place]) is not None:
            values[place] = (generator.uniform(0.5, 1.5, factor.shape) * size).astype(np.float32)
    if site.operands[ROWS] is not None:
        values[ROWS] = np.array(x.shape[0], np.int32)
    return values


def flops_of(site: Site) -> float:
    """Of the product alone."""
    x, w = site.operands[:2]
    assert x is not None and w is not None
    return 2.0 * math.prod(x.shape) * w.shape[0]
