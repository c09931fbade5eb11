"""Weight expressions: any piece equals the same rows of the whole, and rounding happens once."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from frtc.codegen import weights
from frtc.codegen.recipe import read_recipe, recipe_text
from frtc.codegen.weights import padded_row, pieces, share, take_rows
from frtc.errors import FrtcError
from frtc.lowering.interpret import run
from frtc.lowering.ir import Graph, Node, Type, tensor
from frtc.lowering.ops import add, cast, concat, const, linear, matmul, mul, reshape, slice_, transpose

RNG = np.random.default_rng(1)
Q, K, S = tensor("q", Type("f32", (12, 8))), tensor("k", Type("f32", (6, 8))), tensor("s", Type("f32", (8,)))
VALUES = {k: RNG.standard_normal(t.shape).astype(np.float32) for k, t in (("q", Q), ("k", K), ("s", S))}

PAIRS = concat(reshape(Q, shape=(12, 1, 8)), reshape(mul(Q, 2.0), shape=(12, 1, 8)), axis=-2)
INTERLEAVED = reshape(PAIRS, shape=(24, 8))
EXPRESSIONS = {
    "copy": Q,
    "cast": cast(Q, dtype="bf16"),
    "concat": cast(concat(Q, K, axis=-2), dtype="bf16"),
    "norm": mul(concat(Q, K, axis=-2), add(S, const(1.0)), dtype="bf16"),
    "interleave": INTERLEAVED,
    "product": matmul(Q, transpose(K, perm=(-1, -2)), dtype="bf16"),
    "bias": linear(S, Q),
    "columns": slice_(Q, axis=-1, start=2, stop=5),
    "transposed": transpose(Q, perm=(-1, -2)),
    "literal": const(3.0, "bf16", (12, 8)),
}


def whole(expression: Node) -> np.ndarray:
    joined: np.ndarray = np.concatenate(list(pieces(expression, VALUES.__getitem__)))
    return joined


@pytest.mark.parametrize("name", EXPRESSIONS)
@pytest.mark.parametrize("elements", [1, 16, 40, 1 << 20])
def test_pieces_make_the_whole(name: str, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = whole(EXPRESSIONS[name])
    assert expected.shape == EXPRESSIONS[name].shape
    monkeypatch.setattr(weights, "PIECE", elements)
    np.testing.assert_array_equal(whole(EXPRESSIONS[name]), expected)


def test_values() -> None:
    q, k, s = (VALUES[n].astype(np.float64) for n in "qks")
    folded = np.concatenate([q, k]) * (s + 1.0)
    np.testing.assert_array_equal(whole(EXPRESSIONS["norm"]), _bf16(folded))
    np.testing.assert_array_equal(whole(INTERLEAVED)[1::2], VALUES["q"] * 2)
    np.testing.assert_array_equal(whole(EXPRESSIONS["cast"]), VALUES["q"].astype(ml_dtypes.bfloat16))


def _bf16(values: np.ndarray) -> np.ndarray:
    """Nearest bf16 by search among neighbours, in float64: rounded once."""
    near = values.astype(np.float32).astype(ml_dtypes.bfloat16)
    bits = near.view(np.uint16).astype(np.int64)
    candidates = [(bits + d).astype(np.uint16).view(ml_dtypes.bfloat16) for d in (0, -1, 1)]
    distance = np.stack([np.abs(c.astype(np.float64) - values) for c in candidates])
    nearest: np.ndarray = np.choose(np.argmin(distance, 0), candidates)
    return nearest


def test_one_rounding_not_two() -> None:
    """1 + 2^-8 + 2^-40 lies above the middle of two bf16 numbers, but float32 rounds it to the middle."""
    x = tensor("x", Type("f64", (1, 1)))
    value = np.array([[1 + 2.0**-8 + 2.0**-40]])
    got = np.concatenate(list(pieces(mul(x, 1.0, dtype="bf16"), {"x": value}.__getitem__)))
    assert float(got[0, 0]) == 1 + 2.0**-7


def test_a_slice_reaches_the_leaves() -> None:
    """A piece of a concat reads only the tensors that it overlaps."""
    part = take_rows(concat(Q, K, axis=-2), 12, 15)
    assert [n["key"] for n in part.operands if n.op == "tensor"] == ["k"] or part.op == "slice"
    read: list[str] = []

    def lookup(key: str) -> np.ndarray:
        read.append(key)
        return VALUES[key]

    list(pieces(part, lookup))
    assert read == ["k"]


def test_rows_of_a_slice_are_rows_of_what_it_is_cut_from() -> None:
    part = take_rows(slice_(concat(Q, K, axis=-2), axis=-2, start=2, stop=Q.shape[0] + 1), 3, 5)
    assert (part.op, part.operands[0], part["start"], part["stop"]) == ("slice", Q, 5, 7)


def test_rows_are_padded_to_16_bytes() -> None:
    assert padded_row(Type("bf16", (3, 9))) == 16
    assert padded_row(Type("f32", (3, 9))) == 12
    assert padded_row(Type("bf16", (9,))) == 9


def test_only_the_rows_of_a_piece_are_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of slices too: the interpreter never sees the whole tensor."""
    seen: list[tuple[int, ...]] = []

    def watched(graph: Graph, *others: Any) -> dict[str, np.ndarray]:
        seen.extend(n.shape for n in graph.nodes if n.op == "tensor" and len(n.shape) == 2)
        return run(graph, *others)

    monkeypatch.setattr(weights, "PIECE", 16)
    monkeypatch.setattr(weights, "run", watched)
    whole(mul(slice_(Q, axis=-1, start=2, stop=6), 2.0, dtype="bf16"))
    assert seen == [(4, 4)] * 3


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("declared", ["bf16", "f32"])
def test_a_parameter_is_rounded_once_however_it_is_stored(declared: str, stored: str) -> None:
    """Moved as it is: one rounding to the parameter's type. In arithmetic: all bits of what is stored."""
    values = VALUES["q"].astype(np.dtype(stored) if stored != "bfloat16" else ml_dtypes.bfloat16)
    q = tensor("q", Type(declared, (12, 8)))
    lookup = {"q": values}.__getitem__
    exact = values.astype(np.float64)
    moved = np.concatenate(list(pieces(transpose(q, perm=(-1, -2)), lookup)))
    np.testing.assert_array_equal(moved, (_bf16(exact) if declared == "bf16" else exact.astype(np.float32)).T)
    scaled = np.concatenate(list(pieces(mul(q, 3.0, dtype="bf16"), lookup)))
    np.testing.assert_array_equal(scaled, _bf16(exact * 3))
    narrowed = np.concatenate(list(pieces(cast(q, dtype="bf16"), lookup)))
    np.testing.assert_array_equal(narrowed, _bf16(exact))


def test_what_weights_share_is_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain that three weights read, a value of it that one of them reads too, and one too large to keep."""
    inner = linear(S, Q)  # f32 [12]
    outer = mul(linear(inner, transpose(Q, perm=(-1, -2))), 2.0)  # f32 [8]
    large = mul(K, S)  # f32 [6, 8]
    expressions = {
        "a": mul(K, outer, dtype="bf16"), "b": add(outer, S), "c": add(outer, 1.0), "d": cast(inner, dtype="bf16"),
        "e": cast(outer, dtype="bf16"), "f": large, "g": transpose(large, perm=(-1, -2)),
    }  # fmt: skip
    expected = {name: whole(e) for name, e in expressions.items()}
    evaluated: list[str] = []

    def watched(graph: Graph, *others: Any) -> dict[str, np.ndarray]:
        evaluated.extend(n.op for n in graph.nodes if n.op == "linear")
        return run(graph, *others)

    monkeypatch.setattr(weights, "PIECE", 20)
    monkeypatch.setattr(weights, "run", watched)
    shared, lookup = share(expressions, VALUES.__getitem__)
    for name, expression in shared.items():
        np.testing.assert_array_equal(np.concatenate(list(pieces(expression, lookup))), expected[name], err_msg=name)
    assert evaluated == ["linear", "linear"]
    assert shared["f"] is expressions["f"], "more than a piece is not kept"


def test_a_recipe_reads_back_as_it_was() -> None:
    """The same nodes, what they share written once; text and expressions determine each other."""
    named = {"x.0|y.0": EXPRESSIONS["norm"], "literal": const(0.1, "f32", (3,)), **EXPRESSIONS}
    text = recipe_text(named)
    assert read_recipe(text) == named and list(read_recipe(text)) == list(named)
    assert recipe_text(read_recipe(text)) == text
    assert text.count(b"tensor(key=q)") == 1


@pytest.mark.parametrize("text", [b"graph weights() {", b"\xff", b""])
def test_a_recipe_that_cannot_be_read(text: bytes) -> None:
    with pytest.raises(FrtcError) as refused:
        read_recipe(text)
    assert refused.value.code == "plan.recipe"
