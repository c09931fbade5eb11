"""Ops that only move elements: each chain of reshapes and transposes in its shortest spelling, no moves without effect.

A chain over x is one strided view of x's elements. Two chains that mean the same view become the same nodes, whatever
order the front end wrote them in (canonical_chains).
"""

from __future__ import annotations

from frtc.lowering.ir import Node, Type, make
from frtc.lowering.ops import OPS, POINTWISE, broadcast, broadcast_shapes, concat, reshape, slice_
from frtc.passes.canonical_chains import normal
from frtc.passes.rewrite import Rules

_BINARY = frozenset(n for n in POINTWISE if len(OPS[n].operands) > 1)


def _unmoved(node: Node) -> Node | None:
    """A move that moves nothing; a broadcast that only adds unit axes is a reshape."""
    (value,) = node.operands
    if value.shape == node.shape:
        return value
    out: Node | None = None
    if node.op == "broadcast" and value.t.size == node.t.size:
        out = reshape(value, shape=node.shape)
    return out


def _keepdims(node: Node) -> Node | None:
    """Reductions keep their axes; a reshape drops them."""
    if node["keepdims"]:
        return None
    (value,) = node.operands
    row = OPS[node.op]
    attrs = {"axes": node["axes"], "keepdims": True, "dtype": node.dtype}
    kept = row.build([value], attrs)
    out: Node = reshape(kept, shape=node.shape)
    return out


def _slice_of(node: Node) -> Node | None:
    """A slice of a slice, of a part of a concatenation, or of everything."""
    (value,) = node.operands
    axis, start, stop, step = node["axis"], node["start"], node["stop"], node["step"]
    at, out = 0, None
    if value.op == "slice" and value["axis"] == axis and value["step"] == 1:
        at = value["start"]
        out = slice_(value.operands[0], axis=axis, start=at + start, stop=at + stop, step=step)
    for part in value.operands if value.op == "concat" and value["axis"] == axis else ():
        if at <= start and stop <= at + part.shape[axis]:
            out = slice_(part, axis=axis, start=start - at, stop=stop - at, step=step)
        at += part.shape[axis]
    return out


def _joined(node: Node) -> Node | None:
    """Concatenated slices that continue each other are one slice; concatenations within concatenations are one."""
    axis, parts = node["axis"], node.operands
    flat = [p for part in parts for p in (part.operands if part.op == "concat" and part["axis"] == axis else (part,))]
    out: list[Node] = []
    for part in flat:
        if out and (joint := _continued(out[-1], part, axis)) is not None:
            out[-1] = joint
        elif part.shape[axis] > 0:
            out.append(part)
    if tuple(out) == parts or not out:
        return None
    return out[0] if len(out) == 1 else concat(*out, axis=axis)


def _continued(a: Node, b: Node, axis: int) -> Node | None:
    if a.op != "slice" or b.op != "slice" or a.operands != b.operands or not a["axis"] == b["axis"] == axis:
        return None
    if a["step"] != 1 or b["step"] != 1 or a["stop"] != b["start"]:
        return None
    source = a.operands[0]
    whole = a["start"] == 0 and b["stop"] == source.shape[axis]
    return source if whole else slice_(source, axis=axis, start=a["start"], stop=b["stop"])


def _plain_operands(node: Node) -> Node | None:
    """Pointwise ops broadcast by themselves: no broadcast and no leading unit axes on an operand."""
    args = list(node.operands)
    for i, a in enumerate(args):
        lead = a.t.rank - a.operands[0].t.rank if a.op == "reshape" else 0
        grown = lead > 0 and a.shape == (1,) * lead + a.operands[0].shape
        if a.op == "broadcast" or (grown and a.t.size < node.t.size):
            args[i] = a.operands[0]
        if broadcast_shapes(*(n.shape for n in args)) != node.shape:
            args[i] = a
    if tuple(args) == node.args:
        return None
    return make(node.op, args, dict(node.attrs), node.type, node.loc)


def _broadcast_twice(node: Node) -> Node | None:
    (value,) = node.operands
    return broadcast(value.operands[0], shape=node.shape) if value.op == "broadcast" else None


def spread(node: Node) -> Node | None:
    """A reshape of a literal, or a move of a uniform one, is that literal in another shape."""
    (value,) = node.operands
    if value.op != "const" or value.get("value") is None:
        return None
    return make("const", (), dict(value.attrs), Type(value.dtype, node.shape))


RULES = Rules(
    "shape",
    [
        (frozenset({"reshape", "broadcast", "slice"}), _unmoved),
        (frozenset({"reshape", "transpose", "broadcast", "slice"}), spread),
        (frozenset({"reshape", "transpose"}), normal),
        (frozenset({"broadcast"}), _broadcast_twice),
        (frozenset({"slice"}), _slice_of),
        (frozenset({"concat"}), _joined),
        (frozenset(n for n in OPS if n.startswith("reduce_")), _keepdims),
        (_BINARY, _plain_operands),
    ],
)
