"""defer_norms: products of a value before its norm."""

from __future__ import annotations

import pytest

from frtc.lowering.ir import Node
from frtc.passes.check import compare
from frtc.passes.defer_norms import defer_norms
from frtc.passes.fuse_linear_norm import fuse_linear_norm
from frtc.passes.precision import Precision
from tests.passes.expect import as_module, expect_pass, expect_unchanged

BF16, FP8 = Precision(), Precision("fp8", static=True)


def everything(node: Node) -> bool:
    return True


def test_rms() -> None:
    """The residual stream takes the first result; weights of 16 bits stay as they are."""
    expect_pass(
        defer_norms(everything, BF16),
        fires={"defer_norms": 1},
        before="""
        graph g(x: bf16[5,8], r: bf16[5,64]) {
          @n : f32[64]
          @v : bf16[48,64]
          @w : bf16[64,8]
          %0 = linear(%x, @w, _, %r) : bf16[5,64]
          %1 = rms_norm(%0, @n, eps=1e-06, offset=1.0) : bf16[5,64]
          %2 = linear(%1, @v) : bf16[5,48]
          %3 = neg(%2) : bf16[5,48]
          return s=%0, y=%3
        }
        """,
        after="""
        graph g(x: bf16[5,8], r: bf16[5,64]) {
          @n : f32[64]
          @v : bf16[48,64]
          @w : bf16[64,8]
          %0 = linear_moments(%x, @w, _, %r, _, _, _, _, @n, norm=rms, offset=1.0) : (bf16[5,64], f32[5,2], bf16[5,64])
          %1 = linear(%0.2, @v, _, _, _, _, _, %0.1, eps=1e-06, norm=rms) : bf16[5,48]
          %2 = neg(%1) : bf16[5,48]
          return s=%0.0, y=%2
        }
        """,
    )


def test_ada_in_each_round() -> None:
    """The shift becomes one bias of each round."""
    expect_pass(
        defer_norms(everything, BF16),
        fires={"defer_norms": 1},
        before="""
    graph g(x: bf16[5,8], r: bf16[5,64], g: bf16[64], i: i32[]) {
      @b : f32[64]
      @v : bf16[48,64]
      @scale : f32[5,64]
      @shift : f32[5,64]
      @w : bf16[64,8]
      %0 = linear(%x, @w, @b, %r, %g) : bf16[5,64]
      %1 = index(@scale, %i) : f32[64]
      %2 = index(@shift, %i) : f32[64]
      %3 = ada_rms_norm(%0, %1, %2, eps=1e-06) : bf16[5,64]
      %4 = gated_linear(%3, @v, act=silu) : bf16[5,24]
      %5 = neg(%4) : bf16[5,24]
      return s=%0, y=%5
    }
    """,
        after="""
    graph g(x: bf16[5,8], r: bf16[5,64], g: bf16[64], i: i32[]) {
      @b : f32[64]
      @scale : f32[5,64]
      @shift : f32[5,64]
      @v : bf16[48,64]
      @w : bf16[64,8]
      %0 = index(@scale, %i) : f32[64]
      %1 = linear_moments(%x, @w, @b, %r, %g, _, _, _, %0, norm=rms, offset=1.0) : (bf16[5,64], f32[5,2], bf16[5,64])
      %2 = linear(@shift, @v) : f32[5,48]
      %3 = index(%2, %i) : f32[48]
      %4 = gated_linear(%1.2, @v, _, _, _, %1.1, _, %3, act=silu, eps=1e-06, norm=rms) : bf16[5,24]
      %5 = neg(%4) : bf16[5,24]
      return s=%1.0, y=%5
    }
    """,
    )


def test_layer() -> None:
    """Its weights and the mean go into the reader's weights, its shift into the bias."""
    expect_pass(
        defer_norms(everything, FP8),
        fires={"defer_norms": 1},
        before="""
        graph g(x: bf16[5,8]) {
          @a : f32[48]
          @b : bf16[64]
          @n : bf16[64]
          @v : bf16[48,64]
          @w : bf16[64,8]
          %0 = linear(%x, @w) : bf16[5,64]
          %1 = layer_norm(%0, @n, @b, eps=1e-06) : bf16[5,64]
          %2 = linear(%1, @v, @a, act=gelu_tanh) : bf16[5,48]
          %3 = neg(%2) : bf16[5,48]
          return y=%3
        }
        """,
        after="""
        graph g(x: bf16[5,8]) {
          @a : f32[48]
          @b : bf16[64]
          @n : bf16[64]
          @v : bf16[48,64]
          @w : bf16[64,8]
          %0 = linear_moments(%x, @w, norm=layer) : (bf16[5,64], f32[5,4], bf16[5,64])
          %1 = mul(@v, @n) : f32[48,64]
          %2 = reduce_mean(%1, axes=[-1]) : f32[48,1]
          %3 = sub(%1, %2) : bf16[48,64]
          %4 = linear(@b, @v) : f32[48]
          %5 = add(%4, @a) : f32[48]
          %6 = linear(%0.2, %3, %5, _, _, _, _, %0.1, act=gelu_tanh, eps=1e-06, norm=layer) : bf16[5,48]
          %7 = neg(%6) : bf16[5,48]
          return y=%7
        }
        """,
    )


IN_F32 = """
    graph g(x: f32[5,8], r: f32[5,3], n: f32[64], n2: f32[48]) {
      @b : f32[64]
      @c : f32[3]
      @t : bf16[48,48]
      @u : f32[3,48]
      @v : bf16[48,64]
      @w : f32[64,8]
      %0 = linear(%x, @w, @b) : bf16[5,64]
      %1 = rms_norm(%0, %n, eps=1e-06, offset=1.0) : bf16[5,64]
      %2 = linear(%1, @v, act=silu) : bf16[5,48]
      %3 = linear(%2, @t) : bf16[5,48]
      %4 = rms_norm(%3, %n2, eps=1e-06) : bf16[5,48]
      %5 = linear(%4, @u, @c, %r) : f32[5,3]
      return y=%5
    }
    """


@pytest.mark.parametrize("precision", [BF16, FP8], ids=["bf16", "fp8"])
def test_in_front_of_a_product_in_fp32_and_behind_one(precision: Precision) -> None:
    """Also in front of the last one, whose x is never FP8."""
    after = """
    graph g(x: f32[5,8], r: f32[5,3], n: f32[64], n2: f32[48]) {
      @b : f32[64]
      @c : f32[3]
      @t : bf16[48,48]
      @u : f32[3,48]
      @v : bf16[48,64]
      @w : f32[64,8]
      %0 = linear_moments(%x, @w, @b, _, _, _, _, _, %n, norm=rms, offset=1.0) : (bf16[5,64], f32[5,2], bf16[5,64])
      %1 = linear(%0.2, @v, _, _, _, _, _, %0.1, act=silu, eps=1e-06, norm=rms) : bf16[5,48]
      %2 = linear_moments(%1, @t, _, _, _, _, _, _, %n2, norm=rms) : (bf16[5,48], f32[5,2], bf16[5,48])
      %3 = linear(%2.2, @u, @c, %r, _, _, _, %2.1, eps=1e-06, norm=rms) : f32[5,3]
      return y=%3
    }
    """
    expect_pass(defer_norms(everything, precision), fires={"defer_norms": 2}, before=IN_F32, after=after)


def test_scales_per_row_keep_norms_in_front_of_fp32() -> None:
    """What such a Plan consists of runs on every target with FP8."""
    expect_unchanged(defer_norms(everything, Precision("fp8")), IN_F32)


def test_a_product_whose_weights_have_8_bits_keeps_its_norm() -> None:
    """Where no kernel stores moments behind such weights: a deferred norm would cost them."""

    def served(node: Node) -> bool:
        return node.op != "linear_moments" or node.operands[0].dtype == node.operands[1].dtype

    for kind, left in (("w8a16", 2), ("bf16", 0)):
        (graph,) = defer_norms(served, Precision(kind))(as_module(IN_F32)).graphs
        assert graph.count("rms_norm") == left


def test_a_layer_norm_in_front_of_fp32() -> None:
    """W' is fp32, and z is s itself."""
    text = IN_F32.replace("rms_norm(%3, %n2", "layer_norm(%3, @n2, %n2").replace("@t :", "@n2 : f32[48]\n      @t :")
    text = text.replace("@n2, %n2", "@n2, @n2").replace(", n2: f32[48]", "")
    module = as_module(text)
    result = defer_norms(everything, BF16)(module)
    (last,) = [node for node in result.graphs[0].nodes if node.get("norm", "none") == "layer" and node.op == "linear"]
    assert last.operands[1].dtype == "f32" and result.graphs[0].count("layer_norm") == 0
    compare(module, result, "layer")


RMS = """
    graph g(x: bf16[5,8], n: bf16[64]) {
      @v : bf16[48,64]
      @w : bf16[64,8]
      %0 = linear(%x, @w) : bf16[5,64]
      %1 = rms_norm(%0, %n, eps=1e-06) : bf16[5,64]
      %2 = linear(%1, @v) : bf16[5,48]
      %3 = neg(%2) : bf16[5,48]
      return y=%3
    }
    """
LAYER = RMS.replace("rms_norm", "layer_norm")
ADA = RMS.replace("rms_norm(%0, %n", "ada_rms_norm(%0, %n, %n")


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        (RMS, Precision("w8a16")),
        (RMS, Precision("fp8")),
        (RMS, Precision("fp8", static=True, fallen={"v.unnormed": "quiet rows"})),
        (LAYER.replace("%n", "_"), BF16),
        (LAYER, FP8),
        (ADA, FP8),
        (RMS.replace("y=%3", "y=%3, z=%1"), FP8),
        (RMS.replace("linear(%1, @v)", "linear(%1, @v, %c)").replace("n: bf16[64]", "n: bf16[64], c: f32[48]"), FP8),
        (RMS.replace("eps=1e-06", "eps=1e-06, inner=bf16"), FP8),
        (RMS.replace("y=%3", "y=%2"), FP8),
    ],
    ids=[
        "w8a16", "scales per row", "quiet rows would lose", "a layer_norm in 16 bits", "weights that are computed",
        "a shift that is computed", "the norm is a result", "a bias that is computed", "a norm that rounds twice",
        "the product is a result",
    ],
)  # fmt: skip
def test_norms_that_stay(text: str, precision: Precision) -> None:
    expect_unchanged(defer_norms(everything, precision), text)


CHAIN = """
    graph g(x: bf16[5,8]) {
      @b : f32[48]
      @n : bf16[64]
      @n2 : bf16[48]
      @u : bf16[40,48]
      @v : bf16[48,64]
      @w : bf16[64,8]
      %0 = linear(%x, @w) : bf16[5,64]
      %1 = layer_norm(%0, @n, eps=1e-06) : bf16[5,64]
      %2 = linear(%1, @v, @b) : bf16[5,48]
      %3 = layer_norm(%2, @n2, eps=1e-06) : bf16[5,48]
      %4 = linear(%3, @u) : bf16[5,40]
      %5 = neg(%4) : bf16[5,40]
      return y=%5
    }
    """


@pytest.mark.parametrize(("text", "precision"), [(CHAIN, FP8), (CHAIN.replace("layer_norm", "rms_norm"), BF16)])
def test_two_norms_in_a_row(text: str, precision: Precision) -> None:
    """A product makes up for a norm or stores moments for the next one, not both; nor does fuse_linear_norm take it."""
    module = as_module(text)
    once = defer_norms(everything, precision)(module)
    both = fuse_linear_norm(everything)(once)
    for result in (once, both):
        ops = [node.op for node in result.graphs[0].nodes]
        assert ops.count("linear_moments") == 1 and sum(op.endswith("_norm") for op in ops) == 1
        compare(module, result, "in a row")


@pytest.mark.parametrize("shape", ["1,64", "5,64"])
@pytest.mark.parametrize("norm", ["rms_norm(%0, @n", "layer_norm(%0, @n", "ada_rms_norm(%0, @n, @n"])
def test_vectors_that_differ_by_row(norm: str, shape: str) -> None:
    text = RMS.replace("rms_norm(%0, %n", norm).replace(", n: bf16[64]", "")
    expect_unchanged(defer_norms(everything, FP8), text.replace("@v :", f"@n : bf16[{shape}]\n      @v :"))


def test_what_a_program_returns_in_16_bits() -> None:
    """Its error is that of the operand behind a norm."""
    text = RMS.replace("y=%3", "y=%2")
    result = defer_norms(everything, BF16)(as_module(text))
    assert result.graphs[0].count("rms_norm") == 0 and result.graphs[0].count("linear_moments") == 1
    compare(as_module(text), result, "the last")


def test_both_ends_need_kernels() -> None:
    """In FP8 in the form that it will have there, too: one question in five that is refused is enough."""
    asked: list[Node] = []

    def refused(node: Node) -> bool:
        asked.append(node)
        return len(asked) < 5

    expect_unchanged(lambda module: defer_norms(refused, FP8)(module) if not asked else module, RMS)
    kinds = [(node.op, node.operands[0].dtype) for node in asked]
    emits = [node.type[-1].dtype for node in asked if isinstance(node.type, tuple)]
    plain = [("linear_moments", "bf16"), ("linear", "bf16"), ("linear_moments", "bf16")]
    assert kinds == [*plain, ("linear", "e4m3"), ("linear_moments", "e4m3")]
    assert emits == ["bf16", "e4m3", "e4m3"]


def test_a_second_reader_in_another_precision() -> None:
    text = RMS.replace("@v : bf16[48,64]", "@u : bf16[48,64]\n      @v : bf16[48,64]").replace(
        "return y=%3",
        "%4 = linear(%1, @u) : bf16[5,48]\n      %5 = neg(%4) : bf16[5,48]\n      return y=%3, z=%5",
    )
    expect_unchanged(defer_norms(everything, Precision("fp8", keep=("u",), static=True)), text)
