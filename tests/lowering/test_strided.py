"""Strided views against NumPy: whatever NumPy expresses without a copy we express, with the same strides."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from frtc.lowering.strided import Strided

Chain = list[tuple[str, tuple[int, ...]]]


def elements(view: Strided, storage: np.ndarray) -> np.ndarray:
    size = storage.itemsize
    return as_strided(storage[view.offset :], view.shape, tuple(s * size for s in view.strides))


def random_chain(rng: np.random.Generator) -> tuple[Strided | None, np.ndarray]:
    """A few random view ops on a random array, as Strided and as NumPy view; None where elements would have to move."""
    shape = tuple(int(n) for n in rng.integers(1, 5, rng.integers(1, 5)))
    storage = np.arange(int(np.prod(shape)))
    array, view = storage.reshape(shape), Strided.packed(shape)
    for _ in range(4):
        kind = rng.integers(4)
        if kind == 0:
            perm = tuple(int(p) - array.ndim for p in rng.permutation(array.ndim))
            array, view = array.transpose([p % array.ndim for p in perm]), view.transpose(perm)
        elif kind == 1:
            axis = int(rng.integers(array.ndim))
            start = int(rng.integers(array.shape[axis]))
            step = int(rng.integers(1, 3))
            index = [slice(None)] * array.ndim
            index[axis] = slice(start, array.shape[axis], step)
            view = view.slice(axis - array.ndim, start, array.shape[axis], step)
            array = array[tuple(index)]
        elif kind == 2 and array.ndim < 5:
            wide = (2, *array.shape)
            array, view = np.broadcast_to(array, wide), view.broadcast(wide)
        else:
            flat = (array.size,) if rng.integers(2) else (*array.shape[:-1], 1, array.shape[-1])
            moved = view.reshape(flat)
            shares = np.shares_memory(array.reshape(flat), storage)
            assert (moved is not None) == shares, (view, flat)
            if moved is None:
                return None, storage
            array, view = array.reshape(flat), moved
    np.testing.assert_array_equal(elements(view, storage), array)
    return view, storage


@pytest.mark.parametrize("seed", range(300))
def test_chains_of_view_ops_equal_numpy(seed: int) -> None:
    random_chain(np.random.default_rng(seed))


def test_a_reshape_across_a_transpose_moves_elements() -> None:
    assert Strided.packed((4, 6)).transpose((-1, -2)).reshape((24,)) is None


def test_packed_ignores_strides_of_single_elements() -> None:
    assert Strided((1, 4), (99, 1)).is_packed
    assert not Strided((2, 4), (5, 1)).is_packed
    assert not Strided((2, 4), (4, 1), offset=1).is_packed
    assert Strided((2, 4), (5, 1), 3).last == 11
