"""hoist: what does not change leaves the loop."""

from __future__ import annotations

from frtc.passes.hoist import hoist
from tests.passes.expect import expect_pass, expect_unchanged


def test_invariant_leaves() -> None:
    """The mask's length and the angles; the step's own work stays."""
    expect_pass(
        hoist,
        fires={"hoist": 1},
        before="""
        module m

        graph step(y: f32[4], n: i32[], k: i32[]) {
          %0 = const(value=2) : i32[]
          %1 = add(%n, %0) : i32[]
          %2 = cast(%1) : f32[]
          %3 = cos(%2) : f32[]
          %4 = mul(%y, %3) : f32[4]
          return y=%4
        }

        schedule {
          repeat 2 k {
            run step
          }
          return y=y
        }
        """,
        after="""
        module m

        graph step.once(n: i32[]) {
          %0 = const(value=2) : i32[]
          %1 = add(%n, %0) : i32[]
          %2 = cast(%1) : f32[]
          %3 = cos(%2) : f32[]
          return step.h0=%3
        }

        graph step(y: f32[4], step.h0: f32[]) {
          %0 = mul(%y, %step.h0) : f32[4]
          return y=%0
        }

        schedule {
          run step.once
          repeat 2 k {
            run step
          }
          return y=y
        }
        """,
    )


def test_several_readers() -> None:
    """One value that several readers share is computed and handed over once."""
    expect_pass(
        hoist,
        fires={"hoist": 1},
        before="""
        module m

        graph step(y: f32[4], c: f32[4], k: i32[]) {
          %0 = exp(%c) : f32[4]
          %1 = mul(%y, %0) : f32[4]
          %2 = add(%1, %0) : f32[4]
          return y=%2
        }

        schedule {
          repeat 2 k {
            run step
          }
          return y=y
        }
        """,
        after="""
        module m

        graph step.once(c: f32[4]) {
          %0 = exp(%c) : f32[4]
          return step.h0=%0
        }

        graph step(y: f32[4], step.h0: f32[4]) {
          %0 = mul(%y, %step.h0) : f32[4]
          %1 = add(%0, %step.h0) : f32[4]
          return y=%1
        }

        schedule {
          run step.once
          repeat 2 k {
            run step
          }
          return y=y
        }
        """,
    )


def test_carried_stays() -> None:
    """Near miss: what the loop writes is another value in the next round."""
    expect_unchanged(
        hoist,
        """
        module m

        graph step(y: f32[4], c: f32[4], k: i32[]) {
          %0 = exp(%y) : f32[4]
          %1 = mul(%0, %c) : f32[4]
          return y=%1
        }

        schedule {
          repeat 2 k {
            run step
          }
          return y=y
        }
        """,
    )


def test_counter_stays() -> None:
    """Near miss: the round's number."""
    expect_unchanged(
        hoist,
        """
        module m

        graph step(y: f32[4], k: i32[]) {
          %0 = cast(%k) : f32[]
          %1 = exp(%0) : f32[]
          %2 = mul(%y, %1) : f32[4]
          return y=%2
        }

        schedule {
          repeat 2 k {
            run step
          }
          return y=y
        }
        """,
    )


def test_views_of_inputs_stay() -> None:
    """Near miss: a view of an input costs nothing where it is."""
    expect_unchanged(
        hoist,
        """
        module m

        graph step(y: f32[2], c: f32[2,2], k: i32[]) {
          %0 = reshape(%c, shape=[4]) : f32[4]
          %1 = slice(%0, axis=-1, start=0, stop=2) : f32[2]
          %2 = add(%y, %1) : f32[2]
          return y=%2
        }

        schedule {
          repeat 2 k {
            run step
          }
          return y=y
        }
        """,
    )


def test_views_of_hoisted_leave() -> None:
    """A view of a value that leaves goes with it."""
    expect_pass(
        hoist,
        fires={"hoist": 1},
        before="""
        module m

        graph step(y: f32[4], c: f32[2,2], k: i32[]) {
          %0 = exp(%c) : f32[2,2]
          %1 = reshape(%0, shape=[4]) : f32[4]
          %2 = add(%y, %1) : f32[4]
          return y=%2
        }

        schedule {
          repeat 2 k {
            run step
          }
          return y=y
        }
        """,
        after="""
        module m

        graph step.once(c: f32[2,2]) {
          %0 = exp(%c) : f32[2,2]
          %1 = reshape(%0, shape=[4]) : f32[4]
          return step.h0=%1
        }

        graph step(y: f32[4], step.h0: f32[4]) {
          %0 = add(%y, %step.h0) : f32[4]
          return y=%0
        }

        schedule {
          run step.once
          repeat 2 k {
            run step
          }
          return y=y
        }
        """,
    )


def test_states_stay() -> None:
    """Near miss: a state may be written between rounds."""
    expect_unchanged(
        hoist,
        """
        module m

        graph step(y: f32[4], k: i32[]; s: f32[4]) {
          %0 = read(%s) : f32[4]
          %1 = exp(%0) : f32[4]
          %2 = add(%y, %1) : f32[4]
          return y=%2
        }

        schedule {
          repeat 2 k {
            run step
          }
          return y=y
        }
        """,
    )


def test_other_programs_of_the_loop() -> None:
    """Near miss: a program of the same loop writes what this one reads, in whatever depth."""
    expect_unchanged(
        hoist,
        """
        module m

        graph a(z: f32[4]) {
          %0 = const(value=1.0) : f32[]
          %1 = add(%z, %0) : f32[4]
          return z=%1
        }

        graph step(y: f32[4], z: f32[4]) {
          %0 = exp(%z) : f32[4]
          %1 = add(%y, %0) : f32[4]
          return y=%1
        }

        schedule {
          repeat 2 k {
            repeat 3 j {
              run a
            }
            run step
          }
          return y=y
        }
        """,
    )


def test_let_in_the_loop() -> None:
    """Near miss: a value that the loop binds anew."""
    expect_unchanged(
        hoist,
        """
        module m

        graph step(y: f32[4], z: f32[4]) {
          %0 = exp(%z) : f32[4]
          %1 = add(%y, %0) : f32[4]
          return y=%1
        }

        schedule {
          let z = c
          repeat 2 k {
            run step
            let z = y
          }
          return y=y
        }
        """,
    )


def test_program_run_elsewhere_stays_whole() -> None:
    """Near miss: the schedule runs the program before the loop, too."""
    expect_unchanged(
        hoist,
        """
        module m

        graph step(y: f32[4], c: f32[4]) {
          %0 = exp(%c) : f32[4]
          %1 = add(%y, %0) : f32[4]
          return y=%1
        }

        schedule {
          run step
          repeat 2 k {
            run step
          }
          return y=y
        }
        """,
    )


def test_inner_loop_to_the_front() -> None:
    """From an inner loop through the outer one."""
    expect_pass(
        hoist,
        fires={"hoist": 2},
        before="""
        module m

        graph step(y: f32[4], c: f32[4]) {
          %0 = exp(%c) : f32[4]
          %1 = add(%y, %0) : f32[4]
          return y=%1
        }

        schedule {
          repeat 2 k {
            repeat 2 j {
              run step
            }
          }
          return y=y
        }
        """,
        after="""
        module m

        graph step.once.once(c: f32[4]) {
          %0 = exp(%c) : f32[4]
          return step.once.h0=%0
        }

        graph step.once(step.once.h0: f32[4]) {
          return step.h0=%step.once.h0
        }

        graph step(y: f32[4], step.h0: f32[4]) {
          %0 = add(%y, %step.h0) : f32[4]
          return y=%0
        }

        schedule {
          run step.once.once
          repeat 2 k {
            run step.once
            repeat 2 j {
              run step
            }
          }
          return y=y
        }
        """,
    )


def test_every_variant_is_split() -> None:
    """Variants of one program have the same two parts."""
    expect_pass(
        hoist,
        fires={"hoist": 1},
        before="""
        module m

        graph step[a](y: f32[4], c: f32[4]) {
          %0 = exp(%c) : f32[4]
          %1 = add(%y, %0) : f32[4]
          return y=%1
        }

        graph step[b](y: f32[4], c: f32[4]) {
          %0 = add(%y, %c) : f32[4]
          return y=%0
        }

        schedule {
          repeat 2 k {
            run step
          }
        }
        """,
        after="""
        module m

        graph step.once[a](c: f32[4]) {
          %0 = exp(%c) : f32[4]
          return step.h0=%0
        }

        graph step[a](y: f32[4], step.h0: f32[4]) {
          %0 = add(%y, %step.h0) : f32[4]
          return y=%0
        }

        graph step.once[b]() {
          return
        }

        graph step[b](y: f32[4], c: f32[4]) {
          %0 = add(%y, %c) : f32[4]
          return y=%0
        }

        schedule {
          run step.once
          repeat 2 k {
            run step
          }
        }
        """,
    )
