"""Places: padded rows, and which views of a value with gaps between its rows are strided views again."""

from __future__ import annotations

import random

import numpy as np
import pytest

from frtc.codegen.places import Buffer, Place, new_place, padded, storage_nbytes, through
from frtc.lowering.ir import Type
from frtc.lowering.strided import Strided
from frtc.runtime.plan import ARENA, SLOT


@pytest.mark.parametrize(
    ("type", "strides", "nbytes"),
    [
        (Type("bf16", (3, 9)), (16, 1), 3 * 32),
        (Type("f32", (2, 3, 9)), (36, 12, 1), 6 * 48),
        (Type("bf16", (3, 16)), (16, 1), 3 * 32),
        (Type("u8", (5, 1)), (16, 1), 5 * 16),
        (Type("bf16", (9,)), (1,), 18),  # one row has no next one
        (Type("f32", ()), (), 4),
    ],
)
def test_rows_start_at_multiples_of_16_bytes(type: Type, strides: tuple[int, ...], nbytes: int) -> None:
    assert padded(type).strides == strides and storage_nbytes(type) == nbytes
    assert new_place(ARENA, type).buffer.nbytes == nbytes


def test_slots_are_packed_as_callers_hand_them_over() -> None:
    place = new_place(SLOT, Type("bf16", (3, 9)), "x")
    assert place.strided == Strided.packed((3, 9)) and place.buffer.nbytes == 54
    assert place.ref().slot == "x" and place.ref().offset == 0


def test_a_ref_counts_bytes_and_needs_a_memory_plan() -> None:
    place = Place(Buffer(ARENA, 96), "bf16", Strided((2, 4), (16, 1), 5), step=32)
    with pytest.raises(AssertionError, match="not planned"):
        place.ref()
    place.buffer.offset = 512
    ref = place.ref()
    assert (ref.offset, ref.strides, ref.step) == (522, (16, 1), 32)


def test_views_of_padded_rows() -> None:
    rows = padded(Type("bf16", (4, 6)))  # 8 elements from row to row
    assert through(Strided((6, 4), (1, 6)), rows) == Strided((6, 4), (1, 8))  # transposed
    assert through(Strided((2, 3), (12, 2), 7), rows) == Strided((2, 3), (16, 2), 9)  # every other row and column
    assert through(Strided((4, 2, 3), (6, 3, 1)), rows) == Strided((4, 2, 3), (8, 3, 1))  # heads
    assert through(Strided((24,), (1,)), rows) is None  # one row out of four: the gaps are in the way
    assert through(Strided((3, 8), (8, 1)), rows) is None
    assert through(Strided((24,), (1,)), Strided.packed((4, 6))) == Strided((24,), (1,))


def test_through_is_right_or_declines() -> None:
    """Against the addresses of every element; what it declines, no strides can say."""
    rng, expressed = random.Random(3), 0
    for _ in range(400):
        shape = tuple(rng.randrange(1, 5) for _ in range(rng.randrange(1, 4)))
        place = padded(Type(rng.choice(("bf16", "f32")), shape))
        view = _random_view(rng, shape)
        moved = through(view, place)
        wanted = _storage(place).reshape(-1)[_addresses(view)]
        if moved is not None:
            expressed += 1
            np.testing.assert_array_equal(_addresses(moved), wanted)
        else:
            assert not _is_strided(wanted)
    assert 100 < expressed < 400


def _random_view(rng: random.Random, shape: tuple[int, ...]) -> Strided:
    """Some reshape, permutation and slice that move no elements of a gapless value."""
    view = Strided.packed(shape)
    if rng.random() < 0.6:
        view = Strided.packed((int(np.prod(shape)),)) if rng.random() < 0.5 else Strided.packed(shape[::-1])
    axes = list(range(len(view.shape)))
    rng.shuffle(axes)
    view = view.transpose(tuple(a - len(axes) for a in axes))
    axis = rng.randrange(len(view.shape))
    start = rng.randrange(view.shape[axis])
    return view.slice(axis - len(view.shape), start, view.shape[axis], rng.randrange(1, 3))


def _addresses(view: Strided) -> np.ndarray:
    at = np.full(view.shape, view.offset)
    for axis, (extent, stride) in enumerate(zip(view.shape, view.strides, strict=True)):
        at += (stride * np.arange(extent)).reshape((-1,) + (1,) * (len(view.shape) - axis - 1))
    return at


def _storage(place: Strided) -> np.ndarray:
    return _addresses(place)


def _is_strided(addresses: np.ndarray) -> bool:
    for axis in range(addresses.ndim):
        steps = np.diff(addresses, axis=axis)
        if steps.size and (steps != steps.reshape(-1)[0]).any():
            return False
    return True
