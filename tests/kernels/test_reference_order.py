"""Products in float64, which folds are made of: the same bits whatever the blocks, the layout and the neighbours."""

from __future__ import annotations

import numpy as np
import pytest

from frtc.kernels.reference import linear as module
from frtc.kernels.reference.linear import linear, matmul

ROWS, K, N = 7, 300, 50


def operands() -> tuple[np.ndarray, np.ndarray]:
    """Values of very different sizes: any other order of additions shows."""
    rng = np.random.default_rng(3)
    x, w = (rng.standard_normal((n, K)) * 10.0 ** rng.integers(-6, 7, (n, K)) for n in (ROWS, N))
    return x, w


def one_by_one(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The definition: for each element a sum from k = 0 on, each product rounded before it is added."""
    y = np.zeros((len(x), len(w)))
    for i, row in enumerate(x.tolist()):
        for j, column in enumerate(w.tolist()):
            total = 0.0
            for a, b in zip(row, column, strict=True):
                total += a * b
            y[i, j] = total
    return y


def test_sum_is_in_order() -> None:
    x, w = operands()
    assert np.array_equal(linear(x, w), one_by_one(x, w))
    assert not np.array_equal(x @ w.T, one_by_one(x, w)), "any order gives these bits: the test proves nothing"


@pytest.mark.parametrize("sums", [1, 100, 1000, 1 << 20])
def test_blocks_change_nothing(sums: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = operands()
    wide = np.concatenate([w] * 5)
    whole = linear(x, wide)
    monkeypatch.setattr(module, "SUMS_AT_ONCE", sums)
    assert np.array_equal(linear(x, wide), whole)


def test_rows_and_columns_alone() -> None:
    """A piece of a weight has the bits of the whole: the Plan is written in pieces."""
    x, w = operands()
    whole = linear(x, w)
    assert np.array_equal(linear(x[2:3], w), whole[2:3])
    assert np.array_equal(linear(x[2], w), whole[2])
    assert np.array_equal(linear(x, w[5:17]), whole[:, 5:17])
    order = np.random.default_rng(0).permutation(N)
    assert np.array_equal(linear(x, w[order]), whole[:, order])


def test_layout_changes_nothing() -> None:
    x, w = operands()
    whole = linear(x, w)
    assert np.array_equal(linear(np.asfortranarray(x), np.asfortranarray(w)), whole)
    assert np.array_equal(matmul(x, w.T), whole)
    assert np.array_equal(matmul(x[None], np.broadcast_to(w.T, (3, K, N))), np.broadcast_to(whole, (3, ROWS, N)))


def test_order_of_k_matters() -> None:
    """The order is fixed, not irrelevant."""
    x, w = operands()
    assert not np.array_equal(linear(x[:, ::-1], w[:, ::-1]), linear(x, w))
