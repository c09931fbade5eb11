"""What becomes a weight, a literal, a state or an input; and every refusal, with what it says."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from frtc.errors import FrtcError
from frtc.lowering.from_torch import LITERAL_BYTES, constants, export, lower
from frtc.lowering.interpret import run
from frtc.lowering.ir import Graph
from frtc.lowering.programs import define_weights, lower_programs
from frtc.lowering.verify import Invalid, verify, verify_module
from tests.lowering.generator import Program

X = torch.arange(8.0).reshape(2, 4)
AT = torch.tensor(1)


class Made(nn.Module):
    """A module out of a function of (self, *args), with buffers and parameters as given."""

    def __init__(
        self, function: Callable[..., Any], persistent: bool = False, **tensors: Tensor | nn.Parameter
    ) -> None:
        super().__init__()
        self.function = function
        for name, value in tensors.items():
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            else:
                self.register_buffer(name, value, persistent=persistent)
        self.eval()

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def traced(module: nn.Module, *args: Any, **options: Any) -> Graph:
    names = [f"in{i}" for i in range(len(torch.utils._pytree.tree_leaves(args)))]
    return lower(module, args, names, options.pop("outputs", ("out",)), "g", **options)


# --- leaves -------------------------------------------------------------------------------------------------------


def test_parameters_are_weights_and_may_be_on_the_meta_device() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 3, dtype=torch.bfloat16)).eval()
        graph = traced(module, torch.empty(2, 4, dtype=torch.bfloat16), scope="head")
    weights = {n["name"]: str(n.type) for n in graph.nodes if n.op == "weight"}
    assert weights == {"head.0.weight": "bf16[3,4]", "head.0.bias": "bf16[3]"}


def test_tied_parameters_have_the_first_name() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embed(ids))

    graph = traced(Tied().eval(), torch.tensor([1, 2]))
    assert {n["name"] for n in graph.nodes if n.op == "weight"} == {"embed.weight"}


def test_small_buffers_are_literals() -> None:
    table = torch.tensor([1.5, -2.0, 0.0, 3.25], dtype=torch.bfloat16)
    graph = traced(Made(lambda self, x: x * self.table * self.scale + self.ones, table=table, scale=torch.tensor(0.1),
                        ones=torch.ones(4)), X)  # fmt: skip
    values = [n.get("value", n.get("data")) for n in graph.nodes if n.op == "const"]
    assert float(np.float32(0.1)) in values and 1.0 in values, "equal elements are written as one number"
    assert "c03f00c000005040" in values, "bf16, little-endian"
    np.testing.assert_allclose(run(graph, {"in0": X.numpy()})["out"], X * table.float() * 0.1 + 1, rtol=1e-6)


def test_buffers_of_the_checkpoint_are_weights() -> None:
    graph = traced(Made(lambda self, x: x * self.scale, persistent=True, scale=torch.ones(4)), X)
    assert [n["name"] for n in graph.nodes if n.op == "weight"] == ["scale"]


def test_large_buffers_are_weights_whose_values_are_kept() -> None:
    big = torch.arange(LITERAL_BYTES // 4 + 4.0)
    module = Made(lambda self, x: x + self.big[:4] + torch.arange(4.0), big=big)
    assert [n["name"] for n in traced(module, X, scope="s").nodes if n.op == "weight"] == ["s.big"]
    kept = constants(export(module, (X,), "g"), "s")
    weights = define_weights([traced(module, X, scope="s")], literals=kept)
    np.testing.assert_array_equal(run(weights, {})["s.big"], big)


def test_scalars_that_come_from_outside_stay_values() -> None:
    graph = traced(Made(lambda self, x, n: x * n + (torch.arange(4) < n)), X, torch.tensor(3, dtype=torch.int32))
    for n in (2, 4):
        wanted = X * n + (torch.arange(4) < n)
        np.testing.assert_array_equal(run(graph, {"in0": X.numpy(), "in1": np.int32(n)})["out"], wanted)


def test_unused_inputs_stay_and_inputs_may_be_results() -> None:
    graph = traced(Made(lambda self, x, y: (x, x + 1)), X, X.clone(), outputs=("same", "more"))
    assert [n["name"] for n in graph.inputs] == ["in0", "in1"]
    assert graph.outputs[0] == ("same", graph.inputs[0])


# --- states -------------------------------------------------------------------------------------------------------


def states_of(function: Callable[..., Any], *args: Any, **buffers: Tensor) -> Graph:
    graph = traced(Made(function, **buffers), *args)
    verify(graph)
    return graph


def stepped(graph: Graph, calls: list[dict[str, Any]]) -> tuple[list[Any], dict[str, Any]]:
    """Results of several runs that share the states, and the states after them."""
    env = {n["name"]: np.zeros(n.shape, np.float32 if n.t.is_float else np.int64) for n in graph.states}
    results = []
    for call in calls:
        env |= run(graph, {**env, **call})
        results.append(env["out"])
    return results, env


def test_a_counter_is_read_and_replaced() -> None:
    def count(self: Any, x: Tensor) -> Tensor:
        before = self.n * 1
        self.n.add_(2)
        return x * before + self.n

    graph = states_of(count, X, n=torch.tensor(0))
    results, env = stepped(graph, [{"in0": X.numpy()}] * 3)
    assert env["n"] == 6
    np.testing.assert_array_equal(results[2], X.numpy() * 4 + 6)


def test_an_update_in_place_is_one_write_at_a_device_position() -> None:
    def put(self: Any, x: Tensor, at: Tensor) -> Tensor:
        self.kv.index_copy_(1, torch.arange(2) + at, x)
        return self.kv * 1

    graph = states_of(put, X.reshape(1, 2, 4), AT, kv=torch.zeros(1, 6, 4))
    (write,) = [n for n in graph.nodes if n.op == "write"]
    assert write["axis"] == -2 and write.args[1] is graph.inputs[0], "rows only, not the whole state"
    x = X.reshape(1, 2, 4).numpy()
    _, env = stepped(graph, [{"in0": x, "in1": np.int64(n)} for n in (0, 3)])
    assert np.flatnonzero(env["kv"].any(-1)).tolist() == [0, 1, 3, 4]


def test_reads_see_the_version_they_follow() -> None:
    def both(self: Any, x: Tensor) -> Tensor:
        old = self.s + 0
        self.s[0] = x[0]
        middle = self.s + 0
        self.s[1] = x[1]
        return torch.stack([old, middle, self.s])

    graph = states_of(both, X, s=torch.zeros(2, 4))
    writes = [n for n in graph.nodes if n.op == "write"]
    assert len(writes) == 2 and writes[1].args[0] is writes[0], "a chain of versions"
    (_, last), _ = stepped(graph, [{"in0": X.numpy()}, {"in0": 10 + X.numpy()}])
    x = X.numpy()
    np.testing.assert_array_equal(last, [x, [10 + x[0], x[1]], 10 + x])


def test_slices_and_whole_states_are_assigned() -> None:
    def assign(self: Any, x: Tensor) -> Tensor:
        self.a[:, 2:4] = x[:, :2]
        self.b.copy_(x.sum(0))
        self.c.zero_()
        return self.a.sum() + self.b.sum()

    graph = states_of(assign, X, a=torch.zeros(2, 6), b=torch.zeros(4), c=torch.zeros(3))
    results, env = stepped(graph, [{"in0": X.numpy()}])
    wanted = np.zeros((2, 6), np.float32)
    wanted[:, 2:4] = X[:, :2]
    np.testing.assert_array_equal(env["a"], wanted)
    np.testing.assert_array_equal(env["b"], X.sum(0))
    assert results[0] == X[:, :2].sum() + X.sum()


def test_a_state_of_one_program_is_a_state_of_all() -> None:
    class Shared(nn.Module):
        def __init__(self, writes: bool) -> None:
            super().__init__()
            self.writes = writes
            self.register_buffer("s", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            if self.writes:
                self.s.copy_(x[0])
            return x + self.s

    programs = [Program(f"p{w:d}", Shared(w).eval(), (X,), ("x",), ("y",), scope="m") for w in (True, False)]
    module = lower_programs("m", programs)
    verify_module(module)
    assert [[n["name"] for n in g.states] for g in module.graphs] == [["m.s"], ["m.s"]]
    assert module.graphs[1].writes == () and module.graphs[1].count("read") == 1


# --- refusals -----------------------------------------------------------------------------------------------------


def _item(self: Any, x: Tensor) -> Tensor:
    return x[: int(x.sum().item())]


def _branch(self: Any, x: Tensor) -> Tensor:
    return x + 1 if x.sum() > 0 else x


def _masked(self: Any, x: Tensor) -> Tensor:
    return x[x > 0]


def _changed_input(self: Any, x: Tensor) -> Tensor:
    return x.add_(1)


def _scattered(self: Any, x: Tensor, at: Tensor) -> Tensor:
    self.s.index_copy_(0, at, x)
    return x


def _broken(self: Any, x: Tensor) -> Tensor:
    raise ValueError("no such thing\nsecond line")


REFUSALS: dict[str, tuple[nn.Module, tuple[Any, ...], str, list[str]]] = {
    "unknown op": (Made(lambda self, x: x.sort(-1)[0]), (X,), "lowering.unsupported",
                   ["aten.sort.default cannot be lowered", "test_from_torch.py:", "row to lowering/aten_"]),
    "part of an op": (Made(lambda self, x: torch.div(x, 2, rounding_mode="trunc")), (X,), "lowering.unsupported",
                      ["aten.div.Tensor_mode", "rounding mode trunc", "test_from_torch.py:"]),
    "bits": (Made(lambda self, x: x.long() & x.long()), (X,), "lowering.unsupported", ["bit arithmetic on i64"]),
    "element type": (Made(lambda self, x: x.to(torch.complex64).real), (X,), "lowering.unsupported", ["complex64"]),
    "dropout": (Made(lambda self, x: nn.functional.dropout(x, 0.5, True)), (X,), "lowering.unsupported", []),
    "memory": (Made(lambda self, x: torch.empty(4) * 0 + x), (X,), "lowering.unsupported", ["use zeros"]),
    "positions": (Made(_scattered, s=torch.zeros(5, 4)), (X, torch.tensor([3, 1])), "lowering.unsupported",
                  ["index_copy", "not consecutive", "torch.arange(n) + start"]),
    "slice by data": (Made(_item), (X,), "lowering.export", ["cannot trace program g", "follow from the shapes"]),
    "branch on data": (Made(_branch), (X,), "lowering.export", ["test_from_torch.py:"]),
    "shape by data": (Made(_masked), (X,), "lowering.unsupported", ["depends on the data", "test_from_torch.py:"]),
    "its own error": (Made(_broken), (X,), "lowering.export", ["ValueError: no such thing", "test_from_torch.py:"]),
    "input changed": (Made(_changed_input), (X,), "lowering.mutation", ["changes its input", "buffer"]),
    "number as input": (Made(lambda self, x, n: x * n), (X, 3), "lowering.input", ["[1]", "is 3", "shape []"]),
    "number as result": (Made(lambda self, x: (x, 5)), (X,), "lowering.output", ["5, which is not a tensor"]),
    "results": (Made(lambda self, x: (x, x + 1)), (X,), "lowering.output", ["returns 2 tensors", "named are 1"]),
    "training": (Made(lambda self, x: x).train(), (X,), "lowering.training", [".eval()"]),
    "no values": (Made(lambda self, x: x + self.t, t=torch.empty(4, device="meta")), (X.to("meta"),), "lowering.buffer",
                  ["buffer t of program g has no values"]),
    "state not zero": (Made(lambda self, x: self.t.add_(x[0]) * 1, t=torch.ones(4)), (X,), "lowering.state",
                       ["buffer t changes and is not zero at first"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(name: str) -> None:
    module, args, code, words = REFUSALS[name]
    with pytest.raises(FrtcError) as caught:
        traced(module, *args)
    text = str(caught.value)
    assert caught.value.code == code, text
    assert caught.value.hint or code == "lowering.output", text
    assert "Traceback" not in text and "second line" not in text and os.getcwd() not in text
    assert all(word in text for word in words), text


def test_names_must_fit_the_inputs() -> None:
    with pytest.raises(FrtcError, match="has 1 inputs, named are a, b"):
        lower(Made(lambda self, x: x), (X,), ("a", "b"), ("out",), "g")


def test_weights_are_the_models_parameters_whatever_a_file_holds() -> None:
    weights = define_weights([traced(nn.Linear(4, 3).eval(), X)])
    leaves = [(name, leaf.op, leaf["key"], str(leaf.type)) for name, leaf in weights.outputs]
    assert leaves == [("bias", "tensor", "bias", "f32[3]"), ("weight", "tensor", "weight", "f32[3,4]")]


def test_states_of_one_name_must_have_one_type() -> None:
    def program(name: str, n: int) -> Program:
        module = Made(lambda self, x: self.s.copy_(x[0, 0].expand(n)) * 1, s=torch.zeros(n))
        return Program(name, module, (X,), ("x",), ("y",))

    with pytest.raises(Invalid, match=r"state s is f32\[3\] in program b, f32\[2\] in a"):
        verify_module(lower_programs("m", [program("a", 2), program("b", 3)]))
