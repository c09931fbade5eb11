"""The rewriter: what a rule may do, and what it may not."""

from __future__ import annotations

from collections import Counter

import pytest

from frtc.lowering.ir import Graph, Type, input_
from frtc.lowering.ops import add, cast, exp, mul, neg, sub
from frtc.lowering.pattern import Var, once
from frtc.lowering.text import parse, show
from frtc.lowering.verify import Invalid
from frtc.passes.rewrite import FIRED, Rules, rewrite

x, y = Var("x"), Var("y")
TWICE = Rules("twice", [(add(x, x), lambda x: mul(x, 2.0))])


def rewritten(text: str, *rules: Rules) -> str:
    return show(rewrite(parse(text), *rules))


def counted(text: str, *rules: Rules) -> dict[str, int]:
    fired = Counter[str]()
    token = FIRED.set(fired)
    rewrite(parse(text), *rules)
    FIRED.reset(token)
    return dict(fired)


CHAIN = """graph g(a: f32[4], b: f32[4]) {
  %0 = add(%a, %a) : f32[4]  # layer 0
  %1 = add(%0, %0) : f32[4]  # layer 1
  %2 = add(%1, %b) : f32[4]
  return %2
}
"""


def test_one_variable_is_one_node() -> None:
    """a + a and (a + a) + (a + a) match, a + b does not; new nodes stand where the old ones stood."""
    expected = """graph g(a: f32[4], b: f32[4]) {
  %0 = const(value=2.0) : f32[]
  %1 = mul(%a, %0) : f32[4]  # layer 0
  %2 = mul(%1, %0) : f32[4]  # layer 1
  %3 = add(%2, %b) : f32[4]
  return %3
}
"""
    assert rewritten(CHAIN, TWICE) == expected
    assert counted(CHAIN, TWICE) == {"twice": 2}


def test_shared_nodes_are_rewritten_once() -> None:
    text = """graph g(a: f32[4]) {
      %0 = add(%a, %a) : f32[4]
      %1 = exp(%0) : f32[4]
      %2 = neg(%0) : f32[4]
      return p=%1, q=%2
    }"""
    assert counted(text, TWICE) == {"twice": 1}


def test_what_nobody_reads_vanishes() -> None:
    drop = Rules("drop", [(sub(x, y), lambda x, y: x)])
    text = """graph g(a: f32[4], b: f32[4]) {
      %0 = exp(%b) : f32[4]
      %1 = sub(%a, %0) : f32[4]
      return %1
    }"""
    assert rewritten(text, drop) == "graph g(a: f32[4], b: f32[4]) {\n  return %a\n}\n"


def test_commutative_operands_match_in_either_order() -> None:
    rule = Rules("negated", [(add(neg(x), y), lambda x, y: sub(y, x))])
    for operands in ("%0, %b", "%b, %0"):
        text = f"""graph g(a: f32[4], b: f32[4]) {{
          %0 = neg(%a) : f32[4]
          %1 = add({operands}) : f32[4]
          return %1
        }}"""
        assert "sub(%b, %a)" in rewritten(text, rule)


def test_once_spares_what_others_read() -> None:
    rule = Rules("undone", [(neg(once(neg(x))), lambda x: x)])
    text = """graph g(a: f32[4]) {
  %0 = neg(%a) : f32[4]
  %1 = neg(%0) : f32[4]
  return p=%0, q=%1
}
"""
    assert rewritten(text, rule) == text
    assert rewritten(text.replace("p=%0, ", ""), rule).endswith("return q=%a\n}\n")


def test_a_set_of_ops_matches_each_of_them() -> None:
    """The function gets the node, and how many read it."""
    rule = Rules(
        "exp", [(frozenset({"neg", "abs"}), lambda node, uses: exp(*node.operands) if uses[node] == 1 else None)]
    )
    text = """graph g(a: f32[4], b: f32[4]) {
      %0 = neg(%a) : f32[4]
      %1 = abs(%b) : f32[4]
      %2 = add(%0, %1) : f32[4]
      %3 = add(%2, %1) : f32[4]
      return %3
    }"""
    assert counted(text, rule) == {"exp": 1}


def test_declining_tries_the_next_rule() -> None:
    rules = Rules("both", [(neg(x), lambda x: None), (neg(x), lambda x: exp(x))])
    a = input_("a", Type("f32", (4,)))
    graph = rewrite(Graph("g", (a,), (("out", neg(a)),)), rules)
    assert graph.outputs[0][1] is exp(a)


def test_allow_may_veto() -> None:
    graph = parse(CHAIN)
    assert rewrite(graph, TWICE, allow=lambda node: node.op != "mul") == graph


def test_a_rule_never_changes_a_type() -> None:
    wrong = Rules("wrong", [(neg(x), lambda x: cast(x, dtype="bf16"))])
    a = input_("a", Type("f32", (4,)))
    with pytest.raises(Invalid, match=r"rule wrong changes neg : f32\[4\] into cast : bf16\[4\]"):
        rewrite(Graph("g", (a,), (("out", neg(a)),)), wrong)


def test_rules_that_chase_each_other_are_caught() -> None:
    swap = Rules("swap", [(sub(x, y), lambda x, y: sub(y, x))])
    a, b = input_("a", Type("f32", (4,))), input_("b", Type("f32", (4,)))
    with pytest.raises(Invalid, match="do not come to an end"):
        rewrite(Graph("g", (a, b), (("out", sub(a, b)),)), swap)
