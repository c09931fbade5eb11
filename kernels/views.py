"""Strided views as kernels want them: few axes, and one step per row."""

from __future__ import annotations

from collections.abc import Sequence

from frtc.kernels.dtypes import DTYPES
from frtc.kernels.spec import Operand

Strides = tuple[int, ...]


def broadcast_strides(operand: Operand, shape: Sequence[int]) -> Strides:
    """Strides of the operand seen in `shape` by NumPy's rule: 0 along axes that it repeats."""
    missing = len(shape) - len(operand.shape)
    own = zip(operand.shape, operand.strides, shape[missing:], strict=True)
    return (0,) * missing + tuple(step if extent == wanted else 0 for extent, step, wanted in own)


def collapse(shape: Sequence[int], strides: Sequence[Strides]) -> tuple[tuple[int, ...], list[Strides]]:
    """The fewest axes that visit the same elements in the same order, for several views of one shape at once.

    Axes of extent 1 go; neighbours merge where every view steps through both as through one.
    """
    axes: list[tuple[int, list[int]]] = []
    for axis, extent in enumerate(shape):
        steps = [view[axis] for view in strides]
        if extent == 1:
            continue
        if axes and all(outer == inner * extent for outer, inner in zip(axes[-1][1], steps, strict=True)):
            axes[-1] = (axes[-1][0] * extent, steps)
        else:
            axes.append((extent, steps))
    return tuple(extent for extent, _ in axes), [tuple(steps[i] for _, steps in axes) for i in range(len(strides))]


def row_steps(shape: Sequence[int], operands: Sequence[Operand | None]) -> tuple[int, list[int]] | None:
    """(rows, elements from one row of each operand to the next) with all leading axes of `shape` as one; or None.

    An absent operand has step 0. The last axis is not looked at.
    """
    strides = [broadcast_strides(o, shape)[:-1] if o else (0,) * (len(shape) - 1) for o in operands]
    merged, steps = collapse(shape[:-1], strides)
    if len(merged) > 1:
        return None
    return (merged[0], [view[0] for view in steps]) if merged else (1, [0] * len(operands))


def last_axis_is_dense(operand: Operand | None, extent: int) -> bool:
    """Whether the last axis has `extent` elements next to each other."""
    return operand is None or (operand.shape[-1:] == (extent,) and (operand.strides[-1] == 1 or extent == 1))


def moves_as_vectors(operand: Operand) -> bool:
    """Whether every run along the last axis begins at a multiple of 16 bytes, in every round of a loop."""
    size = DTYPES[operand.dtype].itemsize
    steps = zip(operand.shape[:-1], operand.strides[:-1], strict=True)
    return operand.aligned and all(extent == 1 or stride * size % 16 == 0 for extent, stride in steps)
