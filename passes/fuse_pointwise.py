"""fuse_pointwise: a tree of pointwise ops becomes one.

    mul(sub(a, b), sub(a, b))  ->  pointwise(a, b; expr)

One launch instead of several, and what lies between is neither rounded nor stored. An operand is drawn in only if nothing else
reads it and it has the shape of the result, so that nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from frtc.lowering.ir import Graph, Module, Node, rebuild
from frtc.lowering.ops import POINTWISE
from frtc.lowering.pointwise import program
from frtc.passes.rewrite import Pass, count

Implements = Callable[[Node], bool]
MAX_STEPS = 64


def fuse_pointwise(implements: Implements) -> Pass:
    return partial(_run, implements=implements)


def _run(module: Module, implements: Implements) -> Module:
    return module.map(lambda graph: _fuse(graph, implements))


def _fuse(graph: Graph, implements: Implements) -> Graph:
    uses = graph.users()
    fusible = {n for n in graph.nodes if n.op in POINTWISE and not n.is_const}
    done: dict[Node, Node] = {}

    def visit(old: Node, new: Node) -> Node:
        inner = [a for a in dict.fromkeys(old.operands) if a in fusible and _drawn_in(old, a, uses)]
        if old in fusible and inner:
            fused = program(new, [done[a] for a in inner])
            if len(fused["expr"]) <= MAX_STEPS and implements(fused):
                count("fuse_pointwise")
                new = fused
        done[old] = new
        return new

    return rebuild(graph, visit)


def _drawn_in(reader: Node, operand: Node, uses: Mapping[Node, int]) -> bool:
    """Nothing else reads the operand, and it has as many elements as the result."""
    return uses[operand] == sum(a is operand for a in reader.operands) and operand.shape == reader.shape
