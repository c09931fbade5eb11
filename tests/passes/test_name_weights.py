"""name_weights: constant expressions become the module's weights."""

from __future__ import annotations

import numpy as np

from frtc.lowering.interpret import evaluate_weights
from frtc.lowering.ir import Module, tensor
from frtc.lowering.text import show
from frtc.lowering.verify import verify_module
from frtc.passes.name_weights import name_weights
from tests.passes.expect import as_module, expect_pass, plain


def weights_of(text: str) -> str:
    """The weights graph after the pass, as text without locations."""
    module = name_weights(as_module(text))
    verify_module(module)
    return "\n".join(line.partition("  # ")[0] for line in show(module.weights).splitlines())


MERGED = """
graph g(x: f32[5,4]) {
  @l.0.k : f32[2,4]
  @l.0.q : f32[3,4]
  %0 = concat(@l.0.q, @l.0.k, axis=-2) : f32[5,4]
  %1 = linear(%x, %0) : f32[5,5]
  return %1
}
"""


def test_names_of_the_parts() -> None:
    """What the names share is written once."""
    expect_pass(
        name_weights,
        before=MERGED,
        after="""
        graph g(x: f32[5,4]) {
          @l.0.q|k : f32[5,4]
          %0 = linear(%x, @l.0.q|k) : f32[5,5]
          return %0
        }
        """,
    )


def test_expression_is_kept() -> None:
    assert weights_of(MERGED) == (
        "graph weights() {\n"
        "  %0 = tensor(key=l.0.q) : f32[3,4]\n"
        "  %1 = tensor(key=l.0.k) : f32[2,4]\n"
        "  %2 = concat(%0, %1, axis=-2) : f32[5,4]\n"
        '  return "l.0.q|k"=%2\n'
        "}"
    )


def test_expression_is_evaluated() -> None:
    """Exactly and rounded once: the sum of a bf16 weight and 2^-9 is no bf16 number, its product with 2 is rounded."""
    text = """
    graph g(x: bf16[5,1]) {
      @w : bf16[1,1]
      %0 = const(value=0.001953125) : f32[]
      %1 = add(@w, %0) : bf16[1,1]
      %2 = const(value=2.0) : f32[]
      %3 = mul(%1, %2) : f32[1,1]
      %4 = linear(%x, %3) : bf16[5,1]
      return %4
    }
    """
    module = name_weights(as_module(text))
    found = evaluate_weights(module, {"w": np.ones((1, 1))}.__getitem__)
    assert {k: float(v[0, 0]) for k, v in found.items()} == {"w": 2.00390625}


def test_equal_names_are_told_apart() -> None:
    """Two expressions over one tensor; a weight that is read as it is keeps its name."""
    expect_pass(
        name_weights,
        before="""
        graph g(x: f32[5,4]) {
          @w : f32[4,4]
          %0 = linear(%x, @w) : f32[5,4]
          %1 = neg(@w) : f32[4,4]
          %2 = linear(%0, %1) : f32[5,4]
          return %2
        }
        """,
        after="""
        graph g(x: f32[5,4]) {
          @w : f32[4,4]
          @w~2 : f32[4,4]
          %0 = linear(%x, @w) : f32[5,4]
          %1 = linear(%0, @w~2) : f32[5,4]
          return %1
        }
        """,
    )


def test_tables_are_named_by_their_op() -> None:
    expect_pass(
        name_weights,
        before="""
        graph g(x: f32[4]) {
          %0 = iota(size=4) : f32[4]
          %1 = cos(%0) : f32[4]
          %2 = mul(%x, %1) : f32[4]
          return %2
        }
        """,
        after="""
        graph g(x: f32[4]) {
          @table.cos : f32[4]
          %0 = mul(%x, @table.cos) : f32[4]
          return %0
        }
        """,
    )


def test_constant_result() -> None:
    """A result that depends on no input."""
    expect_pass(
        name_weights,
        before="""
        graph g(x: f32[4]) {
          @w : f32[4]
          %0 = exp(@w) : f32[4]
          %1 = exp(%x) : f32[4]
          return a=%0, b=%1
        }
        """,
        after="""
        graph g(x: f32[4]) {
          @w : f32[4]
          %0 = exp(%x) : f32[4]
          return a=@w, b=%0
        }
        """,
    )


def test_scalar_literals_stay() -> None:
    """Near miss: kernels take a number as it is."""
    text = """
    graph g(x: f32[4]) {
      %0 = const(value=2.0) : f32[]
      %1 = mul(%x, %0) : f32[4]
      return %1
    }
    """
    expect_pass(name_weights, before=text, after=text)


def test_unread_weights_disappear() -> None:
    module = as_module(MERGED)
    more = (*module.weights.outputs, ("unread", tensor("unread", module.weights.outputs[0][1].t)))
    read = Module(module.name, module.graphs, module.weights.__class__("weights", (), more), module.schedule)
    assert plain(name_weights(read)) == plain(name_weights(module))
    assert [n["key"] for n in name_weights(read).weights.nodes if n.op == "tensor"] == ["l.0.q", "l.0.k"]


def test_long_names_are_cut() -> None:
    """120 characters, still unique."""
    parts = [f"layer.{i:03d}" for i in range(40)]
    lines = "\n".join(f"  @{p} : f32[1,4]" for p in parts)
    both = "\n".join(
        f"  %{i} = concat({', '.join('@' + p for p in order)}, axis=-2) : f32[40,4]\n"
        for i, order in enumerate((parts, parts[:20] + parts[:19:-1]))
    )
    text = f"graph g(x: f32[4]) {{\n{lines}\n{both}"
    text += "  %2 = linear(%x, %0) : f32[40]\n  %3 = linear(%x, %1) : f32[40]\n  return a=%2, b=%3\n}\n"
    names = [name for name, _ in name_weights(as_module(text)).weights.outputs]
    assert len(set(names)) == 2 and all(len(n) <= 122 for n in names)
