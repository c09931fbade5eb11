"""fuse_residual_norm: a sum and the norm that reads it."""

from __future__ import annotations

from frtc.lowering.ir import Node
from frtc.passes.fuse_residual_norm import fuse_residual_norm
from tests.passes.expect import expect_pass, expect_unchanged


def everything(node: Node) -> bool:
    return True


def nothing(node: Node) -> bool:
    return False


def test_rms() -> None:
    """The sum is a result, too."""
    expect_pass(
        fuse_residual_norm(everything),
        fires={"fuse_residual_norm": 1},
        before="""
        graph g(x: bf16[5,4], r: bf16[5,4]) {
          @w : f32[4]
          %0 = add(%x, %r) : bf16[5,4]
          %1 = rms_norm(%0, @w, eps=1e-06, offset=1.0) : bf16[5,4]
          return s=%0, y=%1
        }
        """,
        after="""
        graph g(x: bf16[5,4], r: bf16[5,4]) {
          @w : f32[4]
          %0 = residual_norm(%x, %r, _, @w, eps=1e-06, kind=rms, offset=1.0) : (bf16[5,4], bf16[5,4])
          return s=%0.0, y=%0.1
        }
        """,
    )


def test_layer() -> None:
    """Weight and shift."""
    expect_pass(
        fuse_residual_norm(everything),
        fires={"fuse_residual_norm": 1},
        before="""
        graph g(x: bf16[5,4], r: bf16[5,4]) {
          @b : f32[4]
          @w : f32[4]
          %0 = add(%x, %r) : bf16[5,4]
          %1 = layer_norm(%0, @w, @b, eps=1e-06) : bf16[5,4]
          %2 = add(%0, %1) : bf16[5,4]
          return %2
        }
        """,
        after="""
        graph g(x: bf16[5,4], r: bf16[5,4]) {
          @b : f32[4]
          @w : f32[4]
          %0 = residual_norm(%x, %r, _, @w, @b, eps=1e-06, kind=layer) : (bf16[5,4], bf16[5,4])
          %1 = add(%0.0, %0.1) : bf16[5,4]
          return %1
        }
        """,
    )


def test_gated_ada() -> None:
    """gate * r joins, and the norm's vectors may be computed after the sum."""
    expect_pass(
        fuse_residual_norm(everything),
        fires={"fuse_residual_norm": 1},
        before="""
        graph g(x: bf16[5,4], r: bf16[5,4], g: bf16[4]) {
          %0 = mul(%r, %g) : bf16[5,4]
          %1 = add(%0, %x) : bf16[5,4]
          %2 = exp(%g) : bf16[4]
          %3 = ada_rms_norm(%1, %2, %g, eps=1e-06) : bf16[5,4]
          return s=%1, y=%3
        }
        """,
        after="""
        graph g(x: bf16[5,4], r: bf16[5,4], g: bf16[4]) {
          %0 = exp(%g) : bf16[4]
          %1 = residual_norm(%x, %r, %g, %0, %g, eps=1e-06, kind=ada) : (bf16[5,4], bf16[5,4])
          return s=%1.0, y=%1.1
        }
        """,
    )


def test_bare() -> None:
    """A norm without weights; a second reader takes the sum."""
    expect_pass(
        fuse_residual_norm(everything),
        fires={"fuse_residual_norm": 1},
        before="""
        graph g(x: f32[5,4], r: f32[5,4]) {
          %0 = add(%x, %r) : f32[5,4]
          %1 = rms_norm(%0, eps=1e-06) : f32[5,4]
          %2 = rms_norm(%0, eps=1e-05) : f32[5,4]
          return a=%1, b=%2
        }
        """,
        after="""
        graph g(x: f32[5,4], r: f32[5,4]) {
          %0 = residual_norm(%x, %r, eps=1e-06, kind=rms) : (f32[5,4], f32[5,4])
          %1 = rms_norm(%0.0, eps=1e-05) : f32[5,4]
          return a=%0.1, b=%1
        }
        """,
    )


def test_two_sums() -> None:
    """Sum upon sum."""
    expect_pass(
        fuse_residual_norm(everything),
        fires={"fuse_residual_norm": 2},
        before="""
        graph g(x: f32[5,4], r: f32[5,4]) {
          %0 = add(%x, %r) : f32[5,4]
          %1 = rms_norm(%0, eps=1e-06) : f32[5,4]
          %2 = exp(%1) : f32[5,4]
          %3 = add(%0, %2) : f32[5,4]
          %4 = rms_norm(%3, eps=1e-06) : f32[5,4]
          return %4
        }
        """,
        after="""
        graph g(x: f32[5,4], r: f32[5,4]) {
          %0 = residual_norm(%x, %r, eps=1e-06, kind=rms) : (f32[5,4], f32[5,4])
          %1 = exp(%0.1) : f32[5,4]
          %2 = residual_norm(%0.0, %1, eps=1e-06, kind=rms) : (f32[5,4], f32[5,4])
          return %2.1
        }
        """,
    )


def test_shared_gate_product() -> None:
    """The product gate * r is read elsewhere: it stays, the sum takes its result."""
    expect_pass(
        fuse_residual_norm(everything),
        fires={"fuse_residual_norm": 1},
        before="""
        graph g(x: f32[5,4], r: f32[5,4], g: f32[4]) {
          %0 = mul(%r, %g) : f32[5,4]
          %1 = add(%x, %0) : f32[5,4]
          %2 = rms_norm(%1, eps=1e-06) : f32[5,4]
          return a=%2, b=%0
        }
        """,
        after="""
        graph g(x: f32[5,4], r: f32[5,4], g: f32[4]) {
          %0 = mul(%r, %g) : f32[5,4]
          %1 = residual_norm(%x, %0, eps=1e-06, kind=rms) : (f32[5,4], f32[5,4])
          return a=%1.1, b=%0
        }
        """,
    )


def test_constant_part_stays() -> None:
    """Near miss: one part of the sum is a constant."""
    expect_unchanged(
        fuse_residual_norm(everything),
        """
        graph g(x: f32[5,4]) {
          @p : f32[5,4]
          %0 = add(%x, @p) : f32[5,4]
          %1 = rms_norm(%0, eps=1e-06) : f32[5,4]
          return %1
        }
        """,
    )


def test_vector_from_the_sum_stays() -> None:
    """Near miss: the norm's vectors depend on the sum."""
    expect_unchanged(
        fuse_residual_norm(everything),
        """
        graph g(x: f32[5,4], r: f32[5,4]) {
          %0 = add(%x, %r) : f32[5,4]
          %1 = reduce_mean(%0, axes=[-2], keepdims=false) : f32[4]
          %2 = ada_rms_norm(%0, %1, %1, eps=1e-06) : f32[5,4]
          return %2
        }
        """,
    )


def test_other_types_stay() -> None:
    """Near miss: the sum is rounded to another type than its parts have."""
    expect_unchanged(
        fuse_residual_norm(everything),
        """
        graph g(x: f32[5,4], r: bf16[5,4]) {
          %0 = add(%x, %r) : bf16[5,4]
          %1 = rms_norm(%0, eps=1e-06) : bf16[5,4]
          return %1
        }
        """,
    )


def test_broadcast_part_stays() -> None:
    """Near miss: a part that every row shares."""
    expect_unchanged(
        fuse_residual_norm(everything),
        """
        graph g(x: f32[5,4], r: f32[4]) {
          %0 = add(%x, %r) : f32[5,4]
          %1 = rms_norm(%0, eps=1e-06) : f32[5,4]
          return %1
        }
        """,
    )


def test_inner_rounding_stays() -> None:
    """Near miss: a norm that rounds inside."""
    expect_unchanged(
        fuse_residual_norm(everything),
        """
        graph g(x: bf16[5,4], r: bf16[5,4]) {
          %0 = add(%x, %r) : bf16[5,4]
          %1 = rms_norm(%0, eps=1e-06, inner=bf16) : bf16[5,4]
          return %1
        }
        """,
    )


def test_only_what_a_kernel_runs() -> None:
    """Near miss: no kernel of the target has it."""
    expect_unchanged(
        fuse_residual_norm(nothing),
        """
        graph g(x: bf16[5,4], r: bf16[5,4]) {
          @w : f32[4]
          %0 = add(%x, %r) : bf16[5,4]
          %1 = rms_norm(%0, @w, eps=1e-06, offset=1.0) : bf16[5,4]
          return s=%0, y=%1
        }
        """,
    )
