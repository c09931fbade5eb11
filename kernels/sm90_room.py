"""How many blocks of Hopper's own kernels its SMs take at a time."""

from __future__ import annotations

from frtc.kernels.targets import KiB, Target

# Blocks of clusters of this size that an H200 holds at once, one on an SM: its GPCs have 16 or 18 SMs.
CLUSTERED = {1: 132, 2: 132, 4: 120, 8: 112}


def fitting(smem: int, target: Target) -> int:
    """Blocks of so many bytes of shared memory on an SM."""
    return target.smem_per_sm // (smem + KiB)


def alone(used: int, target: Target) -> int:
    """Bytes that a block which uses so many asks for, so that no SM takes two.

    A launch that begins early finds some SMs free before others; of small blocks those take two, and the launch is as
    slow as they are. But blocks of the next launch do not fit beside large ones.
    """
    return max(used, target.smem_per_sm // 2)
