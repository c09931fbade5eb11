"""join_pointwise: pointwise ops beside each other are one op with several results."""

from __future__ import annotations

import pytest

from frtc.codegen.fusible import implements
from frtc.kernels.targets import load_targets
from frtc.lowering.ir import Node
from frtc.passes import join_pointwise as passed
from frtc.passes.join_pointwise import join_pointwise
from tests.passes.expect import expect_pass, expect_unchanged

KERNELS = implements(load_targets()["hopper"])


def nothing(node: Node) -> bool:
    return False


def test_cosines_and_sines() -> None:
    """Operands and equal steps once, between them a literal; each result where the program returns it."""
    expect_pass(
        join_pointwise(KERNELS),
        fires={"join_pointwise": 1},
        before="""
        graph g(n: i32[], i: i32[5,1], f: f32[8]) {
          %0 = pointwise(%n, %i, %f, expr=[[const, 1], [add, 0, 3], [add, 4, 1], [cast, 5, f32], [mul, 6, 2], [sin, 7]], results=[8], shape=[5,8]) : f32[5,8]
          %1 = pointwise(%n, %i, %f, expr=[[const, 1], [add, 0, 3], [add, 4, 1], [cast, 5, f32], [mul, 6, 2], [cos, 7]], results=[8], shape=[5,8]) : f32[5,8]
          return cos=%1, sin=%0
        }
        """,  # noqa: E501
        after="""
        graph g(n: i32[], i: i32[5,1], f: f32[8]) {
          %0 = pointwise(%n, %i, %f, expr=[[const, 1], [add, 0, 3], [add, 4, 1], [cast, 5, f32], [mul, 6, 2], [cos, 7], [sin, 7]], results=[8, 9], shape=[5,8], others=[f32]) : (f32[5,8], f32[5,8])
          return cos=%0.0, sin=%0.1
        }
        """,  # noqa: E501
    )


def test_operands_of_one_among_those_of_another() -> None:
    """Of three element types; a literal, a constant and a view keep nothing waiting. The largest comes last here."""
    expect_pass(
        join_pointwise(KERNELS),
        fires={"join_pointwise": 2},
        before="""
        graph g(x: f32[8,8]) {
          @w : f32[8]
          %0 = const(value=2.0) : f32[]
          %1 = lt(%x, %0) : bool[8,8]
          %2 = cast(%x) : bf16[8,8]
          %3 = view(%x, shape=[8,8], strides=[1,8]) : f32[8,8]
          %4 = pointwise(%x, %3, @w, expr=[[mul, 0, 1], [add, 2, 3]], results=[4], shape=[8,8]) : f32[8,8]
          return a=%1, b=%2, c=%4
        }
        """,
        after="""
        graph g(x: f32[8,8]) {
          @w : f32[8]
          %0 = view(%x, shape=[8,8], strides=[1,8]) : f32[8,8]
          %1 = pointwise(%x, %0, @w, expr=[[const, 2.0], [lt, 0, 3], [cast, 0, bf16], [mul, 0, 1], [add, 2, 6]], results=[4, 5, 7], shape=[8,8], others=[bool, bf16]) : (bool[8,8], bf16[8,8], f32[8,8])
          return a=%1.0, b=%1.1, c=%1.2
        }
        """,  # noqa: E501
    )


def test_what_waits_for_one_joint_op_now() -> None:
    """Its operands' launches were two, so that one of the readers would have waited for both."""
    expect_pass(
        join_pointwise(KERNELS),
        fires={"join_pointwise": 2},
        before="""
        graph g(x: f32[8]) {
          %0 = sin(%x) : f32[8]
          %1 = cos(%x) : f32[8]
          %2 = exp(%0) : f32[8]
          %3 = mul(%0, %1) : f32[8]
          return a=%2, b=%3
        }
        """,
        after="""
        graph g(x: f32[8]) {
          %0 = pointwise(%x, expr=[[sin, 0], [cos, 0]], results=[1, 2], shape=[8], others=[f32]) : (f32[8], f32[8])
          %1 = pointwise(%0.0, %0.1, expr=[[exp, 0], [mul, 0, 1]], results=[2, 3], shape=[8], others=[f32]) : (f32[8], f32[8])
          return a=%1.0, b=%1.1
        }
        """,  # noqa: E501
    )


STAYS = {
    "one reads the other, with the same operands": """
        graph g(x: f32[8], y: f32[8]) {
          %0 = mul(%x, %y) : f32[8]
          %1 = pointwise(%x, %y, %0, expr=[[exp, 0], [mul, 3, 1], [mul, 4, 2]], results=[5], shape=[8]) : f32[8]
          return a=%0, b=%1
        }""",
    "one reads the other through a product": """
        graph g(x: f32[8,8]) {
          @w : f32[8,8]
          %0 = sin(%x) : f32[8,8]
          %1 = linear(%0, @w) : f32[8,8]
          %2 = mul(%x, %1) : f32[8,8]
          return a=%0, b=%2
        }""",
    "other shapes": """
        graph g(x: f32[8]) {
          @w : f32[4,8]
          %0 = sin(%x) : f32[8]
          %1 = mul(%x, @w) : f32[4,8]
          return a=%0, b=%1
        }""",
    "the same elements in another shape": """
        graph g(x: f32[]) {
          %0 = pointwise(%x, expr=[[sin, 0]], results=[1], shape=[4,2]) : f32[4,2]
          %1 = pointwise(%x, expr=[[cos, 0]], results=[1], shape=[2,4]) : f32[2,4]
          return a=%0, b=%1
        }""",
    "neither reads all that the other reads": """
        graph g(x: f32[8]) {
          @v : f32[8]
          @w : f32[8]
          %0 = mul(%x, @v) : f32[8]
          %1 = mul(%x, @w) : f32[8]
          return a=%0, b=%1
        }""",
    "one of them waits for another input": """
        graph g(x: f32[8], y: f32[8]) {
          %0 = sin(%x) : f32[8]
          %1 = mul(%x, %y) : f32[8]
          return a=%0, b=%1
        }""",
    "one of them waits for a launch": """
        graph g(x: f32[8,8]) {
          @w : f32[8,8]
          %0 = sin(%x) : f32[8,8]
          %1 = linear(%x, @w) : f32[8,8]
          %2 = mul(%x, %1) : f32[8,8]
          return a=%0, b=%2
        }""",
    "one of them is carried by the loop": """
        graph g(x: f32[8], y: f32[8]) {
          %0 = sin(%y) : f32[8]
          %1 = cos(%y) : f32[8]
          %2 = mul(%x, %0) : f32[8]
          return x=%1, b=%2
        }""",
    "a state is written between them": """
        graph g(; s: f32[8]) {
          @w : f32[8]
          %0 = read(%s) : f32[8]
          %1 = sin(%0) : f32[8]
          %2 = const(value=0) : i32[]
          %3 = write(%s, @w, %2, axis=-1) : f32[8]
          %4 = read(%3) : f32[8]
          %5 = mul(%0, %4) : f32[8]
          return a=%1, b=%5
          write s=%3
        }""",
    "a sum would not be rounded with its product any more": """
        graph g(x: f32[8], y: f32[8]) {
          %0 = pointwise(%x, %y, expr=[[mul, 0, 1], [add, 2, 0]], results=[3], shape=[8]) : f32[8]
          %1 = pointwise(%x, %y, expr=[[mul, 0, 1], [exp, 2]], results=[3], shape=[8]) : f32[8]
          return a=%0, b=%1
        }""",
    "the product itself would be stored": """
        graph g(x: f32[8], y: f32[8]) {
          %0 = pointwise(%x, %y, expr=[[mul, 0, 1], [sub, 0, 2]], results=[3], shape=[8]) : f32[8]
          %1 = mul(%x, %y) : f32[8]
          return a=%0, b=%1
        }""",
    "by itself one of them goes in wider groups": """
        graph g(x: f32[8,3]) {
          @w : f32[3]
          %0 = sin(%x) : f32[8,3]
          %1 = mul(%x, @w) : f32[8,3]
          return a=%0, b=%1
        }""",
    "an element type that no kernel stores": """
        graph g(x: f32[8]) {
          %0 = sin(%x) : f32[8]
          %1 = cast(%x) : f64[8]
          return a=%0, b=%1
        }""",
}


@pytest.mark.parametrize("why", STAYS)
def test_stays(why: str) -> None:
    expect_unchanged(join_pointwise(KERNELS), STAYS[why])


PAIR = """
    graph g(x: f32[8]) {
      %0 = sin(%x) : f32[8]
      %1 = cos(%x) : f32[8]
      return a=%0, b=%1
    }"""


def test_only_what_a_kernel_runs() -> None:
    expect_unchanged(join_pointwise(nothing), PAIR)


def test_a_sum_that_both_share_keeps_its_product() -> None:
    """Near miss of the sums above: the readers of the product are the same as alone."""
    expect_pass(
        join_pointwise(KERNELS),
        fires={"join_pointwise": 1},
        before="""
        graph g(x: f32[8], y: f32[8]) {
          %0 = pointwise(%x, %y, expr=[[mul, 0, 1], [add, 2, 0], [exp, 3]], results=[4], shape=[8]) : f32[8]
          %1 = pointwise(%x, %y, expr=[[mul, 0, 1], [add, 2, 0], [sin, 3]], results=[4], shape=[8]) : f32[8]
          return a=%0, b=%1
        }
        """,
        after="""
        graph g(x: f32[8], y: f32[8]) {
          %0 = pointwise(%x, %y, expr=[[mul, 0, 1], [add, 2, 0], [exp, 3], [sin, 3]], results=[4, 5], shape=[8], others=[f32]) : (f32[8], f32[8])
          return a=%0.0, b=%0.1
        }
        """,  # noqa: E501
    )


def test_no_more_steps_than_one_op_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passed, "MAX_STEPS", 1)
    expect_unchanged(join_pointwise(KERNELS), PAIR)


def test_no_cycle_of_joint_ops() -> None:
    """a reads d through b, c reads a's neighbour: each pair alone could be one op, both would wait for each other."""
    expect_unchanged(
        join_pointwise(KERNELS),
        """
        graph g(x: f32[8,8], y: f32[4,4]) {
          @v : f32[8,8]
          @w : f32[4,4]
          %0 = sin(%x) : f32[8,8]
          %1 = reduce_sum(%0, axes=[-1,-2], keepdims=false) : f32[]
          %2 = pointwise(%y, %1, expr=[[mul, 0, 1]], results=[2], shape=[4,4]) : f32[4,4]
          %3 = sin(%y) : f32[4,4]
          %4 = reduce_sum(%3, axes=[-1,-2], keepdims=false) : f32[]
          %5 = pointwise(%x, %4, expr=[[mul, 0, 1]], results=[2], shape=[8,8]) : f32[8,8]
          return a=%0, b=%2, c=%3, d=%5
        }
        """,
    )
