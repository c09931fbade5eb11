"""fuse_pointwise: a tree of pointwise ops becomes one.

    mul(sub(a, b), sub(a, b))  ->  pointwise(a, b; expr)
    view(pointwise(a; expr))   ->  pointwise(view(a); expr)        where the view permutes all elements

One launch instead of several, and what lies between is neither rounded nor stored. An operand is drawn in only if
nothing else reads it and it has the shape of the result, so that nothing is computed twice; a cast also where it has
fewer elements, because loading converts anyway. Where all readers have few elements, positions and angles for instance,
each of them computes the operand anew: that costs less than a launch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial

from frtc.lowering.ir import Graph, Module, Node, Type, rebuild
from frtc.lowering.ops import POINTWISE, pointwise, view
from frtc.lowering.pointwise import program
from frtc.lowering.strided import Strided
from frtc.passes.rewrite import Implements, Pass, count

MAX_STEPS = 64
FEW = 1 << 14  # elements: an H200 computes them in less than the 0.8 us that a launch adds


def fuse_pointwise(implements: Implements) -> Pass:
    return partial(_run, implements=implements)


def _run(module: Module, implements: Implements) -> Module:
    return module.map(lambda graph: _fuse(graph, implements))


def _fuse(graph: Graph, implements: Implements) -> Graph:
    uses = graph.users()
    fusible = {n for n in graph.nodes if n.op in POINTWISE and isinstance(n.type, Type) and not n.is_const}
    small = Counter(a for n in fusible if n.t.size <= FEW for a in n.operands)
    done: dict[Node, Node] = {}

    def visit(old: Node, new: Node) -> Node:
        operands = dict.fromkeys(old.operands) if old in fusible else ()
        if inner := [a for a in operands if a in fusible and (_drawn_in(old, a, uses) or small[a] == uses[a])]:
            fused = program(new, [done[a] for a in inner])
            if len(fused["expr"]) <= MAX_STEPS and implements(fused):
                count("fuse_pointwise")
                new = fused
        elif old.op == "view" and old.args[0] in fusible and uses[old.args[0]] == 1:
            moved = _permuted(new)
            if moved is not None:
                new = moved
                fusible.add(old)
        done[old] = new
        return new

    return rebuild(graph, visit)


def _permuted(new: Node) -> Node | None:
    """The pointwise op under a view that visits every element once, computed in the order of the view.

    Where that is its own order: only a small one, for the readers to draw it in.
    """
    inner = new.operands[0]
    strided = Strided(new["shape"], new["strides"], new["offset"])
    if not strided.is_dense or new.t.size != inner.t.size or inner.op not in POINTWISE:
        return None
    if strided.is_packed and new.t.size > FEW:
        return None
    fused = program(inner)
    if any(a.shape not in ((), inner.shape) for a in fused.operands):
        return None
    moved = [
        a if a.shape == () else view(a, shape=strided.shape, strides=strided.strides, offset=strided.offset)
        for a in fused.operands
    ]
    count("permute_pointwise")
    result: Node = pointwise(
        *moved, expr=fused["expr"], results=fused["results"], shape=strided.shape, dtype=new.dtype, loc=inner.loc
    )
    return result


def _drawn_in(reader: Node, operand: Node, uses: Mapping[Node, int]) -> bool:
    """Nothing else reads the operand, and it has as many elements as the result or only converts."""
    converts = operand.op == "cast" and operand.args[0] is not None and operand.args[0].op not in POINTWISE
    alone = uses[operand] == sum(a is operand for a in reader.operands)
    return alone and (operand.shape == reader.shape or converts)
