"""The text form of the IR: `parse(show(g)) == g`, and bug reports are text.

    graph step[prompt=48](x_t: f32[50,32], k: i32[]; kv: bf16[2,968,256]) {
      @expert.q.w : bf16[2048,1024]
      %0 = linear(%x_t, @expert.q.w) : bf16[50,2048]  # expert.q models/policy.py:88
      return x=%0
      write kv=%3
    }

One line per node. `%` is a value, `@` a weight, `_` an absent operand; inputs stand before the `;` in the head, states
after it; attributes equal to their default are not written; an op with several results has a tuple type, and its
results are `%3.0`, `%3.1`. A single result named "out" is written as `return %0`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from frtc.lowering.ir import AnyType, Attr, Graph, Let, Module, Node, Repeat, Run, Step, Type
from frtc.lowering.ops import OPS
from frtc.lowering.parser import Parser

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*\Z")
_RESERVED = {"true", "false", "none", "inf", "nan"}


def parse(text: str) -> Graph:
    """The graph that `text` shows. Raises FrtcError ir.syntax with the line."""
    return Parser(text).whole_graph()


def parse_module(text: str) -> Module:
    """The module that `text` shows. Raises FrtcError ir.syntax with the line."""
    return Parser(text).module()


def show(graph: Graph, locations: bool = True) -> str:
    """The graph as text; ends with a newline. `locations`: say behind each node where it came from."""
    names, lines, weights = _Names(graph), [], []
    for node in graph.nodes:
        if node.op == "weight":
            weights.append(f"  @{node['name']} : {node.type}")
        elif node.op not in ("input", "state", "item"):
            where = f"  # {node.loc}" if node.loc and locations else ""
            lines.append(f"  {names.new(node)} = {_call(node, names)} : {_type(node.type)}{where}")
    variant = f"[{graph.variant}]" if graph.variant else ""
    head = ", ".join(f"{n['name']}: {n.type}" for n in graph.inputs)
    if graph.states:
        head += "; " + ", ".join(f"{n['name']}: {n.type}" for n in graph.states)
    lines = [f"graph {graph.name}{variant}({head}) {{", *sorted(weights), *lines]
    results = ", ".join(f"{_attr(k)}={names[n]}" for k, n in graph.outputs)
    if [k for k, _ in graph.outputs] == ["out"]:
        results = names[graph.outputs[0][1]]
    lines.append(f"  return {results}".rstrip())
    if graph.writes:
        lines.append("  write " + ", ".join(f"{_attr(k)}={names[n]}" for k, n in graph.writes))
    return "\n".join([*lines, "}", ""])


def show_module(module: Module) -> str:
    """Weights, programs and schedule as text."""
    parts = [f"module {module.name}\n"]
    if module.weights.outputs:
        parts.append(show(module.weights))
    parts += [show(g) for g in module.graphs]
    if module.schedule:
        results = ", ".join(f"{k}={name}" for k, name in module.outputs)
        ending = f"  return {results}\n" if results else ""
        parts.append("schedule {\n" + "".join(_steps(module.schedule, "  ")) + ending + "}\n")
    return "\n".join(parts)


class _Names:
    """Value names in order of appearance: numbers that are no input's name."""

    def __init__(self, graph: Graph) -> None:
        self._known: dict[Node, str] = {}
        self._taken = {str(n["name"]).partition(".")[0] for n in graph.inputs + graph.states}
        self._count = 0

    def new(self, node: Node) -> str:
        while str(self._count) in self._taken:
            self._count += 1
        self._known[node] = f"%{self._count}"
        self._count += 1
        return self._known[node]

    def __getitem__(self, node: Node | None) -> str:
        if node is None:
            return "_"
        if node.op in ("input", "state"):
            return f"%{node['name']}"
        if node.op == "weight":
            return f"@{node['name']}"
        if node.op == "item":
            return f"{self[node.args[0]]}.{node['index']}"
        return self._known[node]


def _call(node: Node, names: _Names) -> str:
    row = OPS.get(node.op)
    defaults = row.attrs if row else {}
    args = [names[a] for a in node.args]
    while row and not row.variadic and args and args[-1] == "_":
        args.pop()
    attrs = [f"{k}={_attr(v)}" for k, v in node.attrs if k not in defaults or repr(defaults[k]) != repr(v)]
    return f"{node.op}({', '.join(args + attrs)})"


def _type(type: AnyType) -> str:
    return str(type) if isinstance(type, Type) else f"({', '.join(map(str, type))})"


def _attr(value: Attr) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_attr, value))}]"
    return value if _WORD.match(value) and value not in _RESERVED else json.dumps(value)


def _steps(steps: Iterable[Step], indent: str) -> list[str]:
    lines: list[str] = []
    for step in steps:
        if isinstance(step, Run):
            lines.append(f"{indent}run {step.program}\n")
        elif isinstance(step, Let):
            lines.append(f"{indent}let {step.name} = {step.source}\n")
        else:
            head = f"repeat {step.count} {step.index}" if isinstance(step, Repeat) else f"while {step.condition}"
            lines += [f"{indent}{head} {{\n", *_steps(step.body, indent + "  "), f"{indent}}}\n"]
    return lines
