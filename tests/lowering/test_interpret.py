"""The interpreter's three modes, states, schedules and weight expressions, on numbers that can be checked by hand."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from frtc.kernels.reference import REFERENCES
from frtc.lowering import ir, ops
from frtc.lowering.interpret import evaluate_weights, run, run_module
from frtc.lowering.ir import Graph, Let, Module, Repeat, Run, Type, While
from frtc.lowering.text import parse, parse_module
from tests.lowering.every_op import EXAMPLES, graph_of

BF16 = np.dtype(ml_dtypes.bfloat16)


def test_every_op_has_a_reference_of_its_name() -> None:
    assert set(ops.OPS) <= set(REFERENCES)


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("mode", ["typed", "wide", "exact"])
def test_every_op_runs_in_every_mode(name: str, mode: str) -> None:
    """Shapes are the type rule's, element types the mode's."""
    graph = graph_of(EXAMPLES[name]())
    rng = np.random.default_rng(0)

    def filled(type: Type) -> np.ndarray:
        if type.is_float:
            return rng.uniform(0.5, 1.5, type.shape)
        return rng.integers(0, 2, type.shape).astype(bool if type.dtype == "bool" else np.int64)

    inputs = {n["name"]: filled(n.t) for n in graph.inputs + graph.states}
    types = {n["name"]: n.t for n in graph.nodes if n.op == "weight"}
    out = run(graph, inputs, lambda key: filled(types[key]), mode)
    for key, node in graph.outputs + graph.writes:
        wanted = {"typed": node.dtype, "wide": "f64" if node.dtype == "f64" else "f32", "exact": "f64"}[mode]
        assert out[key].shape == node.shape
        assert out[key].dtype == ir.DTYPES[wanted if node.t.is_float else node.dtype].numpy
        assert np.isfinite(out[key].astype(np.float64)).all()


def test_typed_rounds_each_result_once_and_wide_never() -> None:
    graph = parse("""graph g(x: bf16[1]) {
      %0 = const(value=0.00390625) : f32[]
      %1 = add(%x, %0) : bf16[1]
      %2 = add(%1, %0) : bf16[1]
      return %2
    }""")
    one = {"x": np.ones(1)}
    assert run(graph, one)["out"] == 1, "1 + 2^-8 is half way and goes to even, twice"
    assert run(graph, one, mode="wide")["out"] == np.float32(1 + 2**-7)


def test_literals_are_not_rounded_to_the_operands_type() -> None:
    graph = parse("graph g(x: bf16[1]) {\n %0 = const(value=0.1) : f32[]\n %1 = mul(%x, %0) : f32[1]\n return %1\n}")
    assert run(graph, {"x": np.full(1, 3)})["out"] == np.float32(3) * np.float32(0.1)


def test_inputs_are_rounded_to_their_declared_type() -> None:
    graph = parse("graph g(x: bf16[1]) {\n %0 = cast(%x) : f32[1]\n return %0\n}")
    assert run(graph, {"x": np.full(1, 1 + 2**-10)})["out"] == 1
    assert run(graph, {"x": np.full(1, 1 + 2**-10)}, mode="wide")["out"] == np.float32(1 + 2**-10)


def test_float64_stays_float64_unless_all_is_exact() -> None:
    graph = parse("graph g(x: f64[1]) {\n %0 = sin(%x) : f64[1]\n %1 = cast(%0) : f32[1]\n return a=%0, b=%1\n}")
    out = run(graph, {"x": np.array([1e3 + 1e-7])}, mode="wide")
    assert out["a"].dtype == np.float64 and out["a"] == np.sin(1e3 + 1e-7) != np.sin(1e3)
    assert out["b"].dtype == np.float32


def test_a_rounding_inside_an_op_happens_only_as_typed() -> None:
    node = ops.rms_norm(
        ir.input_("x", Type("bf16", (1, 4))), ir.weight("w", Type("f32", (4,))), eps=0.0, inner="bf16", dtype="f32"
    )
    x, w = np.array([[1.0, 2.0, 3.0, 4.0]]), np.full(4, 1 + 2**-12)
    wide = run(graph_of(node), {"x": x}, lambda _: w, "wide")["out"]
    typed = run(graph_of(node), {"x": x}, lambda _: w)["out"]
    normalised = x / np.sqrt((x**2).mean())
    np.testing.assert_allclose(wide, normalised * w, rtol=1e-6)
    np.testing.assert_array_equal(
        typed, normalised.astype(np.float32).astype(BF16).astype(np.float32) * w.astype(np.float32)
    )


@pytest.mark.parametrize(
    ("source", "target", "values", "wanted"),
    [
        ("f32", "i32", [1.9, -1.9, 0.5], [1, -1, 0]),
        ("f32", "bool", [0.0, -0.1, 2.0], [False, True, True]),
        ("i64", "f32", [2**24 + 1, -3, 0], [2**24, -3, 0]),
        ("bool", "i32", [True, False, True], [1, 0, 1]),
        ("i32", "i64", [7, -7, 0], [7, -7, 0]),
        ("f32", "e4m3", [0.3, 17.0, -448.0], [0.3125, 16, -448]),
    ],
)
def test_casts(source: str, target: str, values: list[float], wanted: list[float]) -> None:
    node = ops.cast(ir.input_("x", Type(source, (3,))), dtype=target)
    out = run(graph_of(node), {"x": np.array(values, ir.DTYPES[source].numpy)})["out"]
    assert out.dtype == ir.DTYPES[target].numpy and out.astype(np.float64).tolist() == wanted


def test_wrong_shapes_are_named() -> None:
    graph = graph_of(ops.exp(ir.input_("x", Type("f32", (3,)))))
    with pytest.raises(AssertionError, match=r"x has shape \(4,\), the graph declares f32\[3\]"):
        run(graph, {"x": np.zeros(4)})


def test_writes_give_the_next_version_and_leave_the_old_one() -> None:
    graph = parse("""graph g(x: f32[2], n: i32[]; s: f32[4]) {
      %0 = read(%s) : f32[4]
      %1 = write(%s, %x, %n, axis=-1) : f32[4]
      %2 = read(%1) : f32[4]
      return before=%0, after=%2
      write s=%1
    }""")
    out = run(graph, {"x": np.array([5, 6]), "n": np.int32(1), "s": np.arange(4)})
    assert out["before"].tolist() == [0, 1, 2, 3] and out["after"].tolist() == out["s"].tolist() == [0, 5, 6, 3]
    with pytest.raises(AssertionError, match="leaves the state"):
        run(graph, {"x": np.array([5, 6]), "n": np.int32(3), "s": np.arange(4)})


MODULE = """module m

graph weights() {
  %0 = tensor(key="a/b") : bf16[2,2]
  %1 = const(value=0.1) : f32[]
  %2 = mul(%0, %1) : f32[2,2]
  %3 = mul(%2, %1) : f32[2,2]
  %4 = cast(%3) : bf16[2,2]
  return w=%4
}

graph step(x: f32[2], k: i32[]; sum: f32[]) {
  @w : bf16[2,2]
  %0 = linear(%x, @w) : f32[2]
  %1 = read(%sum) : f32[]
  %2 = add(%1, %k) : f32[]
  %3 = const(value=0) : i32[]
  %4 = write(%sum, %2, %3, axis=-1) : f32[]
  return x=%0
  write sum=%4
}

graph countdown(n: i32[]) {
  %0 = const(value=1) : i32[]
  %1 = sub(%n, %0) : i32[]
  return n=%1
}

schedule {
  let x = noise
  repeat 3 k {
    run step
  }
  while n {
    run countdown
  }
}
"""


def test_schedules_run_states_persist_and_weights_are_rounded_once() -> None:
    module = parse_module(MODULE)
    a = np.array([[10.0, 20.0], [30.0, -10.0]])
    weights = evaluate_weights(module, {"a/b": a}.__getitem__)
    assert weights["w"].dtype == BF16
    np.testing.assert_array_equal(weights["w"], (a * 0.1 * 0.1).astype(np.float32).astype(BF16))
    out = run_module(module, {"noise": np.array([1.0, 2.0]), "n": np.int32(4)}, weights.__getitem__)
    w = weights["w"].astype(np.float64)
    np.testing.assert_allclose(out["x"], w @ w @ w @ [1, 2], rtol=1e-6)
    assert out["sum"] == 0 + 1 + 2 and out["n"] == 0
    again = run_module(module, {**out, "n": np.int32(1)}, weights.__getitem__)
    assert again["sum"] == 6, "a state given is where the next inference starts"


def test_variants() -> None:
    x = ir.input_("x", Type("f32", (2,)))
    graphs = (Graph("p", (x,), (("y", ops.exp(x)),)), Graph("p", (x,), (("y", ops.neg(x)),), variant="v=1"))
    module = Module("m", graphs, schedule=(Run("p"),))
    assert run_module(module, {"x": np.ones(2)}, {}.__getitem__, variant="v=1")["y"].tolist() == [-1, -1]
    assert run_module(module, {"x": np.zeros(2)}, {}.__getitem__)["y"].tolist() == [1, 1]
    with pytest.raises(KeyError, match=r"no program q\[\]; it has p, p\[v=1\]"):
        module.graph("q")
    assert Module("m", graphs, schedule=(Let("x", "z"), Repeat(2, "k", (While("x", ()),)))).inputs.keys() == {"z"}
