"""Element types: their names in IR text, Plans and kernels, and the NumPy type that stores them.

Rounding is to nearest, ties to even, and happens once: float64 values are never rounded through float32 on the way to a
16- or 8-bit type. e4m3 saturates: what exceeds 448 becomes 448, infinity too; NaN stays NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True, slots=True)
class DType:
    """One element type. `kind` is "float", "int" or "bool"; `cuda` is the type's name in device code."""

    name: str
    numpy: np.dtype
    kind: str
    cuda: str

    @property
    def itemsize(self) -> int:  # bytes
        return self.numpy.itemsize


DTYPES: dict[str, DType] = {
    t.name: t
    for t in (
        DType("f64", np.dtype(np.float64), "float", "double"),
        DType("f32", np.dtype(np.float32), "float", "float"),
        DType("f16", np.dtype(np.float16), "float", "__half"),
        DType("bf16", np.dtype(ml_dtypes.bfloat16), "float", "__nv_bfloat16"),
        DType("e4m3", np.dtype(ml_dtypes.float8_e4m3fn), "float", "__nv_fp8_e4m3"),
        DType("e5m2", np.dtype(ml_dtypes.float8_e5m2), "float", "__nv_fp8_e5m2"),
        DType("i64", np.dtype(np.int64), "int", "long long"),
        DType("i32", np.dtype(np.int32), "int", "int"),
        DType("i8", np.dtype(np.int8), "int", "signed char"),
        DType("u8", np.dtype(np.uint8), "int", "unsigned char"),
        DType("bool", np.dtype(np.bool_), "bool", "bool"),
    )
}


def is_float(name: str) -> bool:
    return DTYPES[name].kind == "float"


def round_to(values: np.ndarray, name: str) -> np.ndarray:
    """`values` (any shape) stored as element type `name`, rounded once."""
    target = DTYPES[name]
    if values.dtype == target.numpy:
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        if values.dtype == np.float64 and target.kind == "float" and target.itemsize < 4:
            values = _for_bf16(values) if name == "bf16" else _to_odd_f32(values)
        if name == "e4m3":
            values = np.clip(values.astype(np.float32, copy=False), -448, 448)
        return values.astype(target.numpy)


def _for_bf16(values: np.ndarray) -> np.ndarray:
    """float64 to float32, so that rounding to bf16 equals a single rounding of `values`.

    bf16 is the upper half of float32, subnormals too: two roundings differ from one only where the first ends exactly
    between two bf16 numbers. There, and only there, it rounds to odd: four times as quick as everywhere.
    """
    near = np.array(values, np.float32, order="C")
    flat = near.reshape(-1)
    between = np.flatnonzero((flat.view(np.uint32) & np.uint32(0xFFFF)) == 0x8000)
    if between.size:
        flat[between] = _to_odd_f32(values.reshape(-1)[between])
    return near


def _to_odd_f32(values: np.ndarray) -> np.ndarray:
    """float64 to float32, rounding to odd, so that a second rounding to <= 11 bits equals a single one.

    Source: Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd".
    """
    near = values.astype(np.float32)
    back = near.astype(np.float64)
    inexact = (back != values) & np.isfinite(near)
    away = np.abs(back) > np.abs(values)
    bits = near.view(np.uint32)
    truncated = np.where(inexact & away, bits - np.uint32(1), bits)
    return np.where(inexact, truncated | np.uint32(1), truncated).view(np.float32)
