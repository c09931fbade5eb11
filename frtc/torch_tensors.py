"""Torch tensors for the IR's element types: made from arrays, widened for arithmetic, rounded once to be stored.

Imports torch: only the compile side loads this file.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frtc.kernels.dtypes import DTYPES
from frtc.lowering.ir import Type

Number = float | int | bool
Array = np.ndarray[Any, Any]

TORCH = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2,
    "i64": torch.int64, "i32": torch.int32, "i8": torch.int8, "u8": torch.uint8, "bool": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in TORCH.items()}
NUMPY = {dtype.numpy: name for name, dtype in DTYPES.items()}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}  # FP8 saturates; NaN stays NaN


def from_array(array: Array) -> Tensor:
    """A tensor of its own with the array's bits."""
    tensor = torch.empty(array.shape, dtype=TORCH[NUMPY[array.dtype]])
    bytes_of(tensor)[...] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return tensor


def to_array(tensor: Tensor) -> Array:
    """The tensor's bits as a NumPy array of the IR's element type."""
    there = tensor.detach().cpu().contiguous()
    return bytes_of(there).view(DTYPES[NAMES[tensor.dtype]].numpy).reshape(tuple(tensor.shape)).copy()


def bytes_of(tensor: Tensor) -> Array:
    """u8 [nbytes]: the memory of a contiguous tensor on the CPU."""
    found: Array = tensor.reshape(-1).view(torch.uint8).numpy()
    return found


def stored(x: Tensor, type: Type) -> Tensor:
    """x, rounded once to the element type of `type`; FP8 saturates."""
    wanted = TORCH[type.dtype]
    if x.dtype == wanted:
        return x
    most = LARGEST.get(type.dtype)
    return (x if most is None else x.clamp(-most, most)).to(wanted)


def widen(x: Tensor) -> Tensor:
    """A float tensor as fp32, or as it is if float64; anything else as it is."""
    return x if x.dtype == torch.float64 or not x.is_floating_point() else x.float()


def as_float(x: Tensor) -> Tensor:
    """`widen`, and integers and booleans as fp32."""
    return widen(x) if x.is_floating_point() else x.float()


def together(*operands: Tensor | Number) -> list[Tensor]:
    """Operands of one operation in one arithmetic type: fp32 where any is a float, float64 where any tensor is.

    A Python number has no type of its own: it takes that of the tensors.
    """
    tensors = [x for x in operands if isinstance(x, Tensor)]
    device = tensors[0].device if tensors else torch.device("cpu")
    floats = any(x.is_floating_point() if isinstance(x, Tensor) else isinstance(x, float) for x in operands)
    wide = torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32
    return [
        (x.to(wide) if floats else x) if isinstance(x, Tensor) else scalar(x, wide if floats else None, device)
        for x in operands
    ]


@lru_cache(maxsize=4096, typed=True)  # 1, 1.0 and True are three
def scalar(value: Number, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    """A number on the device; kept, so that it is sent there once."""
    return torch.tensor(value, dtype=dtype, device=device)


def bitwise(move: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`move` on FP8 tensors by their bytes: torch moves few 8-bit floats."""

    def apply(*xs: Tensor, **attrs: Any) -> Tensor:
        kind = xs[0].dtype
        if NAMES[kind] not in LARGEST:
            return move(*xs, **attrs)
        return move(*(x.view(torch.uint8) if x.dtype == kind else x for x in xs), **attrs).view(kind)

    return apply
