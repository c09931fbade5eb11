"""Sites of linear, gated_linear and matmul that kernels are judged on: all of Pi0.5's, and awkward ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frtc.kernels.dtypes import DTYPES
from frtc.kernels.product import PLACES
from frtc.kernels.spec import Operand, Site
from tests.kernels.harness import fresh

Inputs = Callable[[Site, np.random.Generator], list[NDArray[Any] | None]]

VIEWS, PROMPTS, HORIZONS = (1, 2, 3), (48, 200), (10, 50)
PATCHES = 256  # image tokens of a view


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    site: Site


def rows(dtype: str, m: int, n: int, ld: int = 0) -> Operand:
    """[m, n] with `ld` elements from row to row; by default the least multiple of 8."""
    return Operand(dtype, (m, n), (ld or -(-n // 8) * 8, 1))


def linear(
    m: int,
    n: int,
    k: int,
    dtype: str = "bf16",
    bias: str = "",
    residual: str = "",
    gate: str = "",
    act: str = "none",
    out: str = "",
    per_row: bool = False,
    gap: int = 0,
) -> Site:
    """The type of each extra operand, "" where it is absent; `gap`: elements between rows of x, w, y, residual."""
    least = -(-k // 8) * 8 + gap
    x, w = rows(dtype, m, k, least), rows(dtype, n, k, least)
    y = Operand(out or dtype, (m, n), (n + gap, 1))
    shift = Operand.packed(bias, n) if bias else None
    add = Operand(residual, (m, n), (n + gap, 1)) if residual else None
    scale = (Operand.packed(gate, m, n) if per_row else Operand.packed(gate, n)) if gate else None
    return Site("linear", (x, w, shift, add, scale), (y,), {"act": act})


def gated(m: int, f: int, k: int, dtype: str = "bf16", act: str = "gelu_tanh", out: str = "") -> Site:
    x, w = rows(dtype, m, k), rows(dtype, 2 * f, k)
    return Site("gated_linear", (x, w, None), (Operand.packed(out or dtype, m, f),), {"act": act})


def limited(site: Site, dtype: str = "i32") -> Site:
    """The site with a device scalar that counts the rows that something reads."""
    place = PLACES[site.op]["rows"]
    return replace(site, operands=(*site.operands[:place], Operand.packed(dtype), *site.operands[place + 1 :]))


def matmul(batch: tuple[int, ...], m: int, n: int, k: int, dtype: str = "bf16", transposed: bool = False) -> Site:
    """b [..., k, n] row-major with rows padded to 8 elements, or a transposed view of [..., n, k]."""
    a = Operand.packed(dtype, *batch, m, -(-k // 8) * 8)
    b = (
        Operand.packed(dtype, *batch, n, -(-k // 8) * 8)
        if transposed
        else Operand.packed(dtype, *batch, k, -(-n // 8) * 8)
    )
    steps = (*b.strides[:-2], *(b.strides[:-3:-1] if transposed else b.strides[-2:]))
    y = Operand.packed(dtype, *batch, m, n)
    return Site("matmul", (Operand(dtype, (*batch, m, k), a.strides), Operand(dtype, (*batch, k, n), steps)), (y,))


def scaled(site: Site, x: str = "e4m3", out: str = "", x_scale: bool = False, one: bool = False) -> Site:
    """The site with e4m3 weights and alpha, for each column or `one` for all; x in e4m3, or w8a16 with x in 16 bits.

    x_scale: a factor for each row of x. out "e4m3": also inv.
    """
    before, w, *_ = site.operands
    (y,) = site.results
    assert before is not None and w is not None
    places = PLACES[site.op]
    operands = [*site.operands, *[None] * (places["inv"] + 1 - len(site.operands))]
    operands[:2] = aligned(x, before.shape), aligned("e4m3", w.shape)
    operands[places["alpha"]] = Operand.packed("f32", *(() if one else w.shape[:1]))
    operands[places["x_scale"]] = Operand.packed("f32", *before.shape[:-1], 1) if x_scale else None
    operands[places["inv"]] = Operand.packed("f32") if out == "e4m3" else None
    return replace(site, operands=tuple(operands), results=(replace(y, dtype=out or y.dtype),))


def aligned(dtype: str, shape: tuple[int, ...]) -> Operand:
    """Row-major, rows at multiples of 16 bytes."""
    step = 16 // DTYPES[dtype].itemsize
    return Operand(dtype, shape, Operand.packed(dtype, *shape[:-1], -(-shape[-1] // step) * step).strides)


def patch_embedding(views: int) -> Site:
    """fp32 convolution as a product, the positions [256, 1152] added to every view."""
    x, w = Operand.packed("f32", views, PATCHES, 588), Operand.packed("f32", 1152, 588)
    bias, positions = Operand.packed("f32", 1152), Operand.packed("f32", PATCHES, 1152)
    return Site("linear", (x, w, bias, positions, None), (Operand.packed("bf16", views, PATCHES, 1152),))


def real_sites() -> list[Case]:
    """Pi0.5 at 1 to 3 views, prompts of 48 and 200, chunks of 10 and 50."""
    found = []
    for views in VIEWS:
        m = views * PATCHES
        found += [
            Case(f"vision patches, {views} views", patch_embedding(views)),
            Case(f"vision q|k|v, {views} views", linear(m, 3456, 1152, bias="bf16")),
            Case(f"vision out, {views} views", linear(m, 1152, 1152, bias="bf16", residual="bf16")),
            Case(f"vision fc1, {views} views", linear(m, 4304, 1152, bias="bf16", act="gelu_tanh")),
            Case(f"vision fc2, {views} views", linear(m, 1152, 4304, bias="bf16", residual="bf16")),
            Case(f"projector, {views} views", linear(m, 2048, 1152, bias="bf16")),
        ]
        for prompt in PROMPTS:
            m = views * PATCHES + prompt
            found += [
                Case(f"prefix q|k|v, {m} tokens", linear(m, 2560, 2048)),
                Case(f"prefix o, {m} tokens", linear(m, 2048, 2048, residual="bf16")),
                Case(f"prefix gate|up, {m} tokens", gated(m, 16384, 2048)),
                Case(f"prefix down, {m} tokens", linear(m, 2048, 16384, residual="bf16")),
                Case(f"prefix last k|v, {m} tokens", linear(m, 512, 2048)),
            ]
    for m in HORIZONS:
        found += [
            Case(f"action in, chunk {m}", linear(m, 1024, 32, "f32", bias="f32", out="bf16")),
            Case(f"expert q|k|v, chunk {m}", linear(m, 2560, 1024)),
            Case(f"expert o, chunk {m}", linear(m, 1024, 2048, residual="bf16", gate="bf16")),
            Case(f"expert gate|up, chunk {m}", gated(m, 4096, 1024)),
            Case(f"expert down, chunk {m}", linear(m, 1024, 4096, residual="bf16", gate="bf16")),
            Case(f"action out, chunk {m}", linear(m, 32, 1024, "f32", bias="f32")),
        ]
    return found


FULL: dict[str, Any] = {"bias": "f32", "residual": "bf16", "gate": "f32", "per_row": True, "act": "gelu_tanh"}


def awkward_sites() -> list[Case]:
    """Odd sizes, gaps between rows, every type and activation, one row, one column, batches, w as [K, N]."""
    return [
        *(Case(f"full, {m} rows", linear(m, 200, 1000, **FULL)) for m in (1, 7, 10, 50, 61, 130)),
        Case("odd N and K", linear(61, 201, 1021, **FULL)),
        Case("odd N and K, gaps", linear(61, 203, 333, **FULL, gap=24)),
        Case("odd rows of y", linear(33, 95, 128, residual="f16")),
        Case("one column", linear(50, 1, 2048, bias="bf16")),
        Case("short K", linear(50, 128, 8)),
        Case("f16, silu", linear(77, 264, 520, "f16", bias="f16", act="silu")),
        Case("f16 to f32, erf", linear(77, 264, 520, "f16", act="gelu_erf", out="f32")),
        Case("bf16 to f16", linear(20, 72, 4096, out="f16")),
        Case("gated silu f16", gated(50, 300, 520, "f16", "silu")),
        Case("gated odd", gated(33, 77, 205, act="gelu_erf")),
        Case("one row, 4096 x 4096", linear(1, 4096, 4096)),
        Case("batch", matmul((3,), 70, 96, 200)),
        Case("batch, odd", matmul((2, 2), 33, 77, 131)),
        Case("batch, transposed b", matmul((3,), 70, 90, 200, transposed=True)),
        Case("fp32", linear(70, 130, 588, "f32", bias="f32", residual="f32")),
        Case("fp32, odd, gaps", linear(33, 77, 131, "f32", bias="f32", act="silu", gap=3)),
        Case("fp32, gated", gated(20, 31, 65, "f32", "silu")),
        Case("bf16, rows not aligned", linear(50, 64, 131, gap=3)),
    ]


def scaled_sites() -> list[Case]:
    """The products of 16-bit operands among the real sites, in FP8 and as w8a16: results as they are, and in e4m3."""
    plain = [case for case in real_sites() if all(o and o.dtype == "bf16" for o in case.site.operands[:2])]
    return [
        *(Case(f"fp8 {case.name}", scaled(case.site)) for case in plain),
        *(Case(f"fp8 to fp8 {case.name}", scaled(case.site, out="e4m3", x_scale=True)) for case in plain),
        *(Case(f"w8a16 {case.name}", scaled(case.site, "bf16")) for case in plain),
    ]


def awkward_scaled_sites() -> list[Case]:
    """Odd sizes, every epilogue and type, for x in e4m3 and in 16 bits."""
    found = []
    for x in ("e4m3", "bf16", "f16"):
        whole = [linear(m, 200, k, **FULL) for m, k in ((1, 1152), (7, 40), (50, 72), (561, 1152), (130, 4304))]
        found += [
            Case(f"{x} full, K {s.operands[0].shape[-1]}", scaled(s, x, x_scale=True)) for s in whole if s.operands[0]
        ]
        found += [
            Case(f"{x} odd N and K", scaled(linear(61, 201, 1021, **FULL), x, x_scale=True)),
            Case(f"{x} odd, to e4m3", scaled(linear(61, 203, 333, **FULL, gap=24), x, "e4m3", x_scale=True)),
            Case(f"{x} one alpha, to e4m3", scaled(linear(50, 1024, 1024, bias="bf16"), x, "e4m3", one=True)),
            Case(f"{x} one column", scaled(linear(50, 1, 2048, bias="bf16"), x)),
            Case(f"{x} erf, to f32", scaled(linear(77, 264, 520, act="gelu_erf", out="f32"), x)),
            Case(f"{x} gated", scaled(gated(50, 300, 520, act="silu"), x)),
            Case(f"{x} gated odd, to e4m3", scaled(gated(33, 77, 205), x, "e4m3", x_scale=True)),
            Case(f"{x} gated, one alpha", scaled(gated(561, 96, 1152), x, "e4m3", one=True)),
            Case(f"{x} few rows, long K, to e4m3", scaled(linear(10, 1024, 4096, **FULL), x, "e4m3", x_scale=True)),
        ]
    views = Operand.packed("bf16", 2, PATCHES, 1152), Operand.packed("bf16", 1152, 1152), None
    residual = Operand.packed("bf16", PATCHES, 1152)
    batched = Site("linear", (*views, residual, None), (Operand.packed("bf16", 2, PATCHES, 1152),), {"act": "none"})
    return [*found, *(Case(f"{x} batches", scaled(batched, x, x_scale=True)) for x in ("e4m3", "bf16"))]


INV = 150.0  # of e4m3 results: those beyond 3 saturate, of some sites a few, of others a third


def inputs_of(site: Site, generator: np.random.Generator) -> list[NDArray[Any] | None]:
    """Fresh operands; w is scaled so that the product is about N(0, 2): activations see both of their halves.

    w of e4m3 keeps its size, and alpha is small instead. Factors differ from row to row and column to column.
    """
    x, w = site.operands[:2]
    assert x is not None and w is not None
    scale = 0.2 / math.sqrt(x.shape[-1])
    sizes = {1: scale} if w.dtype != "e4m3" else {}
    values = [None if o is None else fresh(o, generator, sizes.get(i, 1.0)) for i, o in enumerate(site.operands)]
    for name, size in (("alpha", scale), ("x_scale", 1.0)):
        place = PLACES.get(site.op, {}).get(name, len(values))
        if place < len(values) and (factor := site.operands[place]) is not None:
            values[place] = np.asarray(size * generator.uniform(0.5, 2.0, factor.shape), np.float32)
    inv = PLACES.get(site.op, {}).get("inv", len(values))
    if inv < len(values) and site.operands[inv] is not None:
        values[inv] = np.array(INV, np.float32)
    return values


def inputs_with_rows(rows: int) -> Inputs:
    """Operands of a limited site that has `rows` rows."""

    def inputs(site: Site, generator: np.random.Generator) -> list[NDArray[Any] | None]:
        place = PLACES[site.op]["rows"]
        without = (*site.operands[:place], None, *site.operands[place + 1 :])
        values = inputs_of(replace(site, operands=without), generator)
        return [*values[:place], np.array(rows, np.int32), *values[place + 1 :]]

    return inputs


def flops_of(site: Site) -> float:
    """Of the product alone."""
    x, w = site.operands[:2]
    assert x is not None and w is not None
    columns = w.shape[-1] if site.op == "matmul" else w.shape[0]
    return 2.0 * math.prod(x.shape) * columns
