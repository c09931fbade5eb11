"""fuse_rope_qkv: q, k and v out of one projection."""

from __future__ import annotations

from frtc.lowering.ir import Node
from frtc.passes.fuse_rope_qkv import fuse_rope_qkv
from tests.passes.expect import expect_pass, expect_unchanged


def everything(node: Node) -> bool:
    return True


def nothing(node: Node) -> bool:
    return False


def test_match() -> None:
    """Two query heads, one key head."""
    expect_pass(
        fuse_rope_qkv(everything),
        fires={"fuse_rope_qkv": 1},
        before="""
        graph g(x: f32[3,16], cos: f32[3,2], sin: f32[3,2]) {
          %0 = view(%x, shape=[2,3,4], strides=[4,16,1]) : f32[2,3,4]
          %1 = view(%x, offset=8, shape=[1,3,4], strides=[16,16,1]) : f32[1,3,4]
          %2 = rope(%0, %cos, %sin) : f32[2,3,4]
          %3 = rope(%1, %cos, %sin) : f32[1,3,4]
          %4 = view(%x, offset=12, shape=[1,3,4], strides=[16,16,1]) : f32[1,3,4]
          return q=%2, k=%3, v=%4
        }
        """,
        after="""
        graph g(x: f32[3,16], cos: f32[3,2], sin: f32[3,2]) {
          %0 = rope_qkv(%x, %cos, %sin, heads=2, kv_heads=1) : (f32[2,3,4], f32[1,3,4], f32[1,3,4])
          return q=%0.0, k=%0.1, v=%0.2
        }
        """,
    )


def test_batch_of_one() -> None:
    """Leading axes of one element, in the heads and in the tables."""
    expect_pass(
        fuse_rope_qkv(everything),
        fires={"fuse_rope_qkv": 1},
        before="""
        graph g(x: f32[3,16], cos: f32[1,3,2], sin: f32[1,3,2]) {
          %0 = view(%x, shape=[1,2,3,4], strides=[48,4,16,1]) : f32[1,2,3,4]
          %1 = view(%x, offset=8, shape=[1,1,3,4], strides=[48,4,16,1]) : f32[1,1,3,4]
          %2 = rope(%0, %cos, %sin) : f32[1,2,3,4]
          %3 = rope(%1, %cos, %sin) : f32[1,1,3,4]
          %4 = view(%x, offset=12, shape=[1,1,3,4], strides=[48,4,16,1]) : f32[1,1,3,4]
          return q=%2, k=%3, v=%4
        }
        """,
        after="""
        graph g(x: f32[3,16], cos: f32[1,3,2], sin: f32[1,3,2]) {
          %0 = view(%cos, shape=[3,2], strides=[2,1]) : f32[3,2]
          %1 = view(%sin, shape=[3,2], strides=[2,1]) : f32[3,2]
          %2 = rope_qkv(%x, %0, %1, heads=2, kv_heads=1) : (f32[2,3,4], f32[1,3,4], f32[1,3,4])
          %3 = view(%2.0, shape=[1,2,3,4], strides=[24,12,4,1]) : f32[1,2,3,4]
          %4 = view(%2.1, shape=[1,1,3,4], strides=[12,12,4,1]) : f32[1,1,3,4]
          %5 = view(%2.2, shape=[1,1,3,4], strides=[12,12,4,1]) : f32[1,1,3,4]
          return q=%3, k=%4, v=%5
        }
        """,
    )


def test_one_row() -> None:
    """Strides of axes with one element do not matter."""
    expect_pass(
        fuse_rope_qkv(everything),
        fires={"fuse_rope_qkv": 1},
        before="""
        graph g(x: f32[1,16], cos: f32[1,2], sin: f32[1,2]) {
          %0 = view(%x, shape=[2,1,4], strides=[4,4,1]) : f32[2,1,4]
          %1 = view(%x, offset=8, shape=[1,1,4], strides=[1,4,1]) : f32[1,1,4]
          %2 = rope(%0, %cos, %sin) : f32[2,1,4]
          %3 = rope(%1, %cos, %sin) : f32[1,1,4]
          %4 = view(%x, offset=12, shape=[1,1,4], strides=[4,16,1]) : f32[1,1,4]
          return q=%2, k=%3, v=%4
        }
        """,
        after="""
        graph g(x: f32[1,16], cos: f32[1,2], sin: f32[1,2]) {
          %0 = rope_qkv(%x, %cos, %sin, heads=2, kv_heads=1) : (f32[2,1,4], f32[1,1,4], f32[1,1,4])
          return q=%0.0, k=%0.1, v=%0.2
        }
        """,
    )


def test_interleaved() -> None:
    """The pairing goes along."""
    expect_pass(
        fuse_rope_qkv(everything),
        fires={"fuse_rope_qkv": 1},
        before="""
        graph g(x: f32[3,16], cos: f32[3,2], sin: f32[3,2]) {
          %0 = view(%x, shape=[2,3,4], strides=[4,16,1]) : f32[2,3,4]
          %1 = view(%x, offset=8, shape=[1,3,4], strides=[16,16,1]) : f32[1,3,4]
          %2 = rope(%0, %cos, %sin, pairing=interleaved) : f32[2,3,4]
          %3 = rope(%1, %cos, %sin, pairing=interleaved) : f32[1,3,4]
          %4 = view(%x, offset=12, shape=[1,3,4], strides=[16,16,1]) : f32[1,3,4]
          return q=%2, k=%3, v=%4
        }
        """,
        after="""
        graph g(x: f32[3,16], cos: f32[3,2], sin: f32[3,2]) {
          %0 = rope_qkv(%x, %cos, %sin, heads=2, kv_heads=1, pairing=interleaved) : (f32[2,3,4], f32[1,3,4], f32[1,3,4])
          return q=%0.0, k=%0.1, v=%0.2
        }
        """,
    )


def test_keys_and_values_alone() -> None:
    """The last layer of a prefix: nothing asks for its queries."""
    expect_pass(
        fuse_rope_qkv(everything),
        fires={"fuse_rope_qkv": 1},
        before="""
        graph g(x: f32[3,16], cos: f32[3,2], sin: f32[3,2]) {
          %0 = view(%x, shape=[2,3,4], strides=[4,16,1]) : f32[2,3,4]
          %1 = rope(%0, %cos, %sin) : f32[2,3,4]
          %2 = view(%x, offset=8, shape=[2,3,4], strides=[4,16,1]) : f32[2,3,4]
          return k=%1, v=%2
        }
        """,
        after="""
        graph g(x: f32[3,16], cos: f32[3,2], sin: f32[3,2]) {
          %0 = rope_qkv(%x, %cos, %sin, heads=0, kv_heads=2) : (f32[0,3,4], f32[2,3,4], f32[2,3,4])
          return k=%0.1, v=%0.2
        }
        """,
    )


def test_queries_alone() -> None:
    """A layer that attends to keys made elsewhere."""
    expect_pass(
        fuse_rope_qkv(everything),
        fires={"fuse_rope_qkv": 1},
        before="""
        graph g(x: f32[3,8], cos: f32[3,2], sin: f32[3,2]) {
          %0 = view(%x, shape=[2,3,4], strides=[4,8,1]) : f32[2,3,4]
          %1 = rope(%0, %cos, %sin) : f32[2,3,4]
          return q=%1
        }
        """,
        after="""
        graph g(x: f32[3,8], cos: f32[3,2], sin: f32[3,2]) {
          %0 = rope_qkv(%x, %cos, %sin, heads=2, kv_heads=0) : (f32[2,3,4], f32[0,3,4], f32[0,3,4])
          return q=%0.0
        }
        """,
    )


def test_part_of_a_row_stays() -> None:
    """Near miss: the first head of two is rotated, the other one is not read."""
    expect_unchanged(
        fuse_rope_qkv(everything),
        """
        graph g(x: f32[3,8], cos: f32[3,2], sin: f32[3,2]) {
          %0 = view(%x, shape=[1,3,4], strides=[8,8,1]) : f32[1,3,4]
          %1 = rope(%0, %cos, %sin) : f32[1,3,4]
          return q=%1
        }
        """,
    )


def test_values_before_keys_stay() -> None:
    """Near miss: the second part is rotated, the first is not."""
    expect_unchanged(
        fuse_rope_qkv(everything),
        """
        graph g(x: f32[3,16], cos: f32[3,2], sin: f32[3,2]) {
          %0 = view(%x, shape=[2,3,4], strides=[4,16,1]) : f32[2,3,4]
          %1 = view(%x, offset=8, shape=[2,3,4], strides=[4,16,1]) : f32[2,3,4]
          %2 = rope(%1, %cos, %sin) : f32[2,3,4]
          return v=%0, k=%2
        }
        """,
    )


def test_one_part_of_two_stays() -> None:
    """Near miss: a query and a key of different sizes, and no value."""
    expect_unchanged(
        fuse_rope_qkv(everything),
        """
        graph g(x: f32[3,12], cos: f32[3,2], sin: f32[3,2]) {
          %0 = view(%x, shape=[2,3,4], strides=[4,12,1]) : f32[2,3,4]
          %1 = view(%x, offset=8, shape=[1,3,4], strides=[12,12,1]) : f32[1,3,4]
          %2 = rope(%0, %cos, %sin) : f32[2,3,4]
          %3 = rope(%1, %cos, %sin) : f32[1,3,4]
          return q=%2, k=%3
        }
        """,
    )


def test_different_tables_stay() -> None:
    """Near miss: q and k are rotated by different angles."""
    expect_unchanged(
        fuse_rope_qkv(everything),
        """
        graph g(x: f32[3,16], cos: f32[3,2], sin: f32[3,2]) {
          %0 = view(%x, shape=[2,3,4], strides=[4,16,1]) : f32[2,3,4]
          %1 = view(%x, offset=8, shape=[1,3,4], strides=[16,16,1]) : f32[1,3,4]
          %2 = rope(%0, %cos, %sin) : f32[2,3,4]
          %3 = rope(%1, %sin, %cos) : f32[1,3,4]
          %4 = view(%x, offset=12, shape=[1,3,4], strides=[16,16,1]) : f32[1,3,4]
          return q=%2, k=%3, v=%4
        }
        """,
    )


def test_different_pairing_stays() -> None:
    """Near miss: q and k are paired differently."""
    expect_unchanged(
        fuse_rope_qkv(everything),
        """
        graph g(x: f32[3,16], cos: f32[3,2], sin: f32[3,2]) {
          %0 = view(%x, shape=[2,3,4], strides=[4,16,1]) : f32[2,3,4]
          %1 = view(%x, offset=8, shape=[1,3,4], strides=[16,16,1]) : f32[1,3,4]
          %2 = rope(%0, %cos, %sin) : f32[2,3,4]
          %3 = rope(%1, %cos, %sin, pairing=interleaved) : f32[1,3,4]
          %4 = view(%x, offset=12, shape=[1,3,4], strides=[16,16,1]) : f32[1,3,4]
          return q=%2, k=%3, v=%4
        }
        """,
    )


def test_unrotated_key_stays() -> None:
    """Near miss: only q is rotated."""
    expect_unchanged(
        fuse_rope_qkv(everything),
        """
        graph g(x: f32[3,16], cos: f32[3,2], sin: f32[3,2]) {
          %0 = view(%x, shape=[2,3,4], strides=[4,16,1]) : f32[2,3,4]
          %1 = view(%x, offset=8, shape=[1,3,4], strides=[16,16,1]) : f32[1,3,4]
          %2 = rope(%0, %cos, %sin) : f32[2,3,4]
          %3 = exp(%1) : f32[1,3,4]
          %4 = view(%x, offset=12, shape=[1,3,4], strides=[16,16,1]) : f32[1,3,4]
          return q=%2, k=%3, v=%4
        }
        """,
    )


def test_key_before_query_stays() -> None:
    """Near miss: the projection's order is k, q, v."""
    expect_unchanged(
        fuse_rope_qkv(everything),
        """
        graph g(x: f32[3,16], cos: f32[3,2], sin: f32[3,2]) {
          %0 = view(%x, offset=4, shape=[2,3,4], strides=[4,16,1]) : f32[2,3,4]
          %1 = view(%x, shape=[1,3,4], strides=[16,16,1]) : f32[1,3,4]
          %2 = rope(%0, %cos, %sin) : f32[2,3,4]
          %3 = rope(%1, %cos, %sin) : f32[1,3,4]
          %4 = view(%x, offset=12, shape=[1,3,4], strides=[16,16,1]) : f32[1,3,4]
          return q=%2, k=%3, v=%4
        }
        """,
    )


def test_projection_read_elsewhere_stays() -> None:
    """Near miss: something else reads the projection."""
    expect_unchanged(
        fuse_rope_qkv(everything),
        """
        graph g(x: f32[3,16], cos: f32[3,2], sin: f32[3,2]) {
          %0 = view(%x, shape=[2,3,4], strides=[4,16,1]) : f32[2,3,4]
          %1 = view(%x, offset=8, shape=[1,3,4], strides=[16,16,1]) : f32[1,3,4]
          %2 = rope(%0, %cos, %sin) : f32[2,3,4]
          %3 = rope(%1, %cos, %sin) : f32[1,3,4]
          %4 = view(%x, offset=12, shape=[1,3,4], strides=[16,16,1]) : f32[1,3,4]
          %5 = exp(%x) : f32[3,16]
          return q=%2, k=%3, v=%4, e=%5
        }
        """,
    )


def test_query_read_before_rotation_stays() -> None:
    """Near miss: something reads q as it was."""
    expect_unchanged(
        fuse_rope_qkv(everything),
        """
        graph g(x: f32[3,16], cos: f32[3,2], sin: f32[3,2]) {
          %0 = view(%x, shape=[2,3,4], strides=[4,16,1]) : f32[2,3,4]
          %1 = view(%x, offset=8, shape=[1,3,4], strides=[16,16,1]) : f32[1,3,4]
          %2 = rope(%0, %cos, %sin) : f32[2,3,4]
          %3 = rope(%1, %cos, %sin) : f32[1,3,4]
          %4 = view(%x, offset=12, shape=[1,3,4], strides=[16,16,1]) : f32[1,3,4]
          %5 = exp(%0) : f32[2,3,4]
          return q=%2, k=%3, v=%4, e=%5
        }
        """,
    )


def test_some_rows_stay() -> None:
    """Near miss: only the first rows are taken."""
    expect_unchanged(
        fuse_rope_qkv(everything),
        """
        graph g(x: f32[3,16], cos: f32[2,2], sin: f32[2,2]) {
          %0 = view(%x, shape=[2,2,4], strides=[4,16,1]) : f32[2,2,4]
          %1 = view(%x, offset=8, shape=[1,2,4], strides=[16,16,1]) : f32[1,2,4]
          %2 = rope(%0, %cos, %sin) : f32[2,2,4]
          %3 = rope(%1, %cos, %sin) : f32[1,2,4]
          %4 = view(%x, offset=12, shape=[1,2,4], strides=[16,16,1]) : f32[1,2,4]
          return q=%2, k=%3, v=%4
        }
        """,
    )


def test_value_of_other_size_stays() -> None:
    """Near miss: v has other heads than k."""
    expect_unchanged(
        fuse_rope_qkv(everything),
        """
        graph g(x: f32[3,20], cos: f32[3,2], sin: f32[3,2]) {
          %0 = view(%x, shape=[2,3,4], strides=[4,20,1]) : f32[2,3,4]
          %1 = view(%x, offset=8, shape=[1,3,4], strides=[20,20,1]) : f32[1,3,4]
          %2 = rope(%0, %cos, %sin) : f32[2,3,4]
          %3 = rope(%1, %cos, %sin) : f32[1,3,4]
          %4 = view(%x, offset=12, shape=[2,3,4], strides=[4,20,1]) : f32[2,3,4]
          return q=%2, k=%3, v=%4
        }
        """,
    )


def test_only_what_a_kernel_runs() -> None:
    """Near miss: no kernel of the target has it."""
    expect_unchanged(
        fuse_rope_qkv(nothing),
        """
        graph g(x: f32[3,16], cos: f32[3,2], sin: f32[3,2]) {
          %0 = view(%x, shape=[2,3,4], strides=[4,16,1]) : f32[2,3,4]
          %1 = view(%x, offset=8, shape=[1,3,4], strides=[16,16,1]) : f32[1,3,4]
          %2 = rope(%0, %cos, %sin) : f32[2,3,4]
          %3 = rope(%1, %cos, %sin) : f32[1,3,4]
          %4 = view(%x, offset=12, shape=[1,3,4], strides=[16,16,1]) : f32[1,3,4]
          return q=%2, k=%3, v=%4
        }
        """,
    )
