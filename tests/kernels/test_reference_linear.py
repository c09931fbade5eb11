"""References of the products of matrices, against their formulas in float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from frtc.kernels.reference import linear as module
from frtc.kernels.reference.linear import gated_linear, linear, matmul

Array = np.ndarray[Any, Any]


def draw(*shape: int, dtype: Any = np.float32) -> Array:
    values: Array = np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)
    return values


def silu(x: Array) -> Array:
    y: Array = x / (1 + np.exp(-x))
    return y


def test_linear_applies_its_operands_in_order() -> None:
    x, w, b, r, g = draw(2, 5, 24), draw(7, 24), draw(7), draw(2, 5, 7), draw(7)
    x64, w64 = x.astype(np.float64), w.astype(np.float64)
    want = r + g * silu(x64 @ w64.T + b)
    assert np.abs(linear(x, w, b, r, g, act="silu") - want).max() < 1e-5
    assert np.abs(linear(x, w) - x64 @ w64.T).max() < 1e-5
    assert linear(x, w).dtype == np.float32 and linear(x64, w64).dtype == np.float64


def test_operands_are_read_in_their_storage_type_and_the_result_is_not_rounded() -> None:
    x, w = draw(3, 64, dtype=ml_dtypes.bfloat16), draw(5, 64, dtype=ml_dtypes.bfloat16)
    want = x.astype(np.float64) @ w.astype(np.float64).T
    assert np.abs(linear(x, w) - want).max() < 1e-5


def test_one_row_without_leading_axes() -> None:
    x, w = draw(24), draw(7, 24)
    assert np.allclose(linear(x, w), linear(x[None], w)[0])
    assert np.allclose(linear(x.astype(np.float64), w), linear(x, w), atol=1e-5)


def test_interleaved_rows_are_gate_and_up() -> None:
    x, gate, up = draw(5, 24), draw(6, 24), draw(6, 24)
    both = np.stack([gate, up], axis=1).reshape(12, 24)
    want = gated_linear(x, gate, up, act="gelu_tanh")
    assert np.allclose(gated_linear(x, both, act="gelu_tanh"), want, atol=1e-5)
    assert np.allclose(gated_linear(x, gate, up, act="silu"), silu(x @ gate.T) * (x @ up.T), atol=1e-5)


def test_weights_in_pieces_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = draw(4, 24), draw(37, 24, dtype=np.float16)
    whole = linear(x, w)
    monkeypatch.setattr(module, "WIDENED_AT_ONCE", 24 * 5)
    assert np.allclose(linear(x, w), whole, atol=1e-6)


def test_float64_adds_one_product_after_the_other() -> None:
    """The bits of a fold must not depend on how a library orders its sums."""
    a, b = draw(2, 3, 17, dtype=np.float64), draw(17, 4, dtype=np.float64)
    want = np.zeros((2, 3, 4))
    for index in np.ndindex(2, 3, 4):
        total = 0.0
        for k in range(17):
            total += float(a[index[0], index[1], k]) * float(b[k, index[2]])
        want[index] = total
    assert (matmul(a, b) == want).all()
    assert (linear(a, np.ascontiguousarray(b.T)) == want).all()
