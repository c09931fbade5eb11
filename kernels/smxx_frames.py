"""Camera frames to `images`, in device memory: the launch and the records it reads. No op of the IR asks for it: what
it does is the policy's image step, and runtime/frames.py launches it where a Plan holds its cubin."""

from __future__ import annotations

import numpy as np

from frtc.kernels.spec import Param, Stage

# The cubin's name among a Plan's files. The number is that of the parameters and records below: a reader that knows
# another one leaves the cubin alone and resizes on the host.
CUBIN = "frames.1"
ELEMENTS, GROUPS, ROWS = 96, 2, 4
THREADS = ELEMENTS * GROUPS
PARAMETERS = (8, 8, 8)  # bytes: cameras, images, range
RULES = {"pil_bilinear": 0, "torch_bilinear01": 1, "torch_bilinear": 2}

TAP = np.dtype([("index", "<i4"), ("weight", "<i4")])  # weight: in 2**-22, or the bits of a float
# What the kernel knows of a camera; smxx_frames.cuh says what the fields are.
CAMERA = np.dtype(
    [("frame", "<u8"), ("across", "<u8"), ("down", "<u8"), ("row", "<i8"), ("column", "<i8"), ("channel", "<i8")]
    + [(name, "<i4") for name in ("across_taps", "down_taps", "height", "width", "top", "left", "size", "is_float")]
    + [("rule", "<i4"), ("border", "<f4"), ("serial", "<u4"), ("unused", "<u4")]
)


def grid_of(views: int, size: int) -> tuple[int, int, int]:
    """Blocks for `views` pictures of [size, size, 3]."""
    return -(-3 * size // ELEMENTS), -(-size // ROWS), views


def stage(views: int, size: int) -> Stage:
    """The launch. The cubin is the same for all numbers of views and sizes."""
    params = (Param("operand", 0), Param("result", 0), Param("result", 1))
    return Stage("smxx_frames.cuh", "frtc::frames", grid_of(views, size), THREADS, 0, params)
