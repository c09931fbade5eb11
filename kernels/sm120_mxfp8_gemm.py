"""linear on block-scaled FP8: GeForce Blackwell. Device code: sm120_mxfp8_gemm.cuh.

A site with block-scaled operands has their scales behind the op's own nine. Those of MX are e8m0, bytes here. No pass
makes such a site yet, so that today this kernel says of every site why not.
Compiles, and has run on no GPU: only `--family native` offers it.
"""

from __future__ import annotations

import math

from frtc.kernels.product import Product, epilogue_refuses, params_of, product_of, types_of
from frtc.kernels.smxx_gemm import CLOCK, DRAM_SHARE, EPILOGUE_US, FIRST_TILE_US, LAUNCH_US
from frtc.kernels.spec import Config, Kernel, Operand, Param, Site, Stage
from frtc.kernels.targets import Target

BLOCK = 32  # elements of K under one scale (OCP Microscaling Formats specification 1.0, MXFP8)
X_SCALE, W_SCALE = 9, 10

# BM, BN, BK, WM, WN, STAGES as in smxx_gemm.py; BK counts pairs of elements.
TILES = (
    (128, 128, 64, 64, 64, 3),  # 96 KB
    (64, 64, 64, 32, 32, 4),  # 64 KB
    (32, 32, 64, 16, 16, 8),  # 64 KB
)
NAMES = ("BM", "BN", "BK", "WM", "WN", "STAGES")


def refuse(site: Site, target: Target) -> str:
    if "block_scaled_mma" not in target.has:
        return "needs block-scaled mma"
    p = product_of(site)
    if isinstance(p, str):
        return p
    if (p.x.dtype, p.w.dtype) != ("e4m3", "e4m3") or len(site.operands) <= W_SCALE:
        return f"x is {p.x.dtype} and w is {p.w.dtype}; needs e4m3 with a scale for every {BLOCK} elements of both"
    if p.batch != 1 or p.k % BLOCK:
        return f"{p.batch} batches of K = {p.k}; needs one, and whole blocks of {BLOCK}"
    for name, index, rows in (("x", X_SCALE, p.m), ("w", W_SCALE, p.n)):
        if why := _wrong_scale(site.operands[index], rows, p.k // BLOCK):
            return f"the scale of {name} {why}"
    if reason := epilogue_refuses(p):
        return reason
    for name, matrix in (("x", p.x), ("w", p.w)):
        if matrix.ld % 16:
            return f"rows of {name} are {matrix.ld} bytes apart, not a multiple of 16"
    return ""


def _wrong_scale(scale: Operand | None, rows: int, blocks: int) -> str:
    if scale is None or scale.dtype != "u8" or scale.shape != (rows, blocks):
        found = "absent" if scale is None else f"{scale.dtype}{list(scale.shape)}"
        return f"is {found}, needs e8m0 as u8[{rows}, {blocks}]"
    return "" if scale.strides[-1] == 1 or blocks == 1 else "is strided"


def configs(site: Site, target: Target) -> list[Config]:
    return [dict(zip(NAMES, tile, strict=True)) for tile in TILES]


def _grid(p: Product, config: Config) -> tuple[int, int, int]:
    return (math.ceil(p.m / config["BM"]), math.ceil(p.n / config["BN"]), 1)


def cost(site: Site, config: Config, target: Target) -> float:
    """Estimated microseconds from rates of the datasheet; no figure here was measured on an RTX 5090."""
    p = product_of(site)
    assert isinstance(p, Product)
    waves = math.ceil(math.prod(_grid(p, config)) / target.sms)
    rate = target.tflops["e4m3"] * 1e12 / target.sms / CLOCK
    busy_us = waves * 2 * config["BM"] * config["BN"] * p.k / rate / CLOCK * 1e6
    dram_us = p.nbytes / (DRAM_SHARE * target.dram) * 1e6
    return float(LAUNCH_US + waves * (FIRST_TILE_US + EPILOGUE_US) + max(busy_us, dram_us))


def stages(site: Site, config: Config, target: Target) -> tuple[Stage, ...]:
    p = product_of(site)
    assert isinstance(p, Product)
    bm, bn, bk, wm, wn, depth = (config[name] for name in NAMES)
    warps = (bm // wm) * (bn // wn)
    x_scale, w_scale = site.operands[X_SCALE], site.operands[W_SCALE]
    assert x_scale is not None and w_scale is not None
    steps = (Param("i32", x_scale.strides[0]), Param("i32", w_scale.strides[0]))
    epilogue = f"{p.epilogue()}, {types_of(p.arguments())}"
    stage = Stage(
        source="sm120_mxfp8_gemm.cuh",
        entry=f"frtc::sm120::mxfp8_gemm<frtc::Tile<{bm}, {bn}, {bk}, {wm}, {wn}, {depth}>, {epilogue}>",
        grid=_grid(p, config),
        block=32 * warps,
        smem=max(depth * (bm + bn) * bk * 2, warps * 16 * (wn + 8) * 4),
        params=(*p.params(), Param("operand", X_SCALE), Param("operand", W_SCALE), *steps, *params_of(p.arguments())),
    )
    return (stage,)


KERNELS = (Kernel("sm120_mxfp8_gemm", "linear", "sm_120a", refuse, configs, cost, stages),)
