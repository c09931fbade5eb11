"""Targets whose machine code the CPU tier compiles kernel by kernel: others in full runs, samples in test_cubins."""

from __future__ import annotations

import pytest

from frtc.kernels.targets import load_targets

IN_TIER = ("hopper", "rtx4090")  # what is run on hardware; FP8 in mma.sync with the shared memory of a workstation
COMPILED = [
    pytest.param(target, id=name, marks=() if name in IN_TIER else pytest.mark.full)
    for name, target in load_targets().items()
]
