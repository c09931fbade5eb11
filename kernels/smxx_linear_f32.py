"""linear and gated_linear on the ordinary units: few outputs in fp32, rows of any alignment. smxx_linear_f32.cuh.

x may be a value before its norm, with moments of its rows; and linear_moments gives those of the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from frtc.kernels import smxx_gemm
from frtc.kernels.mainloop import Mainloop
from frtc.kernels.moments import kernels_over
from frtc.kernels.product import EPILOGUE_TYPES, Argument, Product, epilogue_refuses, params_of, product_of, types_of
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
# About: a row's sums and root behind a warp's product; of a tile, its moments are asked for only then.
FACTOR_US, FACTORS_US = 0.05, 0.8


@dataclass(frozen=True, slots=True)
class Tile:
    """rows: of a tile, or 0. together: four warps have 32 columns of a row, and store them at once."""

    rows: int
    together: bool = False

    @staticmethod
    def of(config: Config, p: Product) -> Tile:
        return Tile(config["ROWS"])

    def config(self) -> Config:
        return {"ROWS": self.rows}

    def shares(self, p: Product, target: Target) -> int:
        """Warps for 8 columns of a row: 4 where SMs are idle otherwise, and rows are long enough for a turn of each."""
        alone = not self.together and math.prod(self.grid(p)) <= target.sms
        return 4 if alone and self.rows == 0 and p.k >= 512 else 1

    def grid(self, p: Product, shares: int = 1) -> tuple[int, int, int]:
        if self.rows == 0:
            return (p.m, math.ceil(p.n * shares / 32), p.batch)
        return (math.ceil(p.m / self.rows), math.ceil(p.n / COLUMNS), p.batch)


def refuse(site: Site, target: Target) -> str:
    p = product_of(site)
    return p if isinstance(p, str) else mainloop_refuses(p, target, moments=True)


def mainloop_refuses(p: Product, target: Target, moments: bool = False) -> str:
    """Why these kernels cannot, or should not, multiply x and w, or "". moments: the epilogue's factors are of them."""
    for matrix in (p.x, p.w):
        if matrix.dtype not in EPILOGUE_TYPES:
            return f"no {matrix.dtype} here"
    if reason := epilogue_refuses(p, moments):
        return reason
    if not smxx_gemm.mainloop_refuses(p, target):
        return "tensor cores can do it"
    if p.batch > 65535 or math.ceil(p.n / 32) > 65535:
        return "more blocks than a grid holds"
    return ""


def configs(site: Site, target: Target) -> list[Config]:
    p = product_of(site)
    assert isinstance(p, Product)
    return [tile.config() for tile in tiles_of(p, target)]


def tiles_of(p: Product, target: Target) -> list[Tile]:
    # A tile that is half empty does half of its work for nothing.
    return [Tile(rows) for rows in (*ROWS, 0) if rows <= 16 or rows // 2 < p.m]


def cost(site: Site, config: Config, target: Target) -> float:
    p = product_of(site)
    assert isinstance(p, Product)
    return cost_us(p, Tile.of(config, p), target)


def cost_us(p: Product, tile: Tile, target: Target) -> float:
    """Estimated microseconds."""
    found = p.norm != "none"
    blocks = math.prod(tile.grid(p))
    if tile.rows == 0:
        shares = tile.shares(p, target)
        turns = math.ceil(p.k / (128 * shares)) * max(1.0, blocks / (target.sms * BLOCKS_PER_SM))
        turn_us = ALONE_US if blocks <= target.sms else SHARED_US
        loaded = blocks * 4 * 9 * p.k * 4  # bytes: one row of x and eight of w for each warp
        l2_us = loaded / (target.sms * L2_BYTES_PER_CLOCK * CLOCK) * 1e6
        return LAUNCH_US + max(turns * turn_us, l2_us) + found * FACTOR_US
    per_thread = tile.rows // 16
    share = per_thread * 8 / (per_thread * 8 + 2 * (per_thread + 8))  # multiply-adds among the instructions
    clocks = tile.rows * COLUMNS * p.k / (FMA_PER_CLOCK * share)
    one_us = max(clocks / CLOCK * 1e6, math.ceil(p.k / 16) * TILE_US) + found * FACTORS_US
    return LAUNCH_US + math.ceil(blocks / target.sms) * one_us


def stages(site: Site, config: Config, target: Target) -> tuple[Stage, ...]:
    p = product_of(site)
    assert isinstance(p, Product)
    return (stage_of(p, Tile.of(config, p), target, p.epilogue(), p.arguments()),)


def stage_of(p: Product, tile: Tile, target: Target, epilogue: str, arguments: Sequence[Argument]) -> Stage:
    """The launch of smxx_linear_f32.cuh with an epilogue: its C++ type, and what it takes."""
    shares = tile.shares(p, target)
    name, size = ("smxx_linear_f32", tile.rows) if tile.rows else ("smxx_dot_f32", shares)
    return Stage(
        source="smxx_linear_f32.cuh",
        entry=f"frtc::{name}<{p.x.cuda}, {p.w.cuda}, {size}, {epilogue}, {types_of(arguments)}>",
        grid=tile.grid(p, shares),
        block=256 if tile.rows else 128,
        smem=0,
        params=(*p.params(), *params_of(arguments)),
        waits=True,
    )


def together(config: Config, p: Product) -> Tile:
    """The tile of linear_moments."""
    return Tile(config["ROWS"], together=True)


MAINLOOP = Mainloop("baseline", "smxx_f32", mainloop_refuses, tiles_of, together, cost_us, stage_of)
KERNELS = (
    *(Kernel(name, op, "baseline", refuse, configs, cost, stages) for op, name in KIND.items()),
    *kernels_over(MAINLOOP),
)
