"""layout: ops that move no data are views."""

from __future__ import annotations

from frtc.passes.layout import layout
from tests.passes.expect import expect_pass, expect_unchanged


def test_heads() -> None:
    """Columns of a projection as heads: one view, whatever the spelling."""
    expect_pass(
        layout,
        fires={"layout": 3},
        before="""
        graph g(x: f32[3,16]) {
          %0 = slice(%x, axis=-1, start=8, stop=16) : f32[3,8]
          %1 = reshape(%0, shape=[3,2,4]) : f32[3,2,4]
          %2 = transpose(%1, perm=[-2,-3,-1]) : f32[2,3,4]
          %3 = exp(%2) : f32[2,3,4]
          return %3
        }
        """,
        after="""
        graph g(x: f32[3,16]) {
          %0 = view(%x, offset=8, shape=[2,3,4], strides=[4,16,1]) : f32[2,3,4]
          %1 = exp(%0) : f32[2,3,4]
          return %1
        }
        """,
    )


def test_broadcast_has_stride_zero() -> None:
    expect_pass(
        layout,
        fires={"layout": 2},
        before="""
        graph g(x: f32[4]) {
          %0 = reshape(%x, shape=[1,4]) : f32[1,4]
          %1 = broadcast(%0, shape=[3,4]) : f32[3,4]
          %2 = exp(%1) : f32[3,4]
          return %2
        }
        """,
        after="""
        graph g(x: f32[4]) {
          %0 = view(%x, shape=[3,4], strides=[0,1]) : f32[3,4]
          %1 = exp(%0) : f32[3,4]
          return %1
        }
        """,
    )


def test_steps() -> None:
    """Every other element."""
    expect_pass(
        layout,
        fires={"layout": 1},
        before="""
        graph g(x: f32[3,8]) {
          %0 = slice(%x, axis=-1, start=1, stop=8, step=2) : f32[3,4]
          %1 = exp(%0) : f32[3,4]
          return %1
        }
        """,
        after="""
        graph g(x: f32[3,8]) {
          %0 = view(%x, offset=1, shape=[3,4], strides=[8,2]) : f32[3,4]
          %1 = exp(%0) : f32[3,4]
          return %1
        }
        """,
    )


def test_there_and_back() -> None:
    """What comes out as it went in is nothing at all."""
    expect_pass(
        layout,
        fires={"layout": 2},
        before="""
        graph g(x: f32[3,4]) {
          %0 = transpose(%x, perm=[-1,-2]) : f32[4,3]
          %1 = transpose(%0, perm=[-1,-2]) : f32[3,4]
          %2 = reshape(%1, shape=[12]) : f32[12]
          %3 = reshape(%2, shape=[3,4]) : f32[3,4]
          %4 = exp(%3) : f32[3,4]
          return %4
        }
        """,
        after="""
        graph g(x: f32[3,4]) {
          %0 = exp(%x) : f32[3,4]
          return %0
        }
        """,
    )


def test_copying_reshape_stays() -> None:
    """Heads side by side again: no strides say that. What follows is a view of the reshape."""
    expect_pass(
        layout,
        fires={"layout": 2},
        before="""
        graph g(x: f32[2,3,4]) {
          %0 = transpose(%x, perm=[-2,-3,-1]) : f32[3,2,4]
          %1 = reshape(%0, shape=[3,8]) : f32[3,8]
          %2 = slice(%1, axis=-1, start=0, stop=4) : f32[3,4]
          return %2
        }
        """,
        after="""
        graph g(x: f32[2,3,4]) {
          %0 = view(%x, shape=[3,2,4], strides=[4,12,1]) : f32[3,2,4]
          %1 = reshape(%0, shape=[3,8]) : f32[3,8]
          %2 = view(%1, shape=[3,4], strides=[8,1]) : f32[3,4]
          return %2
        }
        """,
    )


def test_constants_stay() -> None:
    """Near miss: a constant expression is evaluated when the Plan is written."""
    expect_unchanged(
        layout,
        """
        graph g(x: f32[5,4]) {
          @w : f32[4,3]
          %0 = transpose(@w, perm=[-1,-2]) : f32[3,4]
          %1 = linear(%x, %0) : f32[5,3]
          return %1
        }
        """,
    )


def test_concat_stays() -> None:
    """Near miss: a concat moves data."""
    expect_unchanged(
        layout,
        """
        graph g(x: f32[3,2], y: f32[3,4]) {
          %0 = concat(%x, %y, axis=-1) : f32[3,6]
          return %0
        }
        """,
    )
