"""canonicalize: products with weights, gated products."""

from __future__ import annotations

from frtc.passes.canonicalize import canonicalize
from tests.passes.expect import expect_pass, expect_unchanged


def test_matmul_with_a_weight() -> None:
    expect_pass(
        canonicalize,
        fires={"linear": 1},
        before="""
        graph g(x: bf16[2,5,8]) {
          @w : bf16[8,16]
          %0 = matmul(%x, @w) : bf16[2,5,16]
          return %0
        }
        """,
        after="""
        graph g(x: bf16[2,5,8]) {
          @w : bf16[8,16]
          %0 = transpose(@w, perm=[-1, -2]) : bf16[16,8]
          %1 = linear(%x, %0) : bf16[2,5,16]
          return %1
        }
        """,
    )


def test_transposed_weight() -> None:
    expect_pass(
        canonicalize,
        fires={"linear": 2, "shape": 2},
        before="""
        graph g(x: f32[5,8]) {
          @w : f32[16,8]
          @b : f32[16]
          %0 = transpose(@w, perm=[-1,-2]) : f32[8,16]
          %1 = matmul(%x, %0) : f32[5,16]
          %2 = add(@b, %1) : f32[5,16]
          return %2
        }
        """,
        after="""
        graph g(x: f32[5,8]) {
          @b : f32[16]
          @w : f32[16,8]
          %0 = linear(%x, @w, @b) : f32[5,16]
          return %0
        }
        """,
    )


def test_matmul_of_two_values() -> None:
    expect_unchanged(
        canonicalize,
        """
        graph g(x: f32[5,8], y: f32[8,16]) {
          %0 = matmul(%x, %y) : f32[5,16]
          return %0
        }
        """,
    )


def test_batched_weight() -> None:
    expect_unchanged(
        canonicalize,
        """
        graph g(x: f32[2,5,8]) {
          @w : f32[2,8,16]
          %0 = matmul(%x, @w) : f32[2,5,16]
          return %0
        }
        """,
    )


def test_bias_rounded_once() -> None:
    """The product was rounded before the bias came; now only the sum is."""
    expect_pass(
        canonicalize,
        fires={"linear": 1},
        before="""
        graph g(x: bf16[5,8]) {
          @w : bf16[16,8]
          @b : bf16[1,16]
          %0 = linear(%x, @w) : bf16[5,16]
          %1 = add(%0, @b) : bf16[5,16]
          return %1
        }
        """,
        after="""
        graph g(x: bf16[5,8]) {
          @b : bf16[1,16]
          @w : bf16[16,8]
          %0 = reshape(@b, shape=[16]) : bf16[16]
          %1 = linear(%x, @w, %0) : bf16[5,16]
          return %1
        }
        """,
    )


def test_positions_are_no_bias() -> None:
    expect_unchanged(
        canonicalize,
        """
        graph g(x: bf16[5,8]) {
          @position : bf16[5,16]
          @w : bf16[16,8]
          %0 = linear(%x, @w) : bf16[5,16]
          %1 = add(%0, @position) : bf16[5,16]
          return %1
        }
        """,
    )


def test_product_that_others_read() -> None:
    expect_unchanged(
        canonicalize,
        """
        graph g(x: bf16[5,8]) {
          @b : bf16[16]
          @w : bf16[16,8]
          %0 = linear(%x, @w) : bf16[5,16]
          %1 = add(%0, @b) : bf16[5,16]
          return a=%0, b=%1
        }
        """,
    )


def test_patches() -> None:
    """Pixels that fill no window are dropped."""
    expect_pass(
        canonicalize,
        fires={"linear": 1, "shape": 3},
        before="""
        graph g(x: f32[2,3,9,8]) {
          @w : f32[16,3,4,4]
          @b : f32[16]
          %0 = conv2d(%x, @w, @b, stride=[4,4]) : f32[2,16,2,2]
          %1 = reshape(%0, shape=[2,16,4]) : f32[2,16,4]
          %2 = transpose(%1, perm=[-1,-2]) : f32[2,4,16]
          return %2
        }
        """,
        after="""
        graph g(x: f32[2,3,9,8]) {
          @b : f32[16]
          @w : f32[16,3,4,4]
          %0 = slice(%x, axis=-2, start=0, stop=8) : f32[2,3,8,8]
          %1 = reshape(%0, shape=[2, 3, 2, 4, 2, 4]) : f32[2,3,2,4,2,4]
          %2 = transpose(%1, perm=[-4, -2, -5, -3, -1]) : f32[2,2,2,3,4,4]
          %3 = reshape(%2, shape=[2, 2, 2, 48]) : f32[2,2,2,48]
          %4 = reshape(@w, shape=[16, 48]) : f32[16,48]
          %5 = linear(%3, %4, @b) : f32[2,2,2,16]
          %6 = reshape(%5, shape=[2, 4, 16]) : f32[2,4,16]
          return %6
        }
        """,
    )


def test_overlapping_windows() -> None:
    expect_unchanged(
        canonicalize,
        """
        graph g(x: f32[2,3,8,8]) {
          @w : f32[16,3,4,4]
          %0 = conv2d(%x, @w, stride=[2, 2]) : f32[2,16,3,3]
          return %0
        }
        """,
    )


def test_padded_windows() -> None:
    expect_unchanged(
        canonicalize,
        """
        graph g(x: f32[2,3,8,8]) {
          @w : f32[16,3,4,4]
          %0 = conv2d(%x, @w, padding=[2, 2], stride=[4, 4]) : f32[2,16,3,3]
          return %0
        }
        """,
    )


def test_gated() -> None:
    expect_pass(
        canonicalize,
        fires={"gated_linear": 1},
        before="""
        graph g(x: bf16[5,8]) {
          @gate : bf16[16,8]
          @up : bf16[16,8]
          %0 = linear(%x, @gate) : bf16[5,16]
          %1 = gelu_tanh(%0) : bf16[5,16]
          %2 = linear(%x, @up) : bf16[5,16]
          %3 = mul(%1, %2) : bf16[5,16]
          return %3
        }
        """,
        after="""
        graph g(x: bf16[5,8]) {
          @gate : bf16[16,8]
          @up : bf16[16,8]
          %0 = gated_linear(%x, @gate, @up, act=gelu_tanh) : bf16[5,16]
          return %0
        }
        """,
    )


def test_gated_by_silu_written_out() -> None:
    expect_pass(
        canonicalize,
        fires={"activations": 1, "gated_linear": 1},
        before="""
        graph g(x: bf16[5,8]) {
          @gate : bf16[16,8]
          @up : bf16[16,8]
          %0 = linear(%x, @gate) : bf16[5,16]
          %1 = sigmoid(%0) : bf16[5,16]
          %2 = mul(%0, %1) : bf16[5,16]
          %3 = linear(%x, @up) : bf16[5,16]
          %4 = mul(%3, %2) : bf16[5,16]
          return %4
        }
        """,
        after="""
        graph g(x: bf16[5,8]) {
          @gate : bf16[16,8]
          @up : bf16[16,8]
          %0 = gated_linear(%x, @gate, @up, act=silu) : bf16[5,16]
          return %0
        }
        """,
    )


def test_gated_by_halves_of_one_product() -> None:
    expect_pass(
        canonicalize,
        fires={"gated_linear": 1},
        before="""
        graph g(x: bf16[5,8]) {
          @w : bf16[32,8]
          %0 = linear(%x, @w) : bf16[5,32]
          %1 = slice(%0, axis=-1, start=0, stop=16) : bf16[5,16]
          %2 = slice(%0, axis=-1, start=16, stop=32) : bf16[5,16]
          %3 = silu(%1) : bf16[5,16]
          %4 = mul(%3, %2) : bf16[5,16]
          return %4
        }
        """,
        after="""
        graph g(x: bf16[5,8]) {
          @w : bf16[32,8]
          %0 = slice(@w, axis=-2, start=0, stop=16) : bf16[16,8]
          %1 = slice(@w, axis=-2, start=16, stop=32) : bf16[16,8]
          %2 = gated_linear(%x, %0, %1, act=silu) : bf16[5,16]
          return %2
        }
        """,
    )


def test_gated_with_a_bias() -> None:
    expect_unchanged(
        canonicalize,
        """
        graph g(x: bf16[5,8]) {
          @b : bf16[16]
          @gate : bf16[16,8]
          @up : bf16[16,8]
          %0 = linear(%x, @gate) : bf16[5,16]
          %1 = silu(%0) : bf16[5,16]
          %2 = linear(%x, @up, @b) : bf16[5,16]
          %3 = mul(%1, %2) : bf16[5,16]
          return %3
        }
        """,
    )


def test_gate_and_up_of_different_values() -> None:
    expect_unchanged(
        canonicalize,
        """
        graph g(x: bf16[5,8], y: bf16[5,8]) {
          @gate : bf16[16,8]
          @up : bf16[16,8]
          %0 = linear(%x, @gate) : bf16[5,16]
          %1 = silu(%0) : bf16[5,16]
          %2 = linear(%y, @up) : bf16[5,16]
          %3 = mul(%1, %2) : bf16[5,16]
          return %3
        }
        """,
    )


def test_activation_that_others_read() -> None:
    expect_unchanged(
        canonicalize,
        """
        graph g(x: bf16[5,8]) {
          @gate : bf16[16,8]
          @up : bf16[16,8]
          %0 = linear(%x, @gate) : bf16[5,16]
          %1 = silu(%0) : bf16[5,16]
          %2 = linear(%x, @up) : bf16[5,16]
          %3 = mul(%1, %2) : bf16[5,16]
          return a=%1, b=%3
        }
        """,
    )


def test_outer_product() -> None:
    """Angles as older transformers write them: frequencies [D, 1] @ positions [1, S]."""
    expect_pass(
        canonicalize,
        fires={"linear": 1},
        before="""
        graph g(position: f32[1,1,5]) {
          @frequency : f32[1,4,1]
          %0 = matmul(@frequency, %position) : f32[1,4,5]
          %1 = transpose(%0, perm=[-1,-2]) : f32[1,5,4]
          return %1
        }
        """,
        after="""
        graph g(position: f32[1,1,5]) {
          @frequency : f32[1,4,1]
          %0 = mul(@frequency, %position) : f32[1,4,5]
          %1 = transpose(%0, perm=[-1, -2]) : f32[1,5,4]
          return %1
        }
        """,
    )
