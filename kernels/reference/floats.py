"""The arithmetic type of a reference: fp32, or float64 where an operand is float64.

References take operands in their storage type and return unrounded results; who calls them rounds once to the result's
type. Integers and booleans stay what they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from frtc.kernels.dtypes import DTYPES

Array = NDArray[Any]

_NAMES = {dtype.numpy: name for name, dtype in DTYPES.items()}
_FLOATS = {dtype.numpy for dtype in DTYPES.values() if dtype.kind == "float"}
_E4M3 = DTYPES["e4m3"].numpy
_OF_E4M3 = np.arange(256, dtype=np.uint8).view(_E4M3).astype(np.float32)


def name_of(x: Array) -> str:
    """The IR's name of an array's element type: "bf16"."""
    return _NAMES[x.dtype]


def is_float(x: Array) -> bool:
    return x.dtype in _FLOATS


def widen(x: Array) -> Array:
    """A float array as fp32, or as it is if float64; anything else as it is."""
    if x.dtype == _E4M3 and x.ndim:  # a third of the time that a cast takes
        return _OF_E4M3[x.view(np.uint8)]
    return x if x.dtype == np.float64 or not is_float(x) else x.astype(np.float32, copy=False)


def as_float(x: Array) -> Array:
    """`widen`, and integers and booleans as fp32."""
    return widen(x) if is_float(x) else x.astype(np.float32)


def together(*operands: Array | float | bool) -> list[Array]:
    """Operands of one operation in one arithmetic type.

    Where any is a float, all become fp32 (float64 where any array is); otherwise integers and booleans stay. A Python
    number has no type of its own: it takes that of the arrays.
    """
    arrays = [np.asarray(x) for x in operands]
    typed = [x for x, given in zip(arrays, operands, strict=True) if isinstance(given, np.ndarray | np.generic)]
    if not any(is_float(x) for x in arrays):
        return arrays
    wide = np.float64 if any(x.dtype == np.float64 for x in typed) else np.float32
    return [x.astype(wide, copy=False) for x in arrays]
