"""fuse_epilogues: activation, gate and residual in the linear that they follow."""

from __future__ import annotations

from frtc.lowering.ir import Node
from frtc.passes.fuse_epilogues import add_behind_views, fuse_epilogues
from tests.passes.expect import expect_pass, expect_unchanged


def everything(node: Node) -> bool:
    return True


def nothing(node: Node) -> bool:
    return False


def test_activation() -> None:
    expect_pass(
        fuse_epilogues(everything),
        fires={"fuse_epilogue": 1},
        before="""
        graph g(x: bf16[5,4]) {
          @b : bf16[3]
          @w : bf16[3,4]
          %0 = linear(%x, @w, @b) : bf16[5,3]
          %1 = gelu_tanh(%0) : bf16[5,3]
          return %1
        }
        """,
        after="""
        graph g(x: bf16[5,4]) {
          @b : bf16[3]
          @w : bf16[3,4]
          %0 = linear(%x, @w, @b, act=gelu_tanh) : bf16[5,3]
          return %0
        }
        """,
    )


def test_residual() -> None:
    """Either order of the sum."""
    expect_pass(
        fuse_epilogues(everything),
        fires={"fuse_epilogue": 2},
        before="""
        graph g(x: bf16[5,4]) {
          @w : bf16[4,4]
          %0 = linear(%x, @w) : bf16[5,4]
          %1 = add(%0, %x) : bf16[5,4]
          %2 = linear(%1, @w) : bf16[5,4]
          %3 = add(%1, %2) : bf16[5,4]
          return %3
        }
        """,
        after="""
        graph g(x: bf16[5,4]) {
          @w : bf16[4,4]
          %0 = linear(%x, @w, _, %x) : bf16[5,4]
          %1 = linear(%0, @w, _, %0) : bf16[5,4]
          return %1
        }
        """,
    )


def test_gate_and_residual() -> None:
    """gate * linear + x, the gate one value per column."""
    expect_pass(
        fuse_epilogues(everything),
        fires={"fuse_epilogue": 2},
        before="""
        graph g(x: bf16[5,4], g: bf16[4]) {
          @w : bf16[4,4]
          %0 = linear(%x, @w) : bf16[5,4]
          %1 = mul(%g, %0) : bf16[5,4]
          %2 = add(%x, %1) : bf16[5,4]
          return %2
        }
        """,
        after="""
        graph g(x: bf16[5,4], g: bf16[4]) {
          @w : bf16[4,4]
          %0 = linear(%x, @w, _, %x, %g) : bf16[5,4]
          return %0
        }
        """,
    )


def test_gate_of_every_element() -> None:
    """A gate of the result's shape."""
    expect_pass(
        fuse_epilogues(everything),
        fires={"fuse_epilogue": 2},
        before="""
        graph g(x: f32[5,4], g: f32[5,4]) {
          @w : f32[4,4]
          %0 = linear(%x, @w) : f32[5,4]
          %1 = silu(%0) : f32[5,4]
          %2 = mul(%1, %g) : f32[5,4]
          return %2
        }
        """,
        after="""
        graph g(x: f32[5,4], g: f32[5,4]) {
          @w : f32[4,4]
          %0 = linear(%x, @w, _, _, %g, act=silu) : f32[5,4]
          return %0
        }
        """,
    )


def test_interleave() -> None:
    """Row 2i of the gate, row 2i + 1 of up."""
    expect_pass(
        fuse_epilogues(everything),
        fires={"interleave_gate": 1},
        before="""
        graph g(x: f32[5,4]) {
          @g : f32[3,4]
          @u : f32[3,4]
          %0 = gated_linear(%x, @g, @u, act=silu) : f32[5,3]
          return %0
        }
        """,
        after="""
        graph g(x: f32[5,4]) {
          @g : f32[3,4]
          @u : f32[3,4]
          %0 = reshape(@g, shape=[3,1,4]) : f32[3,1,4]
          %1 = reshape(@u, shape=[3,1,4]) : f32[3,1,4]
          %2 = concat(%0, %1, axis=-2) : f32[3,2,4]
          %3 = reshape(%2, shape=[6,4]) : f32[6,4]
          %4 = gated_linear(%x, %3, act=silu) : f32[5,3]
          return %4
        }
        """,
    )


def test_constant_residual() -> None:
    """A constant that every row shares is one value per element."""
    expect_pass(
        fuse_epilogues(everything),
        fires={"fuse_epilogue": 1},
        before="""
        graph g(x: f32[5,2,4]) {
          @p : f32[2,3]
          @w : f32[3,4]
          %0 = linear(%x, @w) : f32[5,2,3]
          %1 = add(%0, @p) : f32[5,2,3]
          return %1
        }
        """,
        after="""
        graph g(x: f32[5,2,4]) {
          @p : f32[2,3]
          @w : f32[3,4]
          %0 = broadcast(@p, shape=[5,2,3]) : f32[5,2,3]
          %1 = linear(%x, @w, _, %0) : f32[5,2,3]
          return %1
        }
        """,
    )


def test_second_reader_stays() -> None:
    """Near miss: something else reads the linear."""
    expect_unchanged(
        fuse_epilogues(everything),
        """
        graph g(x: f32[5,4]) {
          @w : f32[4,4]
          %0 = linear(%x, @w) : f32[5,4]
          %1 = add(%0, %x) : f32[5,4]
          return a=%0, b=%1
        }
        """,
    )


def test_activation_after_residual_stays() -> None:
    """Near miss: the epilogue's order is activation, gate, residual."""
    expect_unchanged(
        fuse_epilogues(everything),
        """
        graph g(x: f32[5,4], g: f32[4]) {
          @w : f32[4,4]
          %0 = linear(%x, @w, _, %x) : f32[5,4]
          %1 = silu(%0) : f32[5,4]
          %2 = mul(%1, %g) : f32[5,4]
          return %2
        }
        """,
    )


def test_gate_per_row_stays() -> None:
    """Near miss: one value per row is no gate."""
    expect_unchanged(
        fuse_epilogues(everything),
        """
        graph g(x: f32[5,4], g: f32[5,1]) {
          @w : f32[4,4]
          %0 = linear(%x, @w) : f32[5,4]
          %1 = mul(%0, %g) : f32[5,4]
          return %1
        }
        """,
    )


def test_broadcast_residual_stays() -> None:
    """Near miss: a computed row that every row shares."""
    expect_unchanged(
        fuse_epilogues(everything),
        """
        graph g(x: f32[5,4], r: f32[4]) {
          @w : f32[4,4]
          %0 = linear(%x, @w) : f32[5,4]
          %1 = add(%0, %r) : f32[5,4]
          return %1
        }
        """,
    )


def test_wider_result_stays() -> None:
    """Near miss: the sum has more rows than the linear."""
    expect_unchanged(
        fuse_epilogues(everything),
        """
        graph g(x: f32[4], r: f32[5,4]) {
          @w : f32[4,4]
          %0 = linear(%x, @w) : f32[4]
          %1 = add(%0, %r) : f32[5,4]
          %2 = linear(%x, @w, act=silu) : f32[4]
          %3 = mul(%2, %1) : f32[5,4]
          return %3
        }
        """,
    )


def test_only_what_a_kernel_runs() -> None:
    """Near miss: no kernel of the target has it."""
    expect_unchanged(
        fuse_epilogues(nothing),
        """
        graph g(x: bf16[5,4]) {
          @b : bf16[3]
          @w : bf16[3,4]
          %0 = linear(%x, @w, @b) : bf16[5,3]
          %1 = gelu_tanh(%0) : bf16[5,3]
          return %1
        }
        """,
    )


BEHIND_VIEW = """
graph g(x: f32[2,3,3,4]) {
  @p : f32[9,5]
  @w : f32[5,4]
  %0 = linear(%x, @w) : f32[2,3,3,5]
  %1 = view(%0, shape=[2,9,5], strides=STRIDES) : f32[2,9,5]
  %2 = add(%1, @p) : bf16[2,9,5]
  return %2
}
"""


def test_add_behind_a_view() -> None:
    """Patch and position embedding in one launch: the view is a reshape."""
    expect_pass(
        add_behind_views(everything),
        fires={"add_behind_view": 1},
        before=BEHIND_VIEW.replace("STRIDES", "[45,5,1]"),
        after="""
        graph g(x: f32[2,3,3,4]) {
          @p : f32[9,5]
          @w : f32[5,4]
          %0 = broadcast(@p, shape=[2,9,5]) : f32[2,9,5]
          %1 = reshape(%0, shape=[2,3,3,5]) : f32[2,3,3,5]
          %2 = linear(%x, @w, _, %1) : bf16[2,3,3,5]
          %3 = reshape(%2, shape=[2,9,5]) : bf16[2,9,5]
          return %3
        }
        """,
    )


def test_add_behind_a_view_that_moves_stays() -> None:
    """Near miss: rows of the sum are not rows of the product."""
    expect_unchanged(add_behind_views(everything), BEHIND_VIEW.replace("STRIDES", "[45,1,9]"))


def test_add_behind_a_view_only_what_a_kernel_runs() -> None:
    expect_unchanged(add_behind_views(nothing), BEHIND_VIEW.replace("STRIDES", "[45,5,1]"))
