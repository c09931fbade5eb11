"""The ONNX door: an encoder that torch exports lowers to the same canonical text as through torch.export."""

from __future__ import annotations

import logging
import warnings

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from frtc.errors import FrtcError
from frtc.lowering.from_onnx import lower_onnx
from frtc.lowering.from_torch import lower
from frtc.lowering.interpret import run
from frtc.lowering.ir import Graph, Module
from frtc.lowering.text import parse, show
from frtc.lowering.verify import verify
from frtc.passes.attention_sites import attention_sites
from frtc.passes.canonicalize import canonicalize
from frtc.passes.check import relative_error
from tests.lowering.encoder import LAYERS, Encoder, example
from tests.lowering.tiny import array


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    torch.manual_seed(0)
    module = Encoder().eval()
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return module


@pytest.fixture(scope="module")
def exported(encoder: Encoder) -> onnx.ModelProto:
    """As torch writes it, weights under their own names (its optimiser would transpose and rename them)."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = {"input_names": ["ids", "valid"], "output_names": ["pooled"]}
        program = torch.onnx.export(
            encoder, example(), dynamo=True, opset_version=23, optimize=False, verbose=False, **names
        )
    return program.model_proto


def _canonical(graph: Graph) -> Graph:
    return attention_sites(canonicalize(Module("m", (graph,)))).graphs[0]


def _without_locations(graph: Graph) -> str:
    return "\n".join(line.partition("  #")[0] for line in show(graph).splitlines())


def test_both_doors_lead_to_the_same_text(encoder: Encoder, exported: onnx.ModelProto) -> None:
    through_onnx = _canonical(lower_onnx(exported, "encoder"))
    through_torch = _canonical(lower(encoder, example(), ("ids", "valid"), ("pooled",), "encoder"))
    assert through_torch.count("attention") == LAYERS and through_torch.count("linear") == 6 * LAYERS
    assert _without_locations(through_onnx) == _without_locations(through_torch)


def test_raw_ir_equals_eager(encoder: Encoder, exported: onnx.ModelProto) -> None:
    graph = lower_onnx(exported, "encoder")
    verify(graph)
    assert parse(show(graph)) == graph
    ids, valid = (array(x) for x in example())
    found = run(graph, {"ids": ids, "valid": valid}, lambda name: array(encoder.get_parameter(name)), "wide")
    with torch.no_grad():
        assert relative_error(found["pooled"], array(encoder(*example()))) < 1e-6


def test_sources_come_from_the_exporters_notes(exported: onnx.ModelProto) -> None:
    matmul = next(n for n in lower_onnx(exported, "encoder").nodes if n.op == "matmul")
    assert matmul.loc.startswith("layers.0.q ") and "encoder.py:" in matmul.loc and "site-packages" not in matmul.loc


def _model(
    nodes: list[onnx.NodeProto], shape: tuple[int | str, ...], out: tuple[int, ...], **constants: np.ndarray
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, out)],
        [onnx.numpy_helper.from_array(v, k) for k, v in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])


X = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((5, 8)).astype(np.float32)
LISTS = {k: np.array(v, np.int64) for k, v in {"one": [1], "two": [2], "axes": [-1], "ids": [2, 0]}.items()}

# ONNX nodes of one small graph, the constants it needs, what NumPy says
CASES = {
    "gemm": ([("Flatten", ["x"], ["f"], {"axis": 2}), ("Gemm", ["f", "w", "b"], ["y"], {"transB": 1})],
             {"w": W, "b": W[:, 0].copy()}, X.reshape(6, 8) @ W.T + W[:, 0]),
    "gemm_scaled": ([("Flatten", ["x"], ["f"], {"axis": 2}),
                     ("Gemm", ["f", "w", "b"], ["y"], {"alpha": 0.5, "beta": 2.0, "transB": 1})],
                    {"w": W, "b": W[:, 0].copy()}, 0.5 * X.reshape(6, 8) @ W.T + 2 * W[:, 0]),
    "slice": ([("Slice", ["x", "one", "two", "axes"], ["y"], {})], LISTS, X[..., 1:2]),
    "gather": ([("Gather", ["x", "ids"], ["y"], {"axis": 1})], LISTS, X[:, [2, 0]]),
    "split": ([("Split", ["x"], ["a", "b"], {"axis": 2, "num_outputs": 2}), ("Mul", ["a", "b"], ["y"], {})],
              {}, X[..., :4] * X[..., 4:]),
    "reduce": ([("ReduceMax", ["x", "axes"], ["y"], {"keepdims": 0})], LISTS, X.max(-1)),
    "where": ([("Greater", ["x", "zero"], ["p"], {}), ("Where", ["p", "x", "zero"], ["y"], {})],
              {"zero": np.float32([0.0])}, np.maximum(X, 0)),
    "clip": ([("Clip", ["x", "low", "high"], ["y"], {})],
             {"low": np.float32(-0.5), "high": np.float32(0.25)}, X.clip(-0.5, 0.25)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_small_graphs(name: str) -> None:
    rows, constants, wanted = CASES[name]
    nodes = [helper.make_node(op, inputs, outputs, **attrs) for op, inputs, outputs, attrs in rows]
    used = {i for _, inputs, _, _ in rows for i in inputs}
    held = {k: np.asarray(v) for k, v in constants.items() if k in used}
    graph = lower_onnx(_model(nodes, X.shape, wanted.shape, **held), name)
    found = run(graph, {"x": X}, lambda key: held[key], "wide")["y"]
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("nodes", "shape", "words"),
    [
        ([helper.make_node("Softplus", ["x"], ["y"], name="n7")], (2, 3), "ONNX op Softplus cannot be lowered"),
        ([helper.make_node("Exp", ["x"], ["y"])], ("batch", 3), "input x of g: the shape of x is not fixed"),
    ],
)
def test_what_is_refused(nodes: list[onnx.NodeProto], shape: tuple[int | str, ...], words: str) -> None:
    with pytest.raises(FrtcError) as caught:
        lower_onnx(_model(nodes, shape, (2, 3)), "g")
    assert words in str(caught.value) and caught.value.hint
