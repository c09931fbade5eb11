"""linear and gated_linear on the ordinary units: few outputs in fp32, rows of any alignment. smxx_linear_f32.cuh."""

from __future__ import annotations

import math

from frtc.kernels import smxx_gemm
from frtc.kernels.product import EPILOGUE_TYPES, Product, epilogue_refuses, params_of, product_of, types_of
from frtc.kernels.spec import Config, Kernel, Site, Stage
from frtc.kernels.targets import Target

KIND = {"linear": "smxx_linear_f32", "gated_linear": "smxx_gated_linear_f32"}
ROWS = (128, 64, 32, 16)  # of a tile; 0 in a config: one warp for 8 columns of a row
COLUMNS = 128

FMA_PER_CLOCK = 128  # fp32, of an SM; 64 on sm_80, which is then twice as slow as estimated with the same choice
CLOCK, L2_BYTES_PER_CLOCK = 1.7e9, 64
LAUNCH_US, TILE_US = 2.0, 1.3  # launch; one K tile of 16
# A turn of a warp along K, of blocks that have an SM each and of blocks that share one; fitted to 15 shapes on an H200.
ALONE_US, SHARED_US, BLOCKS_PER_SM = 0.3, 1.0, 6


def refuse(site: Site, target: Target) -> str:
    p = product_of(site)
    if isinstance(p, str):
        return p
    for matrix in (p.x, p.w):
        if matrix.dtype not in EPILOGUE_TYPES:
            return f"no {matrix.dtype} here"
    if reason := epilogue_refuses(p):
        return reason
    if not smxx_gemm.refuse(site, target):
        return "tensor cores can do it"
    if p.batch > 65535 or math.ceil(p.n / 32) > 65535:
        return "more blocks than a grid holds"
    return ""


def configs(site: Site, target: Target) -> list[Config]:
    p = product_of(site)
    assert isinstance(p, Product)
    # A tile that is half empty does half of its work for nothing.
    return [{"ROWS": rows} for rows in (*ROWS, 0) if rows <= 16 or rows // 2 < p.m]


def cost(site: Site, config: Config, target: Target) -> float:
    """Estimated microseconds."""
    p = product_of(site)
    assert isinstance(p, Product)
    rows = int(config["ROWS"])
    blocks = math.prod(_grid(p, rows))
    if rows == 0:
        shares = _shares(p, target)
        turns = math.ceil(p.k / (128 * shares)) * max(1.0, blocks / (target.sms * BLOCKS_PER_SM))
        turn_us = ALONE_US if blocks <= target.sms else SHARED_US
        loaded = blocks * 4 * 9 * p.k * 4  # bytes: one row of x and eight of w for each warp
        return LAUNCH_US + max(turns * turn_us, loaded / (target.sms * L2_BYTES_PER_CLOCK * CLOCK) * 1e6)
    per_thread = rows // 16
    share = per_thread * 8 / (per_thread * 8 + 2 * (per_thread + 8))  # multiply-adds among the instructions
    clocks = rows * COLUMNS * p.k / (FMA_PER_CLOCK * share)
    return LAUNCH_US + math.ceil(blocks / target.sms) * max(clocks / CLOCK * 1e6, math.ceil(p.k / 16) * TILE_US)


def _shares(p: Product, target: Target) -> int:
    """Warps for 8 columns of a row: 4 where SMs are idle otherwise, and rows are long enough for a turn of each."""
    return 4 if math.prod(_grid(p, 0)) <= target.sms and p.k >= 512 else 1


def _grid(p: Product, rows: int, shares: int = 1) -> tuple[int, int, int]:
    if rows == 0:
        return (p.m, math.ceil(p.n * shares / 32), p.batch)
    return (math.ceil(p.m / rows), math.ceil(p.n / COLUMNS), p.batch)


def stages(site: Site, config: Config, target: Target) -> tuple[Stage, ...]:
    p = product_of(site)
    assert isinstance(p, Product)
    rows = int(config["ROWS"])
    shares = _shares(p, target)
    name, size = ("smxx_dot_f32", shares) if rows == 0 else ("smxx_linear_f32", rows)
    stage = Stage(
        source="smxx_linear_f32.cuh",
        entry=f"frtc::{name}<{p.x.cuda}, {p.w.cuda}, {size}, {p.epilogue()}, {types_of(p.arguments())}>",
        grid=_grid(p, rows, shares),
        block=128 if rows == 0 else 256,
        smem=0,
        params=(*p.params(), *params_of(p.arguments())),
        waits=True,
    )
    return (stage,)


KERNELS = tuple(Kernel(name, op, "baseline", refuse, configs, cost, stages) for op, name in KIND.items())
