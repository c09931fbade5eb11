"""Fused pointwise programs: pointwise nodes, single or fused already, become one `pointwise` node.

A program that a node draws in has one result; one for several nodes has a result for each of them. Literals among the
operands become numbers of the program; equal steps are computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frtc.lowering.ir import Node
from frtc.lowering.ops import pointwise
from frtc.lowering.pattern import literal


def program(node: Node, inner: Sequence[Node] = ()) -> Node:
    """`node` as a fused program, with the programs of its operands `inner` in front of its own."""
    return _fused([node], inner)


def joint(nodes: Sequence[Node]) -> Node:
    """One program for nodes of one shape: result i is what nodes[i] computes."""
    return _fused(nodes, ())


def _fused(nodes: Sequence[Node], inner: Sequence[Node]) -> Node:
    asked = dict.fromkeys(a for node in nodes for a in node.operands)
    read = [b for a in asked for b in (a.operands if a in inner else (a,))]
    operands = [b for b in dict.fromkeys(read) if literal(b) is None]
    steps: list[tuple[Any, ...]] = []
    build = _Program(operands, steps)
    known = {a: build.add(a) if a in inner else build.value(a) for a in asked}
    results = tuple(build.add(node, known) for node in nodes)
    *others, last = nodes
    dtypes, shape = tuple(node.dtype for node in others), last.shape
    fused: Node = pointwise(
        *operands, expr=tuple(steps), results=results, shape=shape, others=dtypes, dtype=last.dtype, loc=nodes[0].loc
    )
    return fused


class _Program:
    """Steps under construction over known operands."""

    def __init__(self, operands: list[Node], steps: list[tuple[Any, ...]]) -> None:
        self.operands, self.steps = operands, steps

    def value(self, node: Node) -> int:
        """The number of an operand or literal."""
        number = literal(node)
        return self.operands.index(node) if number is None else self._step(("const", number))

    def add(self, node: Node, known: dict[Node, int] | None = None) -> int:
        """The number of what `node`, which has one result, computes."""
        inputs = [(known or {}).get(a, -1) for a in node.operands]
        inputs = [self.value(a) if i < 0 else i for i, a in zip(inputs, node.operands, strict=True)]
        if node.op != "pointwise":
            return self._step((node.op, *inputs, node.dtype) if node.op == "cast" else (node.op, *inputs))
        numbers = list(inputs)
        for op, *arguments in node["expr"]:
            tail = [arguments.pop()] if op == "cast" else []
            moved = arguments if op == "const" else [numbers[i] for i in arguments]
            numbers.append(self._step((op, *moved, *tail)))
        result: int = numbers[node["results"][0]]
        return result

    def _step(self, step: tuple[Any, ...]) -> int:
        written = [repr(s) for s in self.steps]  # repr tells 1, 1.0 and True apart
        if repr(step) not in written:
            self.steps.append(step)
            return len(self.operands) + len(written)
        return len(self.operands) + written.index(repr(step))
