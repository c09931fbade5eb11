"""fuse_rope_qkv: rotation of q and k and the move of v become one launch over the merged projection.

    q = rope(view(y, q part)); k = rope(view(y, k part)); v = view(y, v part)  -> (q, k, v) = rope_qkv(y)

After layout: whatever spelling the model used, the parts are views of y with known strides. k and v can then be written
straight into the KV cache.
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
                change.update({old: (found[0], i) for i, old in enumerate(found[1])})
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


def _match(y: Node, readers: dict[Node, list[Node]], roots: set[Node]) -> tuple[Node, list[Node]] | None:
    """The fused node, and the three values it replaces, if all that reads `y` is two rotations and one move."""
    views = readers.get(y, [])
    if len(views) != 3 or y in roots or any(v.op != "view" for v in views):
        return None
    parts = [(_Heads.of(v, y), v) for v in views]
    if any(h is None for h, _ in parts):
        return None
    ordered = sorted(((h, v) for h, v in parts if h is not None), key=lambda part: part[0].first)
    (q, qv), (k, kv), (v, vv) = ordered
    contiguous = q.first == 0 and k.first == q.heads * q.size and v.first == k.first + k.heads * k.size
    if not contiguous or k != _Heads(v.heads, v.size, k.first) or (q.heads + 2 * k.heads) * q.size != y.shape[1]:
        return None
    ropes = [readers.get(qv, []), readers.get(kv, [])]
    if any(len(r) != 1 or r[0].op != "rope" or r[0].args[0] not in (qv, kv) for r in ropes) or {qv, kv} & roots:
        return None
    rq, rk = ropes[0][0], ropes[1][0]
    if rq.args[1:] != rk.args[1:] or rq.attrs != rk.attrs or rq.dtype != rk.dtype or rq.dtype != y.dtype:
        return None
    cos, sin = (_rows(a, y.shape[0], q.size // 2) for a in rq.args[1:])
    if cos is None or sin is None:
        return None
    fused: Node = rope_qkv(
        y, cos, sin, heads=q.heads, kv_heads=k.heads, pairing=rq["pairing"], dtype=rq.dtype, loc=rq.loc
    )
    return fused, [rq, rk, vv]


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
