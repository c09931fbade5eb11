"""Sites of linear_norm, and of linear and gated_linear with a scale for each row, that kernels are judged on."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frtc.kernels.product import PLACES
from frtc.kernels.smxx_finish_gemm import INV
from frtc.kernels.spec import Operand, Site
from tests.kernels.harness import fresh
from tests.kernels.sites_gemm import gated, linear

EPS = 1e-6
packed = Operand.packed


def padded(dtype: str, m: int, n: int) -> Operand:
    """Rows at multiples of 16 elements."""
    return Operand(dtype, (m, n), (-(-n // 16) * 16, 1))


def per_row(site: Site) -> Site:
    """The site with its last result in e4m3 and a scale for each row of it, 16 bytes apart."""
    *before, y = site.results
    scale = Operand("f32", (*y.shape[:-1], 1), (*(4 * step for step in packed("f32", *y.shape[:-1]).strides), 1))
    results = (*before, replace(_padded(y), dtype="e4m3"), scale)
    return replace(site, results=results, attrs={**site.attrs, "per_row": True})


def _padded(y: Operand) -> Operand:
    ld = -(-y.shape[-1] // 16) * 16
    return Operand(y.dtype, y.shape, (*packed(y.dtype, *y.shape[:-1], ld).strides[:-1], 1))


def in_fp8(site: Site, x: str = "e4m3", x_scale: bool = False) -> Site:
    """w in e4m3 with a factor for each column; x in `x`, with a factor for each of its rows where asked."""
    places, (old_x, old_w) = PLACES["gated_linear" if site.op == "gated_linear" else "linear"], site.operands[:2]
    assert old_x is not None and old_w is not None
    operands: list[Operand | None] = [*site.operands, *[None] * (places["inv"] - len(site.operands))]
    operands[0], operands[1] = (padded(dtype, *o.shape) for dtype, o in ((x, old_x), ("e4m3", old_w)))
    operands[places["alpha"]] = packed("f32", old_w.shape[0])
    operands[places["x_scale"]] = packed("f32", old_x.shape[0], 1) if x_scale else None
    return replace(site, operands=tuple(operands))


def limited(site: Site) -> Site:
    """The site with a device scalar that counts the rows that something reads."""
    place = PLACES["gated_linear" if site.op == "gated_linear" else "linear"]["rows"]
    operands: list[Operand | None] = [*site.operands, *[None] * (place + 1 - len(site.operands))]
    operands[place] = packed("i32")
    return replace(site, operands=tuple(operands))


def linear_norm(
    m: int,
    n: int,
    k: int,
    kind: str,
    dtype: str = "bf16",
    vectors: str = "f32",
    y: str = "",
    inv: bool = False,
    **extras: Any,
) -> Site:
    """`vectors`: type of the norm's, "" where it has none; `extras` are those of linear."""
    base = linear(m, n, k, dtype, **extras)
    s, (x, w, *others) = base.results[0], base.operands
    vector = packed(vectors, n) if vectors else None
    tail = (None, None, None, vector, None if kind == "rms" else vector, packed("f32") if inv else None)
    out = padded("e4m3" if inv else y or dtype, m, n)
    attrs = {**base.attrs, "kind": kind, "eps": EPS, "offset": 1.0, "per_row": False, "stored": dtype}
    return Site("linear_norm", (x, w, *others, *tail), (s, out), attrs)


def batched(site: Site, batch: int) -> Site:
    """`batch` such products with one residual [M, N] for all."""
    x, w, b, residual, gate, *tail = site.operands
    assert x is not None and gate is None

    def repeated(o: Operand) -> Operand:
        return Operand(o.dtype, (batch, *o.shape), (o.shape[0] * o.strides[0], *o.strides))

    return replace(
        site, operands=(repeated(x), w, b, residual, gate, *tail), results=tuple(repeated(r) for r in site.results)
    )


GATED: dict[str, Any] = {"residual": "bf16", "gate": "bf16"}


def expert_sites() -> list[Site]:
    """The action experts' products with the norm behind them: each M and N, and each K, kind and way to store y."""
    found = []
    ways = [
        (k, kind, way) for k in (1024, 2048, 4096) for kind in ("ada", "rms", "layer") for way in ("", "inv", "row")
    ]
    for i, (m, n) in enumerate((m, n) for n in (1024, 2048, 960, 720) for m in (1, 7, 50, 64)):
        for k, kind, way in ways[i % 9 :: 9]:
            site = linear_norm(m, n, k, kind, inv=way == "inv", **GATED)
            found.append(per_row(site) if way == "row" else site)
    return found


def fp8_sites() -> list[Site]:
    """Pi0.5's expert in FP8, static and dynamic, and with weights alone in it."""
    o, down = (linear_norm(50, 1024, k, "ada", inv=True, **GATED) for k in (2048, 4096))
    dynamic = per_row(linear_norm(50, 1024, 4096, "ada", **GATED))
    return [in_fp8(o), in_fp8(down), in_fp8(dynamic, x_scale=True), in_fp8(linear_norm(50, 1024, 4096, "ada"), "bf16")]


def scaled_sites() -> list[Site]:
    """Gated MLPs of prefix and expert, the vision tower's first linear, and one row."""
    return [
        per_row(gated(560, 16384, 2048)),
        per_row(linear(512, 4304, 1152, bias="bf16", act="gelu_tanh")),
        per_row(gated(50, 4096, 1024)),
        per_row(linear(1, 1024, 1024)),
        in_fp8(per_row(gated(560, 16384, 2048)), x_scale=True),
        in_fp8(per_row(gated(50, 4096, 1024)), x_scale=True),
    ]


def awkward_sites() -> list[Site]:
    """Widths that end inside a group of 8, and inside the first; every type; rows of s not aligned; batches."""
    return [
        *(linear_norm(m, n, 333, kind, bias="f32", act="gelu_erf", residual="f32")
          for m, n, kind in ((33, 203, "layer"), (7, 5, "rms"), (64, 719, "ada"), (9, 72, "layer"))),
        linear_norm(50, 4096, 200, "layer", "f16", "f16"), linear_norm(13, 264, 520, "rms", "f16", "", y="f32"),
        linear_norm(61, 264, 520, "ada", vectors="bf16", y="f16"), linear_norm(33, 95, 128, "rms", gap=24),
        linear_norm(33, 95, 128, "layer", residual="bf16"),
        per_row(linear_norm(33, 203, 333, "layer", vectors="")), per_row(linear_norm(50, 2560, 100, "rms", "f16")),
        linear_norm(33, 203, 333, "layer", inv=True), linear_norm(7, 1028, 328, "layer", residual="bf16"),
        per_row(linear(33, 203, 333, bias="f32")), per_row(linear(7, 5, 64)), per_row(linear(70, 100, 64, "f16")),
        per_row(gated(33, 77, 205, act="silu")), per_row(linear(3, 16384, 64)), per_row(gated(9, 4304, 64)),
        batched(linear_norm(20, 200, 264, "layer", residual="f32"), 3),
        batched(per_row(linear(20, 200, 264, residual="f32")), 3),
    ]  # fmt: skip


def inputs(site: Site, generator: np.random.Generator) -> list[NDArray[Any] | None]:
    """Fresh operands; products are about N(0, 2), also of e4m3, and the loudest results of `inv` saturate."""
    x, w = site.operands[:2]
    assert x is not None and w is not None
    places = PLACES["gated_linear" if site.op == "gated_linear" else "linear"]
    scale = 0.2 / math.sqrt(x.shape[-1])
    of_w = 1.0 if w.dtype == "e4m3" else scale
    drawn = [
        None if o is None or o.dtype == "i32" else fresh(o, generator, of_w if place == 1 else 1.0)
        for place, o in enumerate(site.operands)
    ]
    if w.dtype == "e4m3":
        drawn[places["alpha"]] = (scale * generator.uniform(0.5, 1.5, w.shape[0])).astype(np.float32)
        if drawn[places["x_scale"]] is not None:
            drawn[places["x_scale"]] = generator.uniform(0.5, 1.5, (x.shape[0], 1)).astype(np.float32)
    if site.op == "linear_norm" and drawn[INV] is not None:
        drawn[INV] = np.asarray(generator.uniform(8, 40), np.float32)
    return drawn
