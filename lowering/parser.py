"""The parser of the IR's text form (text.py describes it). One line at a time; an error names the line.

Whatever the text, the result is a graph whose nodes have the types that are written, or FrtcError ir.syntax.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from frtc.errors import FrtcError
from frtc.kernels.dtypes import DTYPES
from frtc.lowering import ir
from frtc.lowering.ir import AnyType, Attr, Graph, Let, Module, Node, Repeat, Run, Scale, Step, Type, While
from frtc.lowering.op import TypeMismatch, result_dtype
from frtc.lowering.ops import OPS

_TOKEN = re.compile(
    r"""\s*(?:(?P<string>"(?:[^"\\]|\\.)*")|(?P<value>[%@][\w.\-/|~]+)|(?P<word>[A-Za-z_][\w.\-|~]*)
    |(?P<number>-?(?:\d+\.?\d*(?:e[+-]?\d+)?|inf|nan))|(?P<mark>[()\[\]{},:;=]))""",
    re.VERBOSE | re.ASCII,
)
_INTEGER = re.compile(r"-?\d{1,19}\Z", re.ASCII)
_SCALES = DTYPES.keys() | {"e8m0"}  # element types of scales
MAX_DEPTH = 64  # of nested lists and schedules


class Parser:
    def __init__(self, text: str) -> None:
        self.lines, self.row = text.split("\n"), 0
        self.tokens: list[tuple[str, str]] = []  # of the current line, the next one last
        self.loc = ""

    def fail(self, what: str) -> FrtcError:
        line = self.lines[self.row - 1] if self.row else ""
        return FrtcError("ir.syntax", f"{what} in line {self.row} of the IR text", [("line", line.strip())])

    # --- tokens -------------------------------------------------------------------------------------------------

    def next_line(self) -> bool:
        """Tokenise the next line that holds anything; its comment is the node's location."""
        self.end_of_line()
        while self.row < len(self.lines):
            code, comment = _split_comment(self.lines[self.row])
            self.row += 1
            if code.strip():
                self.loc, at = comment.strip(), 0
                while code[at:].strip():
                    m = _TOKEN.match(code, at)
                    if m is None:
                        raise self.fail(f"cannot read {code[at:].strip()[:20]!r}")
                    self.tokens.append((m.lastgroup or "", m.group().strip()))
                    at = m.end()
                self.tokens.reverse()
                return True
        return False

    def end_of_line(self) -> None:
        if self.tokens:
            raise self.fail(f"expected the end of the line, found {self.peek()}")

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

    def name(self) -> str:
        if not self.tokens or self.tokens[-1][0] not in ("word", "number"):
            raise self.fail(f"expected a name, found {self.peek() or 'the end'}")
        return self.take()

    def integer(self, least: int | None = None) -> int:
        token = self.take()
        if not _INTEGER.match(token) or (least is not None and int(token) < least):
            raise self.fail(f"expected an integer{'' if least is None else f' >= {least}'}, found {token}")
        return int(token)

    def listed(self, close: str, one: Callable[[], object]) -> None:
        """Items separated by commas up to `close`."""
        while not self.accept(close):
            one()
            if self.peek() != close:
                self.take(",")

    # --- types and attributes -----------------------------------------------------------------------------------

    def type(self) -> Type:
        dtype = self.name()
        if dtype not in DTYPES:
            raise self.fail(f"there is no element type {dtype}")
        shape: list[int] = []
        self.take("[")
        self.listed("]", lambda: shape.append(self.integer(least=0)))
        return Type(dtype, tuple(shape), self._scale() if self.accept("{") else None)

    def _scale(self) -> Scale:
        """{f32 1x32 -1 linear}; "1x32" is read as the number 1 and the word x32."""
        parts = []
        while not self.accept("}"):
            parts.append(self.take())
        while len(parts) > 4 and parts[2].startswith("x"):
            parts[1:3] = [parts[1] + parts[2]]
        if len(parts) != 4 or parts[0] not in _SCALES or not re.fullmatch(r"tensor|\d{1,9}(x\d{1,9})*", parts[1]):
            raise self.fail(f"cannot read the scale {{{' '.join(parts)}}}")
        if parts[2] != "_" and not _INTEGER.match(parts[2]):
            raise self.fail(f"expected an axis or _, found {parts[2]}")
        block = () if parts[1] == "tensor" else tuple(map(int, parts[1].split("x")))
        return Scale(parts[0], block, None if parts[2] == "_" else int(parts[2]), parts[3])

    def any_type(self) -> AnyType:
        if not self.accept("("):
            return self.type()
        types: list[Type] = []
        self.listed(")", lambda: types.append(self.type()))
        return tuple(types)

    def attr(self, depth: int = 0) -> Attr:
        kind, token = self.tokens[-1] if self.tokens else ("", "")
        self.take()
        if token == "[":
            if depth == MAX_DEPTH:
                raise self.fail(f"lists are nested more than {MAX_DEPTH} deep")
            items: list[Attr] = []
            self.listed("]", lambda: items.append(self.attr(depth + 1)))
            return tuple(items)
        if kind == "string":
            return self._string(token)
        if token in ("inf", "-inf", "nan"):
            return float(token)
        if kind == "number":
            return float(token) if any(c in token for c in ".en") else self._long(token)
        if kind != "word":
            raise self.fail(f"expected a value, found {token}")
        return {"true": True, "false": False, "none": None}.get(token, token)

    def _string(self, token: str) -> str:
        try:
            return str(json.loads(token))
        except ValueError:
            raise self.fail(f"cannot read the string {token[:20]}") from None

    def _long(self, token: str) -> int:
        if len(token) > 40:
            raise self.fail("an integer of more than 40 digits")
        return int(token)

    # --- graphs -------------------------------------------------------------------------------------------------

    def whole_graph(self) -> Graph:
        """The only graph of the text."""
        graph = self.graph()
        if self.next_line():
            raise self.fail("expected the end after the graph")
        return graph

    def graph(self) -> Graph:
        if not self.tokens and not self.next_line():
            raise self.fail("expected graph, found the end")
        self.take("graph")
        name, variant = self.name(), ""
        values: dict[str, Node] = {}
        if self.accept("["):
            while not self.accept("]"):
                variant += self.take()
        inputs, states = self._head(values)
        self.take("{")
        outputs: list[tuple[str, Node]] = []
        writes: list[tuple[str, Node]] = []
        while True:
            if not self.next_line():
                raise self.fail("expected }, found the end")
            if self.accept("}"):
                break
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
            name = self.name()
            self.take(":")
            into.append(leaf(name, self.type()))
            self._bind(values, f"%{name}", into[-1])
            if self.peek() not in (")", ";"):
                self.take(",")
        return inputs, states

    def _bind(self, values: dict[str, Node], name: str, node: Node) -> None:
        if name in values:
            raise self.fail(f"{name} is defined twice")
        values[name] = node

    def _results(self, values: dict[str, Node]) -> list[tuple[str, Node]]:
        results: list[tuple[str, Node]] = []
        while self.tokens:
            key = "out"
            if not self.peek().startswith(("%", "@")):
                key = str(self.attr())
                self.take("=")
            node = self._value(values)
            if isinstance(node.type, tuple):
                raise self.fail(f"{key} is a value with several results")
            results.append((key, node))
            if self.tokens:
                self.take(",")
        return results

    def _value(self, values: dict[str, Node]) -> Node:
        token = self.take()
        if token in values:
            return values[token]
        base, _, index = token.rpartition(".")
        types = values[base].type if base in values else None
        if isinstance(types, tuple) and _INTEGER.match(index):
            if int(index) >= len(types):
                raise self.fail(f"{token} is not defined: {base} has {len(types)} results")
            return ir.item(values[base], int(index))
        raise self.fail(f"{token} is not defined")

    def _define(self, values: dict[str, Node]) -> None:
        kind, name = self.tokens[-1]
        if kind != "value":
            raise self.fail(f"expected a value's name, found {name}")
        self.take()
        if name.startswith("@"):
            self.take(":")
            self._bind(values, name, ir.weight(name[1:], self.type()))
            return
        self.take("=")
        op = self.name()
        args: list[Node | None] = []
        attrs: dict[str, Attr] = {}
        self.take("(")
        self.listed(")", lambda: self._argument(values, args, attrs))
        self.take(":")
        self._bind(values, name, self._node(op, args, attrs, self.any_type()))

    def _argument(self, values: dict[str, Node], args: list[Node | None], attrs: dict[str, Attr]) -> None:
        if self.peek().startswith(("%", "@")):
            args.append(self._value(values))
            if isinstance(args[-1].type, tuple):  # type: ignore[union-attr]
                raise self.fail("an operand with several results")
        elif self.accept("_"):
            args.append(None)
        else:
            key = self.name()
            self.take("=")
            if key in attrs:
                raise self.fail(f"attribute {key} is given twice")
            attrs[key] = self.attr()

    def _node(self, op: str, args: list[Node | None], attrs: dict[str, Attr], type: AnyType) -> Node:
        row = OPS.get(op)
        if row is None:
            if op not in ("const", "tensor") or args:
                raise self.fail(f"there is no op {op}" if op not in ("const", "tensor") else f"{op} has no operands")
            return ir.make(op, args, attrs, type, self.loc)
        if not row.variadic:
            args = args + [None] * (len(row.operands) - len(args))
        unknown = sorted(set(attrs) - set(row.attrs))
        if unknown:
            raise self.fail(f"op {op} has no attribute {', '.join(unknown)}")
        if "dtype" in row.attrs:
            attrs = {**attrs, "dtype": result_dtype(type, attrs) if type else "f32"}
        try:
            node = row.build(args, attrs, self.loc)
        except TypeMismatch as error:
            raise self.fail(str(error)) from None
        except (TypeError, ValueError, IndexError, AssertionError, ArithmeticError) as error:
            raise self.fail(f"op {op} refuses its attributes ({error})") from None
        if node.type != type:
            raise self.fail(f"{op} gives {node.type}, not {type},")
        return node

    # --- modules ------------------------------------------------------------------------------------------------

    def module(self) -> Module:
        if not self.next_line():
            raise self.fail("expected module, found the end")
        self.take("module")
        name, weights = self.name(), Graph("weights", (), ())
        graphs: list[Graph] = []
        schedule: tuple[Step, ...] = ()
        outputs: list[tuple[str, str]] = []
        while self.next_line():
            if self.accept("schedule"):
                self.take("{")
                schedule = self._schedule(outputs, 0)
                continue
            g = self.graph()
            if g.name == "weights":
                weights = g
            else:
                graphs.append(g)
        return Module(name, tuple(graphs), weights, schedule, tuple(outputs))

    def _schedule(self, outputs: list[tuple[str, str]], depth: int) -> tuple[Step, ...]:
        """Steps up to the closing brace; `return a=x` says under which names results leave."""
        if depth > MAX_DEPTH:
            raise self.fail(f"steps are nested more than {MAX_DEPTH} deep")
        steps: list[Step] = []
        while True:
            if not self.next_line():
                raise self.fail("expected }, found the end")
            if self.accept("}"):
                return tuple(steps)
            word = self.take()
            if word == "return":
                while self.tokens:
                    outputs.append(self._pair())
                    if self.tokens:
                        self.take(",")
            elif word in ("run", "let"):
                steps.append(Run(self.name()) if word == "run" else Let(*self._pair()))
            elif word in ("repeat", "while"):
                count, name = self.integer(least=0) if word == "repeat" else 0, self.name()
                self.take("{")
                body = self._schedule(outputs, depth + 1)
                steps.append(Repeat(count, name, body) if word == "repeat" else While(name, body))
            else:
                raise self.fail(f"there is no step {word}")

    def _pair(self) -> tuple[str, str]:
        name = self.name()
        self.take("=")
        return name, self.name()


def _split_comment(line: str) -> tuple[str, str]:
    """Code and comment: split at the first # outside a string."""
    inside, escaped = False, False
    for i, c in enumerate(line):
        if c == '"' and not escaped:
            inside = not inside
        elif c == "#" and not inside:
            return line[:i], line[i + 1 :]
        escaped = inside and c == "\\" and not escaped
    return line, ""
