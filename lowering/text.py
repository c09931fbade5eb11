"""The text form of the IR: `parse(show(g)) == g`, and bug reports are text.

    graph step[prompt=48](x_t: f32[50,32], k: i32[]; kv: bf16[2,968,256]) {
      @expert.q.w : bf16[2048,1024]
      %0 = linear(%x_t, @expert.q.w) : bf16[50,2048]  # expert.q models/pi05.py:88
      return x=%0
      write kv=%3
    }

One line per node. `%` is a value, `@` a weight, `_` an absent operand; inputs stand before the `;` in the head, states
after it; attributes equal to their default are not written; an op with several results has a tuple type, and its results
are `%3.0`, `%3.1`. A single result named "out" is written as `return %0`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from frtc.errors import FrtcError
from frtc.lowering import ir
from frtc.lowering.ir import AnyType, Attr, Graph, Let, Module, Node, Repeat, Run, Scale, Step, Type, While
from frtc.lowering.op import TypeMismatch
from frtc.lowering.ops import OPS

_WORD = re.compile(r"[A-Za-z_][\w.\-]*\Z")
_RESERVED = {"true", "false", "none", "inf", "nan"}

# --- show ---------------------------------------------------------------------------------------------------------


def show(graph: Graph) -> str:
    """The graph as text; ends with a newline."""
    names, lines, weights = _Names(), [], []
    for node in graph.nodes:
        if node.op == "weight":
            weights.append(f"  @{node['name']} : {node.type}")
        elif node.op not in ("input", "state", "item"):
            where = f"  # {node.loc}" if node.loc else ""
            lines.append(f"  {names.new(node)} = {_call(node, names)} : {_type(node.type)}{where}")
    variant = f"[{graph.variant}]" if graph.variant else ""
    head = ", ".join(f"{n['name']}: {n.type}" for n in graph.inputs)
    if graph.states:
        head += "; " + ", ".join(f"{n['name']}: {n.type}" for n in graph.states)
    lines = [f"graph {graph.name}{variant}({head}) {{", *sorted(weights), *lines]
    results = ", ".join(f"{k}={names[n]}" for k, n in graph.outputs)
    if [k for k, _ in graph.outputs] == ["out"]:
        results = names[graph.outputs[0][1]]
    lines.append(f"  return {results}".rstrip())
    if graph.writes:
        lines.append("  write " + ", ".join(f"{k}={names[n]}" for k, n in graph.writes))
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
    """Value names in order of appearance."""

    def __init__(self) -> None:
        self._known: dict[Node, str] = {}

    def new(self, node: Node) -> str:
        self._known[node] = f"%{len(self._known)}"
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


# --- parse --------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"""\s*(?:(?P<string>"(?:[^"\\]|\\.)*")|(?P<value>[%@][\w.\-/|~]+)|(?P<word>[A-Za-z_][\w.\-|~]*)
    |(?P<number>-?(?:\d+\.?\d*(?:e[+-]?\d+)?|inf|nan))|(?P<mark>[()\[\]{},:;=]))""",
    re.VERBOSE,
)


def parse(text: str) -> Graph:
    """The graph that `text` shows. Raises FrtcError ir.syntax with the line."""
    return _Parser(text).graph()


def parse_module(text: str) -> Module:
    """The module that `text` shows. Raises FrtcError ir.syntax with the line."""
    return _Parser(text).module()


class _Parser:
    def __init__(self, text: str) -> None:
        self.lines, self.row = text.splitlines(), 0
        self.tokens: list[tuple[str, str]] = []
        self.loc = ""

    def fail(self, what: str) -> FrtcError:
        line = self.lines[min(self.row, len(self.lines)) - 1] if self.lines else ""
        return FrtcError("ir.syntax", f"{what} in line {self.row} of the IR text", [("line", line.strip())])

    def next_line(self) -> bool:
        """Tokenise the next line that holds anything; its comment is the node's location."""
        while self.row < len(self.lines):
            code, _, comment = _split_comment(self.lines[self.row])
            self.row += 1
            if code.strip():
                self.loc, self.tokens, at = comment.strip(), [], 0
                while code[at:].strip():
                    m = _TOKEN.match(code, at)
                    if m is None:
                        raise self.fail(f"cannot read {code[at:].strip()[:20]!r}")
                    self.tokens.append((m.lastgroup or "", m.group().strip()))
                    at = m.end()
                self.tokens.reverse()
                return True
        return False

    def peek(self) -> str:
        return self.tokens[-1][1] if self.tokens else ""

    def take(self, expected: str = "") -> str:
        if not self.tokens or (expected and self.peek() != expected):
            raise self.fail(f"expected {expected or 'more'}, found {self.peek() or 'the end'}")
        return self.tokens.pop()[1]

    def accept(self, token: str) -> bool:
        if self.peek() == token:
            self.tokens.pop()
            return True
        return False

    def type(self) -> Type:
        dtype, shape = self.take(), []
        self.take("[")
        while not self.accept("]"):
            shape.append(int(self.take()))
            self.accept(",")
        scale = None
        if self.accept("{"):
            kind, block, axis, layout = self.take(), self.take(), self.take(), self.take()
            while not self.accept("}"):
                block, axis, layout = block + axis, layout, self.take()  # "1x32" is read as number, word
            sizes = () if block == "tensor" else tuple(map(int, block.split("x")))
            scale = Scale(kind, sizes, None if axis == "_" else int(axis), layout)
        return Type(dtype, tuple(shape), scale)

    def any_type(self) -> AnyType:
        if not self.accept("("):
            return self.type()
        types = []
        while not self.accept(")"):
            types.append(self.type())
            self.accept(",")
        return tuple(types)

    def attr(self) -> Attr:
        kind, token = self.tokens[-1] if self.tokens else ("", "")
        self.take()
        if token == "[":
            items = []
            while not self.accept("]"):
                items.append(self.attr())
                self.accept(",")
            return tuple(items)
        if kind == "string":
            return json.loads(token)
        if token in ("inf", "-inf", "nan"):
            return float(token)
        if kind == "number":
            return float(token) if any(c in token for c in ".en") else int(token)
        return {"true": True, "false": False, "none": None}.get(token, token)

    def graph(self) -> Graph:
        if not self.tokens and not self.next_line():
            raise self.fail("expected a graph, found the end")
        self.take("graph")
        name, variant, values = self.take(), "", {}
        if self.accept("["):
            while not self.accept("]"):
                variant += self.take()
        inputs, states = self._head(values)
        self.take("{")
        outputs: list[tuple[str, Node]] = []
        writes: list[tuple[str, Node]] = []
        while self.next_line() and not self.accept("}"):
            if self.accept("return"):
                outputs = self._results(values)
            elif self.accept("write"):
                writes = self._results(values)
            else:
                self._define(values)
        return Graph(name, tuple(inputs), tuple(outputs), tuple(states), tuple(writes), variant)

    def _head(self, values: dict[str, Node]) -> tuple[list[Node], list[Node]]:
        inputs: list[Node] = []
        states: list[Node] = []
        into, leaf = inputs, ir.input_
        self.take("(")
        while not self.accept(")"):
            if self.accept(";"):
                into, leaf = states, ir.state
                continue
            name = self.take()
            self.take(":")
            into.append(leaf(name, self.type()))
            values[f"%{name}"] = into[-1]
            self.accept(",")
        return inputs, states

    def _results(self, values: dict[str, Node]) -> list[tuple[str, Node]]:
        results = []
        while self.tokens:
            name = "out"
            if not self.peek().startswith(("%", "@")):
                name = self.attr()
                self.take("=")
            results.append((name, self._value(values)))
            self.accept(",")
        return results

    def _value(self, values: dict[str, Node]) -> Node:
        token = self.take()
        if token in values:
            return values[token]
        base, _, index = token.rpartition(".")
        if base in values and index.isdigit():
            return ir.item(values[base], int(index))
        raise self.fail(f"{token} is not defined")

    def _define(self, values: dict[str, Node]) -> None:
        name = self.take()
        if name.startswith("@"):
            self.take(":")
            values[name] = ir.weight(name[1:], self.type())
            return
        self.take("=")
        op, args, attrs = self.take(), [], {}
        self.take("(")
        while not self.accept(")"):
            if self.peek().startswith(("%", "@")):
                args.append(self._value(values))
            elif self.accept("_"):
                args.append(None)
            else:
                key = self.take()
                self.take("=")
                attrs[key] = self.attr()
            self.accept(",")
        self.take(":")
        values[name] = self._node(op, args, attrs, self.any_type())

    def _node(self, op: str, args: list[Node | None], attrs: dict[str, Attr], type: AnyType) -> Node:
        row = OPS.get(op)
        if row is None:
            if op not in ("const", "tensor"):
                raise self.fail(f"there is no op {op}")
            return ir.make(op, args, attrs, type, self.loc)
        if not row.variadic:
            args = args + [None] * (len(row.operands) - len(args))
        unknown = sorted(set(attrs) - set(row.attrs))
        if unknown:
            raise self.fail(f"op {op} has no attribute {', '.join(unknown)}")
        if "dtype" in row.attrs:
            attrs["dtype"] = type.dtype if isinstance(type, Type) else type[-1].dtype
        try:
            node = row.build(args, attrs, self.loc)
        except TypeMismatch as error:
            raise self.fail(str(error)) from None
        if node.type != type:
            raise self.fail(f"{op} gives {_type(node.type)}, not {_type(type)},")
        return node

    def module(self) -> Module:
        self.next_line()
        self.take("module")
        name, graphs, weights = self.take(), [], Graph("weights", (), ())
        schedule: tuple[Step, ...] = ()
        outputs: list[tuple[str, str]] = []
        while self.next_line():
            if self.peek() == "schedule":
                self.take()
                self.take("{")
                schedule = self._schedule(outputs)
            else:
                g = self.graph()
                if g.name == "weights":
                    weights = g
                else:
                    graphs.append(g)
        return Module(name, tuple(graphs), weights, schedule, tuple(outputs))

    def _schedule(self, outputs: list[tuple[str, str]]) -> tuple[Step, ...]:
        steps: list[Step] = []
        while self.next_line() and not self.accept("}"):
            word = self.take()
            if word == "run":
                steps.append(Run(self.take()))
            elif word == "let":
                name = self.take()
                self.take("=")
                steps.append(Let(name, self.take()))
            elif word == "return":
                while self.tokens:
                    name = self.take()
                    self.take("=")
                    outputs.append((name, self.take()))
                    self.accept(",")
            elif word == "repeat":
                count, index = int(self.take()), self.take()
                self.take("{")
                steps.append(Repeat(count, index, self._schedule(outputs)))
            elif word == "while":
                condition = self.take()
                self.take("{")
                steps.append(While(condition, self._schedule(outputs)))
            else:
                raise self.fail(f"there is no step {word}")
        return tuple(steps)


def _split_comment(line: str) -> tuple[str, str, str]:
    """Split at the first # outside a string."""
    inside = False
    for i, c in enumerate(line):
        if c == '"' and (i == 0 or line[i - 1] != "\\"):
            inside = not inside
        elif c == "#" and not inside:
            return line[:i], "#", line[i + 1 :]
    return line, "", ""
