"""Device memory of the caller, seen through DLPack or `__cuda_array_interface__`: address, type and shape, no copy.

Layout of DLPack structures: dlpack.h, version 0.8 (github.com/dmlc/dlpack); of the array interface: Numba's
documentation of the CUDA array interface, version 3.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
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
    """An array on GPU `device`, row-major without gaps unless that was not asked. `owner` keeps the memory alive.

    strides   in elements
    made_on   stream that the array's owner still works on; None: none, or it has made sure itself
    """

    address: int
    dtype: str
    shape: tuple[int, ...]
    device: int | None  # None: not said
    owner: Any
    strides: tuple[int, ...] = ()
    made_on: int | None = None

    @staticmethod
    def of(array: Any, gapless: bool = True, stream: int = NO_SYNC) -> DeviceArray:
        """stream: ours; the owner of a DLPack array has it wait for its own work."""
        if hasattr(array, "__dlpack__"):
            found = _from_dlpack(array, stream)
        elif hasattr(array, "__cuda_array_interface__"):
            found = _from_interface(array)
        else:
            name = type(array).__name__
            what = f"{name} is no array on the GPU: it offers neither DLPack nor __cuda_array_interface__"
            raise UsageError("slot.array", what)
        if gapless:
            _require_gapless(found.shape, found.strides)
        return found

    def meets(self, other: DeviceArray) -> bool:
        """Whether two arrays without gaps have a byte in common."""
        ends = [x.address + math.prod(x.shape) * DTYPES[x.dtype].itemsize for x in (self, other)]
        return self.address < ends[1] and other.address < ends[0]

    @property
    def byte_strides(self) -> tuple[int, ...]:
        return tuple(step * DTYPES[self.dtype].itemsize for step in self.strides)

    def transposed(self, order: tuple[int, ...]) -> DeviceArray:
        shape, strides = (tuple(of[axis] for axis in order) for of in (self.shape, self.strides))
        return replace(self, shape=shape, strides=strides)

    def reversed(self, axis: int) -> DeviceArray:
        """The view that runs backwards along an axis."""
        steps, nbytes = list(self.strides), DTYPES[self.dtype].itemsize
        address = self.address + (self.shape[axis] - 1) * steps[axis] * nbytes
        steps[axis] = -steps[axis]
        return replace(self, address=address, strides=tuple(steps))


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


def _from_dlpack(array: Any, stream: int) -> DeviceArray:
    kind, number = array.__dlpack_device__()
    if int(kind) not in (CUDA, CUDA_MANAGED):
        raise UsageError("slot.array", "the array is not in GPU memory")
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    try:
        capsule = array.__dlpack__(stream=stream)  # never marked as used: it releases the array when it is dropped
        tensor = _Tensor.from_address(pointer(capsule, b"dltensor"))
    except Exception as fault:  # whatever its owner raises, of a tensor that needs gradients for instance; no capsule
        raise UsageError("slot.array", f"the array is not shared: {fault}") from None
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else _packed(shape)
    dtype = KINDS.get((tensor.code, tensor.bits), "") if tensor.lanes == 1 else ""
    return DeviceArray((tensor.data or 0) + tensor.byte_offset, dtype, shape, int(number), (array, capsule), strides)


def _from_interface(array: Any) -> DeviceArray:
    about = array.__cuda_array_interface__
    try:
        stored, shape = np.dtype(about["typestr"]), tuple(int(n) for n in about["shape"])
        steps = about.get("strides") or tuple(step * stored.itemsize for step in _packed(shape))
        address, stream = int(about["data"][0] or 0), about.get("stream")
        strides = tuple(int(step) // stored.itemsize for _, step in zip(shape, steps, strict=True))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as fault:
        raise UsageError("slot.array", f"the array says nonsense of itself: {fault!r}") from None
    if any(step % stored.itemsize for step in steps):
        raise UsageError("slot.array", f"the array has strides of {list(steps)} bytes for {stored}")
    dtype = next((t.name for t in DTYPES.values() if t.numpy == stored), "")
    return DeviceArray(address, dtype, shape, None, array, strides, stream)


def _packed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _require_gapless(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    if any(n > 1 and a != b for n, a, b in zip(shape, strides, _packed(shape), strict=True)):
        raise UsageError("slot.array", f"the array has strides {list(strides)}: slots are row-major, without gaps")
