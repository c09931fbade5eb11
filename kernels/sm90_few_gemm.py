"""Products of few rows on wgmma. Device code: sm90_few_gemm.cuh.

A policy's steps have 10 to 50 rows, and each of their products waits for its weights and for the launch before it. Here
weights take wgmma's 64 rows and the few rows of x its other side, which has steps of eight; a block asks for all of its
weights before it waits, and multiplies without a ring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from frtc.kernels import moments, sm90_gemm, smxx_rope_gemm
from frtc.kernels.dtypes import DTYPES
from frtc.kernels.mainloop import Mainloop, kernels_over
from frtc.kernels.product import Argument, Matrix, Product, params_of, types_of
from frtc.kernels.sm90_gemm import BEGUN, FACTOR_BYTES, FEW_ROWS, ROW, WAITED, chunks_of
from frtc.kernels.sm90_room import CLUSTERED, alone, fitting
from frtc.kernels.smxx_gemm import DRAM_SHARE
from frtc.kernels.spec import Config, Param, Stage, TensorMap
from frtc.kernels.targets import Target

KIND = {"linear": "sm90_few_gemm", "gated_linear": "sm90_few_gated_gemm"}
COLUMNS, SIXTEEN = 64, 16  # of a block; whose rows of w the tensor map puts in another order
ALIGN = 1024
SPLITS = (1, 2, 4, 8)
NAMES = ("SPLIT", "RELEASE", "ALONE")  # ALONE: an SM takes one block, not two

# Times in us and clocks, about and not fitted: at the sizes that were searched in the chain the target's table decides.
CLOCK = 1.75e9
LAUNCH_US, FIRST_BYTE_US = 0.75, 0.5
L2_BYTES_PER_CLOCK = 64  # of an SM
WGMMA_CLOCKS, WGMMA_CLOCKS_PER_ROW = 22, 0.36  # of 32 bytes of K
PASS_US, SUMS_US = 0.12, 0.45  # sixteen rows finished; sums that travel


@dataclass(frozen=True, slots=True)
class Tile:
    """One instance of the template: see sm90_few_gemm.cuh. rows: of x, a multiple of 8; chunks: of 128 bytes of K."""

    rows: int
    chunks: int
    split: int
    wide: bool
    release: str
    alone: bool

    persistent = False
    warps = 4
    bn = COLUMNS

    @staticmethod
    def of(config: Config, p: Product) -> Tile:
        rows, split = math.ceil(p.m / 8) * 8, config["SPLIT"]
        wide = split == 1 or p.x.dtype != "e4m3"
        return Tile(rows, chunks_of(p), split, wide, config["RELEASE"], config["ALONE"])

    def config(self) -> Config:
        return dict(zip(NAMES, (self.split, self.release, self.alone), strict=True))

    @property
    def cuda(self) -> str:
        early, wide = (str(flag).lower() for flag in (self.release == BEGUN, self.wide))
        return f"frtc::FewTile<{self.rows}, {self.chunks}, {self.split}, {early}, {wide}>"

    @property
    def bm(self) -> int:
        return self.rows

    @property
    def shares(self) -> int:
        return self.split

    @property
    def most(self) -> int:
        """Chunks of a block."""
        return math.ceil(self.chunks / self.split)

    @property
    def passes(self) -> int:
        """Of sixteen rows each, in which a block finishes its own."""
        return math.ceil(math.ceil(self.rows / 8 / self.split) / 2)

    @property
    def copies(self) -> int:
        """Bytes of w and x."""
        return self.most * (self.rows + COLUMNS) * ROW

    @property
    def free(self) -> int:
        return self.copies

    @property
    def sums(self) -> int:
        """Bytes of sums that a block receives: of two rows a gap of 32 bytes lies behind all columns."""
        pair = COLUMNS // 2 * (16 if self.wide else 8) + 32
        return self.split * math.ceil(self.rows / 8 / self.split) * 4 * pair

    @property
    def used(self) -> int:
        """Bytes of shared memory. Sums of a block alone take the place of w and x."""
        both = max(self.copies, self.sums) if self.split == 1 else self.copies + self.sums
        return ALIGN + both + 8 * self.most + 8

    def smem(self, target: Target) -> int:
        """Bytes that are asked for."""
        return alone(self.used, target) if self.alone else self.used

    def on_sm(self, p: Product, target: Target) -> int:
        """Blocks that an SM may take at a time, of two at most."""
        return min(fitting(self.smem(target) + _statics(p), target), 2)

    def blocks(self, p: Product) -> int:
        return math.ceil(p.n / COLUMNS) * self.split


def mainloop_refuses(p: Product, target: Target) -> str:
    """Why sm90_few_gemm.cuh cannot multiply x and w, whatever becomes of the accumulators, or ""."""
    if reason := sm90_gemm.mainloop_refuses(p, target):
        return reason
    if p.m > FEW_ROWS:
        return f"{p.m} rows, more than {FEW_ROWS}"
    if p.n % SIXTEEN:
        return f"{p.n} columns, not a multiple of {SIXTEEN}"
    return "" if tiles_of(p, target) else "no share of K fits in shared memory, all are too small, or too many blocks"


def tiles_of(p: Product, target: Target) -> list[Tile]:
    """Numbers of blocks that share K, when they let the next launch begin, how many an SM takes."""
    found = []
    for split in SPLITS:
        one = Tile.of({"SPLIT": split, "RELEASE": WAITED, "ALONE": False}, p)
        blocks, on_sm = one.blocks(p), one.on_sm(p, target)
        if split > one.chunks or one.used + _statics(p) > target.smem_per_block or blocks > 2 * CLUSTERED[split]:
            continue
        ways = (False, True) if on_sm > 1 and blocks <= CLUSTERED[split] else (False,)
        found += [replace(one, release=r, alone=a) for r in (WAITED, BEGUN) for a in ways]
    return found


def _statics(p: Product) -> int:
    return 0 if p.norm == "none" else FACTOR_BYTES


def cost_us(p: Product, tile: Tile, target: Target) -> float:
    """Estimated microseconds: a launch, x from L2 or the product, sums, the epilogue; or the weights from DRAM."""
    on_sm = tile.on_sm(p, target)
    waves = math.ceil(tile.blocks(p) / (CLUSTERED[tile.split] * on_sm))
    product = tile.most * ROW // 32 * (WGMMA_CLOCKS + WGMMA_CLOCKS_PER_ROW * tile.rows)
    copies = on_sm * tile.most * tile.rows * ROW / L2_BYTES_PER_CLOCK
    one_us = FIRST_BYTE_US + max(product, copies) / CLOCK * 1e6 + tile.passes * PASS_US
    if tile.split > 1:
        one_us += SUMS_US * (2 if tile.wide else 1) * math.sqrt(tile.rows / FEW_ROWS)
    dram_us = p.nbytes / (DRAM_SHARE * target.dram) * 1e6
    return LAUNCH_US + max(waves * one_us, dram_us)


def stage_of(p: Product, tile: Tile, target: Target, epilogue: str, arguments: Sequence[Argument]) -> Stage:
    """The launch of sm90_few_gemm.cuh with an epilogue: its C++ type, and what it takes."""
    kernel = "sm90_few_split_gemm" if tile.split > 1 else "sm90_few_gemm"
    return Stage(
        source="sm90_few_gemm.cuh",
        entry=f"frtc::{kernel}<{p.x.cuda}, {tile.cuda}, {epilogue}, {types_of(arguments)}>",
        grid=(tile.split, math.ceil(p.n / COLUMNS), 1),
        block=128,
        smem=tile.smem(target),
        params=(
            Param("tensormap", 0), Param("tensormap", 1), Param("i32", p.m), Param("i32", p.n), *params_of(arguments),
        ),
        tensormaps=(sm90_gemm.rows_map(p.x, p.m, p.k, tile.rows), _even_odd_map(p.w, p.n, p.k)),
        waits=True,
        ahead=(p.w.index,),
        begun=tile.release == BEGUN,
    )  # fmt: skip


def _even_odd_map(matrix: Matrix, rows: int, k: int) -> TensorMap:
    """Boxes of 128 bytes of 64 rows, of each sixteen the even ones first: axes K, eight of them, odd, sixteens."""
    size = DTYPES[matrix.dtype].itemsize
    step = matrix.ld * size
    of = Param("operand", matrix.index)
    extents, strides = (k, 8, 2, rows // SIXTEEN), (2 * step, step, SIXTEEN * step)
    return TensorMap(of, matrix.dtype, extents, strides, (ROW // size, 8, 2, COLUMNS // SIXTEEN), ROW)


MAINLOOP = Mainloop(sm90_gemm.FAMILY, "sm90_few", mainloop_refuses, tiles_of, Tile.of, cost_us, stage_of, moments=True)
KERNELS = (
    *kernels_over(MAINLOOP, KIND),
    *smxx_rope_gemm.kernels_over(MAINLOOP),
    *moments.kernels_over(MAINLOOP),
)
