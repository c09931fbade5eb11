"""What a product loses to e4m3 behind its norm and before it, against the same in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from frtc.histogram import LARGEST
from frtc.kernels.dtypes import round_to
from frtc.lowering import ops
from frtc.lowering.ir import Node, Type, input_
from frtc.norm_noise import ROWS, before_norm, noise_of
from frtc.passes.norm_readers import unnormed_of

Array = np.ndarray[Any, Any]
EPS = 1e-14
S, W, T = (input_(name, Type("f32", shape)) for name, shape in (("s", (40, 96)), ("w", (96,)), ("t", (96,))))
NORMS: dict[str, Node] = {
    "rms": ops.rms_norm(S, W, eps=EPS, offset=1.0),
    "ada": ops.ada_rms_norm(S, W, T, eps=EPS),
    "layer": ops.layer_norm(S, W, T, eps=EPS),
}


def held(x: Array, scale: Any) -> Array:
    return round_to(np.clip(x / scale, -LARGEST, LARGEST), "e4m3").astype(np.float64) * scale


def drawn(loudness: float = 0.0) -> dict[str, Array]:
    """s of rows that differ in size by up to e ** loudness, and vectors."""
    rng = np.random.default_rng(0)
    sizes = np.exp(loudness * rng.uniform(-1, 0, (40, 1)))
    return {
        "s": rng.standard_normal((40, 96)) * sizes + 0.1 * sizes,
        "w": rng.uniform(0.6, 1.4, 96),
        "t": rng.standard_normal(96) / 4,
        "W": unit(rng.standard_normal((56, 96))),
    }


def unit(w: Array) -> Array:
    return w / np.linalg.norm(w, axis=-1, keepdims=True)


def normed(kind: str, x: dict[str, Array]) -> tuple[Array, Array, Array, Array]:
    """y, z, W' and r."""
    s, w = x["s"], x["w"]
    if kind == "layer":
        centred = s - s.mean(-1, keepdims=True)
        r = 1 / np.sqrt(centred.var(-1, keepdims=True) + EPS)
        scaled = x["W"] * w
        return centred * r * w + x["t"], s, scaled - scaled.mean(-1, keepdims=True), r
    r = 1 / np.sqrt((s**2).mean(-1, keepdims=True) + EPS)
    z = s * (1 + w)
    return z * r + (x["t"] if kind == "ada" else 0), z, x["W"], r


def found(kind: str, x: dict[str, Array]) -> tuple[Array, Array]:
    """What noise_of says, and what it should."""
    y, z, other, r = normed(kind, x)
    scales = [np.abs(y).max() / LARGEST, np.abs(z).max() / LARGEST]
    norm = NORMS[kind]
    values = {S: torch.from_numpy(x["s"]), W: torch.from_numpy(x["w"]), T: torch.from_numpy(x["t"])}
    before = unnormed_of(norm)
    assert before is not None
    seen = [torch.from_numpy(y), values[S], before_norm(before, values)]
    loud = torch.from_numpy(x["W"] * np.exp(np.arange(56) / 5)[:, None])  # columns count alike, whatever their size
    got = noise_of(norm, seen, values, [loud[:20], loud[20:]], torch.tensor(scales))
    rows = [np.abs(m).max(-1, keepdims=True) / LARGEST for m in (x["W"], other)]
    stored = [held(m, row) if kind == "layer" else m for m, row in zip((x["W"], other), rows, strict=True)]
    out = y @ x["W"].T
    gaps = [held(y, scales[0]) @ stored[0].T - out, r * (held(z, scales[1]) @ stored[1].T - z @ other.T)]
    size = (out**2).sum(-1)
    return got.numpy(), np.array([((gap**2).sum(-1) / size).sum() for gap in gaps])


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("loudness", [0.0, 3.0, 12.0])
def test_against_float64(kind: str, loudness: float) -> None:
    got, expected = found(kind, drawn(loudness))
    np.testing.assert_allclose(got, expected, rtol=2e-2)  # roundings to e4m3 flip in float32


@pytest.mark.parametrize("kind", NORMS)
def test_rows_alike_lose_nothing_and_quiet_ones_are_seen(kind: str) -> None:
    behind, before = found(kind, drawn())[0]
    assert 0.6 < before / behind < 1.4
    behind, before = found(kind, drawn(14.0))[0]
    assert before > 10 * behind


def test_of_many_rows_some_are_looked_at() -> None:
    """Each as much as the others, so the sums do not grow."""
    x = drawn()
    few = found("rms", x)[0]
    many = found("rms", {**x, "s": np.repeat(x["s"], 10, 0)})[0]
    assert (0.8 * few * ROWS / 40 < many).all() and (many < 1.25 * few * ROWS / 40).all()


def test_a_value_without_rows() -> None:
    x = {**drawn(), "s": np.zeros((0, 96))}
    y = torch.zeros(0, 96)
    weights, scales = [torch.from_numpy(x["W"])], torch.ones(2)
    assert noise_of(NORMS["rms"], [y, y, y], {}, weights, scales).tolist() == [0, 0]
