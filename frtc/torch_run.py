"""Run a module in torch, as typed: lowering/interpret.py again, on the CPU at a model's full size or on a GPU.

    run = TorchRun(module, opened.read, "cuda")
    env = run(inputs, watch={node}, tap=...)       # every result of every program, by name, on the device

Each result is rounded once to its type. What is constant (weights, tables) is evaluated when it is first read, rounded
once to its type as a Plan's weights are, and stays on the device.

Imports torch: only the compile side loads this file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frtc import torch_ops, torch_products
from frtc.codegen.weights import Lookup, pieces, share
from frtc.errors import EnvironmentFault, UsageError
from frtc.lowering.ir import Graph, Let, Module, Node, Repeat, Run, Step, Type, rebuild, tensor
from frtc.torch_tensors import NUMPY, TORCH, bytes_of, from_array, stored
from frtc.torch_upload import Uploads

Array = np.ndarray[Any, Any]
Tap = Callable[[str, int, Node, Any], None]  # program, round, node, its value (a tuple where it has several results)
Progress = Callable[[str, float], None]

OPS: dict[str, Callable[..., Any]] = torch_ops.OPS | torch_products.OPS
LEAVES = ("input", "state")
WORKERS = min(16, os.cpu_count() or 1)  # each holds some copies of one piece of a weight in float64


def ignore(program: str, round: int, node: Node, value: Any) -> None:
    """A tap that looks at nothing."""


def device_named(name: str) -> torch.device:
    """ "cpu", "cuda", or "auto": a GPU if torch sees one."""
    if name not in ("auto", "cpu", "cuda"):
        raise UsageError("option.device", f"there is no device {name!r}", [("choices", "auto, cpu, cuda")])
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        what = f"torch {torch.__version__} sees no GPU"
        raise EnvironmentFault("env.torch_gpu", what, hint="install a torch that is built for CUDA, or --device cpu")
    return torch.device("cuda" if there and name != "cpu" else "cpu")


class TorchRun:
    """A module, ready to run. states: zeros at first, unless `inputs` holds them.

    uploads   tensors that are on their way to the device
    """

    def __init__(self, module: Module, tensors: Lookup, device: str = "cpu", uploads: Uploads | None = None) -> None:
        self.module, self.device = module, device_named(device)
        self.constants = Constants(module, tensors, self.device, uploads)
        self.orders = {id(g): (g.nodes, g.users()) for g in module.graphs}

    def __call__(
        self, inputs: Mapping[str, Array | Tensor], watch: Collection[Node] = (), tap: Tap = ignore
    ) -> dict[str, Tensor]:
        """Everything that the schedule leaves: inputs, results of programs, states, and the module's outputs."""
        env: dict[str, Tensor] = {}
        for node in (n for g in self.module.graphs for n in (*g.states, *g.inputs)):
            if node["name"] in inputs:
                env[node["name"]] = self.given(inputs[node["name"]], node.t)
            elif node.op == "state":
                env[node["name"]] = torch.zeros(node.shape, dtype=TORCH[node.dtype], device=self.device)
        for name in inputs.keys() - env.keys():  # read by a `let` alone
            type = self.module.inputs.get(name)
            env[name] = self.given(inputs[name], type) if type else self.tensor(inputs[name])
        with torch.inference_mode():
            self._steps(self.module.schedule, env, 0, frozenset(watch), tap)
        return env | {name: env[source] for name, source in self.module.outputs}

    def program(
        self, graph: Graph, inputs: Mapping[str, Array | Tensor], round: int = 0,
        watch: Collection[Node] = (), tap: Tap = ignore,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Results of one of the module's programs by name; new versions of written states under the state's name."""
        leaves = {n["name"]: n.t for n in (*graph.inputs, *graph.states)}
        env = {name: self.given(inputs[name], type) for name, type in leaves.items()}
        with torch.inference_mode():
            return self._program(graph, env, round, frozenset(watch), tap)

    def given(self, value: Array | Tensor, type: Type) -> Tensor:
        found = self.tensor(value)
        assert tuple(found.shape) == type.shape, f"{tuple(found.shape)} is given where the graph declares {type}"
        return stored(found, type)

    def tensor(self, value: Array | Tensor) -> Tensor:
        if isinstance(value, Tensor):
            return value.to(self.device)
        array = np.asarray(value)
        known = array if array.dtype in NUMPY else array.astype(np.float32)
        return from_array(known).to(self.device)

    def _steps(
        self, steps: tuple[Step, ...], env: dict[str, Tensor], round: int, watch: frozenset[Node], tap: Tap
    ) -> None:
        for step in steps:
            if isinstance(step, Run):
                env.update(self._program(self.module.graph(step.program), env, round, watch, tap))
            elif isinstance(step, Repeat):
                for k in range(step.count):
                    env[step.index] = torch.tensor(k, dtype=torch.int32, device=self.device)
                    self._steps(step.body, env, k, watch, tap)
            elif isinstance(step, Let):
                env[step.name] = env[step.source]
            else:
                while bool(env[step.condition]):
                    self._steps(step.body, env, round, watch, tap)

    def _program(
        self, graph: Graph, env: Mapping[str, Tensor], round: int, watch: frozenset[Node], tap: Tap
    ) -> dict[str, Tensor]:
        nodes, users = self.orders[id(graph)] if id(graph) in self.orders else (graph.nodes, graph.users())
        values: dict[Node, Any] = {}
        remaining = dict(users)
        for node in nodes:
            if node.is_const and node not in self.constants:
                continue  # inside a constant expression
            values[node] = self._value(node, values, env)
            if node in watch:
                tap(graph.name, round, node, values[node])
            for a in () if node.is_const else node.operands:
                remaining[a] -= 1
                if not remaining[a]:
                    del values[a]
        return {name: values[node] for name, node in (*graph.outputs, *graph.writes)}

    def _value(self, node: Node, values: Mapping[Node, Any], env: Mapping[str, Tensor]) -> Any:
        if node in self.constants:
            return self.constants[node]
        if node.op in LEAVES:
            return stored(env[node["name"]], node.t)
        if node.op == "item":
            return values[node.operands[0]][node["index"]]
        args: list[Any] = [None if a is None else values[a] for a in node.args]
        if node.op == "cast":
            return torch_ops.cast(args[0], node.dtype)
        result = OPS[node.op](*args, **dict(node.attrs))
        if isinstance(node.type, tuple):
            return tuple(stored(r, t) for r, t in zip(result, node.type, strict=True))
        assert tuple(result.shape) == node.shape, f"{node.op} gives {tuple(result.shape)}, its type is {node.type}"
        return stored(result, node.t)


class Constants:
    """What is constant in the programs, by node, on the device: evaluated in float64 and rounded once to its type."""

    def __init__(self, module: Module, tensors: Lookup, device: torch.device, uploads: Uploads | None = None) -> None:
        self.device, self.uploads = device, uploads
        found = dict.fromkeys(node for graph in module.graphs for node in constants_of(graph))
        self.names = {node: str(i) for i, node in enumerate(found)}
        known = dict(module.weights.outputs)

        def visit(old: Node, new: Node) -> Node:
            return known.get(old["name"], tensor(old["name"], old.t)) if old.op == "weight" else new

        whole = rebuild(Graph("weights", (), tuple((name, node) for node, name in self.names.items())), visit)
        self.expressions, self.lookup = share(dict(whole.outputs), tensors)
        self.busy, self.values = Lock(), dict[Node, Future[Tensor]]()

    def __contains__(self, node: Node) -> bool:
        return node in self.names

    def __getitem__(self, node: Node) -> Tensor:
        with self.busy:
            future = self.values.get(node)
            mine = future is None
            future = self.values.setdefault(node, Future())
        if mine:
            self._fill(node, future)
        return future.result()

    def evaluate(self, progress: Progress = lambda what, share: None) -> None:
        """All of them, by a few threads."""
        with ThreadPoolExecutor(WORKERS) as pool:
            for done, _ in enumerate(pool.map(self.__getitem__, self.names), 1):
                progress("weights", done / len(self.names))

    def _fill(self, node: Node, future: Future[Tensor]) -> None:
        try:
            future.set_result(self._evaluated(node))
        except BaseException as fault:
            future.set_exception(fault)
            raise

    def _evaluated(self, node: Node) -> Tensor:
        if node.op == "const" and node.get("value") is not None:
            return torch.full(node.shape, node["value"], dtype=TORCH[node.dtype], device=self.device)
        expression = self.expressions[self.names[node]]
        if self.uploads is not None and (there := self.uploads.made(expression)) is not None:
            return there
        made = torch.empty(node.shape, dtype=TORCH[node.dtype])
        memory, at = bytes_of(made), 0
        for piece in pieces(expression, self.lookup):
            raw = piece.reshape(-1).view(np.uint8)
            memory[at : at + raw.size] = raw
            at += raw.size
        assert at == memory.size, f"{node}: {at} bytes of {memory.size}"
        return made.to(self.device)


def constants_of(graph: Graph) -> Iterable[Node]:
    """Maximal constant expressions of a program, in the order of their readers; literals among them."""
    for node in graph.nodes:
        if not node.is_const:
            yield from (a for a in node.operands if a.is_const)
    yield from (root for root in graph.roots if root.is_const)
