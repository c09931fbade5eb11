"""fold_linears: factors and linears move into the linear next to them."""

from __future__ import annotations

from frtc.passes.fold_linears import fold_linears
from tests.passes.expect import expect_pass, expect_unchanged


def test_step_size() -> None:
    """dt moves into the action projection, weight and bias."""
    expect_pass(
        fold_linears,
        fires={"fold_factor": 1},
        before="""
        graph g(x: f32[5,4]) {
          @b : f32[3]
          @w : f32[3,4]
          %0 = linear(%x, @w, @b) : f32[5,3]
          %1 = const(value=-0.1) : f32[]
          %2 = mul(%0, %1) : f32[5,3]
          return %2
        }
        """,
        after="""
        graph g(x: f32[5,4]) {
          @b : f32[3]
          @w : f32[3,4]
          %0 = const(value=-0.1) : f32[]
          %1 = mul(@w, %0) : f32[3,4]
          %2 = mul(@b, %0) : f32[3]
          %3 = linear(%x, %1, %2) : f32[5,3]
          return %3
        }
        """,
    )


def test_factor_without_bias() -> None:
    expect_pass(
        fold_linears,
        fires={"fold_factor": 1},
        before="""
        graph g(x: bf16[5,4]) {
          @w : bf16[3,4]
          %0 = linear(%x, @w) : bf16[5,3]
          %1 = const(value=0.5) : f32[]
          %2 = mul(%1, %0) : bf16[5,3]
          return %2
        }
        """,
        after="""
        graph g(x: bf16[5,4]) {
          @w : bf16[3,4]
          %0 = const(value=0.5) : f32[]
          %1 = mul(@w, %0) : bf16[3,4]
          %2 = linear(%x, %1) : bf16[5,3]
          return %2
        }
        """,
    )


def test_difference() -> None:
    """A difference becomes a sum, which can be an epilogue."""
    expect_pass(
        fold_linears,
        fires={"fold_factor": 1},
        before="""
        graph g(x: f32[5,4], r: f32[5,3]) {
          @b : f32[3]
          @w : f32[3,4]
          %0 = linear(%x, @w, @b) : f32[5,3]
          %1 = sub(%r, %0) : f32[5,3]
          return %1
        }
        """,
        after="""
        graph g(x: f32[5,4], r: f32[5,3]) {
          @b : f32[3]
          @w : f32[3,4]
          %0 = const(value=-1.0) : f32[]
          %1 = mul(@w, %0) : f32[3,4]
          %2 = mul(@b, %0) : f32[3]
          %3 = linear(%x, %1, %2) : f32[5,3]
          %4 = add(%r, %3) : f32[5,3]
          return %4
        }
        """,
    )


def test_difference_the_other_way_stays() -> None:
    """Near miss: the linear is what is subtracted from."""
    expect_unchanged(
        fold_linears,
        """
        graph g(x: f32[5,4], r: f32[5,3]) {
          @w : f32[3,4]
          %0 = linear(%x, @w) : f32[5,3]
          %1 = sub(%0, %r) : f32[5,3]
          return %1
        }
        """,
    )


def test_embedding_scale() -> None:
    """Gemma's sqrt(width)."""
    expect_pass(
        fold_linears,
        fires={"fold_factor": 1},
        before="""
        graph g(ids: i32[5]) {
          @t : bf16[9,4]
          %0 = embedding(@t, %ids, scale=2.0) : bf16[5,4]
          %1 = const(value=8.0) : f32[]
          %2 = mul(%0, %1) : bf16[5,4]
          return %2
        }
        """,
        after="""
        graph g(ids: i32[5]) {
          @t : bf16[9,4]
          %0 = embedding(@t, %ids, scale=16.0) : bf16[5,4]
          return %0
        }
        """,
    )


def test_chain() -> None:
    """The inner bias goes through the outer weight."""
    expect_pass(
        fold_linears,
        fires={"fold_linear_into_linear": 1},
        before="""
        graph g(x: f32[5,4]) {
          @a : f32[8,4]
          @a.b : f32[8]
          @b : f32[3,8]
          @b.b : f32[3]
          %0 = linear(%x, @a, @a.b) : f32[5,8]
          %1 = linear(%0, @b, @b.b) : f32[5,3]
          return %1
        }
        """,
        after="""
        graph g(x: f32[5,4]) {
          @a : f32[8,4]
          @a.b : f32[8]
          @b : f32[3,8]
          @b.b : f32[3]
          %0 = matmul(@b, @a) : f32[3,4]
          %1 = linear(@a.b, @b) : f32[3]
          %2 = add(%1, @b.b) : f32[3]
          %3 = linear(%x, %0, %2) : f32[5,3]
          return %3
        }
        """,
    )


def test_chain_with_inner_bias() -> None:
    expect_pass(
        fold_linears,
        fires={"fold_linear_into_linear": 1},
        before="""
        graph g(x: f32[5,4]) {
          @a : f32[8,4]
          @a.b : f32[8]
          @b : f32[3,8]
          %0 = linear(%x, @a, @a.b) : f32[5,8]
          %1 = linear(%0, @b) : f32[5,3]
          return %1
        }
        """,
        after="""
        graph g(x: f32[5,4]) {
          @a : f32[8,4]
          @a.b : f32[8]
          @b : f32[3,8]
          %0 = matmul(@b, @a) : f32[3,4]
          %1 = linear(@a.b, @b) : f32[3]
          %2 = linear(%x, %0, %1) : f32[5,3]
          return %2
        }
        """,
    )


def test_chain_with_outer_bias() -> None:
    expect_pass(
        fold_linears,
        fires={"fold_linear_into_linear": 1},
        before="""
        graph g(x: f32[5,4]) {
          @a : f32[8,4]
          @b : f32[3,8]
          @b.b : f32[3]
          %0 = linear(%x, @a) : f32[5,8]
          %1 = linear(%0, @b, @b.b) : f32[5,3]
          return %1
        }
        """,
        after="""
        graph g(x: f32[5,4]) {
          @a : f32[8,4]
          @b : f32[3,8]
          @b.b : f32[3]
          %0 = matmul(@b, @a) : f32[3,4]
          %1 = linear(%x, %0, @b.b) : f32[5,3]
          return %1
        }
        """,
    )


def test_chain_of_three() -> None:
    """From the inside out."""
    expect_pass(
        fold_linears,
        fires={"fold_linear_into_linear": 2},
        before="""
        graph g(x: f32[5,4]) {
          @a : f32[6,4]
          @b : f32[6,6]
          @c : f32[3,6]
          %0 = linear(%x, @a) : f32[5,6]
          %1 = linear(%0, @b) : f32[5,6]
          %2 = linear(%1, @c) : f32[5,3]
          return %2
        }
        """,
        after="""
        graph g(x: f32[5,4]) {
          @a : f32[6,4]
          @b : f32[6,6]
          @c : f32[3,6]
          %0 = matmul(@b, @a) : f32[6,4]
          %1 = matmul(@c, %0) : f32[3,4]
          %2 = linear(%x, %1) : f32[5,3]
          return %2
        }
        """,
    )


def test_bottleneck_stays() -> None:
    """Near miss: through a narrow value is less work."""
    expect_unchanged(
        fold_linears,
        """
        graph g(x: f32[5,8]) {
          @a : f32[2,8]
          @b : f32[8,2]
          %0 = linear(%x, @a) : f32[5,2]
          %1 = linear(%0, @b) : f32[5,8]
          return %1
        }
        """,
    )


def test_activation_between_stays() -> None:
    """Near miss: not linear."""
    expect_unchanged(
        fold_linears,
        """
        graph g(x: f32[5,4]) {
          @a : f32[8,4]
          @b : f32[3,8]
          %0 = linear(%x, @a, act=silu) : f32[5,8]
          %1 = linear(%0, @b) : f32[5,3]
          return %1
        }
        """,
    )


def test_second_reader_stays() -> None:
    """Near miss: the inner value is read twice."""
    expect_unchanged(
        fold_linears,
        """
        graph g(x: f32[5,4]) {
          @w : f32[3,4]
          %0 = linear(%x, @w) : f32[5,3]
          %1 = const(value=-0.1) : f32[]
          %2 = mul(%0, %1) : f32[5,3]
          return a=%2, b=%0
        }
        """,
    )


def test_computed_factor_stays() -> None:
    """Near miss: the factor is no literal."""
    expect_unchanged(
        fold_linears,
        """
        graph g(x: f32[5,4], s: f32[]) {
          @w : f32[3,4]
          %0 = linear(%x, @w) : f32[5,3]
          %1 = mul(%0, %s) : f32[5,3]
          return %1
        }
        """,
    )


TABLE = """
module m

graph weights() {{
  %0 = tensor(key=a) : f32[4,4]
  %1 = tensor(key=c) : f32[4]
  %2 = tensor(key=t) : f32[2,4]
  %3 = tensor(key=w) : f32[4,4]
  return a=%0, c=%1, t=%2, w=%3
}}

graph g(x: f32[5,4]{inputs}) {{
  @a : f32[4,4]
  @c : f32[4]{table}
  @w : f32[4,4]
{body}
}}

schedule {{
  repeat 2 i {{
    run g
  }}
  return y=x
}}
"""


def test_a_bias_per_round_takes_the_inner_bias() -> None:
    table = {"inputs": ", i: i32[]", "table": "\n  @t : f32[2,4]"}
    before = """
  %0 = linear(%x, @a, @c) : f32[5,4]
  %1 = index(@t, %i) : f32[4]
  %2 = linear(%0, @w, %1) : f32[5,4]
  return x=%2"""
    after = """
  %0 = matmul(@w, @a) : f32[4,4]
  %1 = linear(@c, @w) : f32[4]
  %2 = add(%1, @t) : f32[2,4]
  %3 = index(%2, %i) : f32[4]
  %4 = linear(%x, %0, %3) : f32[5,4]
  return x=%4"""
    expect_pass(
        fold_linears,
        fires={"fold_linear_into_linear": 1},
        before=TABLE.format(**table, body=before),
        after=TABLE.format(**table, body=after),
    )


def test_a_computed_bias_stays() -> None:
    """Near miss: the sum of the biases would be a launch."""
    body = """
  %0 = linear(%x, @a, @c) : f32[5,4]
  %1 = neg(%y) : f32[4]
  %2 = linear(%0, @w, %1) : f32[5,4]
  return x=%2"""
    expect_unchanged(fold_linears, TABLE.format(inputs=", y: f32[4]", table="", body=body))
