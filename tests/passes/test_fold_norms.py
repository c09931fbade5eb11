"""fold_norms: norm weights move into the linears behind them."""

from __future__ import annotations

from frtc.passes.fold_norms import fold_norms
from tests.passes.expect import expect_pass, expect_unchanged


def test_rms() -> None:
    """One reader, plain weight."""
    expect_pass(
        fold_norms,
        fires={"fold_norms": 1},
        before="""
        graph g(x: f32[5,4]) {
          @n : f32[4]
          @w : f32[3,4]
          %0 = rms_norm(%x, @n, eps=1e-06) : f32[5,4]
          %1 = linear(%0, @w) : f32[5,3]
          return %1
        }
        """,
        after="""
        graph g(x: f32[5,4]) {
          @n : f32[4]
          @w : f32[3,4]
          %0 = rms_norm(%x, eps=1e-06) : f32[5,4]
          %1 = mul(@w, @n) : f32[3,4]
          %2 = linear(%0, %1) : f32[5,3]
          return %2
        }
        """,
    )


def test_rms_with_one_added() -> None:
    """Weights stored without their one. The bias stays."""
    expect_pass(
        fold_norms,
        fires={"fold_norms": 1},
        before="""
        graph g(x: f32[5,4]) {
          @b : f32[3]
          @n : f32[4]
          @w : f32[3,4]
          %0 = rms_norm(%x, @n, eps=1e-06, offset=1.0) : f32[5,4]
          %1 = linear(%0, @w, @b) : f32[5,3]
          return %1
        }
        """,
        after="""
        graph g(x: f32[5,4]) {
          @b : f32[3]
          @n : f32[4]
          @w : f32[3,4]
          %0 = rms_norm(%x, eps=1e-06) : f32[5,4]
          %1 = const(value=1.0) : f32[]
          %2 = add(@n, %1) : f32[4]
          %3 = mul(@w, %2) : f32[3,4]
          %4 = linear(%0, %3, @b) : f32[5,3]
          return %4
        }
        """,
    )


def test_gated() -> None:
    """Gate and up both take the weight."""
    expect_pass(
        fold_norms,
        fires={"fold_norms": 1},
        before="""
        graph g(x: f32[5,4]) {
          @g : f32[3,4]
          @n : f32[4]
          @u : f32[3,4]
          %0 = rms_norm(%x, @n, eps=1e-06, offset=1.0) : f32[5,4]
          %1 = gated_linear(%0, @g, @u, act=gelu_tanh) : f32[5,3]
          return %1
        }
        """,
        after="""
        graph g(x: f32[5,4]) {
          @g : f32[3,4]
          @n : f32[4]
          @u : f32[3,4]
          %0 = rms_norm(%x, eps=1e-06) : f32[5,4]
          %1 = const(value=1.0) : f32[]
          %2 = add(@n, %1) : f32[4]
          %3 = mul(@g, %2) : f32[3,4]
          %4 = mul(@u, %2) : f32[3,4]
          %5 = gated_linear(%0, %3, %4, act=gelu_tanh) : f32[5,3]
          return %5
        }
        """,
    )


def test_two_readers() -> None:
    """Every reader takes it."""
    expect_pass(
        fold_norms,
        fires={"fold_norms": 2},
        before="""
        graph g(x: f32[5,4]) {
          @a : f32[3,4]
          @b : f32[2,4]
          @n : f32[4]
          %0 = rms_norm(%x, @n, eps=1e-06) : f32[5,4]
          %1 = linear(%0, @a, act=silu) : f32[5,3]
          %2 = linear(%0, @b) : f32[5,2]
          return a=%1, b=%2
        }
        """,
        after="""
        graph g(x: f32[5,4]) {
          @a : f32[3,4]
          @b : f32[2,4]
          @n : f32[4]
          %0 = rms_norm(%x, eps=1e-06) : f32[5,4]
          %1 = mul(@a, @n) : f32[3,4]
          %2 = linear(%0, %1, act=silu) : f32[5,3]
          %3 = mul(@b, @n) : f32[2,4]
          %4 = linear(%0, %3) : f32[5,2]
          return a=%2, b=%4
        }
        """,
    )


def test_layer_shift_into_bias() -> None:
    """The shift becomes part of the bias, by the weight as it was."""
    expect_pass(
        fold_norms,
        fires={"fold_norms": 1},
        before="""
        graph g(x: f32[5,4]) {
          @b : f32[3]
          @c : f32[4]
          @n : f32[4]
          @w : f32[3,4]
          %0 = layer_norm(%x, @n, @c, eps=1e-06) : f32[5,4]
          %1 = linear(%0, @w, @b) : f32[5,3]
          return %1
        }
        """,
        after="""
        graph g(x: f32[5,4]) {
          @b : f32[3]
          @c : f32[4]
          @n : f32[4]
          @w : f32[3,4]
          %0 = layer_norm(%x, eps=1e-06) : f32[5,4]
          %1 = mul(@w, @n) : f32[3,4]
          %2 = linear(@c, @w) : f32[3]
          %3 = add(@b, %2) : f32[3]
          %4 = linear(%0, %1, %3) : f32[5,3]
          return %4
        }
        """,
    )


def test_layer_shift_makes_bias() -> None:
    """A linear without a bias gets one."""
    expect_pass(
        fold_norms,
        fires={"fold_norms": 1},
        before="""
        graph g(x: f32[5,4]) {
          @c : f32[4]
          @n : f32[4]
          @w : f32[3,4]
          %0 = layer_norm(%x, @n, @c, eps=1e-06) : f32[5,4]
          %1 = linear(%0, @w) : f32[5,3]
          return %1
        }
        """,
        after="""
        graph g(x: f32[5,4]) {
          @c : f32[4]
          @n : f32[4]
          @w : f32[3,4]
          %0 = layer_norm(%x, eps=1e-06) : f32[5,4]
          %1 = mul(@w, @n) : f32[3,4]
          %2 = linear(@c, @w) : f32[3]
          %3 = linear(%0, %1, %2) : f32[5,3]
          return %3
        }
        """,
    )


def test_other_reader_stays() -> None:
    """Near miss: something else reads the norm."""
    expect_unchanged(
        fold_norms,
        """
        graph g(x: f32[5,4]) {
          @n : f32[4]
          @w : f32[3,4]
          %0 = rms_norm(%x, @n, eps=1e-06) : f32[5,4]
          %1 = linear(%0, @w) : f32[5,3]
          %2 = exp(%0) : f32[5,4]
          return a=%1, b=%2
        }
        """,
    )


def test_result_stays() -> None:
    """Near miss: the norm is a result."""
    expect_unchanged(
        fold_norms,
        """
        graph g(x: f32[5,4]) {
          @n : f32[4]
          @w : f32[3,4]
          %0 = rms_norm(%x, @n, eps=1e-06) : f32[5,4]
          %1 = linear(%0, @w) : f32[5,3]
          return a=%1, b=%0
        }
        """,
    )


def test_residual_reader_stays() -> None:
    """Near miss: the linear reads the norm as its residual, too."""
    expect_unchanged(
        fold_norms,
        """
        graph g(x: f32[5,4]) {
          @n : f32[4]
          @w : f32[4,4]
          %0 = rms_norm(%x, @n, eps=1e-06) : f32[5,4]
          %1 = linear(%0, @w, _, %0) : f32[5,4]
          return %1
        }
        """,
    )


def test_computed_weights_stay() -> None:
    """Near miss: the linear's weight is no constant."""
    expect_unchanged(
        fold_norms,
        """
        graph g(x: f32[5,4], w: f32[3,4]) {
          @n : f32[4]
          %0 = rms_norm(%x, @n, eps=1e-06) : f32[5,4]
          %1 = linear(%0, %w) : f32[5,3]
          return %1
        }
        """,
    )


def test_sixteen_bit_weights_stay() -> None:
    """Near miss: 16 bits hold the linear's weights, and not their product with the norm's."""
    for dtype in ("bf16", "f16"):
        expect_unchanged(
            fold_norms,
            f"""
            graph g(x: {dtype}[5,4]) {{
              @n : f32[4]
              @w : {dtype}[3,4]
              %0 = rms_norm(%x, @n, eps=1e-06) : {dtype}[5,4]
              %1 = linear(%0, @w) : {dtype}[5,3]
              return %1
            }}
            """,
        )


def test_sixteen_bit_gate_and_up_stay() -> None:
    """Near miss: the same of a gated linear."""
    expect_unchanged(
        fold_norms,
        """
        graph g(x: bf16[5,4]) {
          @g : bf16[3,4]
          @n : f32[4]
          @u : bf16[3,4]
          %0 = rms_norm(%x, @n, eps=1e-06) : bf16[5,4]
          %1 = gated_linear(%0, @g, @u, act=silu) : bf16[5,3]
          return %1
        }
        """,
    )


def test_inner_rounding_stays() -> None:
    """Near miss: the model rounds before the weight meets the normalised value."""
    expect_unchanged(
        fold_norms,
        """
        graph g(x: bf16[5,4]) {
          @n : bf16[4]
          @w : bf16[3,4]
          %0 = rms_norm(%x, @n, eps=1e-06, inner=bf16) : bf16[5,4]
          %1 = linear(%0, @w) : bf16[5,3]
          return %1
        }
        """,
    )


def test_gated_shift_stays() -> None:
    """Near miss: a gated linear has no bias for the shift."""
    expect_unchanged(
        fold_norms,
        """
        graph g(x: f32[5,4]) {
          @c : f32[4]
          @g : f32[3,4]
          @n : f32[4]
          @u : f32[3,4]
          %0 = layer_norm(%x, @n, @c, eps=1e-06) : f32[5,4]
          %1 = gated_linear(%0, @g, @u, act=silu) : f32[5,3]
          return %1
        }
        """,
    )
