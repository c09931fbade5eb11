"""linear, gated_linear and matmul on mma.sync: bf16 and fp16, e4m3, and e4m3 weights for 16-bit x. smxx_gemm.cuh.

16-bit products and e4m3 weights run on every target. Products of e4m3 need its conversions; where mma.sync has no e4m3
("fp8_mma"), both are widened to fp16 between shared memory and tensor cores, and are no faster than 16-bit ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from frtc.kernels.dtypes import DTYPES
from frtc.kernels.mainloop import Mainloop, kernels_over
from frtc.kernels.product import NULL, Argument, Product, params_of, types_of
from frtc.kernels.spec import Config, Param, Stage
from frtc.kernels.targets import KiB, Target

KIND = {"linear": "smxx_gemm", "gated_linear": "smxx_gated_gemm", "matmul": "smxx_batched_gemm"}

# BM, BN, BK, WM, WN, STAGES; BK in cells of 16 bits: one element, or two e4m3. Large first. Warps of 64 x 64 read the
# fewest bytes of shared memory for each product and need all 255 registers. Several depths of one tile: the deepest
# that fits beside the wanted neighbours wins by cost.
TILES = (
    (128, 256, 64, 64, 64, 4),  # 192 KB: one block on an SM of 227 KB
    (128, 256, 64, 64, 64, 3),  # 144 KB: one on 163 KB
    (128, 256, 32, 64, 64, 4),  # 96 KB: one on 99 KB
    (128, 128, 64, 64, 64, 3),  # 96 KB: two on 228 KB
    (128, 128, 32, 64, 64, 4),  # 64 KB: two on 164 KB
    (128, 128, 32, 64, 64, 3),  # 48 KB: two on 100 KB
    (96, 128, 64, 48, 64, 3),  # 84 KB: 560 rows are 5.83 tiles of 96 and 4.38 of 128
    (64, 128, 64, 32, 64, 4),  # 96 KB
    (64, 128, 64, 32, 64, 3),  # 72 KB: three on 228 KB
    (64, 128, 32, 32, 64, 4),  # 48 KB: two on 100 KB
    (64, 64, 64, 32, 32, 6),  # 96 KB
    (64, 64, 64, 32, 32, 4),  # 64 KB: three on 228 KB
    (64, 64, 64, 32, 32, 3),  # 48 KB: two on 100 KB
    (64, 32, 64, 32, 16, 8),  # 96 KB: for few rows, weights in flight count, not products
    (64, 32, 64, 32, 16, 4),  # 48 KB
    (32, 64, 64, 16, 32, 8),  # 96 KB
    (32, 64, 64, 16, 32, 4),  # 48 KB
    (32, 32, 64, 16, 16, 8),  # 64 KB
    (16, 64, 64, 16, 16, 8),  # 80 KB
    (16, 64, 64, 16, 16, 4),  # 40 KB
    (16, 32, 64, 16, 16, 8),  # 48 KB
    (16, 32, 128, 16, 16, 4),  # 48 KB: half the barriers
)
# The same where w is e4m3 and x is not: a stage is smaller, and each warp widens its own columns, so that warps reach
# over all rows of a tile of few.
W8_TILES = (
    (128, 256, 64, 64, 64, 6),  # 192 KB: one block on an SM of 227 KB
    (128, 256, 64, 64, 64, 4),  # 128 KB: one on 163 KB
    (128, 256, 64, 64, 64, 3),  # 96 KB: one on 99 KB
    (128, 128, 64, 64, 64, 4),  # 96 KB: two on 228 KB
    (128, 128, 64, 64, 64, 3),  # 72 KB: two on 164 KB
    (128, 128, 64, 64, 64, 2),  # 48 KB: two on 100 KB
    (96, 128, 64, 48, 64, 4),  # 80 KB
    (64, 128, 64, 64, 32, 4),  # 64 KB: three on 228 KB
    (64, 128, 64, 64, 32, 3),  # 48 KB: two on 100 KB
    (64, 64, 64, 64, 16, 8),  # 96 KB
    (64, 64, 64, 64, 16, 4),  # 48 KB
    (64, 64, 64, 32, 32, 4),  # 48 KB
    (64, 32, 64, 32, 16, 8),  # 80 KB: for few rows, weights in flight count, not products
    (64, 32, 128, 32, 16, 4),  # 80 KB: half the barriers
    (32, 64, 64, 32, 16, 8),  # 64 KB
    (32, 32, 128, 32, 16, 6),  # 72 KB
    (16, 64, 64, 16, 16, 8),  # 48 KB
    (16, 64, 128, 16, 16, 6),  # 72 KB
    (16, 32, 128, 16, 16, 6),  # 48 KB
)
NAMES = ("BM", "BN", "BK", "WM", "WN", "STAGES", "SPLITS")  # of a config
SPLITS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)

BLOCK_RESERVED = 1 * KiB  # shared memory that the system takes from each block
REGISTERS_PER_SM = 65536
THREADS_PER_SM = 1536  # of the smallest target

# Rates that no datasheet gives, in operations or bytes per clock and SM, and times in us; measured on an H200.
CLOCK = 1.7e9
SMEM_BYTES_PER_CLOCK, L2_BYTES_PER_CLOCK = 128, 64
LEGACY_MMA = 0.62  # share of the tensor rate that mma.sync reaches where the rate is that of wgmma or tcgen05
EMULATED_MMA = 0.93  # share of the 16-bit rate that e4m3 reaches where it is widened to fp16
# e4m3 elements that an SM widens: counted in instructions, not measured. By bits: five for 64 elements, three of them
# on the pipe that takes 64 lanes a clock. By the conversion to fp16: one for 64.
WIDENED_PER_CLOCK, CONVERTED_PER_CLOCK = 48, 128
DRAM_SHARE = 0.85
LAUNCH_US, FIRST_TILE_US, BARRIER_US, EPILOGUE_US, SPLIT_US = 1.5, 1.0, 0.07, 0.8, 1.5
FILLED = 0.8  # a prompt with 48 of 200 tokens beside two views; tiles of one wave gain nothing from fewer rows
FLIGHT_US = 0.8  # from the request of a tile to its arrival, under load


@dataclass(frozen=True, slots=True)
class Tile:
    """One instance of the template and how often the K tiles are split among blocks. w8: w is half as wide as x."""

    bm: int
    bn: int
    bk: int
    wm: int
    wn: int
    stages: int
    splits: int
    w8: bool = False

    @staticmethod
    def of(config: Config, p: Product) -> Tile:
        bm, bn, bk, wm, wn, stages, splits = (config[name] for name in NAMES)
        return Tile(bm, bn, bk, wm, wn, stages, splits, is_w8(p))

    def config(self) -> Config:
        return dict(zip(NAMES, (self.bm, self.bn, self.bk, self.wm, self.wn, self.stages, self.splits), strict=True))

    @property
    def cuda(self) -> str:
        w8 = ", true" if self.w8 else ""
        return f"frtc::Tile<{self.bm}, {self.bn}, {self.bk}, {self.wm}, {self.wn}, {self.stages}{w8}>"

    @property
    def warps(self) -> int:
        return (self.bm // self.wm) * (self.bn // self.wn)

    @property
    def stage_bytes(self) -> int:
        return (self.bm * 2 + self.bn * (1 if self.w8 else 2)) * self.bk

    @property
    def smem(self) -> int:
        """Bytes: the ring, or the rows that the epilogue stages there."""
        return max(self.stages * self.stage_bytes, self.warps * 16 * (self.wn + 8) * 4)

    @property
    def free(self) -> int:
        """Bytes of shared memory that the epilogue may use behind the product."""
        return self.smem

    @property
    def shares(self) -> int:
        return 1

    @property
    def persistent(self) -> bool:
        return False

    @property
    def registers(self) -> int:
        """Of a thread, about: accumulators, two sets of fragments, addresses. ptxas gives 64 at least."""
        return min(255, max(64, self.wm * self.wn // 32 + (self.wm + self.wn) // 2 + 56))

    def resident(self, target: Target) -> int:
        """Blocks that fit on an SM together."""
        by_smem = target.smem_per_sm // (self.smem + BLOCK_RESERVED)
        by_registers = REGISTERS_PER_SM // (self.registers * 32 * self.warps)
        return max(1, min(by_smem, by_registers, THREADS_PER_SM // (32 * self.warps)))

    def grid(self, p: Product) -> tuple[int, int, int]:
        return (math.ceil(p.m / self.bm), math.ceil(p.n / self.bn), self.splits if self.splits > 1 else p.batch)

    def k_tiles(self, p: Product) -> int:
        """Of one split."""
        return math.ceil(math.ceil(p.k / (self.bk * 2 // DTYPES[p.x.dtype].itemsize)) / self.splits)


def is_w8(p: Product) -> bool:
    return p.w.dtype == "e4m3" and p.x.dtype != "e4m3"


def mainloop_refuses(p: Product, target: Target) -> str:
    """Why smxx_gemm.cuh cannot multiply x and w, whatever becomes of the accumulators, or ""."""
    if "cp.async" not in target.has:
        return "needs cp.async"
    if (p.x.dtype, p.w.dtype) == ("e4m3", "e4m3"):
        if "fp8" not in target.has:
            return "no FP8 tensor instructions; use w8a16"
    elif p.x.dtype not in ("bf16", "f16") or p.w.dtype not in (p.x.dtype, "e4m3"):
        return f"x is {p.x.dtype} and w is {p.w.dtype}; needs bf16 or f16 for both, e4m3 for both, or for w"
    if p.k_rows and p.w.dtype == "e4m3":
        return "the second operand is [K, N]; e4m3 needs rows of K"
    return places_refuse(p)


def places_refuse(p: Product) -> str:
    """Why cp.async cannot copy rows of x and w, or a grid not hold the tiles, or ""."""
    for name, matrix in (("x", p.x), ("w", p.w)):
        vector = 16 // DTYPES[matrix.dtype].itemsize
        if matrix.ld % vector or matrix.batch % vector:
            return f"rows of {name} are {matrix.ld} elements apart (batches {matrix.batch}), not a multiple of 16 bytes"
    if p.batch > 65535 or math.ceil(p.n / 32) > 65535:
        return "more blocks than a grid holds"
    return ""


def tiles_of(p: Product, target: Target) -> list[Tile]:
    """Every useful tile, with every useful number of splits."""
    found = []
    for shape in W8_TILES if is_w8(p) else TILES:
        tile = Tile(*shape, splits=1, w8=is_w8(p))
        if p.k_rows and tile.bn < 64:
            continue  # rows of w are copied in panels of 64 columns
        found += splits_of(tile, p, target, 4)
    return found


TILE = TypeVar("TILE", bound=Tile)


def splits_of(tile: TILE, p: Product, target: Target, fewest: int) -> list[TILE]:
    """`tile` with every useful number of splits, each with `fewest` K tiles or more; none where it is of no use."""
    if tile.smem > target.smem_per_block:
        return []  # cannot be launched
    if tile.bm >= 32 and tile.bm // 2 >= p.m:
        return []  # half of the products are for rows that are not there
    k_tiles = tile.k_tiles(p)
    blocks = math.prod(tile.grid(p))
    found = [tile]
    for wanted in SPLITS[1:]:
        share = math.ceil(k_tiles / wanted)
        splits = math.ceil(k_tiles / share)  # every split has work
        if p.batch > 1 or p.k_rows:
            break  # grid.z is the batch
        if tile.wm * tile.wn >= 64 * 64:
            break  # 128 accumulators leave no registers for the sums: ptxas spills 8 to 40 bytes
        if share < fewest or blocks * splits > 2 * target.sms * tile.resident(target):
            break  # a ring needs tiles to fill, and more waves of blocks bring nothing
        if found[-1].splits != splits:
            found.append(replace(tile, splits=splits))
    return found


def cost_us(p: Product, tile: Tile, target: Target) -> float:
    """Estimated microseconds. Where some rows may not be read: the mean of all rows and FILLED of them."""
    if p.rows is None:
        return _cost_us(p, tile, target)
    return (_cost_us(p, tile, target) + _cost_us(replace(p, m=math.ceil(p.m * FILLED)), tile, target)) / 2


def _cost_us(p: Product, tile: Tile, target: Target) -> float:
    return time_us(p, tile, target, _tile_clocks(tile, p, target), L2_BYTES_PER_CLOCK)


def time_us(p: Product, tile: Tile, target: Target, tile_clocks: float, l2_bytes: float) -> float:
    """The slowest of DRAM, the SM's units and the waits for tiles; what each wave pays.

    tile_clocks: of an SM for one K tile of one block; l2_bytes: per clock and SM.
    """
    blocks = math.prod(tile.grid(p))
    on_busiest = math.ceil(blocks / target.sms)
    together = min(on_busiest, tile.resident(target))
    waves = math.ceil(on_busiest / together)
    k_tiles = tile.k_tiles(p)
    busy_us = on_busiest * k_tiles * tile_clocks / CLOCK * 1e6
    wait_us = waves * k_tiles * max(BARRIER_US, FLIGHT_US / (tile.stages - 1))
    dram_us = p.nbytes / (DRAM_SHARE * target.dram) * 1e6
    once_us = LAUNCH_US + waves * (FIRST_TILE_US + EPILOGUE_US)
    if tile.splits > 1:
        partial = tile.bm * tile.bn * 4 * (tile.splits + 1)
        once_us += SPLIT_US + partial / (l2_bytes * CLOCK) * 1e6
    return once_us + max(busy_us, wait_us, dram_us)


def _tile_clocks(tile: Tile, p: Product, target: Target) -> float:
    """Clocks that an SM needs for one K tile of one block: products, shared memory or L2, whichever is slowest."""
    products = 2 * tile.bm * tile.bn * (tile.bk * 2 // DTYPES[p.x.dtype].itemsize) / _rate(p.x.dtype, target)
    fragments = tile.warps * (tile.wm + tile.wn) * tile.bk * 2  # of e4m3 next to 16 bits each access fills half a line
    smem = (tile.stage_bytes + fragments) / SMEM_BYTES_PER_CLOCK
    widened = 0.0
    if tile.w8:
        widened = tile.warps * tile.wn * tile.bk / WIDENED_PER_CLOCK
    elif p.x.dtype == "e4m3" and "fp8_mma" not in target.has:
        widened = fragments / CONVERTED_PER_CLOCK
    # The units share issue slots: the slowest is never quite alone.
    slowest = max(products, smem, tile.stage_bytes / L2_BYTES_PER_CLOCK, widened)
    return slowest + 0.25 * min(products, smem) + 0.25 * min(products, widened)


def _rate(dtype: str, target: Target) -> float:
    """Operations per clock and SM that mma.sync reaches with x of this type."""
    native = dtype != "e4m3" or "fp8_mma" in target.has
    rate = target.tflops[dtype if native else "f16"] * 1e12 / target.sms / CLOCK
    if target.has & {"wgmma", "tcgen05"}:
        rate *= LEGACY_MMA
    return rate if native else rate * EMULATED_MMA


def stage_of(p: Product, tile: Tile, target: Target, epilogue: str, arguments: Sequence[Argument]) -> Stage:
    """The launch of smxx_gemm.cuh with an epilogue: its C++ type, and what it takes."""
    split = tile.splits > 1
    flags = ", ".join("true" if flag else "false" for flag in (split, p.k_rows))
    workspace = (Param("scratch", 0), Param("counters", 0)) if split else (NULL, NULL)
    return Stage(
        source="smxx_gemm.cuh",
        entry=f"frtc::smxx_gemm<{p.x.cuda}, {p.w.cuda}, {tile.cuda}, {epilogue}, {flags}, {types_of(arguments)}>",
        grid=tile.grid(p),
        block=32 * tile.warps,
        smem=tile.smem,
        params=(*p.params(), *workspace, *params_of(arguments)),
        waits=True,
    )


def scratch_of(p: Product, tile: Tile) -> int:
    """Bytes of fp32 partial tiles."""
    return math.prod(tile.grid(p)) * tile.bm * tile.bn * 4 if tile.splits > 1 else 0


def counters_of(p: Product, tile: Tile) -> int:
    """Bytes: one 32-bit counter for each tile."""
    rows, columns, _ = tile.grid(p)
    return 4 * rows * columns if tile.splits > 1 else 0


MAINLOOP = Mainloop(
    "baseline", "smxx", mainloop_refuses, tiles_of, Tile.of, cost_us, stage_of, scratch_of, counters_of
)  # fmt: skip
KERNELS = kernels_over(MAINLOOP, KIND)
