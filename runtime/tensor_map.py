"""Tensor maps: what the tensor memory accelerator takes, and the bytes that describe it to a kernel.

Rules and limits: CUDA driver API, cuTensorMapEncodeTiled.
"""

from __future__ import annotations

import ctypes
from typing import Any

from frtc.kernels.dtypes import DTYPES
from frtc.runtime.plan import Call, Ref, TensorMap

NBYTES = 128  # of an encoded map
SM_LEAST = 90
ALIGN = 16  # bytes; of addresses, strides and rows of boxes
RANK_MOST, BOX_MOST = 5, 256
EXTENT_MOST, STRIDE_MOST = 1 << 32, (1 << 40) - ALIGN
WIDE = 256  # bytes of a row from which L2 fetches that many at once
# The accelerator moves bytes: for e4m3 any type of one byte does.
DATA_TYPES = {"e4m3": "UINT8", "bf16": "BFLOAT16", "f16": "FLOAT16", "f32": "FLOAT32"}
SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}


def ref_of(map: TensorMap, call: Call) -> Ref | None:
    """What the map is of; None where the call has no such operand or result."""
    kind, index = map.of
    refs = {"operand": call.operands, "result": call.results}.get(kind, ())
    return refs[index] if 0 <= index < len(refs) else None


def refuse(map: TensorMap, call: Call) -> str:
    """Why the map cannot stand in the call, or "". Its Refs are sound already: a map inside one stays inside memory."""
    ref = ref_of(map, call)
    if ref is None:
        return f"of {map.of[0]} {map.of[1]}, which the call does not have"
    if map.dtype not in DATA_TYPES:
        return f"element type {map.dtype!r}"
    rank, size = len(map.extents), DTYPES[map.dtype].itemsize
    if not 1 <= rank <= RANK_MOST or len(map.box) != rank or len(map.strides) != rank - 1:
        return f"{rank} extents, {len(map.strides)} strides, box of {len(map.box)}"
    if not all(1 <= n <= EXTENT_MOST for n in map.extents):
        return f"extents {list(map.extents)}"
    if not all(0 <= n <= STRIDE_MOST and n % ALIGN == 0 for n in map.strides):
        return f"strides {list(map.strides)}"
    if ref.offset % ALIGN or ref.step % ALIGN:
        return f"starts at byte {ref.offset} and steps by {ref.step}: no multiples of {ALIGN}"
    row = map.box[0] * size
    if not all(1 <= n <= BOX_MOST for n in map.box) or row % ALIGN:
        return f"box {list(map.box)}"
    if map.swizzle not in SWIZZLES or 0 < map.swizzle < row:
        return f"rows of {row} bytes in a box, swizzled by {map.swizzle}"
    reach, room = _reach(map, size), _room(ref)
    return f"{reach} bytes, its {map.of[0]} has {room}" if reach > room else ""


def arguments(api: Any, map: TensorMap, address: int) -> list[Any]:
    """Of cuTensorMapEncodeTiled. Elements outside of the extents read as zeros."""
    rank = len(map.extents)
    promotion = "L2_256B" if map.extents[0] * DTYPES[map.dtype].itemsize >= WIDE else "L2_128B"
    return [
        getattr(api.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{DATA_TYPES[map.dtype]}"),
        rank,
        address,
        [api.cuuint64_t(n) for n in map.extents],
        [api.cuuint64_t(n) for n in map.strides or (ALIGN,)],  # one axis has none, but the driver looks at the address
        [api.cuuint32_t(n) for n in map.box],
        [api.cuuint32_t(1)] * rank,
        api.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(api.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{SWIZZLES[map.swizzle]}"),
        getattr(api.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{promotion}"),
        api.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    ]


class Cell(ctypes.Structure):
    """A kernel parameter: an encoded map by value."""

    _fields_ = (("words", ctypes.c_uint64 * (NBYTES // 8)),)


def cell_of(encoded: Any) -> Cell:
    return Cell.from_buffer_copy(ctypes.string_at(encoded.getPtr(), NBYTES))


def _reach(map: TensorMap, size: int) -> int:
    """Bytes from the first element to behind the last."""
    outer = sum((n - 1) * stride for n, stride in zip(map.extents[1:], map.strides, strict=True))
    return map.extents[0] * size + outer


def _room(ref: Ref) -> int:
    """Bytes of the Ref in one round."""
    if 0 in ref.shape:
        return 0
    reach = sum((n - 1) * stride for n, stride in zip(ref.shape, ref.strides, strict=True))
    return (reach + 1) * DTYPES[ref.dtype].itemsize
