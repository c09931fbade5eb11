"""Patterns: graphs with holes, written with the ops themselves, and the matcher.

`mul(Var("a"), rsqrt(Var("b")))` is a pattern because one of its arguments is. The same variable must match the same
node. Operands of commutative ops match in either order; numbers match literals with that value in every element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from frtc.lowering.ir import Attr, Node, Type

Bindings = dict[str, Any]
Uses = Mapping[Node, int]


class Pattern:
    """Anything that can stand where a node stands in a pattern."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Var(Pattern):
    """A hole for one node, or, in an attribute's place, for its value.

    const   True: only values made of literals and parameters; False: only others
    dtype   element type the node must have
    where   further condition on the node or value
    """

    name: str
    const: bool | None = None
    dtype: str | None = None
    where: Callable[[Any], bool] | None = None

    def accepts(self, value: Any) -> bool:
        if isinstance(value, Node):
            if self.const is not None and value.is_const != self.const:
                return False
            if self.dtype is not None and not (isinstance(value.type, Type) and value.dtype == self.dtype):
                return False
        return self.where is None or self.where(value)


@dataclass(frozen=True, slots=True)
class Call(Pattern):
    """An op applied to patterns. Attributes not mentioned must have their default."""

    op: str
    args: tuple[Any, ...]  # Pattern, Node, number or None
    attrs: tuple[tuple[str, Any], ...]
    commutes: bool


@dataclass(frozen=True, slots=True)
class Once(Pattern):
    """The node must have no other user: fusing it away saves its computation."""

    inner: Pattern


@dataclass(frozen=True, slots=True)
class Maybe(Pattern):
    """`inner` or, if it does not match, whatever its variable `skip` accepts: an optional cast, say."""

    inner: Pattern
    skip: Pattern


def once(pattern: Any) -> Any:
    return Once(pattern)


def literal(node: Node) -> int | float | bool | None:
    """The number that every element of a literal holds, or None."""
    if node.op in ("cast", "broadcast", "reshape") and node.is_const and node.args[0] is not None:
        return literal(node.args[0])
    return node.get("value") if node.op == "const" else None


def match(pattern: Any, node: Node | None, uses: Uses, bound: Bindings) -> Iterator[Bindings]:
    """All ways in which `pattern` matches `node`, each as the extended bindings."""
    if isinstance(pattern, Var):
        if node is not None:
            yield from _bind(pattern, node, bound)
    elif isinstance(pattern, Once):
        if node is not None and uses.get(node, 1) == 1:
            yield from match(pattern.inner, node, uses, bound)
    elif isinstance(pattern, Maybe):
        found = False
        for b in match(pattern.inner, node, uses, bound):
            found = True
            yield b
        if not found:
            yield from match(pattern.skip, node, uses, bound)
    elif isinstance(pattern, Call):
        if node is not None and node.op == pattern.op:
            yield from _match_call(pattern, node, uses, bound)
    elif isinstance(pattern, (int, float)):
        if node is not None and _same_number(literal(node), pattern):
            yield bound
    elif pattern is node:  # a concrete node, or None for an absent operand
        yield bound


def _same_number(found: Attr, wanted: float) -> bool:
    return found is not None and not isinstance(found, bool) and found == wanted


def _bind(var: Var, value: Any, bound: Bindings) -> Iterator[Bindings]:
    if var.name in bound:
        known = bound[var.name]
        if known is value or (not isinstance(value, Node) and known == value):
            yield bound
    elif var.accepts(value):
        yield {**bound, var.name: value}


def _match_call(pattern: Call, node: Node, uses: Uses, bound: Bindings) -> Iterator[Bindings]:
    if len(pattern.args) != len(node.args):
        return
    for name, wanted in pattern.attrs:
        value = node.get(name)
        if isinstance(wanted, Var):
            extended = next(_bind(wanted, value, bound), None)
            if extended is None:
                return
            bound = extended
        elif value != wanted:
            return
    orders = [node.args]
    if pattern.commutes and node.args[0] is not node.args[1]:
        orders.append((node.args[1], node.args[0]))
    for args in orders:
        yield from _match_args(pattern.args, args, uses, bound)


def _match_args(patterns: tuple[Any, ...], args: tuple[Any, ...], uses: Uses, bound: Bindings) -> Iterator[Bindings]:
    if not patterns:
        yield bound
        return
    for b in match(patterns[0], args[0], uses, bound):
        yield from _match_args(patterns[1:], args[1:], uses, b)
