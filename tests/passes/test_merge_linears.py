"""merge_linears: linears over one value become one."""

from __future__ import annotations

from frtc.passes.merge_linears import merge_linears
from tests.passes.expect import expect_pass, expect_unchanged


def test_two() -> None:
    """Stacked weights, sliced results."""
    expect_pass(
        merge_linears,
        fires={"merge_linears": 1},
        before="""
        graph g(x: f32[5,4]) {
          @a : f32[3,4]
          @b : f32[2,4]
          %0 = linear(%x, @a) : f32[5,3]
          %1 = linear(%x, @b) : f32[5,2]
          return a=%0, b=%1
        }
        """,
        after="""
        graph g(x: f32[5,4]) {
          @a : f32[3,4]
          @b : f32[2,4]
          %0 = concat(@a, @b, axis=-2) : f32[5,4]
          %1 = linear(%x, %0) : f32[5,5]
          %2 = slice(%1, axis=-1, start=0, stop=3) : f32[5,3]
          %3 = slice(%1, axis=-1, start=3, stop=5) : f32[5,2]
          return a=%2, b=%3
        }
        """,
    )


def test_biases() -> None:
    """A linear without a bias gets zeros; biases of two types meet in fp32."""
    expect_pass(
        merge_linears,
        fires={"merge_linears": 1},
        before="""
        graph g(x: bf16[5,4]) {
          @a : bf16[3,4]
          @a.b : bf16[3]
          @b : bf16[2,4]
          @c : bf16[2,4]
          @c.b : f32[2]
          %0 = linear(%x, @a, @a.b) : bf16[5,3]
          %1 = linear(%x, @b) : bf16[5,2]
          %2 = linear(%x, @c, @c.b) : bf16[5,2]
          return a=%0, b=%1, c=%2
        }
        """,
        after="""
        graph g(x: bf16[5,4]) {
          @a : bf16[3,4]
          @a.b : bf16[3]
          @b : bf16[2,4]
          @c : bf16[2,4]
          @c.b : f32[2]
          %0 = concat(@a, @b, @c, axis=-2) : bf16[7,4]
          %1 = cast(@a.b) : f32[3]
          %2 = const(value=0.0) : f32[2]
          %3 = concat(%1, %2, @c.b, axis=-1) : f32[7]
          %4 = linear(%x, %0, %3) : bf16[5,7]
          %5 = slice(%4, axis=-1, start=0, stop=3) : bf16[5,3]
          %6 = slice(%4, axis=-1, start=3, stop=5) : bf16[5,2]
          %7 = slice(%4, axis=-1, start=5, stop=7) : bf16[5,2]
          return a=%5, b=%6, c=%7
        }
        """,
    )


def test_order_of_the_attention() -> None:
    """Stacked as q, k, v, whatever the order of the results."""
    expect_pass(
        merge_linears,
        fires={"merge_linears": 1},
        before="""
        graph g(x: f32[3,4]) {
          @k : f32[4,4]
          @q : f32[8,4]
          @v : f32[4,4]
          %0 = linear(%x, @k) : f32[3,4]
          %1 = reshape(%0, shape=[3,1,4]) : f32[3,1,4]
          %2 = transpose(%1, perm=[-2,-3,-1]) : f32[1,3,4]
          %3 = linear(%x, @v) : f32[3,4]
          %4 = reshape(%3, shape=[3,1,4]) : f32[3,1,4]
          %5 = transpose(%4, perm=[-2,-3,-1]) : f32[1,3,4]
          %6 = linear(%x, @q) : f32[3,8]
          %7 = reshape(%6, shape=[3,2,4]) : f32[3,2,4]
          %8 = transpose(%7, perm=[-2,-3,-1]) : f32[2,3,4]
          %9 = attention(%8, %2, %5, scale=0.5) : f32[2,3,4]
          return k=%2, v=%5, y=%9
        }
        """,
        after="""
        graph g(x: f32[3,4]) {
          @k : f32[4,4]
          @q : f32[8,4]
          @v : f32[4,4]
          %0 = concat(@q, @k, @v, axis=-2) : f32[16,4]
          %1 = linear(%x, %0) : f32[3,16]
          %2 = slice(%1, axis=-1, start=8, stop=12) : f32[3,4]
          %3 = reshape(%2, shape=[3,1,4]) : f32[3,1,4]
          %4 = transpose(%3, perm=[-2,-3,-1]) : f32[1,3,4]
          %5 = slice(%1, axis=-1, start=12, stop=16) : f32[3,4]
          %6 = reshape(%5, shape=[3,1,4]) : f32[3,1,4]
          %7 = transpose(%6, perm=[-2,-3,-1]) : f32[1,3,4]
          %8 = slice(%1, axis=-1, start=0, stop=8) : f32[3,8]
          %9 = reshape(%8, shape=[3,2,4]) : f32[3,2,4]
          %10 = transpose(%9, perm=[-2,-3,-1]) : f32[2,3,4]
          %11 = attention(%10, %4, %7, scale=0.5) : f32[2,3,4]
          return k=%4, v=%7, y=%11
        }
        """,
    )


def test_two_groups() -> None:
    """Each value has its own merged linear."""
    expect_pass(
        merge_linears,
        fires={"merge_linears": 2},
        before="""
        graph g(x: f32[5,4]) {
          @a : f32[4,4]
          @b : f32[4,4]
          %0 = linear(%x, @a) : f32[5,4]
          %1 = linear(%x, @b) : f32[5,4]
          %2 = mul(%0, %1) : f32[5,4]
          %3 = linear(%2, @a) : f32[5,4]
          %4 = linear(%2, @b) : f32[5,4]
          %5 = add(%3, %4) : f32[5,4]
          return %5
        }
        """,
        after="""
        graph g(x: f32[5,4]) {
          @a : f32[4,4]
          @b : f32[4,4]
          %0 = concat(@a, @b, axis=-2) : f32[8,4]
          %1 = linear(%x, %0) : f32[5,8]
          %2 = slice(%1, axis=-1, start=0, stop=4) : f32[5,4]
          %3 = slice(%1, axis=-1, start=4, stop=8) : f32[5,4]
          %4 = mul(%2, %3) : f32[5,4]
          %5 = linear(%4, %0) : f32[5,8]
          %6 = slice(%5, axis=-1, start=0, stop=4) : f32[5,4]
          %7 = slice(%5, axis=-1, start=4, stop=8) : f32[5,4]
          %8 = add(%6, %7) : f32[5,4]
          return %8
        }
        """,
    )


def test_different_readers_stay() -> None:
    """Near miss: the linears read different values."""
    expect_unchanged(
        merge_linears,
        """
        graph g(x: f32[5,4], z: f32[5,4]) {
          @a : f32[3,4]
          @b : f32[2,4]
          %0 = linear(%x, @a) : f32[5,3]
          %1 = linear(%z, @b) : f32[5,2]
          return a=%0, b=%1
        }
        """,
    )


def test_different_types_stay() -> None:
    """Near miss: the result types differ."""
    expect_unchanged(
        merge_linears,
        """
        graph g(x: bf16[5,4]) {
          @a : bf16[3,4]
          @b : bf16[2,4]
          %0 = linear(%x, @a) : bf16[5,3]
          %1 = linear(%x, @b) : f32[5,2]
          return a=%0, b=%1
        }
        """,
    )


def test_epilogues_stay() -> None:
    """Near miss: an activation belongs to one of them."""
    expect_unchanged(
        merge_linears,
        """
        graph g(x: f32[5,4]) {
          @a : f32[3,4]
          @b : f32[2,4]
          %0 = linear(%x, @a, act=silu) : f32[5,3]
          %1 = linear(%x, @b) : f32[5,2]
          return a=%0, b=%1
        }
        """,
    )


def test_computed_weights_stay() -> None:
    """Near miss: a weight that is no constant."""
    expect_unchanged(
        merge_linears,
        """
        graph g(x: f32[5,4], w: f32[2,4]) {
          @a : f32[3,4]
          %0 = linear(%x, @a) : f32[5,3]
          %1 = linear(%x, %w) : f32[5,2]
          return a=%0, b=%1
        }
        """,
    )


def test_gated_stays() -> None:
    """Near miss: gate and up are one op already."""
    expect_unchanged(
        merge_linears,
        """
        graph g(x: f32[5,4]) {
          @a : f32[3,4]
          @b : f32[3,4]
          @c : f32[2,4]
          %0 = gated_linear(%x, @a, @b, act=silu) : f32[5,3]
          %1 = linear(%x, @c) : f32[5,2]
          return a=%0, b=%1
        }
        """,
    )
