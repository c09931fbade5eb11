"""Device memory of the caller, seen through DLPack or `__cuda_array_interface__`: address, type and shape, no copy.

Layout of DLPack structures: dlpack.h, version 0.8 (github.com/dmlc/dlpack); of the array interface: Numba's
documentation of the CUDA array interface, version 3.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from frtc.errors import UsageError
from frtc.kernels.dtypes import DTYPES

CUDA, CUDA_MANAGED = 2, 13  # kDLCUDA, kDLCUDAManaged
NO_SYNC = -1  # the caller orders its work on the stream
KINDS = {
    (0, 8): "i8", (0, 32): "i32", (0, 64): "i64", (1, 8): "u8", (2, 16): "f16", (2, 32): "f32", (2, 64): "f64",
    (4, 16): "bf16", (6, 8): "bool", (10, 8): "e4m3", (12, 8): "e5m2",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """A gapless, row-major array on GPU `device`. `owner` keeps the memory alive."""

    address: int
    dtype: str
    shape: tuple[int, ...]
    device: int | None  # None: not said
    owner: Any

    @staticmethod
    def of(array: Any) -> DeviceArray:
        if hasattr(array, "__dlpack__"):
            return _from_dlpack(array)
        if hasattr(array, "__cuda_array_interface__"):
            return _from_interface(array)
        what = f"{type(array).__name__} is no array on the GPU: it offers neither DLPack nor __cuda_array_interface__"
        raise UsageError("slot.array", what)


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


def _from_dlpack(array: Any) -> DeviceArray:
    kind, number = array.__dlpack_device__()
    if int(kind) not in (CUDA, CUDA_MANAGED):
        raise UsageError("slot.array", "the array is not in GPU memory")
    capsule = array.__dlpack__(stream=NO_SYNC)  # never marked as used: it releases the array when it is dropped
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    tensor = _Tensor.from_address(pointer(capsule, b"dltensor"))
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else None
    dtype = KINDS.get((tensor.code, tensor.bits), "") if tensor.lanes == 1 else ""
    _require_gapless(shape, strides)
    return DeviceArray((tensor.data or 0) + tensor.byte_offset, dtype, shape, int(number), (array, capsule))


def _from_interface(array: Any) -> DeviceArray:
    about = array.__cuda_array_interface__
    stored = np.dtype(about["typestr"])
    dtype = next((t.name for t in DTYPES.values() if t.numpy == stored), "")
    shape, strides = tuple(about["shape"]), about.get("strides")
    _require_gapless(shape, strides and tuple(s // stored.itemsize for s in strides))
    return DeviceArray(about["data"][0] or 0, dtype, shape, None, array)


def _require_gapless(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> None:
    packed = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    if strides and any(n > 1 and a != b for n, a, b in zip(shape, strides, packed, strict=True)):
        raise UsageError("slot.array", f"the array has strides {list(strides)}: slots are row-major, without gaps")
