"""canonicalize: casts."""

from __future__ import annotations

from frtc.passes.canonicalize import canonicalize
from tests.passes.expect import expect_pass, expect_unchanged


def test_cast_around_an_op() -> None:
    """The op computes in fp32 anyhow and rounds once."""
    expect_pass(
        canonicalize,
        fires={"casts": 2},
        before="""
        graph g(x: bf16[2,8]) {
          %0 = cast(%x) : f32[2,8]
          %1 = mul(%0, %0) : f32[2,8]
          %2 = cast(%1) : bf16[2,8]
          return %2
        }
        """,
        after="""
        graph g(x: bf16[2,8]) {
          %0 = mul(%x, %x) : bf16[2,8]
          return %0
        }
        """,
    )


def test_unrounded_value_that_others_read() -> None:
    """Someone reads the fp32 value: the cast stays."""
    expect_unchanged(
        canonicalize,
        """
        graph g(x: f32[2,8]) {
          %0 = exp(%x) : f32[2,8]
          %1 = cast(%0) : bf16[2,8]
          return a=%0, b=%1
        }
        """,
    )


def test_cast_there_and_back() -> None:
    expect_pass(
        canonicalize,
        fires={"casts": 3},
        before="""
        graph g(x: bf16[2,8]) {
          %0 = cast(%x) : f32[2,8]
          %1 = cast(%0) : f64[2,8]
          %2 = cast(%1) : bf16[2,8]
          return %2
        }
        """,
        after="""
        graph g(x: bf16[2,8]) {
          return %x
        }
        """,
    )


def test_cast_that_rounds() -> None:
    """f32 to bf16 and back is a rounding."""
    expect_unchanged(
        canonicalize,
        """
        graph g(x: f32[2,8]) {
          %0 = cast(%x) : bf16[2,8]
          %1 = cast(%0) : f32[2,8]
          return %1
        }
        """,
    )


def test_bf16_through_f16() -> None:
    """Neither 16-bit type holds the other."""
    expect_unchanged(
        canonicalize,
        """
        graph g(x: bf16[2,8]) {
          %0 = cast(%x) : f16[2,8]
          %1 = cast(%0) : f32[2,8]
          return %1
        }
        """,
    )


def test_widening_moves_to_the_reader() -> None:
    expect_pass(
        canonicalize,
        fires={"casts": 3},
        before="""
        graph g(x: bf16[2,8]) {
          %0 = cast(%x) : f32[2,8]
          %1 = transpose(%0, perm=[-1,-2]) : f32[8,2]
          %2 = slice(%1, axis=-2, start=0, stop=4) : f32[4,2]
          %3 = exp(%2) : f32[4,2]
          return %3
        }
        """,
        after="""
        graph g(x: bf16[2,8]) {
          %0 = transpose(%x, perm=[-1, -2]) : bf16[8,2]
          %1 = slice(%0, axis=-2, start=0, stop=4) : bf16[4,2]
          %2 = exp(%1) : f32[4,2]
          return %2
        }
        """,
    )


def test_narrowing_moves_to_the_maker() -> None:
    expect_pass(
        canonicalize,
        fires={"casts": 4},
        before="""
        graph g(x: f32[2,8], y: f32[2,8]) {
          %0 = exp(%x) : f32[2,8]
          %1 = exp(%y) : f32[2,8]
          %2 = concat(%0, %1, axis=-1) : f32[2,16]
          %3 = reshape(%2, shape=[32]) : f32[32]
          %4 = cast(%3) : bf16[32]
          return %4
        }
        """,
        after="""
        graph g(x: f32[2,8], y: f32[2,8]) {
          %0 = exp(%x) : bf16[2,8]
          %1 = exp(%y) : bf16[2,8]
          %2 = concat(%0, %1, axis=-1) : bf16[2,16]
          %3 = reshape(%2, shape=[32]) : bf16[32]
          return %3
        }
        """,
    )


def test_narrowing_after_a_slice() -> None:
    """Before the slice, more would be cast."""
    expect_unchanged(
        canonicalize,
        """
        graph g(x: f32[2,8]) {
          %0 = slice(%x, axis=-1, start=0, stop=2) : f32[2,2]
          %1 = cast(%0) : bf16[2,2]
          return %1
        }
        """,
    )


def test_weight_in_its_own_type() -> None:
    expect_pass(
        canonicalize,
        fires={"casts": 1},
        before="""
        graph g(x: f32[2,8]) {
          @w : bf16[4,8]
          %0 = cast(@w) : f32[4,8]
          %1 = linear(%x, %0) : f32[2,4]
          return %1
        }
        """,
        after="""
        graph g(x: f32[2,8]) {
          @w : bf16[4,8]
          %0 = linear(%x, @w) : f32[2,4]
          return %0
        }
        """,
    )


def test_float64_arithmetic() -> None:
    """exp in float64 is another exp."""
    expect_unchanged(
        canonicalize,
        """
        graph g(x: bf16[2,8]) {
          %0 = cast(%x) : f64[2,8]
          %1 = exp(%0) : f64[2,8]
          return %1
        }
        """,
    )


def test_attention_reads_16_bits() -> None:
    expect_pass(
        canonicalize,
        fires={"casts": 2},
        before="""
        graph g(q: bf16[2,4,8], k: bf16[2,4,8], v: bf16[2,4,8]) {
          %0 = cast(%q) : f32[2,4,8]
          %1 = cast(%k) : f32[2,4,8]
          %2 = cast(%v) : f32[2,4,8]
          %3 = attention(%0, %1, %2, scale=0.5) : f32[2,4,8]
          %4 = cast(%3) : bf16[2,4,8]
          return %4
        }
        """,
        after="""
        graph g(q: bf16[2,4,8], k: bf16[2,4,8], v: bf16[2,4,8]) {
          %0 = attention(%q, %k, %v, scale=0.5) : bf16[2,4,8]
          return %0
        }
        """,
    )


def test_attention_of_mixed_types() -> None:
    """Operands of one attention keep one type."""
    expect_unchanged(
        canonicalize,
        """
        graph g(q: bf16[2,4,8], k: f32[2,4,8], v: f32[2,4,8]) {
          %0 = cast(%q) : f32[2,4,8]
          %1 = attention(%0, %k, %v, scale=0.5) : f32[2,4,8]
          return %1
        }
        """,
    )


def test_range_in_another_type() -> None:
    expect_pass(
        canonicalize,
        fires={"casts": 1},
        before="""
        graph g(x: f32[4]) {
          %0 = iota(size=4) : i64[4]
          %1 = cast(%0) : f32[4]
          %2 = mul(%x, %1) : f32[4]
          return %2
        }
        """,
        after="""
        graph g(x: f32[4]) {
          %0 = iota(size=4) : f32[4]
          %1 = mul(%x, %0) : f32[4]
          return %1
        }
        """,
    )
