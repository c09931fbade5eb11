"""Products on wgmma whose weights take its 64 rows and whose tokens take its N side. Device code: sm90_turned_gemm.cuh.

sm90_gemm's tiles are multiples of 64 rows high. Here a tile is as high as a share of the rows, in steps of eight: 816
rows are four of 208, where seven of 128 leave 9 % empty. For all blocks at once, on one SM each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from frtc.kernels import moments, sm90_gemm
from frtc.kernels.dtypes import DTYPES
from frtc.kernels.mainloop import Mainloop, kernels_over
from frtc.kernels.product import NULL, Argument, Matrix, Product, params_of, types_of
from frtc.kernels.sm90_gemm import ALIGN, FEW_ROWS, FEWEST_STAGES, GROUP, MOST_STAGES, ROW, chunks_of
from frtc.kernels.sm90_room import CLUSTERED
from frtc.kernels.smxx_gemm import DRAM_SHARE
from frtc.kernels.spec import Config, Param, Stage, TensorMap
from frtc.kernels.targets import Target

COLUMNS, WARPGROUPS, THREADS = 128, 2, 384
# Rows of a tile: widths of wgmma that sm90.cuh has.
HEIGHTS = (80, 96, 104, 112, 128, 144, 152, 160, 176, 192, 208, 224, 240, 256)
SPLITS = (1, 2, 4)
NAMES = ("ROWS", "STAGES", "SPLIT")
# What reaches another block, by the times of 304 to 816 x 2048 x 16384 in the chain (chain_search_turned.json): those
# whose blocks share K take 3 to 9 us longer than their products.
ACROSS_BYTES_PER_CLOCK = 5.0


@dataclass(frozen=True, slots=True)
class Tile:
    """One instance of the template: see sm90_turned_gemm.cuh. rows: of x, a multiple of 8."""

    rows: int
    stages: int
    split: int

    persistent = False
    warps = 4 * WARPGROUPS
    bn = COLUMNS

    @staticmethod
    def of(config: Config, p: Product) -> Tile:
        return Tile(*(config[name] for name in NAMES))

    def config(self) -> Config:
        return dict(zip(NAMES, (self.rows, self.stages, self.split), strict=True))

    @property
    def cuda(self) -> str:
        return f"frtc::TurnedTile<{self.rows}, {self.stages}, {self.split}>"

    @property
    def bm(self) -> int:
        return self.rows

    @property
    def shares(self) -> int:
        return self.split

    @property
    def stage_bytes(self) -> int:
        return (self.rows + COLUMNS) * ROW

    @property
    def free(self) -> int:
        return self.stages * self.stage_bytes

    @property
    def eights(self) -> int:
        """Of rows that a block stores."""
        return math.ceil(self.rows / 8 / self.split)

    @property
    def received(self) -> int:
        """Bytes of sums from the other blocks of a cluster: of two rows a gap of 32 bytes lies behind all columns."""
        return (self.split - 1) * self.eights * 4 * (COLUMNS // 2 * 16 + 32)

    @property
    def smem(self) -> int:
        return ALIGN + self.free + self.received + 16 * self.stages + 32

    def blocks(self, p: Product) -> int:
        return math.ceil(p.m / self.rows) * math.ceil(p.n / COLUMNS) * self.split


def mainloop_refuses(p: Product, target: Target) -> str:
    """Why sm90_turned_gemm.cuh cannot multiply x and w, whatever becomes of the accumulators, or ""."""
    if reason := sm90_gemm.mainloop_refuses(p, target):
        return reason
    if p.m <= FEW_ROWS:
        return f"{p.m} rows; up to {FEW_ROWS} are few"
    if p.n % GROUP:
        return f"{p.n} columns, not a multiple of {GROUP}"
    return "" if tiles_of(p, target) else "more tiles than SMs"


def tiles_of(p: Product, target: Target) -> list[Tile]:
    """For each number of tiles above each other the lowest ones that hold all rows, for each number of shares of K."""
    tall = range(1, math.ceil(p.m / HEIGHTS[0]) + 1)
    fitting = [[height for height in HEIGHTS if count * height >= p.m] for count in tall]
    heights = dict.fromkeys(found[0] for found in fitting if found)
    tiles = [_fitted(Tile(height, 0, split), p, target) for height in heights for split in SPLITS]
    return [tile for tile in tiles if tile is not None]


def _fitted(tile: Tile, p: Product, target: Target) -> Tile | None:
    """With as many stages as fit and are of use; None where those are too few, or blocks too many."""
    chunks = math.ceil(chunks_of(p) / tile.split)
    if tile.blocks(p) > CLUSTERED[tile.split] or (tile.split > 1 and chunks < 2):
        return None  # a second wave, or hardly any K for a block
    stages = min((target.smem_per_block - tile.smem) // (tile.stage_bytes + 16), MOST_STAGES)
    return None if stages < FEWEST_STAGES else replace(tile, stages=max(FEWEST_STAGES, min(stages, chunks)))


def cost_us(p: Product, tile: Tile, target: Target) -> float:
    """Estimated microseconds, by sm90_gemm's rates. As high where rows at the end may not be read: the other tiles take
    no less."""
    chunks = math.ceil(chunks_of(p) / tile.split)
    # Each warpgroup reads its rows of w and all of x from shared memory, where the copies arrive, too.
    moved = WARPGROUPS * (64 + tile.rows) * ROW + tile.stage_bytes
    clocks = sm90_gemm.chunk_clocks(p, tile.rows * COLUMNS, moved)
    busy_us = chunks * clocks / sm90_gemm.CLOCK * 1e6
    if tile.split > 1 and busy_us <= sm90_gemm.SHORT_US:
        busy_us *= sm90_gemm.CLUSTER_FACTOR
    store_us = sm90_gemm.EIGHT_US * math.ceil(tile.eights / 2) * math.sqrt(WARPGROUPS)
    return (
        sm90_gemm.LAUNCH_US
        + sm90_gemm.FIRST_TILE_US
        + max(busy_us, p.nbytes / (DRAM_SHARE * target.dram) * 1e6)
        + _sums_us(tile)
        + store_us
    )


def _sums_us(tile: Tile) -> float:
    """Sums go to shared memory and come back, those of other blocks by way of the cluster."""
    whole = tile.rows * COLUMNS * 4
    within = (whole / tile.split + whole) / sm90_gemm.SMEM_BYTES_PER_CLOCK
    across = whole * (1 - 1 / tile.split) / ACROSS_BYTES_PER_CLOCK
    return (within + across) / sm90_gemm.CLOCK * 1e6 + (sm90_gemm.SPLIT_US if tile.split > 1 else 0.0)


def stage_of(p: Product, tile: Tile, target: Target, epilogue: str, arguments: Sequence[Argument]) -> Stage:
    """The launch of sm90_turned_gemm.cuh with an epilogue: its C++ type, and what it takes."""
    kernel = "sm90_turned_split_gemm" if tile.split > 1 else "sm90_turned_gemm"
    rows = NULL if p.rows is None else Param("operand", p.rows)
    return Stage(
        source="sm90_turned_gemm.cuh",
        entry=f"frtc::{kernel}<{p.x.cuda}, {tile.cuda}, {epilogue}, {types_of(arguments)}>",
        grid=(math.ceil(p.m / tile.rows), math.ceil(p.n / COLUMNS), tile.split),
        block=THREADS,
        smem=tile.smem,
        params=(
            Param("tensormap", 0), Param("tensormap", 1), rows,
            *(Param("i32", value) for value in (p.m, p.n, p.k)), *params_of(arguments),
        ),
        tensormaps=(sm90_gemm.rows_map(p.x, p.m, p.k, tile.rows), _even_odd_map(p.w, p.n, p.k)),
        waits=True,
        ahead=(p.w.index,),
    )  # fmt: skip


def _even_odd_map(matrix: Matrix, rows: int, k: int) -> TensorMap:
    """Boxes of 128 bytes of 128 rows, of each sixteen the even ones first: axes K, eight of them, odd, sixteen, J."""
    size = DTYPES[matrix.dtype].itemsize
    step = matrix.ld * size
    of = Param("operand", matrix.index)
    extents, strides = (k, 8, 2, 2, rows // GROUP), (2 * step, step, 16 * step, GROUP * step)
    return TensorMap(of, matrix.dtype, extents, strides, (ROW // size, 8, 2, 2, COLUMNS // GROUP), ROW)


MAINLOOP = Mainloop(sm90_gemm.FAMILY, "sm90_turned", mainloop_refuses, tiles_of, Tile.of, cost_us, stage_of)
# No gated_linear: those of real policies have more tiles than SMs, or a norm to make up for.
KERNELS = (
    *kernels_over(MAINLOOP, {"linear": "sm90_turned_gemm"}),
    *moments.kernels_over(MAINLOOP),
)
