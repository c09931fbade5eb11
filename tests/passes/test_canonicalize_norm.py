"""canonicalize: norms."""

from __future__ import annotations

from frtc.passes.canonicalize import canonicalize
from tests.passes.expect import expect_pass, expect_unchanged


def test_gemma_spelling() -> None:
    """1 + w in fp32, one cast at the end."""
    expect_pass(
        canonicalize,
        fires={"casts": 4, "algebra": 2, "rms_norm": 2},
        before="""
        graph g(x: bf16[1,5,8]) {
          @w : bf16[8]
          %0 = cast(%x) : f32[1,5,8]
          %1 = const(value=2.0) : f32[]
          %2 = pow(%0, %1) : f32[1,5,8]
          %3 = reduce_mean(%2, axes=[-1]) : f32[1,5,1]
          %4 = const(value=1e-06) : f32[]
          %5 = add(%3, %4) : f32[1,5,1]
          %6 = rsqrt(%5) : f32[1,5,1]
          %7 = mul(%0, %6) : f32[1,5,8]
          %8 = cast(@w) : f32[8]
          %9 = const(value=1.0) : f32[]
          %10 = add(%9, %8) : f32[8]
          %11 = mul(%7, %10) : f32[1,5,8]
          %12 = cast(%11) : bf16[1,5,8]
          return %12
        }
        """,
        after="""
        graph g(x: bf16[1,5,8]) {
          @w : bf16[8]
          %0 = rms_norm(%x, @w, eps=1e-06, offset=1.0) : bf16[1,5,8]
          return %0
        }
        """,
    )


def test_llama_spelling() -> None:
    """The cast comes before the weight."""
    expect_pass(
        canonicalize,
        fires={"casts": 3, "shape": 2, "algebra": 1, "rms_norm": 2},
        before="""
        graph g(x: bf16[5,8]) {
          @w : bf16[8]
          %0 = cast(%x) : f32[5,8]
          %1 = mul(%0, %0) : f32[5,8]
          %2 = reduce_mean(%1, axes=[-1], keepdims=false) : f32[5]
          %3 = reshape(%2, shape=[5,1]) : f32[5,1]
          %4 = const(value=1e-05) : f32[]
          %5 = add(%3, %4) : f32[5,1]
          %6 = sqrt(%5) : f32[5,1]
          %7 = div(%0, %6) : f32[5,8]
          %8 = cast(%7) : bf16[5,8]
          %9 = mul(@w, %8) : bf16[5,8]
          return %9
        }
        """,
        after="""
        graph g(x: bf16[5,8]) {
          @w : bf16[8]
          %0 = rms_norm(%x, @w, eps=1e-05, inner=bf16) : bf16[5,8]
          return %0
        }
        """,
    )


def test_weight_inside_the_factor() -> None:
    expect_pass(
        canonicalize,
        fires={"rms_norm": 1},
        before="""
        graph g(x: f32[5,8]) {
          @w : f32[8]
          %0 = mul(%x, %x) : f32[5,8]
          %1 = reduce_mean(%0, axes=[-1]) : f32[5,1]
          %2 = const(value=1e-06) : f32[]
          %3 = add(%1, %2) : f32[5,1]
          %4 = rsqrt(%3) : f32[5,1]
          %5 = mul(%4, @w) : f32[5,8]
          %6 = mul(%x, %5) : f32[5,8]
          return %6
        }
        """,
        after="""
        graph g(x: f32[5,8]) {
          @w : f32[8]
          %0 = rms_norm(%x, @w, eps=1e-06) : f32[5,8]
          return %0
        }
        """,
    )


def test_one_plus_weight_in_16_bits() -> None:
    """A rounded sum is a weight of its own: the offset stays 0."""
    expect_pass(
        canonicalize,
        fires={"rms_norm": 1},
        before="""
        graph g(x: f32[5,8]) {
          @w : bf16[8]
          %0 = rms_norm(%x, eps=1e-06) : f32[5,8]
          %1 = const(value=1.0) : f32[]
          %2 = add(@w, %1) : bf16[8]
          %3 = mul(%0, %2) : f32[5,8]
          return %3
        }
        """,
        after="""
        graph g(x: f32[5,8]) {
          @w : bf16[8]
          %0 = const(value=1.0) : f32[]
          %1 = add(@w, %0) : bf16[8]
          %2 = rms_norm(%x, %1, eps=1e-06) : f32[5,8]
          return %2
        }
        """,
    )


def test_mean_over_another_axis() -> None:
    expect_unchanged(
        canonicalize,
        """
        graph g(x: f32[8,8]) {
          %0 = mul(%x, %x) : f32[8,8]
          %1 = reduce_mean(%0, axes=[-2]) : f32[1,8]
          %2 = const(value=1e-06) : f32[]
          %3 = add(%1, %2) : f32[1,8]
          %4 = rsqrt(%3) : f32[1,8]
          %5 = mul(%x, %4) : f32[8,8]
          return %5
        }
        """,
    )


def test_statistics_of_another_value() -> None:
    expect_unchanged(
        canonicalize,
        """
        graph g(x: f32[5,8], y: f32[5,8]) {
          %0 = mul(%y, %y) : f32[5,8]
          %1 = reduce_mean(%0, axes=[-1]) : f32[5,1]
          %2 = const(value=1e-06) : f32[]
          %3 = add(%1, %2) : f32[5,1]
          %4 = rsqrt(%3) : f32[5,1]
          %5 = mul(%x, %4) : f32[5,8]
          return %5
        }
        """,
    )


def test_gate_for_each_row() -> None:
    """A factor for each element is not a norm's weight."""
    expect_unchanged(
        canonicalize,
        """
        graph g(x: f32[5,8], gate: f32[5,8]) {
          %0 = rms_norm(%x, eps=1e-06) : f32[5,8]
          %1 = mul(%0, %gate) : f32[5,8]
          return %1
        }
        """,
    )


def test_adaptive() -> None:
    """Scale and shift out of one projection of the condition."""
    expect_pass(
        canonicalize,
        fires={"casts": 3, "rms_norm": 2, "algebra": 1, "ada_rms_norm": 1},
        before="""
        graph g(x: bf16[5,8], cond: f32[4]) {
          @dense : f32[24,4]
          %0 = linear(%cond, @dense) : f32[24]
          %1 = slice(%0, axis=-1, start=0, stop=8) : f32[8]
          %2 = slice(%0, axis=-1, start=8, stop=16) : f32[8]
          %3 = cast(%x) : f32[5,8]
          %4 = mul(%3, %3) : f32[5,8]
          %5 = reduce_mean(%4, axes=[-1]) : f32[5,1]
          %6 = const(value=1e-06) : f32[]
          %7 = add(%5, %6) : f32[5,1]
          %8 = rsqrt(%7) : f32[5,1]
          %9 = mul(%3, %8) : f32[5,8]
          %10 = const(value=1.0) : f32[]
          %11 = add(%10, %1) : f32[8]
          %12 = mul(%9, %11) : f32[5,8]
          %13 = add(%12, %2) : f32[5,8]
          %14 = cast(%13) : bf16[5,8]
          return %14
        }
        """,
        after="""
        graph g(x: bf16[5,8], cond: f32[4]) {
          @dense : f32[24,4]
          %0 = linear(%cond, @dense) : f32[24]
          %1 = slice(%0, axis=-1, start=0, stop=8) : f32[8]
          %2 = slice(%0, axis=-1, start=8, stop=16) : f32[8]
          %3 = ada_rms_norm(%x, %1, %2, eps=1e-06) : bf16[5,8]
          return %3
        }
        """,
    )


def test_adaptive_for_each_row() -> None:
    expect_pass(
        canonicalize,
        fires={"ada_rms_norm": 1},
        before="""
        graph g(x: f32[5,8], scale: f32[5,8], shift: f32[5,8]) {
          %0 = rms_norm(%x, eps=1e-06) : f32[5,8]
          %1 = const(value=1.0) : f32[]
          %2 = add(%scale, %1) : f32[5,8]
          %3 = mul(%0, %2) : f32[5,8]
          %4 = add(%3, %shift) : f32[5,8]
          return %4
        }
        """,
        after="""
        graph g(x: f32[5,8], scale: f32[5,8], shift: f32[5,8]) {
          %0 = ada_rms_norm(%x, %scale, %shift, eps=1e-06) : f32[5,8]
          return %0
        }
        """,
    )


def test_norm_before_a_residual() -> None:
    """What is added is as large as x: no shift."""
    expect_unchanged(
        canonicalize,
        """
        graph g(x: f32[5,8], y: f32[5,8]) {
          @w : f32[8]
          %0 = rms_norm(%x, @w, eps=1e-06, offset=1.0) : f32[5,8]
          %1 = add(%0, %y) : f32[5,8]
          return %1
        }
        """,
    )


def test_norm_with_a_constant_bias() -> None:
    """Weight and bias are constants: not an adaptive norm."""
    expect_unchanged(
        canonicalize,
        """
        graph g(x: f32[5,8]) {
          @b : f32[8]
          @w : f32[8]
          %0 = rms_norm(%x, @w, eps=1e-06, offset=1.0) : f32[5,8]
          %1 = add(%0, @b) : f32[5,8]
          return %1
        }
        """,
    )


def test_layer_norm_written_out() -> None:
    expect_pass(
        canonicalize,
        fires={"casts": 3, "algebra": 2, "rms_norm": 1, "layer_norm": 3},
        before="""
        graph g(x: bf16[5,8]) {
          @w : f32[8]
          @b : f32[8]
          %0 = cast(%x) : f32[5,8]
          %1 = reduce_mean(%0, axes=[-1]) : f32[5,1]
          %2 = sub(%0, %1) : f32[5,8]
          %3 = const(value=2.0) : f32[]
          %4 = pow(%2, %3) : f32[5,8]
          %5 = reduce_mean(%4, axes=[-1]) : f32[5,1]
          %6 = const(value=1e-05) : f32[]
          %7 = add(%5, %6) : f32[5,1]
          %8 = sqrt(%7) : f32[5,1]
          %9 = div(%2, %8) : f32[5,8]
          %10 = mul(%9, @w) : f32[5,8]
          %11 = add(%10, @b) : f32[5,8]
          %12 = cast(%11) : bf16[5,8]
          return %12
        }
        """,
        after="""
        graph g(x: bf16[5,8]) {
          @b : f32[8]
          @w : f32[8]
          %0 = layer_norm(%x, @w, @b, eps=1e-05) : bf16[5,8]
          return %0
        }
        """,
    )


def test_centred_on_another_mean() -> None:
    """The RMS norm of x - mean(y) is no layer norm of x."""
    expect_pass(
        canonicalize,
        fires={"rms_norm": 1},
        before="""
        graph g(x: f32[5,8], y: f32[5,8]) {
          %0 = reduce_mean(%y, axes=[-1]) : f32[5,1]
          %1 = sub(%x, %0) : f32[5,8]
          %2 = mul(%1, %1) : f32[5,8]
          %3 = reduce_mean(%2, axes=[-1]) : f32[5,1]
          %4 = const(value=1e-05) : f32[]
          %5 = add(%3, %4) : f32[5,1]
          %6 = rsqrt(%5) : f32[5,1]
          %7 = mul(%1, %6) : f32[5,8]
          return %7
        }
        """,
        after="""
        graph g(x: f32[5,8], y: f32[5,8]) {
          %0 = reduce_mean(%y, axes=[-1]) : f32[5,1]
          %1 = sub(%x, %0) : f32[5,8]
          %2 = rms_norm(%1, eps=1e-05) : f32[5,8]
          return %2
        }
        """,
    )


def test_two_weights_on_one_normalised_value() -> None:
    expect_pass(
        canonicalize,
        fires={"rms_norm": 2},
        before="""
        graph g(x: f32[5,8]) {
          @v : f32[8]
          @w : f32[8]
          %0 = rms_norm(%x, eps=1e-06) : f32[5,8]
          %1 = mul(%0, @v) : f32[5,8]
          %2 = mul(%0, @w) : f32[5,8]
          return a=%1, b=%2
        }
        """,
        after="""
        graph g(x: f32[5,8]) {
          @v : f32[8]
          @w : f32[8]
          %0 = rms_norm(%x, @v, eps=1e-06) : f32[5,8]
          %1 = rms_norm(%x, @w, eps=1e-06) : f32[5,8]
          return a=%0, b=%1
        }
        """,
    )


def test_factor_that_is_computed_and_a_second_reader() -> None:
    """It may be a table of positions, and not the norm's."""
    expect_unchanged(
        canonicalize,
        """
        graph g(x: f32[1,8], cos: f32[1,8]) {
          %0 = rms_norm(%x, eps=1e-06) : f32[1,8]
          %1 = mul(%0, %cos) : f32[1,8]
          %2 = abs(%0) : f32[1,8]
          %3 = add(%1, %2) : f32[1,8]
          return %3
        }
        """,
    )
