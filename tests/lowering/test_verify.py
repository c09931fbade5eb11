"""The verifier accepts what the ops build, and finds each planted fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from frtc.lowering import ir, ops
from frtc.lowering.ir import Graph, Let, Module, Node, Repeat, Run, Type, While
from frtc.lowering.verify import Invalid, verify, verify_module
from tests.lowering.every_op import EXAMPLES, graph_of

F4 = Type("f32", (4,))
X, Y, N = ir.input_("x", F4), ir.input_("y", F4), ir.input_("n", Type("i32", ()))
S = ir.state("s", Type("f32", (8,)))
T = ir.state("t", F4)


def _write(s: Node, value: Node, at: int = 0) -> Node:
    node: Node = ops.write(s, value, ops.const(at, "i32"), axis=-1)
    return node


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_the_ops_build_is_legal(name: str) -> None:
    verify(graph_of(EXAMPLES[name]()))


@pytest.mark.parametrize("name", [n for n, build in EXAMPLES.items() if isinstance(build().type, Type)])
def test_a_wrong_type_is_found_in_every_op(name: str) -> None:
    node = EXAMPLES[name]()
    node = node.args[0] if node.op == "item" and node.args[0] is not None else node
    good = node.type if isinstance(node.type, Type) else node.type[0]
    bad = Type(good.dtype, (*good.shape, 2))
    wrong = ir.make(node.op, node.args, dict(node.attrs), bad if isinstance(node.type, Type) else (bad, *node.type[1:]))
    with pytest.raises(Invalid, match=r"its rule gives|does not"):
        verify(graph_of(wrong if isinstance(wrong.type, Type) else ir.item(wrong, 0)))


def _graphs() -> dict[str, tuple[Graph, str]]:
    first = _write(S, X)
    plain: Node = ops.exp(X)
    return {
        "undeclared input": (Graph("g", (X,), (("out", ops.add(X, Y)),)), "y is used but not declared"),
        "undeclared state": (Graph("g", (), (("out", ops.read(S)),)), "s is used but not declared"),
        "input twice": (Graph("g", (X, X), (("out", X),)), "x is declared twice"),
        "input and state of one name": (
            Graph("g", (X,), (("out", X),), (ir.state("x", F4),)), "x is declared twice"),
        "result twice": (Graph("g", (X,), (("out", X), ("out", plain))), "result out is returned twice"),
        "no such op": (graph_of(ir.make("exq", (X,), {}, F4)), "no such op"),
        "missing operand": (graph_of(ir.make("add", (X, None), {}, F4)), "operand b is missing"),
        "missing attribute": (graph_of(ir.make("reduce_sum", (X,), {}, F4)), "axes"),
        "unknown attribute": (graph_of(ir.make("exp", (X,), {"shape": (4,)}, F4)), "shape"),
        "too many operands": (graph_of(ir.make("exp", (X, X), {}, F4)), "argument"),
        "bad attribute": (graph_of(ir.make("slice", (X,), {"axis": -1, "start": 3, "stop": 9, "step": 1}, F4)), "9"),
        "read of a value": (graph_of(ir.make("read", (X,), {}, F4)), "not a state"),
        "write into a value": (graph_of(ops.read(_write(plain, X))), "not a state"),
        "a version written twice": (
            Graph("g", (X, Y), (), (S,), (("s", _write(first, X, 1)), ("u", _write(first, Y, 2)))), "written twice"),
        "a write that nothing declares": (
            Graph("g", (X,), (("out", ops.read(first)),), (S,)), "not declared as written"),
        "an old version as the last": (
            Graph("g", (X,), (("out", ops.read(_write(first, X, 4))),), (S,), (("s", first),)), "last version"),
        "writes of no state": (
            Graph("g", (X,), (), (S,), (("s", first), ("v", first))), "v is written but not declared"),
    }  # fmt: skip


@pytest.mark.parametrize("fault", _graphs())
def test_planted_fault(fault: str) -> None:
    graph, words = _graphs()[fault]
    with pytest.raises(Invalid) as caught:
        verify(graph)
    assert "graph g: " in str(caught.value) and words in str(caught.value)


def test_a_fault_is_located() -> None:
    wrong = ir.make("exp", (X,), {}, Type("f32", (5,)), "layers.3.mlp models/gemma.py:112")
    with pytest.raises(Invalid, match=r"exp at layers\.3\.mlp models/gemma\.py:112: has type f32\[5\]"):
        verify(graph_of(wrong))


W = ir.weight("w", Type("f32", (4, 4)))
MAKE = Graph("make", (), (("x", ops.const(1.0, "f32", (4,))), ("n", ops.const(1, "i32"))))
STEP = Graph("step", (X,), (("x", ops.linear(X, W)),))
LATER = Graph(
    "later",
    (ir.input_("k", Type("i32", ())), ir.input_("x", F4)),
    (("out", ops.mul(X, ir.input_("k", Type("i32", ())))),),
)
WEIGHTS = Graph("weights", (), (("w", ops.cast(ir.tensor("a", Type("bf16", (4, 4))), dtype="f32")),))


def test_a_good_module() -> None:
    schedule = (Run("make"), Let("y", "x"), Repeat(3, "k", (Run("step"), Run("later"))), While("n", (Run("step"),)))
    verify_module(Module("m", (MAKE, STEP, LATER), WEIGHTS, schedule))


def _modules() -> dict[str, tuple[Callable[[], Module], str]]:
    other = Graph("step", (X,), (("x", ops.exp(X)),))
    wide = ir.input_("x", Type("f32", (5,)))
    states = [Graph(name, (), (("out", ops.read(s)),), (s,)) for name, s in (("p", S), ("q", ir.state("s", F4)))]
    return {
        "weight without a definition": (lambda: Module("m", (STEP,)), "weight w is f32"),
        "weight of another type": (
            lambda: Module("m", (STEP,), Graph("weights", (), (("w", ir.tensor("a", Type("bf16", (4, 4)))),))), "bf16"),
        "parameter in a program": (
            lambda: Module("m", (graph_of(ir.tensor("a", F4), "p"),)), "parameter a outside the weights"),
        "weights with an input": (
            lambda: Module("m", (), Graph("weights", (X,), (("w", X),))), "depend on more than parameters"),
        "weights out of weights": (
            lambda: Module("m", (), Graph("weights", (), (("v", W),))), "depend on more than parameters"),
        "an unknown program": (lambda: Module("m", (other,), schedule=(Run("stop"),)), "runs stop"),
        "an unknown program inside": (
            lambda: Module("m", (other,), schedule=(Repeat(2, "k", (While("go", (Run("stop"),)),)),)), "runs stop"),
        "a producer of another type": (
            lambda: Module("m", (MAKE, Graph("p", (wide,), (("x", wide),))), schedule=(Run("make"), Run("p"))),
            "input x is f32[5], its producer gives f32[4]"),
        "a bad program": (
            lambda: Module("m", (graph_of(ir.make("exp", (X,), {}, Type("f32", (5,))), "p"),)), "graph p: exp"),
        "a state of two types": (lambda: Module("m", tuple(states)), "state s is f32[4] in program q, f32[8] in p"),
    }  # fmt: skip


@pytest.mark.parametrize("fault", _modules())
def test_planted_fault_of_a_module(fault: str) -> None:
    make, words = _modules()[fault]
    with pytest.raises(Invalid) as caught:
        verify_module(make())
    assert words in str(caught.value)
