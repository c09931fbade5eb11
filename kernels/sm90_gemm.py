"""linear and gated_linear on wgmma: bf16, fp16 and e4m3 products of Hopper. Device code: sm90_gemm.cuh.

Weights in e4m3 beside activations of 16 bits (w8a16) stay with smxx_gemm: wgmma reads both operands from shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from frtc.kernels.dtypes import DTYPES
from frtc.kernels.mainloop import Mainloop, kernels_over
from frtc.kernels.product import NULL, Argument, Matrix, Product, params_of, types_of
from frtc.kernels.sm90_room import CLUSTERED
from frtc.kernels.smxx_gemm import DRAM_SHARE, FILLED
from frtc.kernels.spec import Config, Param, Stage, TensorMap
from frtc.kernels.targets import KiB, Target

FAMILY = "sm_90a"
KIND = {"linear": "sm90_gemm", "gated_linear": "sm90_gated_gemm"}
ROW = 128  # bytes of K in a chunk: the widest swizzle
GROUP = 32  # columns whose rows of w a tensor map can hand over in another order
ALIGN = 1024  # of the ring: eight swizzled rows
FINISH_BYTES = 256  # static shared memory of an epilogue that sums rows
FACTOR_BYTES = 1536  # static shared memory for factors of rows, of moments (row_factors.cuh)

# What a tile takes beside what its bytes and products say: measured on an H200 at sizes of real policies.
FACTORS = {
    (3, 128, "turns", 2): 0.92,
    (2, 128, "turns", 2): 1.2,
    (1, 96, "rows", 3): 0.9,
    (1, 64, "rows", 3): 0.75,
    (1, 128, "rows", 2): 1.05,
    (1, 96, "columns", 2): 1.15,
    (1, 96, "rows", 1): 0.95,
    (1, 160, "rows", 1): 1.25,
    (1, 128, "rows", 1): 1.2,
    (1, 64, "rows", 2): 0.85,
    (1, 64, "columns", 2): 0.9,
}
LINE, BROKEN_LINES = 128, 1.6  # rows that begin inside a line of memory

# BLOCKS, WN, PARTS, WARPGROUPS: parts of 64 BLOCKS rows by WN columns, arranged as sm90_gemm.cuh says.
SHAPES = (
    (3, 128, "turns", 2),  # 192 x 128: 560 rows are 2.92 tiles; many tiles, each stored while the next is multiplied
    (2, 128, "turns", 2),
    (1, 256, "turns", 2),  # 64 x 256
    (1, 160, "turns", 2),  # 64 x 160: two rounds of 512 x 4304, whose GELU takes half as long as their products
    (1, 96, "turns", 2),
    (1, 256, "rows", 2),  # 768 x 4304 at once
    (1, 192, "rows", 2),
    (1, 160, "rows", 2),
    (1, 128, "rows", 2),
    (1, 96, "rows", 2),
    (1, 64, "rows", 2),
    (1, 96, "rows", 3),
    (1, 64, "rows", 3),
    (1, 128, "columns", 2),  # 64 x 256
    (1, 96, "columns", 2),  # 64 x 192
    (1, 64, "columns", 2),  # 64 x 128
    (1, 160, "rows", 1),  # 64 x 160
    (1, 128, "rows", 1),
    (1, 96, "rows", 1),
    (1, 64, "rows", 1),  # few rows: many blocks read weights
    (1, 32, "rows", 1),
)
SPLITS = (1, 2, 4, 8)
NAMES = ("BLOCKS", "WN", "PARTS", "WARPGROUPS", "STAGES", "SPLIT", "RELEASE")
# When the next launch may begin: when the wait of this one is over, or when it has begun, so that two launches' weights
# are on their way at once. Which is quicker depends on the neighbours: bench/chain_search.py.
WAITED, BEGUN = "waited", "begun"
MOST_STAGES, FEWEST_STAGES = 10, 3
# Products of so few rows wait for weights. Their launches take half of an SM's shared memory, so that the next one's
# can be on their way while this one works: of the best chain that a prototype found, each two neighbours fit together.
# Or they take more, with more stages, and no SM has two of them.
FEW_ROWS = 64
# Times in us and rates per clock and SM, fitted to an H200 (bench/results/product_times.json).
CLOCK, LOADED_CLOCK = 1.75e9, 1.5e9  # of short launches; of those that draw all power
SMEM_BYTES_PER_CLOCK, SMEM_SHARE = 128, 0.93
MULTIPLIED_PER_CLOCK = 32  # rows x columns, each of 128 bytes of K
LAUNCH_US, FIRST_TILE_US = 0.7, 1.1
EIGHT_US = 0.05  # eight columns of a row of a thread: scaled, activated, stored
SPLIT_US, CLUSTER_BYTES_PER_CLOCK = 0.3, 12
ROW_FACTORS_US = 0.63  # factors of 64 rows, from moments of 2048 elements
SPARED = 0.02  # of the SMs, for rows that stay the same
SHORT_US = 20.0
# What short products take longer in clusters whose blocks fill their SMs, e4m3 and bf16 alike: 1.0 to 1.7 in clusters
# of two, 2 in clusters of four (product_times.json, lt_times.json). Those longer than SHORT_US do not, nor few rows.
CLUSTER_FACTOR = 1.25


@dataclass(frozen=True, slots=True)
class Tile:
    """One instance of the template: see sm90_gemm.cuh. paired: an SM holds two blocks."""

    blocks: int
    wn: int
    parts: str
    warpgroups: int
    stages: int
    split: int
    paired: bool = False
    release: str = WAITED

    @staticmethod
    def of(config: Config, p: Product) -> Tile:
        blocks, wn, parts, warpgroups, stages, split, release = (config[name] for name in NAMES)
        return Tile(blocks, wn, parts, warpgroups, stages, split, _paired(p, wn, split), release)

    def config(self) -> Config:
        values = (self.blocks, self.wn, self.parts, self.warpgroups, self.stages, self.split, self.release)
        return dict(zip(NAMES, values, strict=True))

    @property
    def cuda(self) -> str:
        flags = ", ".join(str(flag).lower() for flag in (self.persistent, self.paired, self.release == BEGUN))
        numbers = f"{self.blocks}, {self.wn}, frtc::Parts::{self.parts}, {self.warpgroups}, {self.stages}, {self.split}"
        return f"frtc::WgmmaTile<{numbers}, {flags}>"

    @property
    def persistent(self) -> bool:
        return self.parts == "turns"

    @property
    def shares(self) -> int:
        return self.split

    @property
    def bm(self) -> int:
        return 64 * self.blocks * (self.warpgroups if self.parts == "rows" else 1)

    @property
    def bn(self) -> int:
        return self.wn * (self.warpgroups if self.parts == "columns" else 1)

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups + (128 if self.warpgroups > 1 else 32)

    @property
    def stage_bytes(self) -> int:
        return (self.bm + self.bn) * ROW

    @property
    def received(self) -> int:
        """Bytes of partial sums from the other blocks of a cluster."""
        return (self.split - 1) * (self.bm // self.split) * self.bn * 4

    @property
    def ring(self) -> int:
        return self.stages * self.stage_bytes

    @property
    def free(self) -> int:
        """Bytes of shared memory that the epilogue may use behind the product."""
        return self.ring

    @property
    def smem(self) -> int:
        return ALIGN + self.ring + self.received + 16 * self.stages + 32

    @property
    def warps(self) -> int:
        return 4 * self.warpgroups

    def tiles(self, p: Product) -> tuple[int, int]:
        return math.ceil(p.m / self.bm), math.ceil(p.n / self.bn)

    def grid(self, p: Product, target: Target) -> tuple[int, int, int]:
        if self.persistent:
            blocks = min(target.sms, math.prod(self.tiles(p)))
            return (blocks if p.norm == "none" else self._even(blocks, *self.tiles(p)), 1, 1)
        return (*self.tiles(p), self.split)

    @staticmethod
    def _even(blocks: int, tall: int, wide: int) -> int:
        """A few less where each warpgroup then keeps its rows from tile to tile, and finds their factors once; not
        where some block would have a tile more."""
        fewer, tiles = blocks - blocks % (tall // math.gcd(tall, 2)), tall * wide
        few = blocks - fewer <= blocks * SPARED and math.ceil(tiles / fewer) == math.ceil(tiles / blocks)
        return fewer if few else blocks


def chunks_of(p: Product) -> int:
    """Of 128 bytes of K."""
    return math.ceil(p.k * DTYPES[p.x.dtype].itemsize / ROW)


def mainloop_refuses(p: Product, target: Target) -> str:
    """Why sm90_gemm.cuh cannot multiply x and w, whatever becomes of the accumulators, or ""."""
    if "wgmma" not in target.has:
        return "needs wgmma"
    if p.x.dtype not in ("bf16", "f16", "e4m3") or p.w.dtype != p.x.dtype:
        return f"x is {p.x.dtype} and w is {p.w.dtype}; needs bf16, f16 or e4m3 for both"
    if p.batch > 1 or p.k_rows:
        return "batches, or a second operand that is [K, N]"
    size = DTYPES[p.x.dtype].itemsize
    for name, matrix, rows in (("x", p.x, p.m), ("w", p.w, p.n)):
        if matrix.ld * size % 16 or (rows > 1 and matrix.ld < p.k):
            return f"rows of {name} are {matrix.ld} elements apart, not a multiple of 16 bytes behind each other"
    return ""


def tiles_of(p: Product, target: Target) -> list[Tile]:
    """Every useful tile, with every useful number of blocks that share K."""
    found = []
    for blocks, wn, parts, warpgroups in SHAPES:
        for split in SPLITS:
            tile = Tile(blocks, wn, parts, warpgroups, 0, split, _paired(p, wn, split))
            fitted = [_fitted(tile, p, target), *([_fitted(tile, p, target, alone=True)] if p.m <= FEW_ROWS else [])]
            useful = [one for one in dict.fromkeys(fitted) if one is not None and not _wasteful(one, p, target)]
            for one in useful:
                found += [replace(one, release=r) for r in ((WAITED, BEGUN) if p.m <= FEW_ROWS else (WAITED,))]
    return found


def _fitted(tile: Tile, p: Product, target: Target, alone: bool = False) -> Tile | None:
    """With as many stages as fit and are of use; None where those are too few.

    alone: of few rows, as many as an SM holds for one block, where none then has two (sm90_room says why)
    """
    if tile.split > 1 and (tile.parts != "rows" or tile.bn % (8 * tile.split)):
        return None  # so few columns for so many blocks: sums would travel for longer than their products take
    if tile.split > 1 and tile.blocks * tile.wn >= 160:
        return None  # 80 accumulators leave too few registers for the sums of others: ptxas spills
    if alone and (tile.paired or math.prod(tile.tiles(p)) * tile.split > CLUSTERED[tile.split]):
        return None  # blocks that may wait for each other count on two an SM, or there are more than SMs
    half = p.m <= FEW_ROWS and not alone
    room = min(target.smem_per_block, target.smem_per_sm // 2 - KiB if half else target.smem_per_block)
    room -= FINISH_BYTES + tile.smem + (0 if p.norm == "none" else FACTOR_BYTES)
    stages = min(room // (tile.stage_bytes + 16), MOST_STAGES)
    wanted = math.ceil(chunks_of(p) / tile.split) * (2 if tile.persistent else 1)
    if stages < FEWEST_STAGES:
        return None
    return replace(tile, stages=max(2, min(stages, wanted)))


def _wasteful(tile: Tile, p: Product, target: Target) -> bool:
    """Whether a smaller sibling certainly wins."""
    blocks = math.prod(tile.tiles(p)) * tile.split
    if tile.bm > 64 and tile.bm - 64 >= p.m:
        return True  # 64 rows that are not there
    if tile.persistent and blocks <= target.sms:
        return True  # one tile for each block: nobody takes turns
    if tile.split > 1 and (blocks > _held(tile) or chunks_of(p) < 2 * tile.split):
        return True  # a second wave of clusters, or hardly any K for a block
    return not tile.persistent and blocks > 2 * target.sms  # many waves: those that take turns


def cost_us(p: Product, tile: Tile, target: Target) -> float:
    """Estimated microseconds. Where some rows may not be read: the mean of all rows and FILLED of them."""
    if p.rows is None:
        return _cost_us(p, p.m, tile, target)
    return (_cost_us(p, p.m, tile, target) + _cost_us(p, math.ceil(p.m * FILLED), tile, target)) / 2


def chunk_clocks(p: Product, elements: int, moved: int) -> float:
    """Of an SM for 128 bytes of K of so many elements of the product, `moved` bytes from and to shared memory."""
    clocks = max(elements / MULTIPLIED_PER_CLOCK, moved / SMEM_BYTES_PER_CLOCK / SMEM_SHARE)
    broken = any(m.ld * DTYPES[m.dtype].itemsize % LINE and rows > 1 for m, rows in ((p.x, p.m), (p.w, p.n)))
    return clocks * BROKEN_LINES if broken else clocks


def _cost_us(p: Product, m: int, tile: Tile, target: Target) -> float:
    """Rounds of tiles, each its products or its loads; what the epilogue leaves uncovered; DRAM."""
    tall, wide = math.ceil(m / tile.bm), math.ceil(p.n / tile.bn)
    blocks = tall * wide * tile.split
    on_busiest = math.ceil(blocks / target.sms)
    chunks = math.ceil(chunks_of(p) / tile.split)
    # Every block of 64 rows reads the whole width of w from shared memory, where the copies arrive, too.
    parts = tile.blocks * (1 if tile.parts == "turns" else tile.warpgroups)
    read = parts * ROW // 32 * (64 + tile.wn) * 32
    clocks = chunk_clocks(p, tile.bm * tile.bn, read + tile.stage_bytes)
    clocks *= FACTORS.get((tile.blocks, tile.wn, tile.parts, tile.warpgroups), 1.0)
    busy_us = on_busiest * chunks * clocks / CLOCK * 1e6
    if busy_us > SHORT_US:
        busy_us *= CLOCK / LOADED_CLOCK
    elif tile.split > 1 and m > FEW_ROWS:
        busy_us *= CLUSTER_FACTOR
    # A warpgroup issues its products one chunk at a time: about 70 clocks beyond their own.
    busy_us = max(busy_us, on_busiest * chunks * (tile.blocks * tile.wn * 2 + 70) / CLOCK * 1e6)
    store_us = EIGHT_US * tile.blocks * tile.wn / 16 * math.sqrt(tile.warpgroups)
    factors_us = 0.0
    if tile.persistent and p.norm != "none" and 2 * tile.grid(p, target)[0] % tall:
        factors_us = ROW_FACTORS_US * tile.blocks * on_busiest  # a warpgroup has other rows in each tile
    split_us = 0.0
    if tile.split > 1:  # what a block sends to the others
        split_us = SPLIT_US + tile.bm * tile.bn * 4 * (1 - 1 / tile.split) / CLUSTER_BYTES_PER_CLOCK / CLOCK * 1e6
    dram_us = p.nbytes / (DRAM_SHARE * target.dram) * 1e6
    once_us = FIRST_TILE_US + store_us  # where warpgroups take turns: the first tile's start and the last one's end
    each_us = once_us * (1 if tile.persistent else on_busiest) + factors_us
    return LAUNCH_US + each_us + max(busy_us, dram_us) + split_us


def stage_of(p: Product, tile: Tile, target: Target, epilogue: str, arguments: Sequence[Argument]) -> Stage:
    """The launch of sm90_gemm.cuh with an epilogue: its C++ type, and what it takes."""
    order = "plain" if p.n < GROUP else "permuted" if p.n % GROUP == 0 else "whole"
    kernel = "sm90_split_gemm" if tile.split > 1 else "sm90_gemm"
    rows = NULL if p.rows is None else Param("operand", p.rows)
    plain = rows_map(p.w, p.n, p.k, tile.bn)
    ordered = plain if order == "plain" else _permuted_map(p.w, p.n, p.k, tile.bn)
    maps = (rows_map(p.x, p.m, p.k, tile.bm), ordered, plain)
    return Stage(
        source="sm90_gemm.cuh",
        entry=f"frtc::{kernel}<{p.x.cuda}, {tile.cuda}, {epilogue}, frtc::Order::{order}, {types_of(arguments)}>",
        grid=tile.grid(p, target),
        block=tile.threads,
        smem=tile.smem,
        params=(
            *(Param("tensormap", i) for i in range(3)), rows,
            *(Param("i32", value) for value in (p.m, p.n, p.k)), *params_of(arguments),
        ),
        tensormaps=maps,
        waits=True,
        ahead=(p.w.index,),
        begun=tile.release == BEGUN,
    )  # fmt: skip


def rows_map(matrix: Matrix, rows: int, k: int, box: int) -> TensorMap:
    """Boxes of 128 bytes of `box` rows."""
    size = DTYPES[matrix.dtype].itemsize
    step = matrix.ld * size if rows > 1 else math.ceil(k * size / 16) * 16
    of = Param("operand", matrix.index)
    return TensorMap(of, matrix.dtype, (k, rows), (step,), (ROW // size, box), ROW)


def _permuted_map(matrix: Matrix, rows: int, k: int, box: int) -> TensorMap:
    """The same with row 32 J + 8 t + 2 j + i in place 32 J + 8 j + 2 t + i: axes K, i, t, j, J."""
    size = DTYPES[matrix.dtype].itemsize
    step = matrix.ld * size
    of = Param("operand", matrix.index)
    extents, strides = (k, 2, 4, 4, rows // GROUP), (step, 8 * step, 2 * step, GROUP * step)
    return TensorMap(of, matrix.dtype, extents, strides, (ROW // size, 2, 4, 4, box // GROUP), ROW)


def together(p: Product, tile: Tile, target: Target) -> bool:
    return math.prod(tile.tiles(p)) * tile.split <= min(target.sms, _held(tile))


def _held(tile: Tile) -> int:
    """Blocks that are on SMs at once."""
    return CLUSTERED[tile.split] * (2 if tile.paired else 1)


def _paired(p: Product, wn: int, split: int) -> bool:
    """Whether an SM certainly holds two blocks: of few rows two rings fit, and the launch bounds keep registers for
    two. Tiles of more than 32 columns would spill."""
    return p.m <= FEW_ROWS and wn == 32 and split > 1


MAINLOOP = Mainloop(
    FAMILY, "sm90", mainloop_refuses, tiles_of, Tile.of, cost_us, stage_of, together=together, moments=True
)
KERNELS = kernels_over(MAINLOOP, KIND)
