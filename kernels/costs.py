"""What kernels that only move data cost: a launch, and their bytes at the target's memory bandwidth."""

from __future__ import annotations

from collections.abc import Iterable

from frtc.kernels.spec import Operand
from frtc.kernels.targets import Target

# From one small kernel to the next in a chain of graph nodes: 0.97 us for 132 blocks of 256 threads on an H200.
LAUNCH_US = 1.0


def moving_us(views: Iterable[Operand | None], target: Target) -> float:
    """A kernel that reads or writes each view once."""
    return LAUNCH_US + sum(view.nbytes for view in views if view is not None) / target.dram * 1e6
