"""fold_constants: values that only the step number decides."""

from __future__ import annotations

from frtc.passes.fold_constants import fold_constants
from tests.passes.expect import expect_pass, expect_unchanged


def test_scalar_table() -> None:
    """Pointwise ops on a table of numbers, their literals included."""
    expect_pass(
        fold_constants,
        fires={"fold_constants": 2},
        before="""
        module m

        graph step(x: f32[2,4], k: i32[]) {
          %0 = const(data="0000803f00000040") : f32[2]
          %1 = index(%0, %k) : f32[]
          %2 = const(value=3.0) : f32[]
          %3 = mul(%1, %2) : f32[]
          %4 = cos(%3) : f32[]
          %5 = mul(%x, %4) : f32[2,4]
          return y=%5
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

        graph step(x: f32[2,4], k: i32[]) {
          %0 = const(data="0000803f00000040") : f32[2]
          %1 = const(value=3.0) : f32[]
          %2 = mul(%0, %1) : f32[2]
          %3 = cos(%2) : f32[2]
          %4 = index(%3, %k) : f32[]
          %5 = mul(%x, %4) : f32[2,4]
          return y=%5
        }

        schedule {
          repeat 2 k {
            run step
          }
          return y=y
        }
        """,
    )


def test_scalar_becomes_vector() -> None:
    """A number broadcast against a constant vector: the step axis stays in front."""
    expect_pass(
        fold_constants,
        fires={"fold_constants": 1},
        before="""
        module m

        graph step(x: f32[2,4], k: i32[]) {
          %0 = const(data="0000803f00000040") : f32[2]
          %1 = index(%0, %k) : f32[]
          %2 = const(data="0000803f000000400000404000008040") : f32[4]
          %3 = mul(%1, %2) : f32[4]
          %4 = add(%x, %3) : f32[2,4]
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

        graph step(x: f32[2,4], k: i32[]) {
          %0 = const(data="0000803f00000040") : f32[2]
          %1 = reshape(%0, shape=[2,1]) : f32[2,1]
          %2 = const(data="0000803f000000400000404000008040") : f32[4]
          %3 = mul(%1, %2) : f32[2,4]
          %4 = index(%3, %k) : f32[4]
          %5 = add(%x, %4) : f32[2,4]
          return y=%5
        }

        schedule {
          repeat 2 k {
            run step
          }
          return y=y
        }
        """,
    )


def test_vector_against_matrix() -> None:
    """A row against a constant matrix."""
    expect_pass(
        fold_constants,
        fires={"fold_constants": 1},
        before="""
        module m

        graph step(x: f32[2,4], k: i32[]) {
          %0 = const(data="0000803f00000040000000400000803f0000803f00000040000000400000803f") : f32[2,4]
          %1 = index(%0, %k) : f32[4]
          %2 = const(data="0000803f000000400000404000008040000080400000404000000040000080bf") : f32[2,4]
          %3 = add(%1, %2) : f32[2,4]
          %4 = sub(%x, %3) : f32[2,4]
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

        graph step(x: f32[2,4], k: i32[]) {
          %0 = const(data="0000803f00000040000000400000803f0000803f00000040000000400000803f") : f32[2,4]
          %1 = reshape(%0, shape=[2,1,4]) : f32[2,1,4]
          %2 = const(data="0000803f000000400000404000008040000080400000404000000040000080bf") : f32[2,4]
          %3 = add(%1, %2) : f32[2,2,4]
          %4 = index(%3, %k) : f32[2,4]
          %5 = sub(%x, %4) : f32[2,4]
          return y=%5
        }

        schedule {
          repeat 2 k {
            run step
          }
          return y=y
        }
        """,
    )


def test_linear_and_norm() -> None:
    """The time MLP and a norm over it: one matrix product over all steps."""
    expect_pass(
        fold_constants,
        fires={"fold_constants": 5},
        before="""
        module m

        graph weights() {
          %0 = tensor(key=a) : f32[4,4]
          %1 = tensor(key=b) : f32[4]
          return a=%0, b=%1
        }

        graph step(x: f32[3,2], k: i32[]) {
          @a : f32[4,4]
          @b : f32[4]
          %0 = const(data="0000803f00000040000000400000803f0000803f00000040000000400000803f") : f32[2,4]
          %1 = index(%0, %k) : f32[4]
          %2 = linear(%1, @a, @b) : f32[4]
          %3 = silu(%2) : f32[4]
          %4 = linear(%3, @a) : f32[4]
          %5 = rms_norm(%4, @b, eps=1e-06) : f32[4]
          %6 = slice(%5, axis=-1, start=0, stop=2) : f32[2]
          %7 = mul(%x, %6) : f32[3,2]
          return y=%7
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

        graph weights() {
          %0 = tensor(key=a) : f32[4,4]
          %1 = tensor(key=b) : f32[4]
          return a=%0, b=%1
        }

        graph step(x: f32[3,2], k: i32[]) {
          @a : f32[4,4]
          @b : f32[4]
          %0 = const(data="0000803f00000040000000400000803f0000803f00000040000000400000803f") : f32[2,4]
          %1 = linear(%0, @a, @b) : f32[2,4]
          %2 = silu(%1) : f32[2,4]
          %3 = linear(%2, @a) : f32[2,4]
          %4 = rms_norm(%3, @b, eps=1e-06) : f32[2,4]
          %5 = slice(%4, axis=-1, start=0, stop=2) : f32[2,2]
          %6 = index(%5, %k) : f32[2]
          %7 = mul(%x, %6) : f32[3,2]
          return y=%7
        }

        schedule {
          repeat 2 k {
            run step
          }
          return y=y
        }
        """,
    )


def test_columns_of_a_linear() -> None:
    """Scale and shift are columns of one linear: each multiplies its own rows of the weight."""
    expect_pass(
        fold_constants,
        fires={"fold_constants": 3},
        before="""
        module m

        graph weights() {
          %0 = tensor(key=a) : f32[4,4]
          %1 = tensor(key=b) : f32[4]
          return a=%0, b=%1
        }

        graph step(x: f32[3,2], k: i32[]) {
          @a : f32[4,4]
          @b : f32[4]
          %0 = const(data="0000803f00000040000000400000803f0000803f00000040000000400000803f") : f32[2,4]
          %1 = index(%0, %k) : f32[4]
          %2 = linear(%1, @a, @b) : f32[4]
          %3 = slice(%2, axis=-1, start=0, stop=2) : f32[2]
          %4 = slice(%2, axis=-1, start=2, stop=4) : f32[2]
          %5 = mul(%x, %3) : f32[3,2]
          %6 = add(%5, %4) : f32[3,2]
          return y=%6
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

        graph weights() {
          %0 = tensor(key=a) : f32[4,4]
          %1 = tensor(key=b) : f32[4]
          return a=%0, b=%1
        }

        graph step(x: f32[3,2], k: i32[]) {
          @a : f32[4,4]
          @b : f32[4]
          %0 = const(data="0000803f00000040000000400000803f0000803f00000040000000400000803f") : f32[2,4]
          %1 = slice(@a, axis=-2, start=0, stop=2) : f32[2,4]
          %2 = slice(@b, axis=-1, start=0, stop=2) : f32[2]
          %3 = linear(%0, %1, %2) : f32[2,2]
          %4 = index(%3, %k) : f32[2]
          %5 = mul(%x, %4) : f32[3,2]
          %6 = slice(@a, axis=-2, start=2, stop=4) : f32[2,4]
          %7 = slice(@b, axis=-1, start=2, stop=4) : f32[2]
          %8 = linear(%0, %6, %7) : f32[2,2]
          %9 = index(%8, %k) : f32[2]
          %10 = add(%5, %9) : f32[3,2]
          return y=%10
        }

        schedule {
          repeat 2 k {
            run step
          }
          return y=y
        }
        """,
    )


def test_concat_with_constant() -> None:
    """A part that does not depend on the step is repeated for every step."""
    expect_pass(
        fold_constants,
        fires={"fold_constants": 2},
        before="""
        module m

        graph step(x: f32[2,3], k: i32[]) {
          %0 = const(data="0000803f00000040000000400000803f0000803f00000040000000400000803f") : f32[2,4]
          %1 = index(%0, %k) : f32[4]
          %2 = const(value=1.0) : f32[2]
          %3 = concat(%1, %2, axis=-1) : f32[6]
          %4 = reshape(%3, shape=[2,3]) : f32[2,3]
          %5 = add(%x, %4) : f32[2,3]
          return y=%5
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

        graph step(x: f32[2,3], k: i32[]) {
          %0 = const(data="0000803f00000040000000400000803f0000803f00000040000000400000803f") : f32[2,4]
          %1 = const(value=1.0) : f32[2]
          %2 = broadcast(%1, shape=[2,2]) : f32[2,2]
          %3 = concat(%0, %2, axis=-1) : f32[2,6]
          %4 = reshape(%3, shape=[2,2,3]) : f32[2,2,3]
          %5 = index(%4, %k) : f32[2,3]
          %6 = add(%x, %5) : f32[2,3]
          return y=%6
        }

        schedule {
          repeat 2 k {
            run step
          }
          return y=y
        }
        """,
    )


def test_reshape_broadcast_transpose() -> None:
    """Ops that move elements."""
    expect_pass(
        fold_constants,
        fires={"fold_constants": 4},
        before="""
        module m

        graph step(x: f32[2,4], k: i32[]) {
          %0 = const(data="0000803f00000040000000400000803f0000803f00000040000000400000803f") : f32[2,4]
          %1 = index(%0, %k) : f32[4]
          %2 = reshape(%1, shape=[4,1]) : f32[4,1]
          %3 = broadcast(%2, shape=[4,2]) : f32[4,2]
          %4 = transpose(%3, perm=[-1,-2]) : f32[2,4]
          %5 = slice(%4, axis=-2, start=0, stop=2) : f32[2,4]
          %6 = add(%x, %5) : f32[2,4]
          return y=%6
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

        graph step(x: f32[2,4], k: i32[]) {
          %0 = const(data="0000803f00000040000000400000803f0000803f00000040000000400000803f") : f32[2,4]
          %1 = reshape(%0, shape=[2,4,1]) : f32[2,4,1]
          %2 = broadcast(%1, shape=[2,4,2]) : f32[2,4,2]
          %3 = transpose(%2, perm=[-1,-2]) : f32[2,2,4]
          %4 = slice(%3, axis=-2, start=0, stop=2) : f32[2,2,4]
          %5 = index(%4, %k) : f32[2,4]
          %6 = add(%x, %5) : f32[2,4]
          return y=%6
        }

        schedule {
          repeat 2 k {
            run step
          }
          return y=y
        }
        """,
    )


def test_two_tables() -> None:
    """Two tables of one length."""
    expect_pass(
        fold_constants,
        fires={"fold_constants": 1},
        before="""
        module m

        graph step(x: f32[2,4], k: i32[]) {
          %0 = const(data="0000803f00000040") : f32[2]
          %1 = index(%0, %k) : f32[]
          %2 = const(data="0000404000008040") : f32[2]
          %3 = index(%2, %k) : f32[]
          %4 = add(%1, %3) : f32[]
          %5 = mul(%x, %4) : f32[2,4]
          return y=%5
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

        graph step(x: f32[2,4], k: i32[]) {
          %0 = const(data="0000803f00000040") : f32[2]
          %1 = const(data="0000404000008040") : f32[2]
          %2 = add(%0, %1) : f32[2]
          %3 = index(%2, %k) : f32[]
          %4 = mul(%x, %3) : f32[2,4]
          return y=%4
        }

        schedule {
          repeat 2 k {
            run step
          }
          return y=y
        }
        """,
    )


def test_runtime_input_stays() -> None:
    """Near miss: the value depends on an input of the inference, too."""
    expect_unchanged(
        fold_constants,
        """
        module m

        graph step(x: f32[2,4], s: f32[], k: i32[]) {
          %0 = const(data="0000803f00000040") : f32[2]
          %1 = index(%0, %k) : f32[]
          %2 = add(%1, %s) : f32[]
          %3 = cos(%2) : f32[]
          %4 = mul(%x, %3) : f32[2,4]
          return y=%4
        }

        schedule {
          repeat 2 k {
            run step
          }
          return y=y
        }
        """,
    )


def test_another_index_stays() -> None:
    """Near miss: the index is no counter of a loop."""
    expect_unchanged(
        fold_constants,
        """
        module m

        graph step(x: f32[2,4], i: i32[], k: i32[]) {
          %0 = const(data="0000803f00000040000040400000804000000000") : f32[5]
          %1 = index(%0, %i) : f32[]
          %2 = cos(%1) : f32[]
          %3 = mul(%x, %2) : f32[2,4]
          %4 = index(%0, %k) : f32[]
          %5 = mul(%3, %4) : f32[2,4]
          return y=%5
        }

        schedule {
          repeat 2 k {
            run step
          }
          return y=y
        }
        """,
    )


def test_computed_table_stays() -> None:
    """Near miss: the table itself is computed at run time."""
    expect_unchanged(
        fold_constants,
        """
        module m

        graph step(x: f32[2,4], k: i32[]) {
          %0 = index(%x, %k) : f32[4]
          %1 = cos(%0) : f32[4]
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


def test_tables_of_different_length_stay() -> None:
    """Near miss: a table with more rows than the other."""
    expect_unchanged(
        fold_constants,
        """
        module m

        graph step(x: f32[2,4], k: i32[]) {
          %0 = const(data="0000803f00000040") : f32[2]
          %1 = index(%0, %k) : f32[]
          %2 = const(data="00004040000080400000803f") : f32[3]
          %3 = index(%2, %k) : f32[]
          %4 = add(%1, %3) : f32[]
          %5 = mul(%x, %4) : f32[2,4]
          return y=%5
        }

        schedule {
          repeat 2 k {
            run step
          }
          return y=y
        }
        """,
    )


def test_weight_of_the_step_stays() -> None:
    """Near miss: a matrix that differs from step to step is no batch of rows."""
    expect_unchanged(
        fold_constants,
        """
        module m

        graph step(x: f32[3,2], k: i32[]) {
          %0 = const(data="0000803f00000040000000400000803f0000803f00000040000000400000803f") : f32[2,2,2]
          %1 = index(%0, %k) : f32[2,2]
          %2 = const(data="0000803f00000040") : f32[2]
          %3 = linear(%2, %1) : f32[2]
          %4 = add(%x, %3) : f32[3,2]
          return y=%4
        }

        schedule {
          repeat 2 k {
            run step
          }
          return y=y
        }
        """,
    )


def test_outside_a_loop() -> None:
    """Near miss: no repeat counts this program."""
    expect_unchanged(
        fold_constants,
        """
        graph g(x: f32[4], k: i32[]) {
          %0 = const(data="0000803f00000040000040400000804000000000") : f32[5]
          %1 = index(%0, %k) : f32[]
          %2 = cos(%1) : f32[]
          %3 = mul(%x, %2) : f32[4]
          return %3
        }
        """,
    )
