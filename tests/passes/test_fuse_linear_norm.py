"""fuse_linear_norm: a linear and the norm that reads its result."""

from __future__ import annotations

from frtc.lowering.ir import Node
from frtc.passes.fuse_linear_norm import fuse_linear_norm
from tests.passes.expect import expect_pass, expect_unchanged


def everything(node: Node) -> bool:
    return True


def few_rows(node: Node) -> bool:
    """A kernel that has room for five rows."""
    assert node.op == "linear_norm"
    return node.operands[0].shape[-2] <= 5


def test_rms() -> None:
    """The residual stream takes the first result, the next linear the second."""
    expect_pass(
        fuse_linear_norm(everything),
        fires={"fuse_linear_norm": 1},
        before="""
        graph g(x: bf16[5,8], r: bf16[5,4]) {
          @v : bf16[6,4]
          @w : bf16[4,8]
          @n : f32[4]
          %0 = linear(%x, @w, _, %r) : bf16[5,4]
          %1 = rms_norm(%0, @n, eps=1e-06, offset=1.0) : bf16[5,4]
          %2 = linear(%1, @v) : bf16[5,6]
          return s=%0, y=%2
        }
        """,
        after="""
        graph g(x: bf16[5,8], r: bf16[5,4]) {
          @n : f32[4]
          @v : bf16[6,4]
          @w : bf16[4,8]
          %0 = linear_norm(%x, @w, _, %r, _, _, _, _, @n, eps=1e-06, kind=rms, offset=1.0) : (bf16[5,4], bf16[5,4])
          %1 = linear(%0.1, @v) : bf16[5,6]
          return s=%0.0, y=%1
        }
        """,
    )


def test_gated_ada() -> None:
    """All operands of the linear stay; the norm's vectors may be computed after it."""
    expect_pass(
        fuse_linear_norm(everything),
        fires={"fuse_linear_norm": 1},
        before="""
        graph g(x: f16[5,8], r: f16[5,4], g: f16[4]) {
          @b : f32[4]
          @w : f16[4,8]
          %0 = linear(%x, @w, @b, %r, %g) : f16[5,4]
          %1 = exp(%g) : f16[4]
          %2 = ada_rms_norm(%0, %1, %g, eps=1e-06) : f32[5,4]
          return s=%0, y=%2
        }
        """,
        after="""
        graph g(x: f16[5,8], r: f16[5,4], g: f16[4]) {
          @b : f32[4]
          @w : f16[4,8]
          %0 = exp(%g) : f16[4]
          %1 = linear_norm(%x, @w, @b, %r, %g, _, _, _, %0, %g, eps=1e-06, kind=ada, stored=f16) : (f16[5,4], f32[5,4])
          return s=%1.0, y=%1.1
        }
        """,
    )


def test_layer() -> None:
    """Weight and shift, behind an activation; nothing else reads s."""
    expect_pass(
        fuse_linear_norm(everything),
        fires={"fuse_linear_norm": 1},
        before="""
        graph g(x: bf16[5,8]) {
          @b : f32[4]
          @n : f32[4]
          @w : bf16[4,8]
          %0 = linear(%x, @w, act=silu) : bf16[5,4]
          %1 = layer_norm(%0, @n, @b, eps=1e-06) : bf16[5,4]
          return %1
        }
        """,
        after="""
        graph g(x: bf16[5,8]) {
          @b : f32[4]
          @n : f32[4]
          @w : bf16[4,8]
          %0 = linear_norm(%x, @w, _, _, _, _, _, _, @n, @b, act=silu, eps=1e-06, kind=layer) : (bf16[5,4], bf16[5,4])
          return %0.1
        }
        """,
    )


def test_chain() -> None:
    """Linear upon linear; the residual of the second is the first result of the first. Of two norms one is fused."""
    expect_pass(
        fuse_linear_norm(everything),
        fires={"fuse_linear_norm": 2},
        before="""
        graph g(x: bf16[5,4]) {
          @v : bf16[4,4]
          @w : bf16[4,4]
          %0 = linear(%x, @w) : bf16[5,4]
          %1 = rms_norm(%0, eps=1e-06) : bf16[5,4]
          %2 = rms_norm(%0, eps=1e-05) : bf16[5,4]
          %3 = linear(%1, @v, _, %0) : bf16[5,4]
          %4 = rms_norm(%3, eps=1e-06) : bf16[5,4]
          return a=%4, b=%2
        }
        """,
        after="""
        graph g(x: bf16[5,4]) {
          @v : bf16[4,4]
          @w : bf16[4,4]
          %0 = linear_norm(%x, @w, eps=1e-06, kind=rms) : (bf16[5,4], bf16[5,4])
          %1 = linear_norm(%0.1, @v, _, %0.0, eps=1e-06, kind=rms) : (bf16[5,4], bf16[5,4])
          %2 = rms_norm(%0.0, eps=1e-05) : bf16[5,4]
          return a=%1.1, b=%2
        }
        """,
    )


def test_vector_from_the_linear_stays() -> None:
    """Near miss: the norm's vectors depend on the linear's result."""
    expect_unchanged(
        fuse_linear_norm(everything),
        """
        graph g(x: bf16[5,8]) {
          @w : bf16[4,8]
          %0 = linear(%x, @w) : bf16[5,4]
          %1 = reduce_mean(%0, axes=[-2], keepdims=false) : bf16[4]
          %2 = ada_rms_norm(%0, %1, %1, eps=1e-06) : bf16[5,4]
          return %2
        }
        """,
    )


def test_vector_from_another_norm_stays() -> None:
    """Near miss: of two linears whose norms take vectors from each other's result, one is fused."""
    expect_pass(
        fuse_linear_norm(everything),
        fires={"fuse_linear_norm": 1},
        before="""
        graph g(x: bf16[5,8]) {
          @v : bf16[4,8]
          @w : bf16[4,8]
          %0 = linear(%x, @w) : bf16[5,4]
          %1 = linear(%x, @v) : bf16[5,4]
          %2 = reduce_mean(%1, axes=[-2], keepdims=false) : bf16[4]
          %3 = rms_norm(%0, %2, eps=1e-06) : bf16[5,4]
          %4 = reduce_mean(%0, axes=[-2], keepdims=false) : bf16[4]
          %5 = rms_norm(%1, %4, eps=1e-06) : bf16[5,4]
          return a=%3, b=%5
        }
        """,
        after="""
        graph g(x: bf16[5,8]) {
          @v : bf16[4,8]
          @w : bf16[4,8]
          %0 = linear(%x, @v) : bf16[5,4]
          %1 = reduce_mean(%0, axes=[-2], keepdims=false) : bf16[4]
          %2 = linear_norm(%x, @w, _, _, _, _, _, _, %1, eps=1e-06, kind=rms) : (bf16[5,4], bf16[5,4])
          %3 = reduce_mean(%2.0, axes=[-2], keepdims=false) : bf16[4]
          %4 = rms_norm(%0, %3, eps=1e-06) : bf16[5,4]
          return a=%2.1, b=%4
        }
        """,
    )


def test_view_between_stays() -> None:
    """Near miss: the norm is over heads, not over the linear's rows."""
    expect_unchanged(
        fuse_linear_norm(everything),
        """
        graph g(x: bf16[5,8]) {
          @w : bf16[8,8]
          %0 = linear(%x, @w) : bf16[5,8]
          %1 = reshape(%0, shape=[5,2,4]) : bf16[5,2,4]
          %2 = rms_norm(%1, eps=1e-06) : bf16[5,2,4]
          return %2
        }
        """,
    )


def test_inner_rounding_stays() -> None:
    """Near miss: a norm that rounds inside."""
    expect_unchanged(
        fuse_linear_norm(everything),
        """
        graph g(x: bf16[5,8]) {
          @n : bf16[4]
          @w : bf16[4,8]
          %0 = linear(%x, @w) : bf16[5,4]
          %1 = rms_norm(%0, @n, eps=1e-06, inner=bf16) : bf16[5,4]
          return %1
        }
        """,
    )


def test_fp8_stays() -> None:
    """Near miss: results that are stored with scales already."""
    expect_unchanged(
        fuse_linear_norm(everything),
        """
        graph g(x: bf16[5,8], i: f32[]) {
          @v : bf16[4,8]
          @w : bf16[4,8]
          %0 = linear(%x, @w, _, _, _, _, _, _, %i) : e4m3[5,4]
          %1 = rms_norm(%0, eps=1e-06) : bf16[5,4]
          %2 = linear(%x, @v) : bf16[5,4]
          %3 = rms_norm(%2, _, %i, eps=1e-06) : e4m3[5,4]
          return a=%1, b=%3
        }
        """,
    )


def test_constant_stays() -> None:
    """Near miss: a product of weights is made once, at compile time."""
    expect_unchanged(
        fuse_linear_norm(everything),
        """
        graph g(x: bf16[4]) {
          @v : bf16[5,8]
          @w : bf16[4,8]
          %0 = linear(@v, @w) : bf16[5,4]
          %1 = rms_norm(%0, %x, eps=1e-06) : bf16[5,4]
          return %1
        }
        """,
    )


def test_only_what_a_kernel_runs() -> None:
    """Near miss: more rows than the kernel takes."""
    expect_unchanged(
        fuse_linear_norm(few_rows),
        """
        graph g(x: bf16[6,8]) {
          @w : bf16[4,8]
          %0 = linear(%x, @w) : bf16[6,4]
          %1 = rms_norm(%0, eps=1e-06) : bf16[6,4]
          return %1
        }
        """,
    )
