"""Results in FP8: every op that can store one, with a given scale and with a scale for each row."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from frtc.kernels.dtypes import round_to
from frtc.lowering import ir, ops
from frtc.lowering.interpret import run
from frtc.lowering.ir import Node, Type, item
from frtc.lowering.op import TypeMismatch
from frtc.lowering.text import parse, show
from frtc.lowering.verify import verify
from tests.lowering.every_op import BIAS, GATE, K, Q, V, W, X, Y, graph_of, leaf, weight

SHIFT = weight("shift", "f32", 8)
SQUARE = weight("square", "bf16", 8, 8)
INV = leaf("inv", "f32")
Make = Callable[..., Node]

# Each with `inv` in its place and the attributes of a result.
PRODUCERS: dict[str, Make] = {
    "rms_norm": lambda inv, **how: ops.rms_norm(X, V, inv, eps=1e-6, **how),
    "ada_rms_norm": lambda inv, **how: ops.ada_rms_norm(X, V, SHIFT, inv, eps=1e-6, **how),
    "layer_norm": lambda inv, **how: ops.layer_norm(X, V, SHIFT, inv, eps=1e-6, **how),
    "residual_norm": lambda inv, **how: ops.residual_norm(X, Y, None, V, None, inv, kind="rms", eps=1e-6, **how),
    "linear": lambda inv, **how: ops.linear(X, W, BIAS, None, GATE, None, None, None, inv, act="silu", **how),
    "gated_linear": lambda inv, **how: ops.gated_linear(X, W, None, None, None, None, inv, act="silu", **how),
    "linear_norm": lambda inv, **how: ops.linear_norm(
        X, SQUARE, None, Y, None, None, None, None, V, SHIFT, inv, kind="ada", eps=1e-6, **how
    ),
    "attention": lambda inv, **how: ops.attention(Q, K, K, None, None, inv, scale=0.3, **how),
}
SCALED_BEFORE = frozenset({"linear", "gated_linear", "attention"})  # rows that are rounded to bf16 first


def results(node: Node, mode: str, inv: float) -> list[np.ndarray]:
    outputs = [node] if isinstance(node.type, Type) else [item(node, i) for i in range(len(node.type))]
    found = [run(graph_of(one), _values(inv), _weights, mode)["out"].astype(np.float32) for one in outputs]
    return found[1:] if node.op in ("residual_norm", "linear_norm") else found


def _values(inv: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {n["name"]: rng.standard_normal(n.shape).astype(np.float32) for n in (X, Y, Q, K)} | {
        "inv": np.array(inv, np.float32)
    }


def _weights(name: str) -> np.ndarray:
    node = {n["name"]: n for n in (V, W, BIAS, GATE, SHIFT, SQUARE)}[name]
    return np.random.default_rng(list(name.encode())).standard_normal(node.shape).astype(np.float32)


@pytest.mark.parametrize("name", PRODUCERS)
def test_static_scale(name: str) -> None:
    (plain,) = results(PRODUCERS[name](None, dtype="f32"), "typed", 1)
    (stored,) = results(PRODUCERS[name](INV, dtype="e4m3"), "typed", 1000)
    expected = round_to(plain * np.float32(1000), "e4m3").astype(np.float32)
    assert np.array_equal(stored, expected)
    assert np.max(np.abs(stored)) == 448  # some saturate: none is NaN


@pytest.mark.parametrize("name", PRODUCERS)
def test_scale_of_each_row(name: str) -> None:
    node = PRODUCERS[name](None, per_row=True, dtype="e4m3")
    (plain,) = results(PRODUCERS[name](None, dtype="bf16" if name in SCALED_BEFORE else "f32"), "typed", 1)
    stored, scale = results(node, "typed", 1)
    most = np.max(np.abs(plain), axis=(-3, -1) if name == "attention" else -1, keepdims=True)
    most = most[..., 0, :, :] if name == "attention" else most
    assert np.array_equal(scale, most / np.float32(448))
    assert np.max(np.abs(stored * scale - plain) / (most + 1e-9)) <= 16 / 448 + 1e-6
    assert np.all(np.max(np.abs(stored), axis=(-3, -1) if name == "attention" else -1) == 448)


@pytest.mark.parametrize("name", PRODUCERS)
def test_widened_means_the_same(name: str) -> None:
    (plain,) = results(PRODUCERS[name](None, dtype="f32"), "wide", 1)
    stored, scale = results(PRODUCERS[name](None, per_row=True, dtype="e4m3"), "wide", 1)
    np.testing.assert_allclose(stored * scale, plain, rtol=1e-5, atol=1e-6)
    (static,) = results(PRODUCERS[name](INV, dtype="e4m3"), "wide", 100)
    np.testing.assert_allclose(static / 100, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", PRODUCERS)
@pytest.mark.parametrize("how", [dict(inv=INV), dict(inv=None, per_row=True)], ids=["static", "rows"])
def test_text(name: str, how: dict[str, object]) -> None:
    graph = graph_of(ir.item(n, 1) if isinstance((n := PRODUCERS[name](**how, dtype="e4m3")).type, tuple) else n)
    verify(graph)
    assert show(parse(show(graph))) == show(graph)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (dict(inv=INV, dtype="bf16"), "a scaled result is e4m3"),
        (dict(inv=None, per_row=True, dtype="bf16"), "a scaled result is e4m3"),
        (dict(inv=INV, per_row=True, dtype="e4m3"), "exclude each other"),
        (dict(inv=leaf("bad", "bf16"), dtype="e4m3"), "is not one f32"),
        (dict(inv=leaf("bad", "f32", 1), dtype="e4m3"), "is not one f32"),
    ],
    ids=str,
)
def test_refused(how: dict[str, object], reason: str) -> None:
    for make in PRODUCERS.values():
        with pytest.raises(TypeMismatch, match=reason):
            make(**how)


def test_scaled_products() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((3, 5)).astype(np.float32), rng.standard_normal((4, 5)).astype(np.float32)
    alpha, rows = rng.random(4).astype(np.float32), rng.random((3, 1)).astype(np.float32)
    names = {"x": x, "w": w, "alpha": alpha, "rows": rows}
    leaves = {name: leaf(name, "f32", *value.shape) for name, value in names.items()}
    node = ops.linear(leaves["x"], leaves["w"], None, None, None, None, leaves["alpha"], leaves["rows"])
    found = run(graph_of(node), names)["out"]
    np.testing.assert_allclose(found, (x @ w.T) * alpha * rows, rtol=1e-5)
    with pytest.raises(TypeMismatch, match="does not fit the rows"):
        ops.linear(leaves["x"], leaves["w"], None, None, None, None, None, leaf("r", "f32", 3))
    with pytest.raises(TypeMismatch, match="for 4 columns"):
        ops.linear(leaves["x"], leaves["w"], None, None, None, None, leaf("a", "f32", 3))


def test_weights_in_fp8() -> None:
    rng = np.random.default_rng(3)
    w = rng.standard_normal((6, 64)).astype(np.float32) * np.array([1, 1, 1, 1e-4, 50, 1], np.float32)[:, None]
    node = leaf("w", "bf16", 6, 64)
    scale = ops.channel_scale(node)
    found = run(graph_of(scale), {"w": w})["out"]
    rounded = round_to(w, "bf16").astype(np.float32)
    assert np.array_equal(found, np.max(np.abs(rounded), axis=1) / np.float32(448))  # one scale would lose row 3
    stored = run(graph_of(ops.quantize(node, scale)), {"w": w})["out"].astype(np.float32) * found[:, None]
    error = np.linalg.norm(stored - rounded, axis=1) / np.linalg.norm(rounded, axis=1)
    assert np.all(error < 0.04)


def test_one_scale_where_it_is_better() -> None:
    """Values that are powers of two away from the largest: exact under the tensor's scale, not under their row's."""
    w = np.array([[448, 416, 384], [3.25, 3.0, 1.0]], np.float32)
    scale = run(graph_of(ops.channel_scale(leaf("w", "f32", 2, 3))), {"w": w})["out"]
    assert np.array_equal(scale, [1, 1])
