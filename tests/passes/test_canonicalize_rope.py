"""canonicalize: rotary positions."""

from __future__ import annotations

from frtc.passes.canonicalize import canonicalize
from tests.passes.expect import expect_pass, expect_unchanged


def test_rotate_half() -> None:
    """Hugging Face: full-width tables whose halves are one concatenated twice, rounded to 16 bits."""
    expect_pass(
        canonicalize,
        fires={"algebra": 1, "casts": 2, "shape": 2, "rope": 1},
        before="""
        graph g(x: bf16[1,2,5,8], angle: f32[1,5,4]) {
          %0 = concat(%angle, %angle, axis=-1) : f32[1,5,8]
          %1 = cos(%0) : f32[1,5,8]
          %2 = const(value=1.0) : f32[]
          %3 = mul(%1, %2) : f32[1,5,8]
          %4 = cast(%3) : bf16[1,5,8]
          %5 = reshape(%4, shape=[1,1,5,8]) : bf16[1,1,5,8]
          %6 = sin(%0) : f32[1,5,8]
          %7 = cast(%6) : bf16[1,5,8]
          %8 = reshape(%7, shape=[1,1,5,8]) : bf16[1,1,5,8]
          %9 = mul(%x, %5) : bf16[1,2,5,8]
          %10 = slice(%x, axis=-1, start=0, stop=4) : bf16[1,2,5,4]
          %11 = slice(%x, axis=-1, start=4, stop=8) : bf16[1,2,5,4]
          %12 = neg(%11) : bf16[1,2,5,4]
          %13 = concat(%12, %10, axis=-1) : bf16[1,2,5,8]
          %14 = mul(%13, %8) : bf16[1,2,5,8]
          %15 = add(%9, %14) : bf16[1,2,5,8]
          return %15
        }
        """,
        after="""
        graph g(x: bf16[1,2,5,8], angle: f32[1,5,4]) {
          %0 = cos(%angle) : bf16[1,5,4]
          %1 = reshape(%0, shape=[5, 4]) : bf16[5,4]
          %2 = sin(%angle) : bf16[1,5,4]
          %3 = reshape(%2, shape=[5, 4]) : bf16[5,4]
          %4 = rope(%x, %1, %3) : bf16[1,2,5,8]
          return %4
        }
        """,
    )


def test_rotate_half_in_fp32() -> None:
    expect_pass(
        canonicalize,
        fires={"casts": 5, "rope": 1},
        before="""
        graph g(x: bf16[2,5,8], angle: f32[5,4]) {
          %0 = concat(%angle, %angle, axis=-1) : f32[5,8]
          %1 = cos(%0) : f32[5,8]
          %2 = sin(%0) : f32[5,8]
          %3 = cast(%x) : f32[2,5,8]
          %4 = mul(%3, %1) : f32[2,5,8]
          %5 = slice(%3, axis=-1, start=0, stop=4) : f32[2,5,4]
          %6 = slice(%3, axis=-1, start=4, stop=8) : f32[2,5,4]
          %7 = neg(%6) : f32[2,5,4]
          %8 = concat(%7, %5, axis=-1) : f32[2,5,8]
          %9 = mul(%8, %2) : f32[2,5,8]
          %10 = add(%4, %9) : f32[2,5,8]
          %11 = cast(%10) : bf16[2,5,8]
          return %11
        }
        """,
        after="""
        graph g(x: bf16[2,5,8], angle: f32[5,4]) {
          %0 = cos(%angle) : f32[5,4]
          %1 = sin(%angle) : f32[5,4]
          %2 = rope(%x, %0, %1) : bf16[2,5,8]
          return %2
        }
        """,
    )


def test_part_of_the_head() -> None:
    """Only the first half of the head turns."""
    expect_pass(
        canonicalize,
        fires={"shape": 2, "rope": 1},
        before="""
        graph g(x: f32[2,5,8], angle: f32[5,2]) {
          %0 = concat(%angle, %angle, axis=-1) : f32[5,4]
          %1 = cos(%0) : f32[5,4]
          %2 = sin(%0) : f32[5,4]
          %3 = slice(%x, axis=-1, start=0, stop=4) : f32[2,5,4]
          %4 = slice(%x, axis=-1, start=4, stop=8) : f32[2,5,4]
          %5 = mul(%3, %1) : f32[2,5,4]
          %6 = slice(%3, axis=-1, start=0, stop=2) : f32[2,5,2]
          %7 = slice(%3, axis=-1, start=2, stop=4) : f32[2,5,2]
          %8 = neg(%7) : f32[2,5,2]
          %9 = concat(%8, %6, axis=-1) : f32[2,5,4]
          %10 = mul(%9, %2) : f32[2,5,4]
          %11 = add(%5, %10) : f32[2,5,4]
          %12 = concat(%11, %4, axis=-1) : f32[2,5,8]
          return %12
        }
        """,
        after="""
        graph g(x: f32[2,5,8], angle: f32[5,2]) {
          %0 = slice(%x, axis=-1, start=0, stop=4) : f32[2,5,4]
          %1 = cos(%angle) : f32[5,2]
          %2 = sin(%angle) : f32[5,2]
          %3 = rope(%0, %1, %2) : f32[2,5,4]
          %4 = slice(%x, axis=-1, start=4, stop=8) : f32[2,5,4]
          %5 = concat(%3, %4, axis=-1) : f32[2,5,8]
          return %5
        }
        """,
    )


def test_tables_with_different_halves() -> None:
    """Nothing proves that the halves of an input are equal."""
    expect_unchanged(
        canonicalize,
        """
        graph g(x: f32[2,5,8], cos: f32[5,8], sin: f32[5,8]) {
          %0 = mul(%x, %cos) : f32[2,5,8]
          %1 = slice(%x, axis=-1, start=4, stop=8) : f32[2,5,4]
          %2 = neg(%1) : f32[2,5,4]
          %3 = slice(%x, axis=-1, start=0, stop=4) : f32[2,5,4]
          %4 = concat(%2, %3, axis=-1) : f32[2,5,8]
          %5 = mul(%4, %sin) : f32[2,5,8]
          %6 = add(%0, %5) : f32[2,5,8]
          return %6
        }
        """,
    )


def test_other_half_negated() -> None:
    """The rotation of the other direction."""
    expect_unchanged(
        canonicalize,
        """
        graph g(x: f32[2,5,8], angle: f32[5,4]) {
          %0 = concat(%angle, %angle, axis=-1) : f32[5,8]
          %1 = cos(%0) : f32[5,8]
          %2 = mul(%x, %1) : f32[2,5,8]
          %3 = slice(%x, axis=-1, start=4, stop=8) : f32[2,5,4]
          %4 = slice(%x, axis=-1, start=0, stop=4) : f32[2,5,4]
          %5 = neg(%4) : f32[2,5,4]
          %6 = concat(%3, %5, axis=-1) : f32[2,5,8]
          %7 = sin(%0) : f32[5,8]
          %8 = mul(%6, %7) : f32[2,5,8]
          %9 = add(%2, %8) : f32[2,5,8]
          return %9
        }
        """,
    )


def test_halves_of_another_value() -> None:
    expect_unchanged(
        canonicalize,
        """
        graph g(x: f32[2,5,8], y: f32[2,5,8], angle: f32[5,4]) {
          %0 = concat(%angle, %angle, axis=-1) : f32[5,8]
          %1 = cos(%0) : f32[5,8]
          %2 = mul(%x, %1) : f32[2,5,8]
          %3 = slice(%y, axis=-1, start=4, stop=8) : f32[2,5,4]
          %4 = neg(%3) : f32[2,5,4]
          %5 = slice(%y, axis=-1, start=0, stop=4) : f32[2,5,4]
          %6 = concat(%4, %5, axis=-1) : f32[2,5,8]
          %7 = sin(%0) : f32[5,8]
          %8 = mul(%6, %7) : f32[2,5,8]
          %9 = add(%2, %8) : f32[2,5,8]
          return %9
        }
        """,
    )


def test_halves_apart() -> None:
    """Ours, and JAX: half tables, in fp32, rounded once."""
    expect_pass(
        canonicalize,
        fires={"casts": 7, "rope": 1},
        before="""
        graph g(x: bf16[2,5,8], cos: f32[5,4], sin: f32[5,4]) {
          %0 = cast(%x) : f32[2,5,8]
          %1 = slice(%0, axis=-1, start=0, stop=4) : f32[2,5,4]
          %2 = slice(%0, axis=-1, start=4, stop=8) : f32[2,5,4]
          %3 = mul(%1, %cos) : f32[2,5,4]
          %4 = mul(%2, %sin) : f32[2,5,4]
          %5 = sub(%3, %4) : f32[2,5,4]
          %6 = mul(%2, %cos) : f32[2,5,4]
          %7 = mul(%1, %sin) : f32[2,5,4]
          %8 = add(%6, %7) : f32[2,5,4]
          %9 = concat(%5, %8, axis=-1) : f32[2,5,8]
          %10 = cast(%9) : bf16[2,5,8]
          return %10
        }
        """,
        after="""
        graph g(x: bf16[2,5,8], cos: f32[5,4], sin: f32[5,4]) {
          %0 = rope(%x, %cos, %sin) : bf16[2,5,8]
          return %0
        }
        """,
    )


def test_halves_of_the_result_exchanged() -> None:
    expect_unchanged(
        canonicalize,
        """
        graph g(x: f32[2,5,8], cos: f32[5,4], sin: f32[5,4]) {
          %0 = slice(%x, axis=-1, start=4, stop=8) : f32[2,5,4]
          %1 = mul(%0, %cos) : f32[2,5,4]
          %2 = slice(%x, axis=-1, start=0, stop=4) : f32[2,5,4]
          %3 = mul(%2, %sin) : f32[2,5,4]
          %4 = add(%1, %3) : f32[2,5,4]
          %5 = mul(%2, %cos) : f32[2,5,4]
          %6 = mul(%0, %sin) : f32[2,5,4]
          %7 = sub(%5, %6) : f32[2,5,4]
          %8 = concat(%4, %7, axis=-1) : f32[2,5,8]
          return %8
        }
        """,
    )


def test_interleaved_pairs() -> None:
    expect_pass(
        canonicalize,
        fires={"rope": 1},
        before="""
        graph g(x: f32[2,5,8], cos: f32[5,4], sin: f32[5,4]) {
          %0 = slice(%x, axis=-1, start=0, stop=8, step=2) : f32[2,5,4]
          %1 = slice(%x, axis=-1, start=1, stop=8, step=2) : f32[2,5,4]
          %2 = mul(%0, %cos) : f32[2,5,4]
          %3 = mul(%1, %sin) : f32[2,5,4]
          %4 = sub(%2, %3) : f32[2,5,4]
          %5 = mul(%1, %cos) : f32[2,5,4]
          %6 = mul(%0, %sin) : f32[2,5,4]
          %7 = add(%5, %6) : f32[2,5,4]
          %8 = reshape(%4, shape=[2,5,4,1]) : f32[2,5,4,1]
          %9 = reshape(%7, shape=[2,5,4,1]) : f32[2,5,4,1]
          %10 = concat(%8, %9, axis=-1) : f32[2,5,4,2]
          %11 = reshape(%10, shape=[2,5,8]) : f32[2,5,8]
          return %11
        }
        """,
        after="""
        graph g(x: f32[2,5,8], cos: f32[5,4], sin: f32[5,4]) {
          %0 = rope(%x, %cos, %sin, pairing=interleaved) : f32[2,5,8]
          return %0
        }
        """,
    )


def test_rotate_every_two() -> None:
    """GPT-J: every value of the tables twice in a row."""
    expect_pass(
        canonicalize,
        fires={"rope": 1},
        before="""
        graph g(x: f32[2,5,8], cos: f32[5,4], sin: f32[5,4]) {
          %0 = reshape(%cos, shape=[5,4,1]) : f32[5,4,1]
          %1 = broadcast(%0, shape=[5,4,2]) : f32[5,4,2]
          %2 = reshape(%1, shape=[5,8]) : f32[5,8]
          %3 = reshape(%sin, shape=[5,4,1]) : f32[5,4,1]
          %4 = broadcast(%3, shape=[5,4,2]) : f32[5,4,2]
          %5 = reshape(%4, shape=[5,8]) : f32[5,8]
          %6 = mul(%x, %2) : f32[2,5,8]
          %7 = slice(%x, axis=-1, start=1, stop=8, step=2) : f32[2,5,4]
          %8 = neg(%7) : f32[2,5,4]
          %9 = slice(%x, axis=-1, start=0, stop=8, step=2) : f32[2,5,4]
          %10 = reshape(%8, shape=[2,5,4,1]) : f32[2,5,4,1]
          %11 = reshape(%9, shape=[2,5,4,1]) : f32[2,5,4,1]
          %12 = concat(%10, %11, axis=-1) : f32[2,5,4,2]
          %13 = reshape(%12, shape=[2,5,8]) : f32[2,5,8]
          %14 = mul(%13, %5) : f32[2,5,8]
          %15 = add(%6, %14) : f32[2,5,8]
          return %15
        }
        """,
        after="""
        graph g(x: f32[2,5,8], cos: f32[5,4], sin: f32[5,4]) {
          %0 = rope(%x, %cos, %sin, pairing=interleaved) : f32[2,5,8]
          return %0
        }
        """,
    )


def test_interleaved_with_half_tables() -> None:
    """Tables for halves do not fit pairs."""
    expect_unchanged(
        canonicalize,
        """
        graph g(x: f32[2,5,8], angle: f32[5,4]) {
          %0 = concat(%angle, %angle, axis=-1) : f32[5,8]
          %1 = cos(%0) : f32[5,8]
          %2 = mul(%x, %1) : f32[2,5,8]
          %3 = slice(%x, axis=-1, start=1, step=2, stop=8) : f32[2,5,4]
          %4 = neg(%3) : f32[2,5,4]
          %5 = reshape(%4, shape=[2, 5, 4, 1]) : f32[2,5,4,1]
          %6 = slice(%x, axis=-1, start=0, step=2, stop=8) : f32[2,5,4]
          %7 = reshape(%6, shape=[2, 5, 4, 1]) : f32[2,5,4,1]
          %8 = concat(%5, %7, axis=-1) : f32[2,5,4,2]
          %9 = reshape(%8, shape=[2, 5, 8]) : f32[2,5,8]
          %10 = sin(%0) : f32[5,8]
          %11 = mul(%9, %10) : f32[2,5,8]
          %12 = add(%2, %11) : f32[2,5,8]
          return %12
        }
        """,
    )
