"""References against torch (foreign code) in float64 and fp32, and the rules of types that all of them keep."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from frtc.kernels.dtypes import round_to
from frtc.kernels.reference import REFERENCES
from frtc.kernels.reference.floats import together
from frtc.lowering.ops import OPS

Array = np.ndarray[Any, Any]
BF16 = ml_dtypes.bfloat16


def draw(*shape: int, dtype: Any = np.float64, seed: int = 0) -> Array:
    values: Array = np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)
    return values


def tensor(x: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x))


def close(got: Array, want: torch.Tensor, bar: float) -> None:
    expected = want.numpy()
    assert got.shape == expected.shape
    error = np.linalg.norm((got - expected).astype(np.float64)) / np.linalg.norm(expected.astype(np.float64))
    assert error <= bar, error


def test_every_op_has_a_reference() -> None:
    assert set(OPS) == set(REFERENCES)


UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": torch.exp,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "sin": torch.sin,
    "cos": torch.cos,
    "floor": torch.floor,
    "neg": torch.neg,
    "abs": torch.abs,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_erf": F.gelu,
    "log": lambda x: torch.log(x.abs() + 0.5),
    "sqrt": lambda x: torch.sqrt(x.abs() + 0.5),
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 0.5),
}


@pytest.mark.parametrize("op", UNARY)
@pytest.mark.parametrize(("dtype", "bar"), [(np.float64, 1e-15), (np.float32, 2e-7)])
def test_unary(op: str, dtype: Any, bar: float) -> None:
    x = 3 * draw(40, 50, dtype=dtype)
    given = np.abs(x) + dtype(0.5) if op in ("log", "sqrt", "rsqrt") else x
    got = REFERENCES[op](given)
    assert got.dtype == dtype
    close(got, UNARY[op](tensor(x)), bar)


BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "mod": torch.remainder,
    "floor_div": torch.floor_divide,
}


@pytest.mark.parametrize("op", BINARY)
def test_binary(op: str) -> None:
    a, b = draw(40, 50), draw(50, seed=1)
    close(REFERENCES[op](a, b), BINARY[op](tensor(a), tensor(b)), 1e-15)
    i, j = (100 * a).astype(np.int64), (10 * np.abs(b)).astype(np.int64) + 1
    if op != "div":
        assert np.array_equal(REFERENCES[op](i, j), BINARY[op](tensor(i), tensor(j)).numpy())


def test_pow() -> None:
    a, b = np.abs(draw(40, 50)), draw(50)
    close(REFERENCES["pow"](a, b), torch.pow(tensor(a), tensor(b)), 1e-15)
    assert REFERENCES["pow"](np.array([2, 3]), np.array([5, 2])).tolist() == [32, 9]


def test_comparisons_and_logic() -> None:
    a, b = np.array([1.0, 2.0, np.nan]), np.array([2.0, 2.0, np.nan])
    wanted = {"eq": [0, 1, 0], "ne": [1, 0, 1], "lt": [1, 0, 0], "le": [1, 1, 0], "gt": [0, 0, 0], "ge": [0, 1, 0]}
    for op, values in wanted.items():
        assert REFERENCES[op](a, b).dtype == np.bool_ and REFERENCES[op](a, b).tolist() == values
    p, q = np.array([True, True, False]), np.array([True, False, False])
    assert REFERENCES["and"](p, q).tolist() == [True, False, False]
    assert REFERENCES["or"](p, q).tolist() == [True, True, False]
    assert REFERENCES["not"](p).tolist() == [False, False, True]
    assert REFERENCES["where"](p, a, 0.0).tolist() == [1.0, 2.0, 0.0]


def test_poles_and_overflow_in_float64() -> None:
    assert REFERENCES["exp"](np.array([800.0, -800.0, math.inf])).tolist() == [math.inf, 0.0, math.inf]
    assert REFERENCES["log"](np.array([0.0, 1.0])).tolist() == [-math.inf, 0.0]
    assert np.isnan(REFERENCES["log"](np.array([-1.0, math.nan]))).all()
    assert np.isnan(REFERENCES["sin"](np.array([math.inf]))).all()


def test_floats_meet_in_fp32_and_integers_stay() -> None:
    assert REFERENCES["add"](draw(3, dtype=BF16), draw(3, dtype=np.float16)).dtype == np.float32
    assert REFERENCES["add"](draw(3, dtype=BF16), draw(3)).dtype == np.float64
    assert REFERENCES["add"](draw(3, dtype=BF16), 2.5).dtype == np.float32, "a Python number has no type of its own"
    assert REFERENCES["mul"](np.arange(3), draw(3, dtype=BF16)).dtype == np.float32
    assert REFERENCES["mul"](np.arange(3), 2).dtype == np.int64
    assert REFERENCES["neg"](np.arange(3)).dtype == np.int64
    assert [x.dtype for x in together(True, np.arange(2))] == [np.bool_, np.int64]


def test_results_are_not_rounded() -> None:
    x = np.array([1.0], BF16)
    assert REFERENCES["div"](x, np.array([3.0], BF16))[0] == np.float32(1) / np.float32(3)


def test_cast() -> None:
    x = np.array([1.75, -1.75, 0.0], np.float32)
    assert REFERENCES["cast"](x, dtype="i32").tolist() == [1, -1, 0]
    assert REFERENCES["cast"](x, dtype="bool").tolist() == [True, True, False]
    assert REFERENCES["cast"](x, dtype="bf16").dtype == np.float32, "who calls rounds"
    assert REFERENCES["cast"](np.array([3]), dtype="bf16").dtype == np.float32


def test_pointwise_program() -> None:
    x, w = draw(4, 6, dtype=BF16), draw(6, dtype=np.float32)
    expr = (("mul", 0, 1), ("cast", 2, "bf16"), ("const", 2.0), ("add", 3, 4))
    product, total = REFERENCES["pointwise"](x, w, expr=expr, results=(2, 5), shape=(4, 6))
    want = x.astype(np.float32) * w
    assert np.array_equal(product, want)
    assert np.array_equal(total, round_to(want, "bf16").astype(np.float32) + 2)
    filled = REFERENCES["pointwise"](expr=(("const", 7.0),), results=(0,), shape=(2, 3))
    assert filled.shape == (2, 3) and filled.dtype == np.float32 and (filled == 7).all()


# ---- norms and rope -------------------------------------------------------------------------------------------------


def test_rms_norm() -> None:
    x, w = draw(5, 64), draw(64)
    close(REFERENCES["rms_norm"](x, w, eps=1e-6), F.rms_norm(tensor(x), (64,), tensor(w), 1e-6), 1e-15)
    close(REFERENCES["rms_norm"](x, w, eps=1e-6, offset=1.0), F.rms_norm(tensor(x), (64,), tensor(1 + w), 1e-6), 1e-15)
    close(REFERENCES["rms_norm"](x, None, eps=1e-6), F.rms_norm(tensor(x), (64,), None, 1e-6), 1e-15)


def test_rms_norm_rounds_inside_where_it_says_so() -> None:
    x, w = draw(5, 64, dtype=BF16), draw(64, dtype=BF16)
    plain = REFERENCES["rms_norm"](x, None, eps=1e-6)
    rounded = round_to(plain, "bf16").astype(np.float32) * w.astype(np.float32)
    assert np.array_equal(REFERENCES["rms_norm"](x, w, eps=1e-6, inner="bf16"), rounded)


def test_layer_norm() -> None:
    x, w, b = 100 + draw(5, 64), draw(64), draw(64, seed=1)
    close(
        REFERENCES["layer_norm"](x, w, b, eps=1e-6), F.layer_norm(tensor(x), (64,), tensor(w), tensor(b), 1e-6), 1e-13
    )
    close(REFERENCES["layer_norm"](x, None, None, eps=1e-6), F.layer_norm(tensor(x), (64,), None, None, 1e-6), 1e-13)


def test_ada_rms_norm() -> None:
    x, scale, shift = draw(5, 64), draw(64), draw(5, 64, seed=1)
    want = F.rms_norm(tensor(x), (64,), None, 1e-6) * (1 + tensor(scale)) + tensor(shift)
    close(REFERENCES["ada_rms_norm"](x, scale, shift, eps=1e-6), want, 1e-15)


@pytest.mark.parametrize("kind", ["rms", "layer", "ada"])
@pytest.mark.parametrize("gated", [False, True])
def test_residual_norm_normalises_the_rounded_sum(kind: str, gated: bool) -> None:
    x, r, w, b = (draw(5, 64, dtype=BF16, seed=i) for i in range(4))
    gate = draw(64, dtype=np.float32, seed=5) if gated else None
    s, y = REFERENCES["residual_norm"](x, r, gate, w, b, kind=kind, eps=1e-6, offset=1.0)
    step = r.astype(np.float32) * (1 if gate is None else gate)
    rounded = round_to(x.astype(np.float32) + step, "bf16")
    assert np.array_equal(round_to(s, "bf16"), rounded)
    single = {
        "rms": ("rms_norm", (w,), {"offset": 1.0}),
        "layer": ("layer_norm", (w, b), {}),
        "ada": ("ada_rms_norm", (w, b), {}),
    }
    op, vectors, attrs = single[kind]
    assert np.array_equal(y, REFERENCES[op](rounded, *vectors, eps=1e-6, **attrs))


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_rope_is_a_complex_product(pairing: str) -> None:
    x, angles = draw(2, 3, 5, 8), draw(5, 4, seed=1)
    pairs = (x[..., :4], x[..., 4:]) if pairing == "half" else (x[..., 0::2], x[..., 1::2])
    turned = (pairs[0] + 1j * pairs[1]) * np.exp(1j * angles)
    y = REFERENCES["rope"](x, np.cos(angles), np.sin(angles), pairing=pairing)
    got = (y[..., :4], y[..., 4:]) if pairing == "half" else (y[..., 0::2], y[..., 1::2])
    assert np.allclose(got[0], turned.real, atol=1e-14) and np.allclose(got[1], turned.imag, atol=1e-14)


def test_rope_qkv_is_a_split_and_two_ropes() -> None:
    x, angles = draw(5, 8 * 6), draw(5, 3, seed=1)
    cos, sin = np.cos(angles), np.sin(angles)
    q, k, v = REFERENCES["rope_qkv"](x, cos, sin, heads=4, kv_heads=2)
    heads = x.reshape(5, 8, 6).swapaxes(0, 1)
    assert np.array_equal(q, REFERENCES["rope"](heads[:4], cos, sin))
    assert np.array_equal(k, REFERENCES["rope"](heads[4:6], cos, sin))
    assert np.array_equal(v, heads[6:])


# ---- shapes and reductions ------------------------------------------------------------------------------------------


def test_moves_keep_bits() -> None:
    x = draw(2, 3, 4, dtype=BF16)
    assert np.array_equal(REFERENCES["reshape"](x, shape=(6, 4)), x.reshape(6, 4))
    assert np.array_equal(REFERENCES["transpose"](x, perm=(-1, -2)), x.swapaxes(1, 2))
    assert np.array_equal(REFERENCES["slice"](x, axis=-1, start=1, stop=4, step=2), x[..., 1:4:2])
    assert np.array_equal(REFERENCES["concat"](x, x[:, :1], axis=-2), np.concatenate([x, x[:, :1]], 1))
    assert np.array_equal(REFERENCES["broadcast"](x[:, :1], shape=(2, 3, 4)), np.repeat(x[:, :1], 3, 1))
    padded = REFERENCES["pad"](x, axis=-1, before=1, after=2, value=1.5)
    assert padded.dtype == BF16 and padded.shape == (2, 3, 7)
    assert (padded[..., 0] == 1.5).all() and (padded[..., 5:] == 1.5).all() and np.array_equal(padded[..., 1:5], x)
    strided = REFERENCES["view"](x, shape=(4, 2), strides=(1, 12), offset=4)
    assert np.array_equal(strided, x[:, 1].T)


def test_lookups() -> None:
    table, ids = draw(10, 4, dtype=BF16), np.array([[3, 0], [9, 3]], np.int32)
    assert np.array_equal(REFERENCES["embedding"](table, ids), table[ids])
    assert np.array_equal(
        REFERENCES["embedding"](table, ids, scale=45.25), table[ids].astype(np.float32) * np.float32(45.25)
    )
    assert np.array_equal(REFERENCES["index"](table, np.array(7, np.int32)), table[7])


def test_states() -> None:
    state, value = np.zeros((2, 6, 3), BF16), draw(2, 2, 3, dtype=BF16)
    after = REFERENCES["write"](state, value, np.array(4, np.int32), axis=-2)
    assert np.array_equal(after[:, 4:], value) and not after[:, :4].any() and not state.any()
    assert REFERENCES["write"](np.array(3), np.array(5), np.array(0), axis=-1) == 5
    with pytest.raises(AssertionError, match="write at 5 leaves the state"):
        REFERENCES["write"](state, value, np.array(5), axis=-2)


def test_reductions() -> None:
    x = draw(3, 4, 5)
    close(REFERENCES["reduce_sum"](x, axes=(-1,), keepdims=True), tensor(x).sum(-1, keepdim=True), 1e-15)
    close(REFERENCES["reduce_mean"](x, axes=(-2, -1), keepdims=False), tensor(x).mean((-2, -1)), 1e-15)
    close(REFERENCES["reduce_max"](x, axes=(-2,), keepdims=False), tensor(x).amax(-2), 0)
    close(REFERENCES["softmax"](x), torch.softmax(tensor(x), -1), 1e-15)
    assert REFERENCES["reduce_sum"](np.arange(4), axes=(-1,), keepdims=False) == 6
    assert REFERENCES["reduce_mean"](np.arange(4), axes=(-1,)).dtype == np.float32
    assert REFERENCES["reduce_any"](np.array([[True, False]]), axes=(-1,), keepdims=False).tolist() == [True]
    assert REFERENCES["reduce_all"](np.array([[True, False]]), axes=(-1,), keepdims=False).tolist() == [False]


def test_counting() -> None:
    assert REFERENCES["iota"](size=3).tolist() == [0, 1, 2]
    assert REFERENCES["cumsum"](np.array([True, False, True]), axis=-1).tolist() == [1, 1, 2]
    x = draw(3, 4)
    close(REFERENCES["cumsum"](x, axis=-2), tensor(x).cumsum(0), 1e-15)
