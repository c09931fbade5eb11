"""linear and gated_linear of fp32 operands on mma.sync, three TF32 products for each of fp32. smxx_tf32_gemm.cuh.

And linear_moments, by tiles whose columns are whole moments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from frtc.kernels import moments, smxx_gemm
from frtc.kernels.mainloop import Mainloop, kernels_over
from frtc.kernels.product import NULL, Argument, Product, params_of, types_of
from frtc.kernels.spec import Config, Param, Stage
from frtc.kernels.targets import Target

KIND = {"linear": "smxx_tf32_gemm", "gated_linear": "smxx_gated_tf32_gemm"}

CELLS = 64  # of a row of a tile, 16 bits each: 32 elements
# BM, BN, WM, WN, STAGES. Large first. Few rows want many weights in flight and many blocks, so small tiles are deep.
TILES = (
    (128, 96, 32, 48, 3),  # 84 KB: two on 228 KB
    (64, 96, 32, 24, 4),  # 80 KB
    (64, 80, 16, 40, 5),  # 90 KB: 120 blocks for two views of 256 patches in 1152 channels
    (64, 72, 16, 24, 5),  # 85 KB: 128 blocks for them
    (64, 64, 16, 32, 4),  # 64 KB: three on 228 KB
    (64, 32, 16, 16, 6),  # 72 KB
    (32, 64, 16, 16, 6),  # 72 KB
    (32, 32, 16, 8, 8),  # 64 KB
    (16, 64, 16, 8, 8),  # 80 KB
    (16, 32, 16, 8, 8),  # 48 KB
)
NAMES = ("BM", "BN", "WM", "WN", "STAGES", "SPLITS")  # of a config

PRODUCTS = 3  # of TF32 for one of fp32
FEW_FRAGMENTS = 2  # of a warp: each of the three products has a sum of its own
MMA_CLOCKS = 24  # from a product to the next of the same sum, as ptxas spaces them on sm_90a
AROUND = 80  # instructions of a warp around the products of a K tile: copies, addresses, barrier
SCHEDULERS = 4  # of an SM, an instruction of a warp a clock each
L2_BYTES_PER_CLOCK = 32  # of an SM where all of them read


@dataclass(frozen=True, slots=True)
class Tile(smxx_gemm.Tile):
    """One instance of the template and how often the K tiles are split among blocks."""

    @staticmethod
    def of(config: Config, p: Product) -> Tile:
        bm, bn, wm, wn, stages, splits = (config[name] for name in NAMES)
        return Tile(bm, bn, CELLS, wm, wn, stages, splits)

    def config(self) -> Config:
        return dict(zip(NAMES, (self.bm, self.bn, self.wm, self.wn, self.stages, self.splits), strict=True))

    @property
    def cuda(self) -> str:
        return f"frtc::F32Tile<{self.bm}, {self.bn}, {self.wm}, {self.wn}, {self.stages}>"

    @property
    def sums(self) -> int:
        """Accumulators that a K tile has for each fragment, as kSums in smxx_tf32_gemm.cuh."""
        return PRODUCTS if self.wm // 16 * (self.wn // 8) <= FEW_FRAGMENTS else 1

    @property
    def registers(self) -> int:
        """Of a thread, about: accumulators of all and of a tile, two sets of fragments and one in parts, addresses."""
        accumulators, fragments = self.wm * self.wn // 32, (self.wm + self.wn) // 4
        return min(255, max(64, (1 + self.sums) * accumulators + 3 * fragments + 40))


def mainloop_refuses(p: Product, target: Target) -> str:
    """Why smxx_tf32_gemm.cuh cannot multiply x and w, whatever becomes of the accumulators, or ""."""
    if "cp.async" not in target.has:
        return "needs cp.async"
    if (p.x.dtype, p.w.dtype) != ("f32", "f32"):
        return f"x is {p.x.dtype} and w is {p.w.dtype}; needs f32 for both"
    return smxx_gemm.places_refuse(p)


def tiles_of(p: Product, target: Target) -> list[Tile]:
    """Every useful tile, with every useful number of splits."""
    tiles = (Tile.of(_unsplit(shape), p) for shape in TILES)
    return [split for tile in tiles for split in smxx_gemm.splits_of(tile, p, target, 3)]


def _unsplit(shape: tuple[int, ...]) -> Config:
    return dict(zip(NAMES, (*shape, 1), strict=True))


def cost_us(p: Product, tile: Tile, target: Target) -> float:
    """Estimated microseconds."""
    return smxx_gemm.time_us(p, tile, target, _tile_clocks(tile, target), L2_BYTES_PER_CLOCK)


def _tile_clocks(tile: Tile, target: Target) -> float:
    """Clocks that an SM needs for one K tile of one block: products, instructions, shared memory, L2 or a chain."""
    rate = target.tflops["bf16"] / 2 * 1e12 / target.sms / smxx_gemm.CLOCK  # of TF32, on every GPU half of 16 bits
    if target.has & {"wgmma", "tcgen05"}:
        rate *= smxx_gemm.LEGACY_MMA
    products = PRODUCTS * 2 * tile.bm * tile.bn * tile.bk / 2 / rate
    elements = (tile.wm + tile.wn) * tile.bk / 2  # of a warp's fragments: two instructions for each 32
    pieces = tile.wm * tile.wn / 32  # of accumulators: a product for each 4 and 8 of K, an addition for each sum
    issued = 2 * elements / 32 + PRODUCTS * pieces / 4 * tile.bk / 16 + tile.sums * pieces + AROUND
    smem = (tile.stage_bytes + tile.warps * elements * 4) / smxx_gemm.SMEM_BYTES_PER_CLOCK
    other = max(tile.warps * issued / SCHEDULERS, smem)
    chain = PRODUCTS // tile.sums * tile.bk / 16 * MMA_CLOCKS
    # The units share issue slots: the slowest is never quite alone.
    return max(products, other, tile.stage_bytes / L2_BYTES_PER_CLOCK, chain) + 0.25 * min(products, other)


def stage_of(p: Product, tile: Tile, target: Target, epilogue: str, arguments: Sequence[Argument]) -> Stage:
    """The launch of smxx_tf32_gemm.cuh with an epilogue: its C++ type, and what it takes."""
    split = tile.splits > 1
    workspace = (Param("scratch", 0), Param("counters", 0)) if split else (NULL, NULL)
    template = f"{tile.cuda}, {epilogue}, {'true' if split else 'false'}, {types_of(arguments)}"
    return Stage(
        source="smxx_tf32_gemm.cuh",
        entry=f"frtc::smxx_tf32_gemm<{template}>",
        grid=tile.grid(p),
        block=32 * tile.warps,
        smem=tile.smem,
        params=(*p.params(), *workspace, *params_of(arguments)),
        waits=True,
    )


def _cuts_moments(tile: Tile) -> bool:
    """Whether 32 columns, of which a moment is, belong to several tiles."""
    return tile.bn % 32 > 0


MAINLOOP = Mainloop(
    "baseline", "smxx_tf32", mainloop_refuses, tiles_of, Tile.of, cost_us, stage_of, smxx_gemm.scratch_of,
    smxx_gemm.counters_of,
)  # fmt: skip
KERNELS = (
    *kernels_over(MAINLOOP, KIND),
    *moments.kernels_over(MAINLOOP, _cuts_moments),
)
