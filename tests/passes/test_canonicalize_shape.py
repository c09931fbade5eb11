"""canonicalize: ops that only move elements, lookups by known rows."""

from __future__ import annotations

import numpy as np

from frtc.lowering.interpret import run
from frtc.lowering.ir import Graph, Node, Type, input_
from frtc.lowering.ops import reshape, transpose
from frtc.passes.canonical_chains import normal
from frtc.passes.canonicalize import canonicalize
from tests.passes.expect import expect_pass, expect_unchanged


def _random_chain(rng: np.random.Generator) -> tuple[Node, Node, int]:
    """(source, chain of reshapes and transposes over it, its length); unit axes and odd factors included"""
    shape = tuple(int(n) for n in rng.choice([1, 1, 2, 3, 4, 6], rng.integers(1, 5)))
    source = node = input_("x", Type("f32", shape))
    length = int(rng.integers(1, 7))
    for _ in range(length):
        if rng.random() < 0.5:
            rank = node.t.rank
            node = transpose(node, perm=tuple(int(i) - rank for i in rng.permutation(rank)))
        else:
            node = reshape(node, shape=_random_shape(rng, node.t.size))
    return source, node, length


def _random_shape(rng: np.random.Generator, size: int) -> tuple[int, ...]:
    shape: list[int] = []
    while size > 1:
        factor = int(rng.choice([n for n in range(2, size + 1) if size % n == 0]))
        shape.append(factor)
        size //= factor
    for _ in range(rng.integers(0, 3)):
        shape.insert(int(rng.integers(0, len(shape) + 1)), 1)
    return tuple(shape) or (1,)


def test_random_chains() -> None:
    """300 chains keep their elements where they were, become no longer, and have one spelling."""
    rng = np.random.default_rng(0)
    shorter = 0
    for _ in range(300):
        source, node, length = _random_chain(rng)
        new = normal(node)
        x = np.arange(source.t.size, dtype=np.float32).reshape(source.shape)
        before, after = (run(Graph("g", (source,), (("out", n),)), {"x": x})["out"] for n in (node, new))
        np.testing.assert_array_equal(before, after)
        steps = len([n for n in Graph("g", (source,), (("out", new),)).nodes if n is not source])
        assert steps <= length
        assert normal(new) is new
        shorter += steps < length
    assert shorter > 150


def test_moves_that_cancel() -> None:
    expect_pass(
        canonicalize,
        fires={"shape": 2},
        before="""
        graph g(x: f32[2,3,4]) {
          %0 = transpose(%x, perm=[-1,-3,-2]) : f32[4,2,3]
          %1 = transpose(%0, perm=[-2,-1,-3]) : f32[2,3,4]
          %2 = reshape(%1, shape=[6,4]) : f32[6,4]
          %3 = reshape(%2, shape=[2,3,4]) : f32[2,3,4]
          %4 = exp(%3) : f32[2,3,4]
          return %4
        }
        """,
        after="""
        graph g(x: f32[2,3,4]) {
          %0 = exp(%x) : f32[2,3,4]
          return %0
        }
        """,
    )


def test_reshape_below_a_transpose() -> None:
    """As patches: [O, H', W'] flattened and transposed is [H' W', O] read as it lies."""
    expect_pass(
        canonicalize,
        fires={"shape": 2},
        before="""
        graph g(x: f32[4,4,8]) {
          %0 = transpose(%x, perm=[-1,-3,-2]) : f32[8,4,4]
          %1 = reshape(%0, shape=[8,16]) : f32[8,16]
          %2 = transpose(%1, perm=[-1,-2]) : f32[16,8]
          return %2
        }
        """,
        after="""
        graph g(x: f32[4,4,8]) {
          %0 = reshape(%x, shape=[16, 8]) : f32[16,8]
          return %0
        }
        """,
    )


def test_heads_from_a_batch_of_one() -> None:
    expect_pass(
        canonicalize,
        fires={"shape": 2},
        before="""
        graph g(x: f32[1,6,32]) {
          %0 = reshape(%x, shape=[1,6,1,4,8]) : f32[1,6,1,4,8]
          %1 = reshape(%0, shape=[1,6,4,8]) : f32[1,6,4,8]
          %2 = transpose(%1, perm=[-4,-2,-3,-1]) : f32[1,4,6,8]
          return %2
        }
        """,
        after="""
        graph g(x: f32[1,6,32]) {
          %0 = reshape(%x, shape=[1, 6, 4, 8]) : f32[1,6,4,8]
          %1 = transpose(%0, perm=[-2, -3, -1]) : f32[1,4,6,8]
          return %1
        }
        """,
    )


def test_transpose_of_a_single_head() -> None:
    """One head: nothing moves."""
    expect_pass(
        canonicalize,
        fires={"shape": 1},
        before="""
        graph g(x: f32[6,8]) {
          %0 = reshape(%x, shape=[6,1,8]) : f32[6,1,8]
          %1 = transpose(%0, perm=[-2,-3,-1]) : f32[1,6,8]
          return %1
        }
        """,
        after="""
        graph g(x: f32[6,8]) {
          %0 = reshape(%x, shape=[1, 6, 8]) : f32[1,6,8]
          return %0
        }
        """,
    )


def test_reshape_across_a_transpose() -> None:
    """Both are needed."""
    expect_unchanged(
        canonicalize,
        """
        graph g(x: f32[4,6,8]) {
          %0 = transpose(%x, perm=[-2, -3, -1]) : f32[6,4,8]
          %1 = reshape(%0, shape=[6, 32]) : f32[6,32]
          return %1
        }
        """,
    )


def test_reshape_that_splits_no_axis_evenly() -> None:
    """Rows of 8 out of columns of 6: no strided view says that."""
    expect_unchanged(
        canonicalize,
        """
        graph g(x: f32[4,6]) {
          %0 = transpose(%x, perm=[-1, -2]) : f32[6,4]
          %1 = reshape(%0, shape=[8, 3]) : f32[8,3]
          %2 = transpose(%1, perm=[-1, -2]) : f32[3,8]
          return %2
        }
        """,
    )


def test_reductions_keep_their_axes() -> None:
    expect_pass(
        canonicalize,
        fires={"shape": 2},
        before="""
        graph g(x: f32[2,8]) {
          %0 = reduce_mean(%x, axes=[-1], keepdims=false) : f32[2]
          %1 = reshape(%0, shape=[2,1]) : f32[2,1]
          %2 = add(%x, %1) : f32[2,8]
          return %2
        }
        """,
        after="""
        graph g(x: f32[2,8]) {
          %0 = reduce_mean(%x, axes=[-1]) : f32[2,1]
          %1 = add(%x, %0) : f32[2,8]
          return %1
        }
        """,
    )


def test_broadcasts_that_happen_anyway() -> None:
    expect_pass(
        canonicalize,
        fires={"shape": 3},
        before="""
        graph g(x: f32[2,3,4], y: f32[4]) {
          %0 = broadcast(%y, shape=[3,4]) : f32[3,4]
          %1 = reshape(%0, shape=[1,3,4]) : f32[1,3,4]
          %2 = broadcast(%1, shape=[2,3,4]) : f32[2,3,4]
          %3 = mul(%x, %2) : f32[2,3,4]
          return %3
        }
        """,
        after="""
        graph g(x: f32[2,3,4], y: f32[4]) {
          %0 = mul(%x, %y) : f32[2,3,4]
          return %0
        }
        """,
    )


def test_broadcast_that_makes_the_shape() -> None:
    expect_unchanged(
        canonicalize,
        """
        graph g(x: f32[1,4], y: f32[4]) {
          %0 = broadcast(%x, shape=[3, 4]) : f32[3,4]
          %1 = mul(%0, %y) : f32[3,4]
          return %1
        }
        """,
    )


def test_slices_and_concatenations() -> None:
    expect_pass(
        canonicalize,
        fires={"shape": 3},
        before="""
        graph g(x: f32[2,8], y: f32[2,4]) {
          %0 = concat(%x, %y, axis=-1) : f32[2,12]
          %1 = slice(%0, axis=-1, start=0, stop=8) : f32[2,8]
          %2 = slice(%1, axis=-1, start=0, stop=4) : f32[2,4]
          %3 = slice(%1, axis=-1, start=4, stop=8) : f32[2,4]
          %4 = concat(%2, %3, axis=-1) : f32[2,8]
          %5 = slice(%4, axis=-1, start=2, stop=6) : f32[2,4]
          return a=%4, b=%5
        }
        """,
        after="""
        graph g(x: f32[2,8], y: f32[2,4]) {
          %0 = slice(%x, axis=-1, start=2, stop=6) : f32[2,4]
          return a=%x, b=%0
        }
        """,
    )


def test_slice_over_two_parts() -> None:
    expect_unchanged(
        canonicalize,
        """
        graph g(x: f32[2,8], y: f32[2,4]) {
          %0 = concat(%x, %y, axis=-1) : f32[2,12]
          %1 = slice(%0, axis=-1, start=6, stop=10) : f32[2,4]
          return %1
        }
        """,
    )


def test_halves_in_the_other_order() -> None:
    expect_unchanged(
        canonicalize,
        """
        graph g(x: f32[2,8]) {
          %0 = slice(%x, axis=-1, start=4, stop=8) : f32[2,4]
          %1 = slice(%x, axis=-1, start=0, stop=4) : f32[2,4]
          %2 = concat(%0, %1, axis=-1) : f32[2,8]
          return %2
        }
        """,
    )


def test_rows_by_known_numbers() -> None:
    """Learned positions."""
    expect_pass(
        canonicalize,
        fires={"lookup": 1, "casts": 1},
        before="""
        graph g(x: f32[1,4,8]) {
          @position : f32[6,8]
          %0 = iota(size=4) : i64[4]
          %1 = const(value=2) : i64[]
          %2 = add(%0, %1) : i64[4]
          %3 = reshape(%2, shape=[1,4]) : i64[1,4]
          %4 = embedding(@position, %3) : f32[1,4,8]
          %5 = add(%x, %4) : f32[1,4,8]
          return %5
        }
        """,
        after="""
        graph g(x: f32[1,4,8]) {
          @position : f32[6,8]
          %0 = slice(@position, axis=-2, start=2, stop=6) : f32[4,8]
          %1 = reshape(%0, shape=[1, 4, 8]) : f32[1,4,8]
          %2 = add(%x, %1) : f32[1,4,8]
          return %2
        }
        """,
    )


def test_rows_that_are_not_consecutive() -> None:
    expect_unchanged(
        canonicalize,
        """
        graph g(x: f32[2,8]) {
          @position : f32[6,8]
          %0 = iota(size=2) : i64[2]
          %1 = const(value=2) : i64[]
          %2 = mul(%0, %1) : i64[2]
          %3 = embedding(@position, %2) : f32[2,8]
          %4 = add(%x, %3) : f32[2,8]
          return %4
        }
        """,
    )


def test_rows_by_an_input() -> None:
    expect_unchanged(
        canonicalize,
        """
        graph g(ids: i64[2]) {
          @position : f32[6,8]
          %0 = embedding(@position, %ids) : f32[2,8]
          return %0
        }
        """,
    )


def test_position_of_a_single_row() -> None:
    """A range of one is zero; a scalar in one row is a reshape."""
    expect_pass(
        canonicalize,
        fires={"literals": 1, "algebra": 2, "shape": 1},
        before="""
        graph g(n: i64[]) {
          %0 = iota(size=1) : i64[1]
          %1 = add(%0, %n) : i64[1]
          return %1
        }
        """,
        after="""
        graph g(n: i64[]) {
          %0 = reshape(%n, shape=[1]) : i64[1]
          return %0
        }
        """,
    )
