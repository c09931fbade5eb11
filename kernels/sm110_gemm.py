"""linear, gated_linear and matmul in bf16 and fp16 on tcgen05: Jetson Thor. Device code: sm110_gemm.cuh.

Compiles, and has run on no GPU: only `--family native` offers it, and a Plan with it must pass its self-test first.
"""

from __future__ import annotations

import math

from frtc.kernels.product import Product, epilogue_refuses, params_of, product_of, types_of
from frtc.kernels.smxx_gemm import (
    BARRIER_US,
    CLOCK,
    DRAM_SHARE,
    EPILOGUE_US,
    FIRST_TILE_US,
    FLIGHT_US,
    L2_BYTES_PER_CLOCK,
    LAUNCH_US,
)
from frtc.kernels.spec import Config, Kernel, Site, Stage
from frtc.kernels.targets import Target

KIND = {"linear": "sm110_gemm", "gated_linear": "sm110_gated_gemm", "matmul": "sm110_batched_gemm"}
BM, BK, THREADS = 128, 64, 128
ATOM = 1024  # bytes; the ring is aligned to a swizzle atom inside the block's shared memory

# BN, STAGES. Wide tiles read the fewest bytes of L2 for each product, narrow ones fill more SMs.
TILES = (
    (256, 4),  # 192 KB
    (128, 6),  # 192 KB
    (128, 3),  # 96 KB: two blocks on an SM of 228 KB
    (64, 4),  # 96 KB
    (32, 5),  # 100 KB
)


def smem(config: Config) -> int:
    return int(config["STAGES"]) * (BM + int(config["BN"])) * BK * 2 + ATOM


def grid(p: Product, config: Config) -> tuple[int, int, int]:
    return (math.ceil(p.m / BM), math.ceil(p.n / config["BN"]), p.batch)


def refuse(site: Site, target: Target) -> str:
    if "tcgen05" not in target.has:
        return "needs tcgen05"
    p = product_of(site)
    if isinstance(p, str):
        return p
    if p.x.dtype not in ("bf16", "f16") or p.w.dtype != p.x.dtype:
        return f"x is {p.x.dtype} and w is {p.w.dtype}; needs bf16 or f16 for both"
    if p.k_rows:
        return "the second operand is [K, N]; needs rows of K"
    if reason := epilogue_refuses(p):
        return reason
    for name, matrix in (("x", p.x), ("w", p.w)):
        if matrix.ld % 8 or matrix.batch % 8:
            return f"rows of {name} are {matrix.ld} elements apart (batches {matrix.batch}), not a multiple of 16 bytes"
    if p.batch > 65535 or math.ceil(p.n / 32) > 65535:
        return "more blocks than a grid holds"
    return ""


def configs(site: Site, target: Target) -> list[Config]:
    return [{"BN": columns, "STAGES": stages} for columns, stages in TILES]


def cost(site: Site, config: Config, target: Target) -> float:
    """Estimated microseconds. The rates are the baseline GEMM's; no figure here was measured on a Thor."""
    p = product_of(site)
    assert isinstance(p, Product)
    resident = max(1, target.smem_per_sm // (smem(config) + ATOM))
    on_busiest = math.ceil(math.prod(grid(p, config)) / target.sms)
    waves = math.ceil(on_busiest / resident)
    k_tiles = math.ceil(p.k / BK)
    rate = target.tflops[p.x.dtype] * 1e12 / target.sms / CLOCK
    products = 2 * BM * config["BN"] * BK / rate
    loaded = (BM + config["BN"]) * BK * 2
    busy_us = on_busiest * k_tiles * max(products, loaded / L2_BYTES_PER_CLOCK) / CLOCK * 1e6
    wait_us = waves * k_tiles * max(BARRIER_US, FLIGHT_US / (config["STAGES"] - 1))
    dram_us = p.nbytes / (DRAM_SHARE * target.dram) * 1e6
    return float(LAUNCH_US + waves * (FIRST_TILE_US + EPILOGUE_US) + max(busy_us, wait_us, dram_us))


def stages(site: Site, config: Config, target: Target) -> tuple[Stage, ...]:
    p = product_of(site)
    assert isinstance(p, Product)
    epilogue = f"{p.epilogue()}, {types_of(p.arguments())}"
    stage = Stage(
        source="sm110_gemm.cuh",
        entry=f"frtc::sm110::gemm<{p.x.cuda}, {config['BN']}, {config['STAGES']}, {epilogue}>",
        grid=grid(p, config),
        block=THREADS,
        smem=smem(config),
        params=(*p.params(), *params_of(p.arguments())),
    )
    return (stage,)


KERNELS = tuple(Kernel(name, op, "sm_110a", refuse, configs, cost, stages) for op, name in KIND.items())
