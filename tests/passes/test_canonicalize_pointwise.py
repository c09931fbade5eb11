"""canonicalize: algebra of pointwise ops, literals, activations."""

from __future__ import annotations

from frtc.passes.canonicalize import canonicalize
from tests.passes.expect import expect_pass, expect_unchanged


def test_neutral_elements() -> None:
    expect_pass(
        canonicalize,
        fires={"algebra": 5},
        before="""
        graph g(x: bf16[2,8]) {
          %0 = const(value=1.0) : f32[]
          %1 = const(value=0.0) : f32[]
          %2 = mul(%0, %x) : bf16[2,8]
          %3 = add(%2, %1) : bf16[2,8]
          %4 = sub(%3, %1) : bf16[2,8]
          %5 = div(%4, %0) : bf16[2,8]
          %6 = exp(%5) : bf16[2,8]
          return %6
        }
        """,
        after="""
        graph g(x: bf16[2,8]) {
          %0 = exp(%x) : bf16[2,8]
          return %0
        }
        """,
    )


def test_neutral_element_that_rounds() -> None:
    """What is left is the rounding."""
    expect_pass(
        canonicalize,
        fires={"algebra": 1},
        before="""
        graph g(x: f32[2,8]) {
          %0 = const(value=1.0) : f32[]
          %1 = mul(%x, %0) : bf16[2,8]
          return %1
        }
        """,
        after="""
        graph g(x: f32[2,8]) {
          %0 = cast(%x) : bf16[2,8]
          return %0
        }
        """,
    )


def test_nearly_neutral() -> None:
    expect_unchanged(
        canonicalize,
        """
        graph g(x: f32[2,8]) {
          %0 = const(value=1.0000001) : f32[]
          %1 = mul(%x, %0) : f32[2,8]
          return %1
        }
        """,
    )


def test_powers() -> None:
    expect_pass(
        canonicalize,
        fires={"algebra": 4},
        before="""
        graph g(x: f32[2,8]) {
          %0 = abs(%x) : f32[2,8]
          %1 = const(value=2.0) : f32[]
          %2 = const(value=3.0) : f32[]
          %3 = const(value=0.5) : f32[]
          %4 = const(value=-0.5) : f32[]
          %5 = pow(%0, %1) : f32[2,8]
          %6 = pow(%0, %2) : f32[2,8]
          %7 = pow(%0, %3) : f32[2,8]
          %8 = pow(%0, %4) : f32[2,8]
          return a=%5, b=%6, c=%7, d=%8
        }
        """,
        after="""
        graph g(x: f32[2,8]) {
          %0 = abs(%x) : f32[2,8]
          %1 = mul(%0, %0) : f32[2,8]
          %2 = mul(%1, %0) : f32[2,8]
          %3 = sqrt(%0) : f32[2,8]
          %4 = rsqrt(%0) : f32[2,8]
          return a=%1, b=%2, c=%3, d=%4
        }
        """,
    )


def test_other_power() -> None:
    expect_unchanged(
        canonicalize,
        """
        graph g(x: f32[2,8]) {
          %0 = abs(%x) : f32[2,8]
          %1 = const(value=2.5) : f32[]
          %2 = pow(%0, %1) : f32[2,8]
          return %2
        }
        """,
    )


def test_signs() -> None:
    expect_pass(
        canonicalize,
        fires={"algebra": 3},
        before="""
        graph g(x: f32[2,8], y: f32[2,8]) {
          %0 = neg(%y) : f32[2,8]
          %1 = add(%x, %0) : f32[2,8]
          %2 = neg(%0) : f32[2,8]
          %3 = const(value=3.0) : f32[]
          %4 = sub(%2, %3) : f32[2,8]
          return a=%1, b=%4
        }
        """,
        after="""
        graph g(x: f32[2,8], y: f32[2,8]) {
          %0 = sub(%x, %y) : f32[2,8]
          %1 = const(value=-3.0) : f32[]
          %2 = add(%y, %1) : f32[2,8]
          return a=%0, b=%2
        }
        """,
    )


def test_sign_of_a_rounded_value() -> None:
    """The negation rounded: it is not undone."""
    expect_unchanged(
        canonicalize,
        """
        graph g(x: f32[2,8]) {
          %0 = neg(%x) : bf16[2,8]
          %1 = neg(%0) : f32[2,8]
          return %1
        }
        """,
    )


def test_inverse_roots() -> None:
    expect_pass(
        canonicalize,
        fires={"algebra": 2},
        before="""
        graph g(x: f32[2,8], y: f32[2,8]) {
          %0 = abs(%x) : f32[2,8]
          %1 = sqrt(%0) : f32[2,8]
          %2 = const(value=1.0) : f32[]
          %3 = div(%2, %1) : f32[2,8]
          %4 = div(%y, %1) : f32[2,8]
          return a=%3, b=%4
        }
        """,
        after="""
        graph g(x: f32[2,8], y: f32[2,8]) {
          %0 = abs(%x) : f32[2,8]
          %1 = rsqrt(%0) : f32[2,8]
          %2 = mul(%y, %1) : f32[2,8]
          return a=%1, b=%2
        }
        """,
    )


def test_divisor_with_an_exact_inverse() -> None:
    expect_pass(
        canonicalize,
        fires={"algebra": 1},
        before="""
        graph g(x: f32[2,8]) {
          %0 = const(value=8.0) : f32[]
          %1 = div(%x, %0) : f32[2,8]
          return %1
        }
        """,
        after="""
        graph g(x: f32[2,8]) {
          %0 = const(value=0.125) : f32[]
          %1 = mul(%x, %0) : f32[2,8]
          return %1
        }
        """,
    )


def test_divisor_without_an_exact_inverse() -> None:
    expect_unchanged(
        canonicalize,
        """
        graph g(x: f32[2,8]) {
          %0 = const(value=3.0) : f32[]
          %1 = div(%x, %0) : f32[2,8]
          return %1
        }
        """,
    )


def test_integer_division() -> None:
    """Integers divide as numbers do; only floats are multiplied."""
    expect_unchanged(
        canonicalize,
        """
        graph g(x: i32[4]) {
          %0 = const(value=2) : i32[]
          %1 = div(%x, %0) : f32[4]
          return %1
        }
        """,
    )


def test_logic() -> None:
    expect_pass(
        canonicalize,
        fires={"algebra": 1, "logic": 4},
        before="""
        graph g(a: bool[4], b: bool[4], x: f32[4], y: f32[4]) {
          %0 = const(value=true) : bool[]
          %1 = and(%0, %a) : bool[4]
          %2 = not(%1) : bool[4]
          %3 = not(%2) : bool[4]
          %4 = cast(%b) : i64[4]
          %5 = const(value=0) : i64[]
          %6 = ne(%4, %5) : bool[4]
          %7 = or(%3, %6) : bool[4]
          %8 = where(%0, %x, %y) : f32[4]
          %9 = where(%7, %8, %y) : f32[4]
          return %9
        }
        """,
        after="""
        graph g(a: bool[4], b: bool[4], x: f32[4], y: f32[4]) {
          %0 = or(%a, %b) : bool[4]
          %1 = where(%0, %x, %y) : f32[4]
          return %1
        }
        """,
    )


def test_number_that_is_no_truth_value() -> None:
    expect_unchanged(
        canonicalize,
        """
        graph g(a: i64[4]) {
          %0 = const(value=0) : i64[]
          %1 = ne(%a, %0) : bool[4]
          return %1
        }
        """,
    )


def test_literals_are_computed() -> None:
    """Shape arithmetic, a comparison that always holds, a scalar factor."""
    expect_pass(
        canonicalize,
        fires={"literals": 3, "logic": 1},
        before="""
        graph g(x: f32[6]) {
          %0 = iota(size=6) : i64[6]
          %1 = const(value=2) : i64[]
          %2 = const(value=3) : i64[]
          %3 = mul(%1, %2) : i64[]
          %4 = lt(%0, %3) : bool[6]
          %5 = const(value=-1.0) : f32[]
          %6 = where(%4, %x, %5) : f32[6]
          %7 = const(value=5.0) : f32[]
          %8 = const(value=4.0) : f32[]
          %9 = div(%7, %8) : f32[]
          %10 = mul(%6, %9) : f32[6]
          return %10
        }
        """,
        after="""
        graph g(x: f32[6]) {
          %0 = const(value=1.25) : f32[]
          %1 = mul(%x, %0) : f32[6]
          return %1
        }
        """,
    )


def test_tables_stay() -> None:
    """A longer literal says less than the op; exp differs between machines."""
    expect_unchanged(
        canonicalize,
        """
        graph g(x: f32[6]) {
          %0 = iota(size=6) : f32[6]
          %1 = const(value=0.5) : f32[]
          %2 = mul(%0, %1) : f32[6]
          %3 = add(%x, %2) : f32[6]
          %4 = exp(%1) : f32[]
          %5 = mul(%3, %4) : f32[6]
          return %5
        }
        """,
    )


def test_device_scalars_stay() -> None:
    expect_unchanged(
        canonicalize,
        """
        graph g(n: i32[]) {
          %0 = const(value=3) : i32[]
          %1 = add(%n, %0) : i32[]
          return %1
        }
        """,
    )


def test_silu() -> None:
    expect_pass(
        canonicalize,
        fires={"activations": 1},
        before="""
        graph g(x: bf16[2,8]) {
          %0 = sigmoid(%x) : bf16[2,8]
          %1 = mul(%0, %x) : bf16[2,8]
          return %1
        }
        """,
        after="""
        graph g(x: bf16[2,8]) {
          %0 = silu(%x) : bf16[2,8]
          return %0
        }
        """,
    )


def test_sigmoid_of_another() -> None:
    expect_unchanged(
        canonicalize,
        """
        graph g(x: bf16[2,8], y: bf16[2,8]) {
          %0 = sigmoid(%x) : bf16[2,8]
          %1 = mul(%0, %y) : bf16[2,8]
          return %1
        }
        """,
    )


def test_gelu_tanh() -> None:
    expect_pass(
        canonicalize,
        fires={"algebra": 5, "activations": 1},
        before="""
        graph g(x: f32[2,8]) {
          %0 = const(value=0.5) : f32[]
          %1 = mul(%0, %x) : f32[2,8]
          %2 = const(value=3.0) : f32[]
          %3 = pow(%x, %2) : f32[2,8]
          %4 = const(value=0.044715) : f32[]
          %5 = mul(%4, %3) : f32[2,8]
          %6 = add(%x, %5) : f32[2,8]
          %7 = const(value=0.7978845608028654) : f32[]
          %8 = mul(%7, %6) : f32[2,8]
          %9 = tanh(%8) : f32[2,8]
          %10 = const(value=1.0) : f32[]
          %11 = add(%10, %9) : f32[2,8]
          %12 = mul(%1, %11) : f32[2,8]
          return %12
        }
        """,
        after="""
        graph g(x: f32[2,8]) {
          %0 = gelu_tanh(%x) : f32[2,8]
          return %0
        }
        """,
    )


def test_gelu_tanh_with_another_constant() -> None:
    expect_unchanged(
        canonicalize,
        """
        graph g(x: f32[2,8]) {
          %0 = mul(%x, %x) : f32[2,8]
          %1 = mul(%0, %x) : f32[2,8]
          %2 = const(value=0.045) : f32[]
          %3 = mul(%1, %2) : f32[2,8]
          %4 = add(%x, %3) : f32[2,8]
          %5 = const(value=0.7978845608028654) : f32[]
          %6 = mul(%4, %5) : f32[2,8]
          %7 = tanh(%6) : f32[2,8]
          %8 = const(value=1.0) : f32[]
          %9 = add(%7, %8) : f32[2,8]
          %10 = mul(%x, %9) : f32[2,8]
          %11 = const(value=0.5) : f32[]
          %12 = mul(%10, %11) : f32[2,8]
          return %12
        }
        """,
    )


def test_gelu_erf() -> None:
    expect_pass(
        canonicalize,
        fires={"activations": 1},
        before="""
        graph g(x: bf16[2,8]) {
          %0 = const(value=1.4142135623730951) : f32[]
          %1 = div(%x, %0) : bf16[2,8]
          %2 = erf(%1) : bf16[2,8]
          %3 = const(value=1.0) : f32[]
          %4 = add(%2, %3) : bf16[2,8]
          %5 = mul(%x, %4) : bf16[2,8]
          %6 = const(value=0.5) : f32[]
          %7 = mul(%5, %6) : bf16[2,8]
          return %7
        }
        """,
        after="""
        graph g(x: bf16[2,8]) {
          %0 = gelu_erf(%x) : bf16[2,8]
          return %0
        }
        """,
    )


def test_softmax_written_out() -> None:
    expect_pass(
        canonicalize,
        fires={"activations": 1},
        before="""
        graph g(x: f32[2,8]) {
          %0 = reduce_max(%x, axes=[-1]) : f32[2,1]
          %1 = sub(%x, %0) : f32[2,8]
          %2 = exp(%1) : f32[2,8]
          %3 = reduce_sum(%2, axes=[-1]) : f32[2,1]
          %4 = div(%2, %3) : f32[2,8]
          return %4
        }
        """,
        after="""
        graph g(x: f32[2,8]) {
          %0 = softmax(%x) : f32[2,8]
          return %0
        }
        """,
    )


def test_softmax_over_another_axis_than_the_maximum() -> None:
    expect_unchanged(
        canonicalize,
        """
        graph g(x: f32[2,8]) {
          %0 = reduce_max(%x, axes=[-2]) : f32[1,8]
          %1 = sub(%x, %0) : f32[2,8]
          %2 = exp(%1) : f32[2,8]
          %3 = reduce_sum(%2, axes=[-1]) : f32[2,1]
          %4 = div(%2, %3) : f32[2,8]
          return %4
        }
        """,
    )


def test_means_written_out() -> None:
    expect_pass(
        canonicalize,
        fires={"algebra": 3},
        before="""
        graph g(x: f32[2,8]) {
          %0 = reduce_sum(%x, axes=[-1]) : f32[2,1]
          %1 = const(value=0.125) : f32[]
          %2 = mul(%0, %1) : f32[2,1]
          %3 = reduce_sum(%x, axes=[-2,-1]) : f32[1,1]
          %4 = const(value=16.0) : f32[]
          %5 = div(%3, %4) : f32[1,1]
          return a=%2, b=%5
        }
        """,
        after="""
        graph g(x: f32[2,8]) {
          %0 = reduce_mean(%x, axes=[-1]) : f32[2,1]
          %1 = reduce_mean(%x, axes=[-2, -1]) : f32[1,1]
          return a=%0, b=%1
        }
        """,
    )


def test_sum_divided_by_something_else() -> None:
    expect_unchanged(
        canonicalize,
        """
        graph g(x: f32[2,8]) {
          %0 = reduce_sum(%x, axes=[-1]) : f32[2,1]
          %1 = const(value=7.0) : f32[]
          %2 = div(%0, %1) : f32[2,1]
          return %2
        }
        """,
    )


def test_truth_values_multiplied() -> None:
    expect_pass(
        canonicalize,
        fires={"logic": 1},
        before="""
        graph g(a: bool[4], b: bool[4]) {
          %0 = mul(%a, %b) : bool[4]
          return %0
        }
        """,
        after="""
        graph g(a: bool[4], b: bool[4]) {
          %0 = and(%a, %b) : bool[4]
          return %0
        }
        """,
    )


def test_opposite_comparison() -> None:
    expect_pass(
        canonicalize,
        fires={"logic": 1},
        before="""
        graph g(a: i32[4], b: i32[4]) {
          %0 = lt(%a, %b) : bool[4]
          %1 = not(%0) : bool[4]
          return %1
        }
        """,
        after="""
        graph g(a: i32[4], b: i32[4]) {
          %0 = ge(%a, %b) : bool[4]
          return %0
        }
        """,
    )


def test_opposite_comparison_of_floats() -> None:
    """A NaN is neither less nor not less."""
    expect_unchanged(
        canonicalize,
        """
        graph g(a: f32[4], b: f32[4]) {
          %0 = lt(%a, %b) : bool[4]
          %1 = not(%0) : bool[4]
          return %1
        }
        """,
    )
