"""linear_moments on wgmma: the products of sm90_gemm with the epilogue of moments.cuh."""

from __future__ import annotations

from frtc.kernels import sm90_gemm
from frtc.kernels.moments import kernels_over


def _spills(tile: sm90_gemm.Tile) -> bool:
    """Whether 192 accumulators and moments are too much for 232 registers, or sums of others beside 64 for 255."""
    return tile.blocks * tile.wn > 256 or (tile.split > 1 and tile.warpgroups == 1 and tile.wn >= 128)


KERNELS = kernels_over(sm90_gemm.MAINLOOP, _spills)
