"""fuse_pointwise: a tree of pointwise ops is one op."""

from __future__ import annotations

from frtc.lowering.ir import Node
from frtc.passes.fuse_pointwise import fuse_pointwise
from tests.passes.expect import expect_pass, expect_unchanged


def everything(node: Node) -> bool:
    return True


def nothing(node: Node) -> bool:
    return False


def test_chain() -> None:
    """Literals become numbers of the program."""
    expect_pass(
        fuse_pointwise(everything),
        fires={"fuse_pointwise": 2},
        before="""
        graph g(x: f32[5,4]) {
          %0 = const(value=255.0) : f32[]
          %1 = div(%x, %0) : f32[5,4]
          %2 = const(value=2.0) : f32[]
          %3 = mul(%1, %2) : f32[5,4]
          %4 = const(value=1.0) : f32[]
          %5 = sub(%3, %4) : f32[5,4]
          return %5
        }
        """,
        after="""
        graph g(x: f32[5,4]) {
          %0 = pointwise(%x, expr=[[const, 255.0], [div, 0, 1], [const, 2.0], [mul, 2, 3], [const, 1.0], [sub, 4, 5]], results=[6], shape=[5,4]) : f32[5,4]
          return %0
        }
        """,  # noqa: E501
    )


def test_square() -> None:
    """A value that its only reader reads twice."""
    expect_pass(
        fuse_pointwise(everything),
        fires={"fuse_pointwise": 1},
        before="""
        graph g(a: f32[4], b: f32[4]) {
          %0 = sub(%a, %b) : f32[4]
          %1 = mul(%0, %0) : f32[4]
          return %1
        }
        """,
        after="""
        graph g(a: f32[4], b: f32[4]) {
          %0 = pointwise(%a, %b, expr=[[sub, 0, 1], [mul, 2, 2]], results=[3], shape=[4]) : f32[4]
          return %0
        }
        """,
    )


def test_operand_once() -> None:
    """An operand that several steps read is one operand."""
    expect_pass(
        fuse_pointwise(everything),
        fires={"fuse_pointwise": 1},
        before="""
        graph g(a: f32[4]) {
          %0 = mul(%a, %a) : f32[4]
          %1 = exp(%a) : f32[4]
          %2 = add(%0, %1) : f32[4]
          return %2
        }
        """,
        after="""
        graph g(a: f32[4]) {
          %0 = pointwise(%a, expr=[[mul, 0, 0], [exp, 0], [add, 1, 2]], results=[3], shape=[4]) : f32[4]
          return %0
        }
        """,
    )


def test_equal_steps_once() -> None:
    """Literals that differ in type only are one number."""
    expect_pass(
        fuse_pointwise(everything),
        fires={"fuse_pointwise": 1},
        before="""
        graph g(a: bf16[4]) {
          %0 = const(value=1.5) : f32[]
          %1 = add(%a, %0) : bf16[4]
          %2 = const(value=1.5) : bf16[]
          %3 = mul(%1, %2) : bf16[4]
          return %3
        }
        """,
        after="""
        graph g(a: bf16[4]) {
          %0 = pointwise(%a, expr=[[const, 1.5], [add, 0, 1], [mul, 2, 1]], results=[3], shape=[4]) : bf16[4]
          return %0
        }
        """,
    )


def test_literals_of_three_kinds() -> None:
    """1, 1.0 and true are different numbers."""
    expect_pass(
        fuse_pointwise(everything),
        fires={"fuse_pointwise": 3},
        before="""
        graph g(i: i32[4]) {
          %0 = const(value=1) : i32[]
          %1 = add(%i, %0) : i32[4]
          %2 = cast(%1) : f32[4]
          %3 = const(value=1.0) : f32[]
          %4 = add(%2, %3) : f32[4]
          %5 = const(value=true) : bool[]
          %6 = where(%5, %4, %3) : f32[4]
          return %6
        }
        """,
        after="""
        graph g(i: i32[4]) {
          %0 = pointwise(%i, expr=[[const, true], [const, 1], [add, 0, 2], [cast, 3, f32], [const, 1.0], [add, 4, 5], [where, 1, 6, 5]], results=[7], shape=[4]) : f32[4]
          return %0
        }
        """,  # noqa: E501
    )


def test_cast_inside() -> None:
    """A rounding that the model asks for stays a step."""
    expect_pass(
        fuse_pointwise(everything),
        fires={"fuse_pointwise": 3},
        before="""
        graph g(x: f32[4]) {
          %0 = mul(%x, %x) : f32[4]
          %1 = cast(%0) : bf16[4]
          %2 = cast(%1) : f32[4]
          %3 = add(%2, %x) : f32[4]
          return %3
        }
        """,
        after="""
        graph g(x: f32[4]) {
          %0 = pointwise(%x, expr=[[mul, 0, 0], [cast, 1, bf16], [cast, 2, f32], [add, 3, 0]], results=[4], shape=[4]) : f32[4]
          return %0
        }
        """,  # noqa: E501
    )


def test_broadcast_operands() -> None:
    """Operands of any shape, steps of the result's."""
    expect_pass(
        fuse_pointwise(everything),
        fires={"fuse_pointwise": 1},
        before="""
        graph g(x: f32[5,4], b: f32[4], s: f32[]) {
          %0 = add(%x, %b) : f32[5,4]
          %1 = mul(%0, %s) : f32[5,4]
          return %1
        }
        """,
        after="""
        graph g(x: f32[5,4], b: f32[4], s: f32[]) {
          %0 = pointwise(%x, %b, %s, expr=[[add, 0, 1], [mul, 3, 2]], results=[4], shape=[5,4]) : f32[5,4]
          return %0
        }
        """,
    )


def test_permuted() -> None:
    """What only a transposed view reads is computed in the view's order."""
    expect_pass(
        fuse_pointwise(everything),
        fires={"permute_pointwise": 1},
        before="""
        graph g(x: f32[2,3], y: f32[2,3]) {
          @w : f32[4,2]
          %0 = add(%x, %y) : f32[2,3]
          %1 = view(%0, shape=[3,2], strides=[1,3]) : f32[3,2]
          %2 = linear(%1, @w) : f32[3,4]
          return %2
        }
        """,
        after="""
        graph g(x: f32[2,3], y: f32[2,3]) {
          @w : f32[4,2]
          %0 = view(%x, shape=[3,2], strides=[1,3]) : f32[3,2]
          %1 = view(%y, shape=[3,2], strides=[1,3]) : f32[3,2]
          %2 = pointwise(%0, %1, expr=[[add, 0, 1]], results=[2], shape=[3,2]) : f32[3,2]
          %3 = linear(%2, @w) : f32[3,4]
          return %3
        }
        """,
    )


def test_smaller_cast() -> None:
    """A cast of fewer elements: to convert while loading is no work."""
    expect_pass(
        fuse_pointwise(everything),
        fires={"fuse_pointwise": 1},
        before="""
        graph g(n: i32[1], b: f32[3,4]) {
          %0 = cast(%n) : f32[1]
          %1 = mul(%0, %b) : f32[3,4]
          return %1
        }
        """,
        after="""
        graph g(n: i32[1], b: f32[3,4]) {
          %0 = pointwise(%n, %b, expr=[[cast, 0, f32], [mul, 2, 1]], results=[3], shape=[3,4]) : f32[3,4]
          return %0
        }
        """,
    )


def test_smaller_cast_of_a_computed_value_stays() -> None:
    """Near miss: the cast takes in what it converts, and then it computes."""
    expect_pass(
        fuse_pointwise(everything),
        fires={"fuse_pointwise": 1},
        before="""
        graph g(a: f32[1], b: f32[300,400]) {
          %0 = exp(%a) : f32[1]
          %1 = cast(%0) : bf16[1]
          %2 = mul(%1, %b) : f32[300,400]
          return %2
        }
        """,
        after="""
        graph g(a: f32[1], b: f32[300,400]) {
          %0 = pointwise(%a, expr=[[exp, 0], [cast, 1, bf16]], results=[2], shape=[1]) : bf16[1]
          %1 = mul(%0, %b) : f32[300,400]
          return %1
        }
        """,
    )


def test_smaller_cast_with_two_readers_stays() -> None:
    """Near miss: something else reads the cast."""
    expect_unchanged(
        fuse_pointwise(everything),
        """
        graph g(n: i32[1], b: f32[3,4]) {
          %0 = cast(%n) : f32[1]
          %1 = mul(%0, %b) : f32[3,4]
          return y=%1, n=%0
        }
        """,
    )


def test_second_reader_stays() -> None:
    """Near miss: something else reads the inner value."""
    expect_unchanged(
        fuse_pointwise(everything),
        """
        graph g(x: f32[4]) {
          %0 = exp(%x) : f32[4]
          %1 = add(%0, %x) : f32[4]
          return a=%0, b=%1
        }
        """,
    )


def test_smaller_shape_stays() -> None:
    """Near miss: the inner value would be computed anew for every row."""
    expect_unchanged(
        fuse_pointwise(everything),
        """
        graph g(x: f32[500,400], b: f32[400]) {
          %0 = exp(%b) : f32[400]
          %1 = add(%x, %0) : f32[500,400]
          return %1
        }
        """,
    )


def test_few_elements_are_computed_anew() -> None:
    """Positions and angles of a few tokens: each of the readers has them to itself, behind a reshape, too."""
    expect_pass(
        fuse_pointwise(everything),
        fires={"fuse_pointwise": 4, "permute_pointwise": 1},
        before="""
        graph g(n: i32[], i: i32[5], f: f32[4]) {
          %0 = add(%n, %i) : i32[5]
          %1 = cast(%0) : f32[5]
          %2 = view(%1, shape=[5,1], strides=[1,1]) : f32[5,1]
          %3 = mul(%2, %f) : f32[5,4]
          %4 = cos(%3) : f32[5,4]
          %5 = sin(%3) : f32[5,4]
          return cos=%4, sin=%5
        }
        """,
        after="""
        graph g(n: i32[], i: i32[5], f: f32[4]) {
          %0 = view(%i, shape=[5,1], strides=[1,1]) : i32[5,1]
          %1 = pointwise(%n, %0, %f, expr=[[add, 0, 1], [cast, 3, f32], [mul, 4, 2], [cos, 5]], results=[6], shape=[5,4]) : f32[5,4]
          %2 = pointwise(%n, %0, %f, expr=[[add, 0, 1], [cast, 3, f32], [mul, 4, 2], [sin, 5]], results=[6], shape=[5,4]) : f32[5,4]
          return cos=%1, sin=%2
        }
        """,  # noqa: E501
    )


def test_few_elements_that_something_else_reads_stay() -> None:
    """Near miss: the value has to be stored anyway."""
    expect_unchanged(
        fuse_pointwise(everything),
        """
        graph g(b: f32[4], x: f32[5,4]) {
          @w : f32[2,4]
          %0 = exp(%b) : f32[4]
          %1 = add(%x, %0) : f32[5,4]
          %2 = linear(%0, @w) : f32[2]
          return sum=%1, out=%2
        }
        """,
    )


def test_other_ops_stay() -> None:
    """Near miss: a reduction is no pointwise op."""
    expect_unchanged(
        fuse_pointwise(everything),
        """
        graph g(x: f32[5,4]) {
          %0 = reduce_sum(%x, axes=[-1]) : f32[5,1]
          %1 = exp(%0) : f32[5,1]
          return %1
        }
        """,
    )


def test_part_of_a_view_stays() -> None:
    """Near miss: the view leaves elements out."""
    expect_unchanged(
        fuse_pointwise(everything),
        """
        graph g(x: f32[2,3], y: f32[2,3]) {
          %0 = add(%x, %y) : f32[2,3]
          %1 = view(%0, shape=[2,2], strides=[1,3]) : f32[2,2]
          return %1
        }
        """,
    )


def test_only_what_a_kernel_runs() -> None:
    """Near miss: no kernel of the target has it."""
    expect_unchanged(
        fuse_pointwise(nothing),
        """
        graph g(x: f32[5,4]) {
          %0 = const(value=255.0) : f32[]
          %1 = div(%x, %0) : f32[5,4]
          %2 = const(value=2.0) : f32[]
          %3 = mul(%1, %2) : f32[5,4]
          %4 = const(value=1.0) : f32[]
          %5 = sub(%3, %4) : f32[5,4]
          return %5
        }
        """,
    )
