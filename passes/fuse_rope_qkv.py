"""fuse_rope_qkv: rotation of q and k and the move of v become one launch over the merged projection.

    q = rope(view(y, q part)); k = rope(view(y, k part)); v = view(y, v part)  -> (q, k, v) = rope_qkv(y)
                               k = rope(view(y, k part)); v = view(y, v part)  -> (_, k, v) = rope_qkv(y, heads=0)
    q = rope(view(y))                                                          -> (q, _, _) = rope_qkv(y, kv_heads=0)

After layout: whatever spelling the model used, the parts are views of y with known strides. k and v can then be written
straight into the KV cache. Without queries: a last layer of which only keys and values are read. Without keys: queries
of what is attended to elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from frtc.lowering.ir import Graph, Module, Node, item, rebuild
from frtc.lowering.ops import reshape, rope_qkv, view
from frtc.lowering.strided import Strided
from frtc.passes.rewrite import Implements, Pass, count


def fuse_rope_qkv(implements: Implements) -> Pass:
    return partial(_run, implements=implements)


def _run(module: Module, implements: Implements) -> Module:
    return module.map(lambda graph: _fuse(graph, implements))


@dataclass(frozen=True, slots=True)
class _Heads:
    """A view [.., heads, rows, size] of some heads of a projection [rows, width]; leading axes have one element."""

    heads: int
    size: int
    first: int  # element of the row

    @staticmethod
    def of(node: Node, projection: Node) -> _Heads | None:
        shape, strides = node["shape"], node["strides"]
        if len(shape) < 3 or any(n != 1 for n in shape[:-3]):
            return None
        heads, rows, size = shape[-3:]
        expected = (size, projection.shape[1], 1)
        same = all(n == 1 or a == b for n, a, b in zip(shape[-3:], strides[-3:], expected, strict=True))
        return _Heads(heads, size, node["offset"]) if same and rows == projection.shape[0] else None


def _fuse(graph: Graph, implements: Implements) -> Graph:
    change: dict[Node, tuple[Node, int]] = {}  # rotated q, rotated k, view v -> (the fused node, which result)
    readers: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        for a in node.operands:
            readers.setdefault(a, []).append(node)
    for node in graph.nodes:
        if not node.is_const and isinstance(node.type, tuple) is False and len(node.shape) == 2:
            found = _match(node, readers, set(graph.roots))
            if found is not None and implements(found[0]):
                change.update({old: (found[0], i) for i, old in enumerate(found[1]) if old is not None})
                count("fuse_rope_qkv")
    rebuilt: dict[Node, Node] = {}

    def visit(old: Node, new: Node) -> Node:
        if old not in change:
            rebuilt[old] = new
            return new
        fused, which = change[old]
        y, cos, sin = (rebuilt.get(a, a) for a in fused.operands)
        attrs = {k: v for k, v in fused.attrs}
        result = item(rope_qkv(y, cos, sin, **attrs, dtype=old.dtype, loc=fused.loc), which)
        return _shaped(result, old.shape)

    return rebuild(graph, visit)


def _match(
    y: Node, readers: dict[Node, list[Node]], roots: set[Node]
) -> tuple[Node, tuple[Node | None, Node | None, Node | None]] | None:
    """The fused node and the q, k and v that it replaces, if all that reads `y` is rotations, and one move behind."""
    views = readers.get(y, [])
    if len(views) not in (1, 2, 3) or y in roots or any(v.op != "view" for v in views):
        return None
    found = [(_Heads.of(v, y), v) for v in views]
    parts = sorted(((h, v) for h, v in found if h is not None), key=lambda part: part[0].first)
    if len(parts) < len(views) or not _follow([h for h, _ in parts], y.shape[1]):
        return None
    (*others, last), moved = [h.heads for h, _ in parts], parts[-1][1]
    if others and others[-1] != last:
        return None  # as many keys as values
    ropes = [_rotation(view, readers, roots) for _, view in parts[: max(1, len(others))]]
    turned = [r for r in ropes if r is not None]
    same = {(r.args[1:], r.attrs, r.dtype) for r in turned}
    if len(turned) < len(ropes) or len(same) > 1 or turned[0].dtype != y.dtype:
        return None
    cos, sin = (_rows(a, y.shape[0], parts[0][0].size // 2) for a in turned[0].args[1:])
    if cos is None or sin is None:
        return None
    heads, kv_heads = 0 if len(parts) == 2 else parts[0][0].heads, last if others else 0
    fused: Node = rope_qkv(
        y, cos, sin, heads=heads, kv_heads=kv_heads, pairing=turned[0]["pairing"], dtype=y.dtype, loc=turned[0].loc
    )
    return fused, (turned[0] if heads else None, *((turned[-1], moved) if others else (None, None)))


def _follow(parts: list[_Heads], width: int) -> bool:
    """Heads of one size, one behind the other, that fill a row."""
    size, starts = parts[0].size, [0]
    for part in parts:
        starts.append(starts[-1] + part.heads * size)
    return all(p.size == size and p.first == at for p, at in zip(parts, starts, strict=False)) and starts[-1] == width


def _rotation(view: Node, readers: dict[Node, list[Node]], roots: set[Node]) -> Node | None:
    """The rope that alone reads `view`."""
    found = readers.get(view, [])
    alone = len(found) == 1 and found[0].op == "rope" and found[0].args[0] is view and view not in roots
    return found[0] if alone else None


def _rows(table: Node | None, rows: int, half: int) -> Node | None:
    """The table as [rows, half], if it is that up to leading axes of one element."""
    if table is None or table.t.size != rows * half or table.shape[-2:] != (rows, half):
        return None
    if len(table.shape) == 2:
        return table
    shape = (rows, half)
    flat: Node = reshape(table, shape=shape) if table.is_const else view(table, shape=shape, strides=(half, 1))
    return flat


def _shaped(node: Node, shape: tuple[int, ...]) -> Node:
    """`node` with leading axes of one element."""
    if node.shape == shape:
        return node
    packed = Strided.packed(shape)
    result: Node = view(node, shape=shape, strides=packed.strides)
    return result
