"""quantize: what multiplies in 8 bits, who stores its operand in FP8, and what stays as it is and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from frtc.lowering.ir import Graph, Module, Node, Repeat, Run, tensor, walk
from frtc.passes.precision import Precision, shares_of
from frtc.passes.quantize import Note, quantize
from frtc.passes.sites import sites_of
from tests.passes.expect import as_module, expect_pass, expect_unchanged, plain

STATIC, ROWS, WEIGHTS = Precision("fp8", static=True), Precision("fp8"), Precision("w8a16")


def everything(node: Node) -> bool:
    return True


def notes_of(text: str | Module, precision: Precision, implements: Callable[[Node], bool] = everything) -> list[Note]:
    found: list[Note] = []
    quantize(implements, precision, found.append)(as_module(text) if isinstance(text, str) else text)
    return found


def reason(text: str, precision: Precision = STATIC, implements: Callable[[Node], bool] = everything) -> str:
    """Why the only site stays in 16 bits; nothing in the program changes."""
    expect_unchanged(quantize(implements, precision), text, {"quantize_bf16": 1})
    (note,) = notes_of(text, precision, implements)
    assert note.kind == "bf16"
    return note.reason


NORM = """
graph g(x: bf16[5,8]) {
  @n : f32[8]
  @q : bf16[6,8]
  %0 = rms_norm(%x, @n, eps=1e-06) : bf16[5,8]
  %1 = linear(%0, @q) : bf16[5,6]
  return y=%1
}
"""


def test_norm_with_a_static_scale() -> None:
    expect_pass(
        quantize(everything, STATIC),
        fires={"quantize_fp8": 1},
        before=NORM,
        after="""
        graph g(x: bf16[5,8]) {
          @n : f32[8]
          @q : bf16[6,8]
          @scale.q : f32[]
          %0 = const(value=1.0) : f32[]
          %1 = div(%0, @scale.q) : f32[]
          %2 = rms_norm(%x, @n, %1, eps=1e-06) : e4m3[5,8]
          %3 = channel_scale(@q) : f32[6]
          %4 = quantize(@q, %3) : e4m3[6,8]
          %5 = mul(@scale.q, %3) : f32[6]
          %6 = linear(%2, %4, _, _, _, _, %5) : bf16[5,6]
          return y=%6
        }
        """,
    )


def test_norm_with_a_scale_for_each_row() -> None:
    expect_pass(
        quantize(everything, ROWS),
        fires={"quantize_fp8": 1},
        before=NORM,
        after="""
        graph g(x: bf16[5,8]) {
          @n : f32[8]
          @q : bf16[6,8]
          %0 = rms_norm(%x, @n, eps=1e-06, per_row=true) : (e4m3[5,8], f32[5,1])
          %1 = channel_scale(@q) : f32[6]
          %2 = quantize(@q, %1) : e4m3[6,8]
          %3 = linear(%0.0, %2, _, _, _, _, %1, %0.1) : bf16[5,6]
          return y=%3
        }
        """,
    )


def test_weights_alone() -> None:
    expect_pass(
        quantize(everything, WEIGHTS),
        fires={"quantize_w8a16": 1},
        before=NORM,
        after="""
        graph g(x: bf16[5,8]) {
          @n : f32[8]
          @q : bf16[6,8]
          %0 = rms_norm(%x, @n, eps=1e-06) : bf16[5,8]
          %1 = channel_scale(@q) : f32[6]
          %2 = quantize(@q, %1) : e4m3[6,8]
          %3 = linear(%0, %2, _, _, _, _, %1) : bf16[5,6]
          return y=%3
        }
        """,
    )


def test_sixteen_bits_are_left_alone() -> None:
    expect_unchanged(quantize(everything, Precision()), NORM)


def test_sum_and_norm_for_two_products() -> None:
    """The sum stays in 16 bits; both products read one value, so they share its scale."""
    expect_pass(
        quantize(everything, STATIC),
        fires={"quantize_fp8": 2},
        before="""
        graph g(x: bf16[5,8], r: bf16[5,8], g: f32[8]) {
          @k : bf16[4,8]
          @n : f32[8]
          @q : bf16[6,8]
          %0 = residual_norm(%x, %r, %g, @n, @n, eps=1e-06, kind=ada) : (bf16[5,8], bf16[5,8])
          %1 = linear(%0.1, @q) : bf16[5,6]
          %2 = linear(%0.1, @k) : bf16[5,4]
          return s=%0.0, y=%1, z=%2
        }
        """,
        after="""
        graph g(x: bf16[5,8], r: bf16[5,8], g: f32[8]) {
          @k : bf16[4,8]
          @n : f32[8]
          @q : bf16[6,8]
          @scale.q : f32[]
          %0 = const(value=1.0) : f32[]
          %1 = div(%0, @scale.q) : f32[]
          %2 = residual_norm(%x, %r, %g, @n, @n, %1, eps=1e-06, kind=ada) : (bf16[5,8], e4m3[5,8])
          %3 = channel_scale(@q) : f32[6]
          %4 = quantize(@q, %3) : e4m3[6,8]
          %5 = mul(@scale.q, %3) : f32[6]
          %6 = linear(%2.1, %4, _, _, _, _, %5) : bf16[5,6]
          %7 = channel_scale(@k) : f32[4]
          %8 = quantize(@k, %7) : e4m3[4,8]
          %9 = mul(@scale.q, %7) : f32[4]
          %10 = linear(%2.1, %8, _, _, _, _, %9) : bf16[5,4]
          return s=%2.0, y=%6, z=%10
        }
        """,
    )


def test_products_with_activations() -> None:
    """LayerNorm, gate * up and bias + GELU store what the next product reads."""
    expect_pass(
        quantize(everything, ROWS),
        fires={"quantize_fp8": 3},
        before="""
        graph g(x: bf16[5,8]) {
          @b : f32[8]
          @d : bf16[8,6]
          @f : bf16[6,8]
          @u : bf16[12,8]
          %0 = layer_norm(%x, eps=1e-06) : bf16[5,8]
          %1 = gated_linear(%0, @u, act=silu) : bf16[5,6]
          %2 = linear(%1, @d, @b, act=gelu_tanh) : bf16[5,8]
          %3 = linear(%2, @f) : bf16[5,6]
          return y=%3
        }
        """,
        after="""
        graph g(x: bf16[5,8]) {
          @b : f32[8]
          @d : bf16[8,6]
          @f : bf16[6,8]
          @u : bf16[12,8]
          %0 = layer_norm(%x, eps=1e-06, per_row=true) : (e4m3[5,8], f32[5,1])
          %1 = channel_scale(@u) : f32[12]
          %2 = quantize(@u, %1) : e4m3[12,8]
          %3 = gated_linear(%0.0, %2, _, _, %1, %0.1, act=silu, per_row=true) : (e4m3[5,6], f32[5,1])
          %4 = channel_scale(@d) : f32[8]
          %5 = quantize(@d, %4) : e4m3[8,6]
          %6 = linear(%3.0, %5, @b, _, _, _, %4, %3.1, act=gelu_tanh, per_row=true) : (e4m3[5,8], f32[5,1])
          %7 = channel_scale(@f) : f32[6]
          %8 = quantize(@f, %7) : e4m3[6,8]
          %9 = linear(%6.0, %8, _, _, _, _, %7, %6.1) : bf16[5,6]
          return y=%9
        }
        """,
    )


ATTENTION = """
graph g(q: bf16[2,5,8], k: bf16[1,7,8]) {
  @o : bf16[6,16]
  %0 = attention(%q, %k, %k, scale=0.5) : bf16[2,5,8]
  %1 = view(%0, shape=[5, 2, 8], strides=[8, 40, 1]) : bf16[5,2,8]
  %2 = reshape(%1, shape=[5, 16]) : bf16[5,16]
  %3 = linear(%2, @o) : bf16[5,6]
  return y=%3
}
"""


def test_attention_through_views() -> None:
    """All heads of a token are one row of the product, and share a scale."""
    expect_pass(
        quantize(everything, ROWS),
        fires={"quantize_fp8": 1},
        before=ATTENTION,
        after="""
        graph g(q: bf16[2,5,8], k: bf16[1,7,8]) {
          @o : bf16[6,16]
          %0 = attention(%q, %k, %k, per_row=true, scale=0.5) : (e4m3[2,5,8], f32[5,1])
          %1 = view(%0.0, shape=[5, 2, 8], strides=[8, 40, 1]) : e4m3[5,2,8]
          %2 = reshape(%1, shape=[5, 16]) : e4m3[5,16]
          %3 = channel_scale(@o) : f32[6]
          %4 = quantize(@o, %3) : e4m3[6,16]
          %5 = linear(%2, %4, _, _, _, _, %3, %0.1) : bf16[5,6]
          return y=%5
        }
        """,
    )


def test_views_that_mix_rows() -> None:
    """Near miss: heads as rows of the product. One scale for all may pass, one for each token may not."""
    mixed = ATTENTION.replace("strides=[8, 40, 1]", "strides=[16, 8, 1]")
    assert reason(mixed, ROWS) == "views between move elements from row to row"
    assert [n.kind for n in notes_of(mixed, STATIC)] == ["fp8"]


def looped(rounds: int = 3) -> Module:
    """The norm and the product in the body of a repeat."""
    module = as_module(NORM.replace("x: bf16[5,8]", "x: bf16[5,8], k: i32[]"))
    return replace(module, schedule=(Repeat(rounds, "k", (Run("g"),)),))


def test_a_scale_for_each_round() -> None:
    graph = quantize(everything, STATIC)(looped()).graph("g")
    assert plain(Module("m", (graph,))).split("\n")[2:] == (
        """
graph g(x: bf16[5,8], k: i32[]) {
  @n : f32[8]
  @q : bf16[6,8]
  @scale.q : f32[3]
  %0 = const(value=1.0) : f32[]
  %1 = div(%0, @scale.q) : f32[3]
  %2 = index(%1, %k) : f32[]
  %3 = rms_norm(%x, @n, %2, eps=1e-06) : e4m3[5,8]
  %4 = channel_scale(@q) : f32[6]
  %5 = quantize(@q, %4) : e4m3[6,8]
  %6 = reshape(@scale.q, shape=[3, 1]) : f32[3,1]
  %7 = mul(%6, %4) : f32[3,6]
  %8 = index(%7, %k) : f32[6]
  %9 = linear(%3, %5, _, _, _, _, %8) : bf16[5,6]
  return y=%9
}""".strip().split("\n")
    )


def test_a_program_that_did_not_count_its_rounds() -> None:
    """The round becomes an input of a program that had no use for it."""
    module = replace(as_module(NORM), schedule=(Repeat(3, "k", (Run("g"),)),))
    assert [n["name"] for n in quantize(everything, STATIC)(module).graph("g").inputs] == ["x", "k"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (NORM.replace("return y=%1", "return y=%1, x=%0"), "its x is a result of the program"),
        (
            NORM.replace("return y=%1", "%2 = exp(%0) : bf16[5,8]\n  return y=%1, z=%2"),
            "exp at unknown reads its x, too",
        ),
        (
            NORM.replace("linear(%0, @q)", "linear(%x, @q)")
            .replace("rms_norm(%x", "exp(%x")
            .replace(", @n, eps=1e-06", ""),
            "input at unknown makes its x and stores no FP8",
        ),
        (
            """
            graph g(x: bf16[5,8], r: bf16[5,8]) {
              @q : bf16[6,8]
              %0 = residual_norm(%x, %r, eps=1e-06, kind=rms) : (bf16[5,8], bf16[5,8])
              %1 = linear(%0.0, @q) : bf16[5,6]
              return y=%1, n=%0.1
            }
            """,
            "its x is the sum of residual_norm",
        ),
        (
            """
            graph g(x: bf16[5,8]) {
              @q : bf16[6,8]
              @u : bf16[6,8]
              %0 = rms_norm(%x, eps=1e-06) : bf16[5,8]
              %1 = gated_linear(%0, @q, @u, act=silu) : bf16[5,6]
              return y=%1
            }
            """,
            "gate and up are two weights",
        ),
    ],
    ids=["returned", "read", "no producer", "the sum", "two weights"],
)
def test_near_misses(text: str, why: str) -> None:
    assert reason(text) == why


def test_what_kernels_cannot_do() -> None:
    assert reason(NORM, implements=lambda node: node.op != "linear") == "no kernel runs it in FP8"
    assert reason(NORM, implements=lambda node: node.op != "rms_norm") == "no kernel of rms_norm stores FP8"
    assert reason(NORM, WEIGHTS, lambda node: False) == "no kernel runs it with weights in 8 bits"


def test_not_sites() -> None:
    """Products in fp32, and of two values, are none: nobody hears of them."""
    for old, new in (("@q : bf16[6,8]", "@q : f32[6,8]"), ("bf16[5,8]", "f32[5,8]")):
        text = NORM.replace(old, new)
        assert sites_of(as_module(text)) == ()
        expect_unchanged(quantize(everything, STATIC), text)


def test_what_the_user_keeps() -> None:
    kept = replace(STATIC, keep=("q*",))
    assert reason(NORM, kept) == ""
    assert reason(NORM, replace(STATIC, stages={"g": "bf16"})) == ""
    assert reason(NORM, replace(STATIC, fallen={"q": "SQNR 3.0 dB, under 20"})) == "SQNR 3.0 dB, under 20"
    assert [n.kind for n in notes_of(NORM, Precision("bf16", {"g": "w8a16"}))] == ["w8a16"]
    module = as_module(NORM)
    assert replace(kept, stages={"h": "fp8"}, keep=("q", "r.*")).unknown(module) == ["h", "r.*"]


def test_shares() -> None:
    """Read from the operands after the pass: 2 x 5 x 8 x 6 FLOPs a round."""
    for precision, kind in ((STATIC, "fp8"), (ROWS, "fp8"), (WEIGHTS, "w8a16"), (Precision(), "bf16")):
        (share,) = shares_of(quantize(everything, precision)(looped()))
        assert share.flops == {kind: 3 * 480.0}
        assert share.fp8 == (kind == "fp8")


def test_weights_used_twice() -> None:
    """Two products by one weight are two sites."""
    text = NORM.replace("return y=%1", "%2 = rms_norm(%1, eps=1e-06) : bf16[5,6]\n  return y=%1, z=%2")
    twice = text.replace("%2 = rms_norm(%1", "%3 = linear(%x, @q) : bf16[5,6]\n  %2 = rms_norm(%3")
    assert [s.name for s in sites_of(as_module(twice))] == ["q", "q~2"]


def test_the_scales_are_leaves_of_the_weights() -> None:
    module = quantize(everything, STATIC)(as_module(NORM))
    leaves = {str(n["key"]) for n in walk(module.weights.roots) if n.op == "tensor"}
    assert leaves == {"n", "q", "scale:q"}
    expected = Graph("weights", (), (("scale.q", tensor("scale:q", module.weights.outputs[-1][1].t)),))
    assert module.weights.outputs[-1:] == expected.outputs
