"""Sites of linear_moments, and of products that make up for a norm of x by the moments of its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frtc.kernels.moments import INV, NORM_W, as_linear
from frtc.kernels.product import PLACES
from frtc.kernels.reference.linear import MOMENTS
from frtc.kernels.spec import Operand, Site
from tests.kernels import sites_rope_gemm
from tests.kernels.harness import fresh
from tests.kernels.sites_gemm import gated, inputs_of, inputs_with_rows, linear, scaled
from tests.kernels.sites_rope_gemm import rope_qkv

EPS = 1e-6
ADA: dict[str, Any] = {"residual": "bf16", "gate": "f32"}  # of the action expert: norm_w is a scale, offset 1
VISION: dict[str, Any] = {"bias": "f32", "residual": "bf16"}  # the norm's own vectors are in the readers' weights
packed = Operand.packed


def moments(m: int, width: int, norm: str) -> Operand:
    return packed("f32", m, -(-width // MOMENTS) * (2 if norm == "layer" else 1))


def places_of(site: Site) -> dict[str, int]:
    """Of the optional operands. linear_rope_qkv and linear_moments have those of linear."""
    return dict(PLACES["gated_linear" if site.op == "gated_linear" else "linear"])


def with_operand(site: Site, place: int, operand: Operand | None) -> Site:
    operands = [*site.operands, *[None] * (place + 1 - len(site.operands))]
    operands[place] = operand
    return replace(site, operands=tuple(operands))


def deferred(site: Site, norm: str, bias: str = "") -> Site:
    """The product with the moments of x's rows in place of x_scale; `bias`: the type of one that it has besides."""
    x, w = site.operands[:2]
    assert x is not None and w is not None
    places = places_of(site)
    site = with_operand(site, places["x_scale"], moments(x.shape[0], x.shape[1], norm))
    site = with_operand(site, places["bias"], packed(bias, w.shape[0])) if bias else site
    return replace(site, attrs={**site.attrs, "norm": norm, "eps": EPS})


def limited(site: Site) -> Site:
    """The site with a device scalar that counts the rows that something reads."""
    return with_operand(site, places_of(site)["rows"], packed("i32"))


def producer(
    m: int,
    n: int,
    k: int,
    norm: str,
    x: str = "bf16",
    norm_w: str = "f32",
    offset: float = 1.0,
    inv: bool | None = None,
    **extras: Any,
) -> Site:
    """linear_moments; x e4m3: w too, with alpha; inv: z in e4m3, by default where x is; `extras` as for linear."""
    base = linear(m, n, k, "bf16" if x == "e4m3" else x, **extras)
    base = scaled(base) if x == "e4m3" else base
    (s,), coded = base.results, x == "e4m3" if inv is None else inv
    operands = [*base.operands, *[None] * INV][:NORM_W]
    operands += [packed(norm_w, n) if norm_w else None, packed("f32") if coded else None]
    z = Operand("e4m3" if coded else s.dtype, (m, n), (-(-n // 16) * 16, 1))
    attrs = {"act": base.attrs["act"], "norm": norm, "offset": offset, "stored": s.dtype}
    return Site("linear_moments", tuple(operands), (s, moments(m, n, norm), z), attrs)


def real_producers() -> list[Site]:
    """Vision, prefix and expert of Pi0.5, and SmolVLA's widths, which end inside 32 columns."""
    return [
        made
        for x in ("e4m3", "bf16")
        for made in (
            producer(512, 1152, 1152, "layer", x, "", **VISION), producer(512, 1152, 4304, "layer", x, "", **VISION),
            limited(producer(560, 2048, 2048, "rms", x, residual="bf16")),
            limited(producer(560, 2048, 16384, "rms", x, residual="bf16")),
            producer(50, 1024, 2048, "rms", x, **ADA), producer(50, 1024, 4096, "rms", x, **ADA),
            producer(10, 1024, 4096, "rms", x, **ADA), producer(113, 960, 960, "rms", x, residual="bf16"),
            producer(50, 720, 720, "rms", x, residual="bf16"),
        )
    ]  # fmt: skip


def awkward_producers() -> list[Site]:
    """Few and odd rows, every end of 32 columns, fewer than 32, every type and way to store z."""
    full: dict[str, Any] = {"bias": "bf16", "residual": "f32", "gate": "f32", "per_row": True, "act": "gelu_tanh"}
    return [
        producer(1, 72, 1008, "layer", **full), producer(7, 1000, 520, "rms", "f16", "f16", residual="f16"),
        producer(561, 1000, 1008, "layer", "e4m3", **full), producer(61, 24, 264, "layer", "bf16", "bf16", 0.0),
        producer(33, 104, 2048, "rms", "bf16", "", **full), producer(7, 720, 4096, "rms", "e4m3", "bf16", inv=False),
        producer(130, 2040, 64, "rms", "f16", inv=True, act="silu"), producer(9, 8, 4096, "layer", bias="f32"),
        producer(50, 136, 2040, "layer", "bf16", "f32", inv=True, **ADA),
    ]  # fmt: skip


def real_readers() -> list[Site]:
    """What multiplies behind the norms of Pi0.5."""
    return [
        made
        for x in ("e4m3", "bf16")
        for made in (
            deferred(of(x, linear(512, 3456, 1152)), "layer", "f32"),
            deferred(of(x, linear(512, 4304, 1152, act="gelu_tanh"), "e4m3"), "layer", "f32"),
            deferred(rope_qkv(560, 8, 1, 256, 2048, x=x, alpha="each" if x == "e4m3" else "", rows=True), "rms"),
            limited(deferred(of(x, gated(560, 16384, 2048), "e4m3"), "rms")),
            deferred(rope_qkv(50, 8, 1, 256, 1024, x=x, alpha="each" if x == "e4m3" else "", bias="f32"), "rms"),
            deferred(of(x, gated(50, 4096, 1024), "e4m3"), "rms", "f32"),
        )
    ]  # fmt: skip


def of(x: str, site: Site, out: str = "") -> Site:
    """The site with x and w in e4m3, and its result in `out`, where x is."""
    return scaled(site, out=out) if x == "e4m3" else site


def awkward_readers() -> list[Site]:
    """Few and odd rows; rows of moments that move four, two and one at a time, one of them, and many."""
    return [
        deferred(linear(1, 64, 720, bias="bf16"), "rms"), deferred(linear(7, 320, 4304), "rms", "f32"),
        deferred(linear(61, 201, 1000, "f16", residual="f16"), "layer", "f16"),
        deferred(linear(50, 136, 4304), "layer"),
        deferred(linear(33, 95, 24, act="gelu_erf"), "rms"), deferred(linear(9, 40, 32), "layer"),
        deferred(scaled(linear(561, 1000, 16384)), "layer"), deferred(scaled(linear(130, 96, 16384)), "rms", "f32"),
        deferred(gated(33, 77, 208, act="silu"), "layer", "bf16"), deferred(gated(10, 200, 4096, "f16"), "rms", "f16"),
        deferred(rope_qkv(61, 2, 1, 128, 520, "f16", bias="f16", gap=5), "layer"),
        deferred(rope_qkv(7, 2, 1, 32, 1000, angles="bf16", gap=3), "rms"),
    ]  # fmt: skip


def mixed(site: Site, x: str = "bf16") -> Site:
    """fp32 weights, x in another type: what a norm of 16 bits hands to a product in fp32."""
    before, *others = site.operands
    assert before is not None
    return replace(site, operands=(replace(before, dtype=x), *others))


def f32_producers() -> list[Site]:
    """What a step begins with, and sizes at no edge; s in 16 bits, of operands in fp32 and of one that is not."""
    full: dict[str, Any] = {"residual": "f32", "gate": "f32", "per_row": True, "act": "gelu_tanh", "out": "bf16"}
    bare: dict[str, Any] = {"bias": "f32", "out": "bf16"}
    return [
        *(producer(m, 1024, 32, "rms", "f32", inv=True, **bare) for m in (10, 50)),
        producer(50, 1024, 1024, "rms", "f32", inv=True, **bare), producer(50, 720, 720, "rms", "f32", **bare),
        producer(1, 72, 1021, "layer", "f32", "bf16", 0.0, **full), producer(7, 1000, 31, "rms", "f32", out="f16"),
        producer(561, 136, 333, "layer", "f32", inv=True, **full), producer(50, 8, 2048, "rms", "f32", "", **bare),
        mixed(producer(7, 200, 100, "layer", "f32", "f16", **full)), mixed(producer(561, 24, 36, "rms", "f32", **bare)),
    ]  # fmt: skip


def f32_readers() -> list[Site]:
    """What a step ends with; rows of moments that move four, two and one at a time, one of them, and many."""
    ends: dict[str, Any] = {"bias": "f32", "residual": "f32"}
    return [
        *(mixed(deferred(linear(m, 32, 1024, "f32", **ends), "rms")) for m in (10, 50)),
        mixed(deferred(linear(50, 32, 720, "f32", **ends), "rms")),
        mixed(deferred(linear(1, 33, 4304, "f32", **ends, act="silu"), "layer")),
        mixed(deferred(linear(7, 203, 1000, "f32", gate="f32", per_row=True), "rms", "bf16"), "f16"),
        mixed(deferred(linear(561, 96, 24, "f32", residual="bf16"), "layer", "f32")),
        mixed(deferred(gated(61, 31, 2040, "f32", "silu"), "rms", "f32")),
        deferred(linear(50, 130, 16384, "f32"), "rms"), deferred(linear(9, 40, 32, "f32"), "layer"),
    ]  # fmt: skip


Inputs = Callable[[Site, np.random.Generator], list[NDArray[Any] | None]]


def inputs(site: Site, generator: np.random.Generator) -> list[NDArray[Any] | None]:
    """Fresh operands, all rows counted: moments of a reader are those of what x is before its norm."""
    x = site.operands[0]
    assert x is not None
    return inputs_of_rows(x.shape[-2])(site, generator)


def inputs_of_rows(count: int) -> Inputs:
    def made(site: Site, generator: np.random.Generator) -> list[NDArray[Any] | None]:
        inner, places = as_linear(site) if site.op == "linear_moments" else site, places_of(site)
        counted = places["rows"] < len(site.operands) and site.operands[places["rows"]] is not None
        if site.op == "linear_rope_qkv":
            values = sites_rope_gemm.inputs(inner, generator)
            values[places["rows"]] = np.array(count, np.int32) if counted else None
        else:
            values = (inputs_with_rows(count) if counted else inputs_of)(inner, generator)
        if site.op == "linear_moments":
            norm_w, inv = site.operands[NORM_W], site.operands[INV]
            values.append(None if norm_w is None else fresh(norm_w, generator))
            values.append(None if inv is None else np.asarray(generator.uniform(8, 40), np.float32))
        elif site.attrs.get("norm", "none") != "none":
            values[places["x_scale"]] = moments_of(values[0], str(site.attrs["norm"]), generator)
        return values

    return made


def moments_of(x: NDArray[Any] | None, norm: str, generator: np.random.Generator) -> NDArray[Any]:
    """Of rows that are x times a number of the row's own, shifted by another where there is a mean to take away.

    x [..., K] -> f32 [..., ceil(K / 32)], or twice as many for "layer"
    """
    assert x is not None
    size, shift = generator.uniform(0.5, 2.0, (*x.shape[:-1], 1)), generator.uniform(-2.0, 2.0, (*x.shape[:-1], 1))
    rows = (x.astype(np.float32) + (shift if norm == "layer" else 0.0)) * size
    ends = [*[(0, 0)] * (x.ndim - 1), (0, -x.shape[-1] % MOMENTS)]
    parts = np.pad(rows, ends).reshape(*x.shape[:-1], -1, MOMENTS)
    sums = [np.sum(parts**2, -1)] if norm == "rms" else [np.sum(parts, -1), np.sum(parts**2, -1)]
    return np.stack(sums, -1).reshape(*x.shape[:-1], -1).astype(np.float32)
