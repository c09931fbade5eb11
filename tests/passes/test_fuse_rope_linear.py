"""fuse_rope_linear: rotation in the epilogue of the projection."""

from __future__ import annotations

import numpy as np
import pytest

from frtc.lowering.interpret import run
from frtc.lowering.ir import Graph, Node, Type, tensor
from frtc.passes.fuse_rope_linear import fuse_rope_linear, pairs
from tests.passes.expect import expect_pass, expect_unchanged


def everything(node: Node) -> bool:
    return True


def nothing(node: Node) -> bool:
    return False


def test_match() -> None:
    """Two query heads, one key head, of four elements each: rows 0 and 2, 1 and 3 of a head come together."""
    expect_pass(
        fuse_rope_linear(everything),
        fires={"fuse_rope_linear": 1},
        before="""
        graph g(x: bf16[3,8], cos: f32[3,2], sin: f32[3,2]) {
          @w : bf16[16,8]
          %0 = linear(%x, @w) : bf16[3,16]
          %1 = rope_qkv(%0, %cos, %sin, heads=2, kv_heads=1) : (bf16[2,3,4], bf16[1,3,4], bf16[1,3,4])
          return q=%1.0, k=%1.1, v=%1.2
        }
        """,
        after="""
        graph g(x: bf16[3,8], cos: f32[3,2], sin: f32[3,2]) {
          @w : bf16[16,8]
          %0 = slice(@w, axis=-2, start=0, stop=12) : bf16[12,8]
          %1 = reshape(%0, shape=[3, 2, 2, 8]) : bf16[3,2,2,8]
          %2 = slice(%1, axis=-3, start=0, stop=1) : bf16[3,1,2,8]
          %3 = reshape(%2, shape=[6, 1, 8]) : bf16[6,1,8]
          %4 = slice(%1, axis=-3, start=1, stop=2) : bf16[3,1,2,8]
          %5 = reshape(%4, shape=[6, 1, 8]) : bf16[6,1,8]
          %6 = concat(%3, %5, axis=-2) : bf16[6,2,8]
          %7 = reshape(%6, shape=[12, 8]) : bf16[12,8]
          %8 = slice(@w, axis=-2, start=12, stop=16) : bf16[4,8]
          %9 = concat(%7, %8, axis=-2) : bf16[16,8]
          %10 = linear_rope_qkv(%x, %9, _, %cos, %sin, heads=2, kv_heads=1) : (bf16[2,3,4], bf16[1,3,4], bf16[1,3,4])
          return q=%10.0, k=%10.1, v=%10.2
        }
        """,
    )


def test_bias_rows_and_no_queries() -> None:
    """The bias goes in pairs like the weights; the count of rows stays; a last layer has keys and values only."""
    expect_pass(
        fuse_rope_linear(everything),
        fires={"fuse_rope_linear": 1},
        before="""
        graph g(x: bf16[3,8], cos: f32[3,2], sin: f32[3,2]) {
          @b : bf16[8]
          @w : bf16[8,8]
          %0 = const(value=3) : i32[]
          %1 = linear(%x, @w, @b, _, _, %0) : bf16[3,8]
          %2 = rope_qkv(%1, %cos, %sin, heads=0, kv_heads=1) : (bf16[0,3,4], bf16[1,3,4], bf16[1,3,4])
          return k=%2.1, v=%2.2
        }
        """,
        after="""
        graph g(x: bf16[3,8], cos: f32[3,2], sin: f32[3,2]) {
          @b : bf16[8]
          @w : bf16[8,8]
          %0 = slice(@w, axis=-2, start=0, stop=4) : bf16[4,8]
          %1 = reshape(%0, shape=[1, 2, 2, 8]) : bf16[1,2,2,8]
          %2 = slice(%1, axis=-3, start=0, stop=1) : bf16[1,1,2,8]
          %3 = reshape(%2, shape=[2, 1, 8]) : bf16[2,1,8]
          %4 = slice(%1, axis=-3, start=1, stop=2) : bf16[1,1,2,8]
          %5 = reshape(%4, shape=[2, 1, 8]) : bf16[2,1,8]
          %6 = concat(%3, %5, axis=-2) : bf16[2,2,8]
          %7 = reshape(%6, shape=[4, 8]) : bf16[4,8]
          %8 = slice(@w, axis=-2, start=4, stop=8) : bf16[4,8]
          %9 = concat(%7, %8, axis=-2) : bf16[8,8]
          %10 = reshape(@b, shape=[8, 1]) : bf16[8,1]
          %11 = slice(%10, axis=-2, start=0, stop=4) : bf16[4,1]
          %12 = reshape(%11, shape=[1, 2, 2, 1]) : bf16[1,2,2,1]
          %13 = slice(%12, axis=-3, start=0, stop=1) : bf16[1,1,2,1]
          %14 = reshape(%13, shape=[2, 1, 1]) : bf16[2,1,1]
          %15 = slice(%12, axis=-3, start=1, stop=2) : bf16[1,1,2,1]
          %16 = reshape(%15, shape=[2, 1, 1]) : bf16[2,1,1]
          %17 = concat(%14, %16, axis=-2) : bf16[2,2,1]
          %18 = reshape(%17, shape=[4, 1]) : bf16[4,1]
          %19 = slice(%10, axis=-2, start=4, stop=8) : bf16[4,1]
          %20 = concat(%18, %19, axis=-2) : bf16[8,1]
          %21 = reshape(%20, shape=[8]) : bf16[8]
          %22 = const(value=3) : i32[]
     %23 = linear_rope_qkv(%x, %9, %21, %cos, %sin, %22, heads=0, kv_heads=1) : (bf16[0,3,4], bf16[1,3,4], bf16[1,3,4])
          return k=%23.1, v=%23.2
        }
        """,
    )


@pytest.mark.parametrize(("heads", "size"), [(1, 4), (3, 6), (9, 16)])
def test_pairs(heads: int, size: int) -> None:
    """Row 2i is row i of the head, row 2i + 1 is row i + size / 2; what follows the heads stays."""
    rows = np.arange((heads + 2) * size)
    node = pairs(tensor("w", Type("i32", (len(rows), 1))), heads, size)
    found = run(Graph("weights", (), (("w", node),)), {}, lambda name: rows[:, None].astype(np.int32), "typed")["w"]
    want = [h * size + i + half * size // 2 for h in range(heads) for i in range(size // 2) for half in (0, 1)]
    assert found[:, 0].tolist() == [*want, *rows[heads * size :]]


def before(product: str, roped: str = "%0", more: str = "", also: str = "", results: str = "") -> str:
    """A near miss of the smallest match."""
    return f"""
    graph g(x: bf16[3,8], u: bf16[8,8], cos: f32[3,2], sin: f32[3,2], r: bf16[3,8]) {{
      @b : bf16[3,8]
      @w : bf16[8,8]
      %0 = linear({product}) : bf16[3,8]{also}
  %{1 + bool(also)} = rope_qkv({roped}, %cos, %sin, heads=0, kv_heads=1{more}) : (bf16[0,3,4], bf16[1,3,4], bf16[1,3,4])
      return k=%{1 + bool(also)}.1, v=%{1 + bool(also)}.2{results}
    }}
    """


@pytest.mark.parametrize(
    "text",
    [
        before("%x, @w, act=silu"),  # an activation between product and rotation
        before("%x, @w, _, %r"),
        before("%x, @w, _, _, %r"),
        before("%x, %u"),  # no constant whose rows could be moved
        before("%x, @w, @b"),  # a bias for each row
        before("%x, @w", more=", pairing=interleaved"),
        before("%x, @w", results=", y=%0"),  # something else reads the product
        before("%x, @w", also="\n      %1 = exp(%0) : bf16[3,8]", roped="%1"),
    ],
)
def test_near_misses(text: str) -> None:
    expect_unchanged(fuse_rope_linear(everything), text)


def test_only_what_a_kernel_runs() -> None:
    expect_unchanged(fuse_rope_linear(nothing), before("%x, @w"))
