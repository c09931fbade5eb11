"""split_linears: what does not change between rows and rounds leaves a linear as its bias."""

from __future__ import annotations

from frtc.passes.fold_constants import fold_constants
from frtc.passes.fold_linears import fold_linears
from frtc.passes.split_linears import split_linears
from tests.passes.expect import as_module, expect_pass, expect_unchanged, plain

LOOP = """
module m

graph weights() {{
  %0 = tensor(key=b) : f32[3]
  %1 = tensor(key=w) : f32[3,6]
  return b=%0, w=%1
}}

graph step(x: f32[5,4], t: f32[2], i: i32[]) {{
  @b : f32[3]
  @w : f32[3,6]
{body}
  return x={result}
}}

schedule {{
  repeat 2 i {{
    run step
  }}
  return y=x
}}
"""
BOTH = """
  %0 = broadcast(%t, shape=[5,2]) : f32[5,2]
  %1 = concat(%x, %0, axis=-1) : f32[5,6]
  %2 = linear(%1, @w, @b) : f32[5,3]
  %3 = pad(%2, axis=-1, before=0, after=1) : f32[5,4]
"""


def test_a_loop_invariant_part_is_a_bias() -> None:
    expect_pass(
        split_linears,
        fires={"split_linears": 1},
        before=LOOP.format(body=BOTH, result="%3"),
        after=LOOP.format(
            body="""
  %0 = slice(@w, axis=-1, start=0, stop=4) : f32[3,4]
  %1 = slice(@w, axis=-1, start=4, stop=6) : f32[3,2]
  %2 = linear(%t, %1, @b) : f32[3]
  %3 = linear(%x, %0, %2) : f32[5,3]
  %4 = pad(%3, axis=-1, before=0, after=1) : f32[5,4]
""",
            result="%4",
        ),
    )


def test_three_parts_in_another_order_and_no_bias() -> None:
    """What changes stays side by side, with its columns of the weight; [1, K] rows count, too."""
    expect_pass(
        split_linears,
        fires={"split_linears": 1},
        before=LOOP.format(
            body="""
  %0 = reshape(%t, shape=[1,2]) : f32[1,2]
  %1 = broadcast(%0, shape=[5,2]) : f32[5,2]
  %2 = slice(%x, axis=-1, start=0, stop=2) : f32[5,2]
  %3 = neg(%2) : f32[5,2]
  %4 = concat(%2, %1, %3, axis=-1) : f32[5,6]
  %5 = linear(%4, @w) : f32[5,3]
  %6 = pad(%5, axis=-1, before=0, after=1) : f32[5,4]
""",
            result="%6",
        ),
        after=LOOP.format(
            body="""
  %0 = slice(%x, axis=-1, start=0, stop=2) : f32[5,2]
  %1 = neg(%0) : f32[5,2]
  %2 = concat(%0, %1, axis=-1) : f32[5,4]
  %3 = slice(@w, axis=-1, start=0, stop=2) : f32[3,2]
  %4 = slice(@w, axis=-1, start=4, stop=6) : f32[3,2]
  %5 = concat(%3, %4, axis=-1) : f32[3,4]
  %6 = reshape(%t, shape=[1,2]) : f32[1,2]
  %7 = reshape(%6, shape=[2]) : f32[2]
  %8 = slice(@w, axis=-1, start=2, stop=4) : f32[3,2]
  %9 = linear(%7, %8) : f32[3]
  %10 = linear(%2, %5, %9) : f32[5,3]
  %11 = pad(%10, axis=-1, before=0, after=1) : f32[5,4]
""",
            result="%11",
        ),
    )


def test_a_constant_part_outside_a_loop() -> None:
    expect_pass(
        split_linears,
        fires={"split_linears": 1},
        before="""
        graph g(x: f32[5,4]) {
          @c : f32[2]
          @w : f32[3,6]
          %0 = broadcast(@c, shape=[5,2]) : f32[5,2]
          %1 = concat(%x, %0, axis=-1) : f32[5,6]
          %2 = linear(%1, @w) : f32[5,3]
          return %2
        }""",
        after="""
        graph g(x: f32[5,4]) {
          @c : f32[2]
          @w : f32[3,6]
          %0 = slice(@w, axis=-1, start=0, stop=4) : f32[3,4]
          %1 = slice(@w, axis=-1, start=4, stop=6) : f32[3,2]
          %2 = linear(@c, %1) : f32[3]
          %3 = linear(%x, %0, %2) : f32[5,3]
          return %3
        }""",
    )


def test_a_single_row_needs_no_broadcast() -> None:
    """One row of x: canonical IR has a reshape of t where more rows have a broadcast."""
    text = LOOP.replace("x: f32[5,4]", "x: f32[1,4]")
    expect_pass(
        split_linears,
        fires={"split_linears": 1},
        before=text.format(
            body="""
  %0 = reshape(%t, shape=[1,2]) : f32[1,2]
  %1 = concat(%x, %0, axis=-1) : f32[1,6]
  %2 = linear(%1, @w, @b) : f32[1,3]
  %3 = pad(%2, axis=-1, before=0, after=1) : f32[1,4]
""",
            result="%3",
        ),
        after=text.format(
            body="""
  %0 = slice(@w, axis=-1, start=0, stop=4) : f32[3,4]
  %1 = reshape(%t, shape=[1,2]) : f32[1,2]
  %2 = reshape(%1, shape=[2]) : f32[2]
  %3 = slice(@w, axis=-1, start=4, stop=6) : f32[3,2]
  %4 = linear(%2, %3, @b) : f32[3]
  %5 = linear(%x, %0, %4) : f32[1,3]
  %6 = pad(%5, axis=-1, before=0, after=1) : f32[1,4]
""",
            result="%6",
        ),
    )


def test_a_part_that_the_loop_changes_stays() -> None:
    """Near miss: the same rows, but made of x, which each round writes."""
    body = BOTH.replace("broadcast(%t,", "broadcast(%row,")
    row = (
        "\n  %s = slice(%x, axis=-2, start=0, stop=1) : f32[1,4]\n  %h = slice(%s, axis=-1, start=0, stop=2) : f32[1,2]"
    )
    row += "\n  %row = reshape(%h, shape=[2]) : f32[2]"
    expect_unchanged(split_linears, LOOP.format(body=row + body, result="%3"))


def test_rows_that_differ_stay() -> None:
    """Near miss: an invariant part with rows of its own would be a second product of the same size."""
    text = LOOP.replace("t: f32[2]", "t: f32[5,2]")
    body = BOTH.replace("  %0 = broadcast(%t, shape=[5,2]) : f32[5,2]\n", "").replace("%0,", "%t,")
    expect_unchanged(split_linears, text.format(body=body, result="%3"))


def test_outside_a_loop_an_input_stays() -> None:
    """Near miss: nothing would leave any loop; it is one launch more."""
    expect_unchanged(
        split_linears,
        """
        graph g(x: f32[5,4], t: f32[2]) {
          @w : f32[3,6]
          %0 = broadcast(%t, shape=[5,2]) : f32[5,2]
          %1 = concat(%x, %0, axis=-1) : f32[5,6]
          %2 = linear(%1, @w) : f32[5,3]
          return %2
        }""",
    )


def test_nothing_but_constant_parts_is_left_to_others() -> None:
    expect_unchanged(
        split_linears,
        LOOP.format(
            body="""
  %0 = broadcast(%t, shape=[5,2]) : f32[5,2]
  %1 = concat(%0, %0, %0, axis=-1) : f32[5,6]
  %2 = linear(%1, @w, @b) : f32[5,3]
  %3 = pad(%2, axis=-1, before=0, after=1) : f32[5,4]
  %4 = add(%3, %x) : f32[5,4]
""",
            result="%4",
        ),
    )


def test_a_part_of_the_rounds_number_is_a_bias_per_round_into_which_linears_fold() -> None:
    """The three passes together: one linear of x is left, its bias an entry of a constant table."""
    text = """
module m

graph weights() {
  %0 = tensor(key=a) : f32[4,4]
  %1 = tensor(key=b) : f32[3]
  %2 = tensor(key=c) : f32[4]
  %3 = tensor(key=t) : f32[2,2]
  %4 = tensor(key=w) : f32[3,6]
  return a=%0, b=%1, c=%2, t=%3, w=%4
}

graph step(x: f32[5,4], i: i32[]) {
  @a : f32[4,4]
  @b : f32[3]
  @c : f32[4]
  @t : f32[2,2]
  @w : f32[3,6]
  %0 = linear(%x, @a, @c) : f32[5,4]
  %1 = index(@t, %i) : f32[2]
  %2 = sin(%1) : f32[2]
  %3 = broadcast(%2, shape=[5,2]) : f32[5,2]
  %4 = concat(%0, %3, axis=-1) : f32[5,6]
  %5 = linear(%4, @w, @b) : f32[5,3]
  %6 = pad(%5, axis=-1, before=0, after=1) : f32[5,4]
  return x=%6
}

schedule {
  repeat 2 i {
    run step
  }
  return y=x
}
"""
    shown = plain(fold_linears(fold_constants(split_linears(as_module(text)))))
    left = [line for line in shown.splitlines() if "%x" in line and "linear" in line]
    assert len(left) == 1 and "%x, " in left[0]
    table = left[0].split("linear(")[1].split(")")[0].split(", ")[2]
    assert f"{table} = index(" in shown and "concat" not in shown
