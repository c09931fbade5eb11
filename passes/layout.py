"""layout: reshape, transpose, slice and broadcast become strided views of the value they start from.

    slice(reshape(x)) -> view(x, shape, strides, offset)

No data moves for a view; kernels read it by its strides. A reshape that no strides can express stays: its operand is
written where the reshape wants it, or copied.
Last in the pipeline: no rule matches views.
"""

from __future__ import annotations

from frtc.lowering.ir import Graph, Module, Node, rebuild
from frtc.lowering.ops import SHAPE, view
from frtc.lowering.strided import Strided
from frtc.passes.rewrite import count


def layout(module: Module) -> Module:
    return module.map(_layout)


def _layout(graph: Graph) -> Graph:
    views: dict[Node, tuple[Node, Strided]] = {}

    def visit(old: Node, new: Node) -> Node:
        if new.op not in SHAPE or new.is_const:
            return new
        source = new.args[0]
        assert source is not None
        base, strided = views.get(source, (source, Strided.packed(source.shape)))
        moved = apply(new, strided)
        if moved is None:
            return new
        result = base
        if not (moved.is_packed and moved.shape == base.shape):
            result = view(base, shape=moved.shape, strides=moved.strides, offset=moved.offset, loc=new.loc)
            views[result] = (base, moved)
            if new.op != "view":
                count("layout")
        return result

    return rebuild(graph, visit)


def apply(node: Node, strided: Strided) -> Strided | None:
    """The shape op `node` applied to a view; None if elements would have to move."""
    if node.op == "transpose":
        return strided.transpose(node["perm"])
    if node.op == "slice":
        return strided.slice(node["axis"], node["start"], node["stop"], node["step"])
    if node.op == "broadcast":
        return strided.broadcast(node["shape"])
    if node.op == "view":
        return Strided(node["shape"], node["strides"], node["offset"]) if strided.is_packed else None
    return strided.reshape(node["shape"])
