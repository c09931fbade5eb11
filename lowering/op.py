"""What an op is: a row with operands, attributes and a type rule. `@op` turns the rule into that row; calling the row
builds a node, or a pattern when an argument is one.

The rule receives the operands' types and the attributes, and returns the result's type (a tuple for several results).
A `dtype` attribute is the result's element type; it is kept in the node's type and nowhere else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, overload

from frtc.lowering.ir import AnyType, Attr, Node, Type, make
from frtc.lowering.pattern import Call, Pattern, Var

Rule = Callable[..., AnyType]
Flops = Callable[[tuple[Type | None, ...], AnyType, Mapping[str, Attr]], float]


class TypeMismatch(Exception):
    """Operands that the op's type rule refuses. Always a bug in whatever built the node."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise TypeMismatch(message)


def result_dtype(type: AnyType, attrs: Mapping[str, Attr]) -> str:
    """What the `dtype` attribute of a node with this type and these attributes was: scales of rows come after it."""
    if isinstance(type, Type):
        return type.dtype
    return type[-2 if attrs.get("per_row") and len(type) > 1 else -1].dtype


class Op:
    """One row of the op table.

    operands   names in order; the last may be variadic
    optional   names of operands that may be absent
    attrs      attribute name -> default (inspect.Parameter.empty: required)
    commutes   both operands may be exchanged
    inner      attributes that name the type of a rounding inside the op ("f32": none)
    flops      floating-point operations, from operand types, result type and attributes
    """

    def __init__(self, rule: Rule, commutes: bool, inner: tuple[str, ...], flops: Flops | None) -> None:
        self.name = rule.__name__.rstrip("_")
        self.rule, self.commutes, self.inner, self._flops = rule, commutes, inner, flops
        self.__doc__ = rule.__doc__
        parameters = inspect.signature(rule).parameters.values()
        positional = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
        self.operands = tuple(p.name for p in positional)
        self.variadic = any(p.kind is p.VAR_POSITIONAL for p in positional)
        self.optional = frozenset(p.name for p in positional if p.default is None)
        self.attrs = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    def __call__(self, *args: Any, loc: str = "", **attrs: Any) -> Any:
        args = args if self.variadic else args + (None,) * (len(self.operands) - len(args))
        if any(isinstance(a, Pattern) for a in args) or any(isinstance(a, Var) for a in attrs.values()):
            return self._pattern(args, attrs)
        operands = [_literal(a, args) for a in args]
        return self.build(operands, attrs, loc)

    def build(self, args: list[Node | None], attrs: Mapping[str, Attr], loc: str = "") -> Node:
        """The node, its type inferred by the rule."""
        if "dtype" not in self.attrs:
            attrs = {k: v for k, v in attrs.items() if k != "dtype"}
        try:
            result = self.infer([None if a is None else a.t for a in args], attrs)
        except TypeError as error:
            raise TypeMismatch(f"{self.name}: {error}") from None
        kept = {k: attrs.get(k, d) for k, d in self.attrs.items() if k != "dtype"}
        return make(self.name, args, kept, result, loc)

    def infer(self, types: list[Type | None], attrs: Mapping[str, Attr]) -> AnyType:
        for name, type in zip(self.operands, types, strict=False):
            require(type is not None or name in self.optional, f"{self.name}: operand {name} is missing")
        try:
            return self.rule(*types, **attrs)
        except TypeMismatch as error:
            raise TypeMismatch(f"{self.name}: {error}") from None

    def flops(self, node: Node) -> float:
        return self.flops_of(tuple(None if a is None else a.t for a in node.args), node.type, dict(node.attrs))

    def flops_of(self, types: tuple[Type | None, ...], result: AnyType, attrs: Mapping[str, Attr]) -> float:
        if self._flops is not None:
            return self._flops(types, result, attrs)
        results = result if isinstance(result, tuple) else (result,)
        return float(sum(t.size for t in results))

    def _pattern(self, args: tuple[Any, ...], attrs: Mapping[str, Any]) -> Call:
        defaults = {k: d for k, d in self.attrs.items() if k != "dtype"}
        wanted = {**defaults, **{k: v for k, v in attrs.items() if k != "dtype"}}
        missing = [k for k, v in wanted.items() if v is inspect.Parameter.empty]
        assert not missing, f"pattern over {self.name} must say what {missing} may be (a value or a Var)"
        return Call(self.name, args, tuple(wanted.items()), self.commutes)


def _literal(argument: Any, args: tuple[Any, ...]) -> Node | None:
    """Numbers among the operands become literals: float literals are f32, so that they are not rounded to 16 bits."""
    if argument is None or isinstance(argument, Node):
        return argument
    kinds = {a.dtype for a in args if isinstance(a, Node)}
    dtype = "f32"
    if isinstance(argument, int) and kinds <= {"i32", "i64", "i8", "u8", "bool"}:
        dtype = next(iter(sorted(kinds)), "i32")
    value = float(argument) if dtype == "f32" else argument
    return make("const", (), {"value": value}, Type(dtype, ()))


@overload
def op(rule: Rule) -> Op: ...
@overload
def op(*, commutes: bool = ..., inner: tuple[str, ...] = ..., flops: Flops | None = ...) -> Callable[[Rule], Op]: ...
def op(
    rule: Rule | None = None,
    *,
    commutes: bool = False,
    inner: tuple[str, ...] = (),
    flops: Flops | None = None,
) -> Op | Callable[[Rule], Op]:
    """Decorator: the type rule becomes a row."""
    if rule is None:
        return lambda r: Op(r, commutes, inner, flops)
    return Op(rule, commutes, inner, flops)
