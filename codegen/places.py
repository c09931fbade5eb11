"""Where values live: buffers, and places in them.

A Buffer is bytes in one space; its offset is known once memory is planned. A Place is a strided view of a buffer. Rows
(the last axis) start at multiples of 16 bytes, long ones of 128 (runtime/plan.py), so that kernels may load vectors
whatever the model's sizes are.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from frtc.codegen.weights import padded_row
from frtc.kernels.dtypes import DTYPES
from frtc.kernels.spec import Operand
from frtc.lowering.ir import Type
from frtc.lowering.strided import Strided
from frtc.runtime.plan import ROW_ALIGN, Ref


@dataclass(eq=False, slots=True)
class Buffer:
    """`nbytes` in a space; `offset` is set by the memory plan."""

    space: str
    nbytes: int
    slot: str = ""
    offset: int = field(default=-1)


@dataclass(frozen=True, slots=True)
class Place:
    """A value of element type `dtype` in a buffer; `strided` counts elements, `step` bytes per round of a repeat."""

    buffer: Buffer
    dtype: str
    strided: Strided
    step: int = 0

    def ref(self) -> Ref:
        at = self.buffer.offset + self.strided.offset * DTYPES[self.dtype].itemsize
        assert self.buffer.offset >= 0, "memory is not planned yet"
        return Ref(
            self.buffer.space, at, self.dtype, self.strided.shape, self.strided.strides, self.step, self.buffer.slot
        )

    def operand(self) -> Operand:
        at = self.strided.offset * DTYPES[self.dtype].itemsize
        aligned = at % ROW_ALIGN == 0 and self.step % ROW_ALIGN == 0
        return Operand(self.dtype, self.strided.shape, self.strided.strides, aligned)

    def view(self, packed: Strided) -> Place | None:
        """The view that `packed` describes in terms of a gapless value; None if the gaps make it inexpressible."""
        moved = through(packed, self.strided)
        return None if moved is None else Place(self.buffer, self.dtype, moved, self.step)


def padded(type: Type) -> Strided:
    """Row-major, each row at the pitch of rows."""
    if type.rank < 2:
        return Strided.packed(type.shape)
    inner = Strided.packed((*type.shape[:-1], padded_row(type)))
    return Strided(type.shape, inner.strides)


def storage_nbytes(type: Type) -> int:
    """Bytes of a value in padded rows."""
    rows = type.size // max(type.shape[-1], 1) if type.shape else 1
    return rows * padded_row(type) * DTYPES[type.dtype].itemsize


def new_place(space: str, type: Type, slot: str = "") -> Place:
    """A buffer of its own for a value; slots are packed, as callers hand them over."""
    if slot:
        return Place(Buffer(space, type.nbytes, slot, 0), type.dtype, Strided.packed(type.shape))
    return Place(Buffer(space, storage_nbytes(type)), type.dtype, padded(type))


def through(view: Strided, place: Strided) -> Strided | None:
    """`view` is over the packed elements of a value that lies at `place`: the same view over the place's storage."""
    packed = Strided.packed(place.shape)
    if place.strides == packed.strides:
        return Strided(view.shape, view.strides, view.offset + place.offset)
    at = _locate(np.array([view.offset]), place)[0]
    strides = []
    for extent, stride in zip(view.shape, view.strides, strict=True):
        where = _locate(view.offset + stride * np.arange(max(extent, 1)), place) - at
        step = int(where[1]) if extent > 1 else 0
        if not np.array_equal(where, step * np.arange(max(extent, 1))):
            return None
        strides.append(step)
    # linear along each axis; the corners show that the axes add up
    for corner in itertools.product(*((0, n - 1) for n in view.shape)):
        element = view.offset + sum(c * s for c, s in zip(corner, view.strides, strict=True))
        if _locate(np.array([element]), place)[0] != at + sum(c * s for c, s in zip(corner, strides, strict=True)):
            return None
    return Strided(view.shape, tuple(strides), int(at))


def _locate(elements: np.ndarray, place: Strided) -> np.ndarray:
    """Storage positions of row-major element numbers of the value at `place`."""
    position = np.full(elements.shape, place.offset, np.int64)
    rest = elements.astype(np.int64)
    for extent, stride in zip(reversed(place.shape), reversed(place.strides), strict=True):
        rest, digit = np.divmod(rest, extent)
        position += digit * stride
    return position
