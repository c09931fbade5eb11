"""Modules in torch against the interpreter: every op, and every program of the policies before and after all passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from threading import Barrier, Event
from time import sleep
from typing import Any

import numpy as np
import pytest
import torch

from frtc import observation
from frtc.codegen.fusible import implements
from frtc.compiler import CompileOptions, import_module, open_model, sizes_of
from frtc.errors import FrtcError
from frtc.kernels.dtypes import DTYPES, round_to
from frtc.kernels.targets import load_targets
from frtc.lowering import ops
from frtc.lowering.interpret import evaluate_weights, run, run_module
from frtc.lowering.ir import Graph, Module, Node, Repeat, Run, Type, input_, item, make, tensor, weight
from frtc.lowering.text import show_module
from frtc.models.synthetic import write_checkpoint
from frtc.passes.check import relative_error
from frtc.passes.limit_rows import limit_rows
from frtc.passes.name_weights import name_weights
from frtc.passes.pipeline import Options, run_passes
from frtc.passes.standard import FRONT, pipeline
from frtc.runtime.policy_steps import PolicySteps
from frtc.torch_products import fp8_product, times_transposed
from frtc.torch_run import TorchRun, device_named
from frtc.torch_tensors import NUMPY as NAMES
from frtc.torch_tensors import from_array, to_array
from frtc.torch_upload import Uploads
from tests.lowering.every_op import EXAMPLES, graph_of, leaf

Array = np.ndarray[Any, Any]
KINDS = {"pi05": "openpi", "pi0": "jax", "smolvla": "lerobot"}
IN_TIER = ["pi05", pytest.param("pi0", marks=pytest.mark.full), pytest.param("smolvla", marks=pytest.mark.full)]
# Relative. Sums in another order flip roundings to bf16 (4e-3 of a number): few in one node, what follows in a stage.
ONE_OP, ONE_NODE, STAGE = 1e-6, 1e-3, 8e-3


def filled(type: Type, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    if type.is_float:
        return round_to(rng.uniform(0.5, 1.5, type.shape), type.dtype)
    return rng.integers(0, 2, type.shape).astype(DTYPES[type.dtype].numpy)


def nothing(key: str) -> Array:
    raise AssertionError(f"{key} is read")


def both(graph: Graph, inputs: dict[str, Array], weights: Callable[[str], Array]) -> list[tuple[Array, Array]]:
    """Results of a graph: (torch, interpreter)."""
    found = TorchRun(Module("m", (graph,)), weights).program(graph, inputs)
    expected = run(graph, inputs, weights)
    assert found.keys() == expected.keys()
    return [(to_array(found[name]), expected[name]) for name in expected]


def error_of(found: Array, expected: Array) -> float:
    """Relative; NaN must stand in the same places."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    a, b = found.astype(np.float64), expected.astype(np.float64)
    assert np.array_equal(np.isnan(a), np.isnan(b))
    return relative_error(np.nan_to_num(a), np.nan_to_num(b))


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_op(name: str) -> None:
    graph = graph_of(EXAMPLES[name]())
    inputs = {n["name"]: filled(n.t, i) for i, n in enumerate(graph.inputs + graph.states)}
    types = {n["name"]: n.t for n in graph.nodes if n.op == "weight"}
    for found, expected in both(graph, inputs, lambda key: filled(types[key], len(key))):
        assert error_of(found, expected) <= ONE_OP


def x8(*shape: int) -> Node:
    return leaf("x8", "e4m3", *shape)


INV, X_SCALE = leaf("inv", "f32"), leaf("x_scale", "f32", 5, 1)
SIX = leaf("x_scale", "f32", 5, 6)
X = leaf("x", "bf16", 5, 24)
FP8 = {
    "static x static": lambda: ops.linear(
        x8(5, 24), weight("w8", Type("e4m3", (40, 24))), None, leaf("r", "bf16", 5, 40), None, None,
        weight("a", Type("f32", (40,))), act="gelu_tanh", dtype="bf16",
    ),
    "dynamic rows": lambda: ops.linear(
        x8(5, 24), weight("w8", Type("e4m3", (40, 24))), weight("b", Type("f32", (40,))), None, None, leaf("n", "i32"),
        weight("a", Type("f32", (40,))), X_SCALE, per_row=True, dtype="e4m3",
    ),
    "w8a16": lambda: ops.linear(
        X, weight("w8", Type("e4m3", (40, 24))), None, None, None, None, weight("a", Type("f32", ())), dtype="bf16"
    ),
    "gated to static": lambda: ops.gated_linear(
        x8(5, 24), weight("g8", Type("e4m3", (64, 24))), None, None, weight("a2", Type("f32", (64,))), None, INV,
        act="silu", dtype="e4m3",
    ),
    "gated to rows": lambda: ops.gated_linear(
        x8(5, 24), weight("g8", Type("e4m3", (64, 24))), None, None, weight("a2", Type("f32", (64,))), X_SCALE,
        act="gelu_tanh", per_row=True, dtype="e4m3",
    ),
    "rms": lambda: ops.rms_norm(X, None, INV, eps=1e-6, dtype="e4m3"),
    "rms rows": lambda: ops.rms_norm(X, eps=1e-6, per_row=True, dtype="e4m3"),
    "layer rows": lambda: ops.layer_norm(X, eps=1e-6, per_row=True, dtype="e4m3"),
    "ada": lambda: ops.ada_rms_norm(
        X, leaf("s", "f32", 24), leaf("t", "f32", 24), INV, eps=1e-6, dtype="e4m3"
    ),
    "residual rows": lambda: ops.residual_norm(
        X, leaf("y", "bf16", 5, 24), leaf("g", "bf16", 24), kind="layer", eps=1e-6, per_row=True, dtype="e4m3"
    ),
    "attention": lambda: ops.attention(
        leaf("q", "bf16", 4, 5, 8), leaf("k", "bf16", 2, 7, 8), leaf("k", "bf16", 2, 7, 8), None, leaf("n", "i32"), INV,
        scale=0.3, dtype="e4m3",
    ),
    "attention rows": lambda: ops.attention(
        leaf("q", "bf16", 4, 5, 8), leaf("k", "bf16", 2, 7, 8), leaf("k", "bf16", 2, 7, 8), scale=0.3, causal=True,
        per_row=True, dtype="e4m3",
    ),
    "linear_norm": lambda: ops.linear_norm(
        x8(5, 24), weight("w8", Type("e4m3", (24, 24))), None, X, None, None, weight("a1", Type("f32", (24,))), None,
        None, None, INV, kind="rms", eps=1e-6, offset=1.0, dtype="e4m3",
    ),
    "moments of rms": lambda: ops.linear_moments(
        x8(5, 24), weight("w8", Type("e4m3", (24, 24))), None, X, None, None, weight("a1", Type("f32", (24,))), None,
        leaf("s", "f32", 24), INV, norm="rms", offset=1.0, dtype="e4m3",
    ),
    "moments of layer": lambda: ops.linear_moments(
        leaf("y", "bf16", 5, 24), weight("wide", Type("bf16", (72, 24))), None, norm="layer", stored="f16", dtype="f32",
    ),
    "linear behind rms": lambda: ops.linear(
        x8(5, 24), weight("w8", Type("e4m3", (24, 24))), leaf("t", "f32", 24), None, None, None,
        weight("a1", Type("f32", (24,))), X_SCALE, norm="rms", eps=0.5, dtype="bf16",
    ),
    "gated behind layer": lambda: ops.gated_linear(
        x8(5, 72), weight("g72", Type("e4m3", (64, 72))), None, None, weight("a2", Type("f32", (64,))), SIX,
        None, leaf("shift", "f32", 64), act="silu", norm="layer", eps=0.5, dtype="bf16",
    ),
    "rope behind rms": lambda: ops.linear_rope_qkv(
        x8(5, 24), weight("w8r", Type("e4m3", (16, 24))), None, leaf("c", "f32", 5, 4), leaf("d", "f32", 5, 4), None,
        weight("a3", Type("f32", (16,))), X_SCALE, heads=0, kv_heads=1, norm="rms", eps=0.5, dtype="bf16",
    ),
    "rope": lambda: ops.linear_rope_qkv(
        x8(5, 24), weight("w8", Type("e4m3", (16, 24))), None, leaf("c", "f32", 5, 4), leaf("d", "f32", 5, 4), None,
        weight("a3", Type("f32", (16,))), heads=0, kv_heads=1, dtype="bf16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FP8)
def test_fp8_operands_and_results(name: str) -> None:
    """All results of an op; sizes that are no multiples of 16, rows that are not specified, values that saturate."""
    node = FP8[name]()
    results = [item(node, i) for i in range(len(node.type))] if isinstance(node.type, tuple) else [node]
    leaves = tuple(n for n in graph_of(results[0]).inputs)
    graph = Graph("g", leaves, tuple((str(i), n) for i, n in enumerate(results)))
    types = {n["name"]: n.t for n in graph.nodes if n.op == "weight"}
    rng = np.random.default_rng(1)

    def spread(type: Type) -> Array:
        return round_to(rng.standard_normal(type.shape) * 3, type.dtype)

    weights = {key: spread(type) for key, type in types.items()}
    inputs: dict[str, Array] = {n["name"]: np.array(3, np.int32) if n.dtype == "i32" else spread(n.t) for n in leaves}
    inputs |= {"x_scale": np.abs(inputs["x_scale"])} if "x_scale" in inputs else {}
    inputs |= {"inv": np.array(300, np.float32)} if "inv" in inputs else {}
    for found, expected in both(graph, inputs, weights.__getitem__):
        bar = 1e-2 if expected.dtype == DTYPES["e4m3"].numpy else ONE_NODE  # a flipped rounding of e4m3 is 6e-2 of it
        assert error_of(found, expected) <= bar


@pytest.mark.parametrize("sizes", [(5, 24, 40), (16, 32, 48), (1, 16, 16), (3, 7, 1)])
def test_torchs_own_product_of_fp8_is_the_one_in_fp32(sizes: tuple[int, int, int]) -> None:
    """What a GPU uses, here on the CPU; sizes that it takes and others."""
    m, k, n = sizes
    x, w = (torch.randn(*shape, generator=torch.Generator().manual_seed(k)) for shape in ((m, k), (n, k)))
    x, w = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
    found, expected = fp8_product(x, w), times_transposed(x, w)
    assert found.shape == (m, n) and found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)


def test_e4m3_saturates_and_keeps_nan() -> None:
    graph = graph_of(ops.cast(leaf("x", "f32", 6), dtype="e4m3"))
    values = np.array([500, -1e9, np.inf, np.nan, 0.3, -0.0], np.float32)
    ((found, expected),) = both(graph, {"x": values}, nothing)
    assert found.tobytes() == expected.tobytes()
    assert found.astype(np.float32).tolist()[:3] == [448, -448, 448]


def test_bits_survive_the_way_there_and_back() -> None:
    for name, dtype in DTYPES.items():
        raw = np.arange(96, dtype=np.uint8) % 2 if name == "bool" else np.arange(96, dtype=np.uint8)
        array = raw.view(dtype.numpy).reshape(2, -1)
        assert to_array(from_array(array)).tobytes() == array.tobytes()


@cache
def policy(kind: str, folder: Path) -> tuple[Module, Callable[[str], Array], dict[str, Array]]:
    """The traced module of a tiny checkpoint, its tensors, and the inputs of a seeded observation."""
    write_checkpoint(folder / kind, KINDS[kind], "tiny", seed=0, kind=kind)
    opened = open_model(folder / kind, CompileOptions())
    module = import_module(opened)
    steps = PolicySteps(opened.policy(sizes_of(module)), opened.files.tokenizer)
    prepared = steps.prepare(observation.seeded(steps), draw=0)
    return module, opened.read, {name: value.copy() for name, value in prepared.inputs.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("policies")


@cache
def optimised(kind: str, passes: str, folder: Path) -> tuple[Module, Callable[[str], Array], dict[str, Array]]:
    module, tensors, inputs = policy(kind, folder)
    accepts = implements(load_targets()["hopper"])
    chosen = (*FRONT, limit_rows, name_weights) if passes == "front" else pipeline(accepts)
    return run_passes(module, chosen, Options(check=0))[0], tensors, inputs


def programs(module: Module, env: dict[str, Array]) -> Iterator[tuple[Graph, int, dict[str, Array]]]:
    """Each program with what it starts from; one in a loop in the first and the last round."""
    loop = next(step for step in module.schedule if isinstance(step, Repeat))
    for graph in module.graphs:
        for round in (0, loop.count - 1) if Run(graph.name) in loop.body else (0,):
            yield graph, round, {**env, loop.index: np.array(round, np.int32)}


@pytest.mark.parametrize("passes", ["front", "all"])
@pytest.mark.parametrize("kind", IN_TIER)
def test_every_node(kind: str, passes: str, folder: Path) -> None:
    """Each node of each program, from the operands that the interpreter has: nothing adds up."""
    module, tensors, inputs = optimised(kind, passes, folder)
    weights = evaluate_weights(module, tensors)
    env = run_module(module, inputs, weights.__getitem__)
    for graph, round, before in programs(module, env):
        nodes = {str(i): n for i, n in enumerate(graph.nodes) if isinstance(n.type, Type)}
        whole = Graph(graph.name, graph.inputs, tuple(nodes.items()), graph.states)
        found = run(whole, before, weights.__getitem__)
        values = {node: found[name] for name, node in nodes.items()}
        for node in (n for n in graph.nodes if n.operands and n.op != "item" and not n.is_const):
            for got, expected in alone(node, values, graph):
                assert error_of(got, expected) <= ONE_NODE, (graph.name, round, node)


def alone(node: Node, values: dict[Node, Array], graph: Graph) -> Iterator[tuple[Array, Array]]:
    """Results of one node in torch and in the interpreter."""
    leaves = {a: input_(f"a{i}", a.t) for i, a in enumerate(node.operands)}
    again = make(node.op, [None if a is None else leaves[a] for a in node.args], dict(node.attrs), node.type)
    if isinstance(node.type, tuple):
        pairs = [(item(again, n["index"]), values[n]) for n in graph.nodes if n.op == "item" and n.args[0] is node]
    else:
        pairs = [(again, values[node])]
    small = Graph("one", tuple(leaves.values()), tuple((str(i), n) for i, (n, _) in enumerate(pairs)))
    found = TorchRun(Module("m", (small,)), nothing).program(
        small, {leaf["name"]: values[a] for a, leaf in leaves.items()}
    )
    yield from ((to_array(found[str(i)]), value) for i, (_, value) in enumerate(pairs))


@pytest.mark.parametrize("passes", ["front", "all"])
@pytest.mark.parametrize("kind", IN_TIER)
def test_every_stage(kind: str, passes: str, folder: Path) -> None:
    """Each program from the interpreter's own inputs; then the whole schedule."""
    module, tensors, inputs = optimised(kind, passes, folder)
    weights = evaluate_weights(module, tensors)
    running = TorchRun(module, tensors)
    env = run_module(module, inputs, weights.__getitem__)
    for graph, round, before in programs(module, env):
        expected = run(graph, before, weights.__getitem__)
        found = running.program(graph, before, round)
        for name, value in expected.items():
            assert error_of(to_array(found[name]), value) <= STAGE, (graph.name, round, name)
    found = running(inputs)
    assert all(error_of(to_array(found[name]), env[name]) <= STAGE for name in ("actions", "x_t"))


def test_the_tap_sees_chosen_nodes_with_program_and_round() -> None:
    x, step = input_("x", Type("f32", (2,))), input_("step", Type("i32", ()))
    sum = ops.add(x, step)
    double = ops.mul(sum, 2.0)
    module = Module("m", (Graph("g", (x, step), (("x", double),)),), schedule=(Repeat(3, "step", (Run("g"),)),))
    seen: list[tuple[str, int, Node, list[float]]] = []
    out = TorchRun(module, nothing)(
        {"x": np.ones(2, np.float32)}, [sum], lambda *args: seen.append((*args[:3], args[3].tolist()))
    )
    assert seen == [("g", 0, sum, [1, 1]), ("g", 1, sum, [3, 3]), ("g", 2, sum, [8, 8])]
    assert out["x"].tolist() == [16, 16]


def test_constants_are_evaluated_once_and_only_where_they_are_read() -> None:
    read: list[str] = []

    def tensors(key: str) -> Array:
        read.append(key)
        return np.full(4, 2.0)

    x, w, v = input_("x", Type("f32", (4,))), weight("w", Type("f32", (4,))), weight("v", Type("bf16", (4,)))
    graphs = tuple(Graph(n, (x,), ((n, ops.mul(x, ops.add(c, 1.0))),)) for n, c in (("a", w), ("b", w), ("c", v)))
    running = TorchRun(Module("m", graphs, schedule=(Repeat(2, "k", (Run("a"), Run("b"))),)), tensors)
    assert running({"x": np.ones(4, np.float32)})["b"].tolist() == [3] * 4
    assert read == ["w"]


@pytest.mark.parametrize("stored_in", ["bf16", "f32", "f64"])
@pytest.mark.parametrize("kind", IN_TIER)
def test_weights_of_uploaded_tensors_are_those_of_read_ones(kind: str, stored_in: str, folder: Path) -> None:
    """To the bit, whatever the file holds; and most of them are made on the device."""
    module, tensors, _ = optimised(kind, "front", folder)
    keys = {n["key"]: n["key"] for n in module.weights.nodes if n.op == "tensor"}

    def wide(key: str) -> Array:
        return (
            tensors(key) if stored_in == "bf16" else tensors(key).astype({"f32": "f4", "f64": "f8"}[stored_in]) * 1.01
        )

    uploads = Uploads(wide, keys, torch.device("cpu"))
    there, read = TorchRun(module, wide, uploads=uploads).constants, TorchRun(module, wide).constants
    made = 0
    for node in there.names:
        assert to_array(there[node]).tobytes() == to_array(read[node]).tobytes(), node
        expression = there.expressions[there.names[node]]
        made += 0 if uploads.made(expression) is None else expression.t.nbytes
    whole = sum(node.t.nbytes for node in there.names)
    uploads.close()
    assert made >= 0.5 * whole or stored_in == "f64"
    assert uploads.made(next(e for e in there.expressions.values() if e.op == "tensor")) is None


def test_tensors_are_sent_while_a_model_is_traced(folder: Path) -> None:
    """Neither sees what the other does: a trace holds no real tensor, and no tensor becomes fake."""
    module, tensors, _ = policy("pi05", folder)
    opened = open_model(folder / "pi05", CompileOptions())
    begun, traced = Barrier(2), Event()

    def slow(key: str) -> Array:
        if key == first:
            begun.wait(60)
        elif not traced.is_set():
            sleep(0.01)
        return tensors(key)

    first = next(iter(opened.keys))
    uploads = Uploads(slow, {name: name for name in opened.keys}, torch.device("cpu"))
    begun.wait(60)
    again = import_module(opened)
    traced.set()
    assert show_module(again) == show_module(module)
    for name in opened.keys:
        expected = tensors(name)
        made = uploads.made(tensor(name, Type(NAMES[expected.dtype], expected.shape)))
        assert made is not None and type(made) is torch.Tensor and to_array(made).tobytes() == expected.tobytes()
    uploads.close()


def test_a_tensor_is_sent_once_and_its_fault_is_raised_where_it_is_read() -> None:
    read: list[str] = []

    def tensors(key: str) -> Array:
        read.append(key)
        if key == "bad":
            raise FrtcError("checkpoint.nonfinite", "bad holds NaN")
        return np.arange(6, dtype=np.float32).reshape(2, 3)

    uploads = Uploads(tensors, {"a": "one", "b": "one", "bad": "two"}, torch.device("cpu"))
    a, b, bad = (tensor(name, Type("f32", (2, 3))) for name in ("a", "b", "bad"))
    made = uploads.made(ops.concat(a, b, axis=-2))
    assert made is not None and made.tolist() == [[0, 1, 2], [3, 4, 5]] * 2
    with pytest.raises(FrtcError):
        uploads.made(bad)
    uploads.close()
    assert sorted(read) == ["b", "bad"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU here")
def test_without_a_gpu() -> None:
    assert device_named("auto").type == "cpu"
    for name, code in (("cuda", "env.torch_gpu"), ("tpu", "option.device")):
        with pytest.raises(FrtcError) as refused:
            device_named(name)
        assert refused.value.code == code
