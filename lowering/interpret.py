"""The interpreter: run a graph or a module with the NumPy references. Slow, exact, the oracle of every pass.

Modes
    typed   every result is rounded once to its own element type (roundings inside ops happen as their row says)
    wide    all floats are float32 (those declared f64 stay float64) and nothing is rounded: what the model means
    exact   all floats are float64: for folding constants, whose results the caller rounds once
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from frtc.kernels.dtypes import DTYPES, is_float, round_to
from frtc.kernels.reference import REFERENCES
from frtc.lowering.ir import Graph, Let, Module, Node, Repeat, Run, Step, Type
from frtc.lowering.ops import OPS

Array = np.ndarray[Any, Any]
Lookup = Callable[[str], Array]


def run(
    graph: Graph, inputs: Mapping[str, Array], weights: Lookup | None = None, mode: str = "typed"
) -> dict[str, Array]:
    """Results by name; new versions of written states under the state's name.

    inputs    arrays by the names of inputs and states, in any float type (rounded to the declared one)
    weights   returns a weight (or, in a weights graph, a parameter) by name, in any float type: "typed" rounds it once
              to its type, "wide" to float32, "exact" takes all its bits
    """
    values: dict[Node, Any] = {}
    remaining = graph.users()
    for node in graph.nodes:
        values[node] = evaluate(node, values, inputs, weights, mode)
        for a in node.operands:
            remaining[a] -= 1
            if not remaining[a]:
                del values[a]
    return {k: values[n] for k, n in graph.outputs + graph.writes}


def run_module(
    module: Module, inputs: Mapping[str, Array], weights: Lookup, mode: str = "typed", variant: str = ""
) -> dict[str, Array]:
    """Everything the schedule leaves in the environment: inputs, results of programs, states (zeros at first)."""
    env: dict[str, Array] = dict(inputs)
    for graph in module.graphs:
        for s in graph.states:
            env.setdefault(s["name"], np.zeros(s.shape, DTYPES[s.dtype].numpy))
    _run_steps(module, module.schedule, env, weights, mode, variant)
    env.update({k: env[name] for k, name in module.outputs})
    return env


def _run_steps(
    module: Module, steps: tuple[Step, ...], env: dict[str, Array], weights: Lookup, mode: str, variant: str
) -> None:
    for step in steps:
        if isinstance(step, Run):
            variants = {g.variant: g for g in module.graphs if g.name == step.program}
            graph = variants[variant] if variant in variants else variants[""]
            env.update(run(graph, env, weights, mode))
        elif isinstance(step, Repeat):
            for k in range(step.count):
                env[step.index] = np.array(k, np.int32)
                _run_steps(module, step.body, env, weights, mode, variant)
        elif isinstance(step, Let):
            env[step.name] = env[step.source]
        else:
            while env[step.condition]:
                _run_steps(module, step.body, env, weights, mode, variant)


def evaluate_weights(module: Module, tensors: Lookup, mode: str = "typed") -> dict[str, Array]:
    """Every weight of the module, its expression evaluated in float64 and rounded once to the weight's type.

    tensors   returns a parameter by its name, in any float type; mode "wide" skips the rounding of the result (float32)
    """
    exact = run(module.weights, {}, tensors, "exact")
    return {k: stored(exact[k], n.t, "typed" if mode == "typed" else "wide") for k, n in module.weights.outputs}


def stored(values: Array, type: Type, mode: str) -> Array:
    """`values` as the mode stores a value of `type`."""
    if not is_float(type.dtype):
        return values.astype(DTYPES[type.dtype].numpy, copy=False)
    if mode == "typed":
        return round_to(values, type.dtype)
    narrow = mode == "wide" and type.dtype != "f64"
    return values.astype(np.float32 if narrow else np.float64, copy=False)


def evaluate(
    node: Node, values: Mapping[Node, Any], inputs: Mapping[str, Array], weights: Lookup | None, mode: str
) -> Any:
    """The value of one node, or the tuple of its values, from those of its operands."""
    if node.op in ("input", "state"):
        return stored(_checked(np.asarray(inputs[node["name"]]), node), node.t, mode)
    if node.op in ("weight", "tensor"):
        assert weights is not None, f"no weights given, but {node} is read"
        return stored(_checked(weights(node.get("name") or node["key"]), node), node.t, mode)
    if node.op == "const":
        return stored(_literal(node), node.t, mode)
    if node.op == "item":
        return values[node.args[0]][node["index"]]  # type: ignore[index]
    attrs = dict(node.attrs) if mode == "typed" else _unrounded(node, mode)
    args: list[Any] = [None if a is None else values[a] for a in node.args]
    result: Any = _cast(args[0], node.t) if node.op == "cast" else REFERENCES[node.op](*args, **attrs)
    if isinstance(node.type, tuple):
        return tuple(stored(np.asarray(r), t, mode) for r, t in zip(result, node.type, strict=True))
    result = np.asarray(result)
    assert result.shape == node.shape, f"reference of {node.op} gives {result.shape}, its type is {node.type}"
    return stored(result, node.t, mode)


def _unrounded(node: Node, mode: str) -> dict[str, Any]:
    """The attributes without roundings inside the op: neither named ones nor casts between the steps of a program."""
    attrs = {k: "f32" if k in OPS[node.op].inner else v for k, v in node.attrs}
    if node.op == "pointwise":
        wide = "f64" if mode == "exact" else "f32"
        steps = ((*s[:-1], wide) if s[0] == "cast" and is_float(s[-1]) and s[-1] != "f64" else s for s in attrs["expr"])
        attrs["expr"] = tuple(steps)
    return attrs


def _cast(x: Array, type: Type) -> Array:
    if is_float(type.dtype) and x.dtype.kind in "iub":
        return x.astype(np.float64)
    if not is_float(type.dtype) and type.dtype != "bool" and x.dtype.kind not in "iub":
        return np.trunc(x.astype(np.float64))
    return x != 0 if type.dtype == "bool" else x


def _literal(node: Node) -> Array:
    dtype = DTYPES[node.dtype].numpy
    if node.get("data") is not None:
        return np.frombuffer(bytes.fromhex(node["data"]), dtype).reshape(node.shape)
    return np.full(node.shape, node["value"], np.float64 if is_float(node.dtype) else dtype)


def _checked(array: Array, node: Node) -> Array:
    name = node.get("name") or node.get("key")
    assert array.shape == node.shape, f"{name} has shape {array.shape}, the graph declares {node.type}"
    return array
