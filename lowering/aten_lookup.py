"""ATen ops that read or write at positions: embedding, indexing, and the updates of states.

Inside a chain of updates of a state the first operand is a version of that state (an op `state` or `write`), and the
result is the next version. Everywhere else these ops get and give plain values.
"""

from __future__ import annotations

from collections.abc import Sequence

from frtc.lowering import ops
from frtc.lowering.aten import Call, Lowering, Unsupported, broadcast, cast, negative, number, reshape
from frtc.lowering.aten_shape import cut
from frtc.lowering.ir import Node

VERSIONS = frozenset({"state", "write"})
_SAME_ELEMENTS = frozenset({"reshape", "broadcast", "transpose", "slice"})


def embedding(c: Call, table: Node, ids: Node, *_: object) -> Node:
    """Rows of table[V, D] by ids; the padding row is a row like any other."""
    node: Node = ops.embedding(table, ids, dtype=c.dtype)
    return node


def index_select(c: Call, x: Node, dim: int, ids: Node) -> Node:
    """Entries of one axis, in the order of ids [n]"""
    return _gather(c, x, negative(dim, len(x.shape)) + len(x.shape), [ids])


def index(c: Call, x: Node, indices: Sequence[Node | None]) -> Node:
    """x[i, j, ...]: index tensors broadcast together and stand next to each other among the axes of x."""
    used = [n for n, i in enumerate(indices) if i is not None]
    given = [i for i in indices if i is not None]
    if used != list(range(used[0], used[0] + len(used))):
        raise Unsupported("index tensors with an axis between them")
    if any(i.dtype == "bool" for i in given):
        raise Unsupported("a boolean mask as an index: the shape of the result depends on the data")
    return _gather(c, x, used[0], given)


def _gather(c: Call, x: Node, first: int, indices: list[Node]) -> Node:
    """Axes first, first + 1, ... of x looked up by one index tensor each, as rows of a table."""
    last = first + len(indices)
    lead, looked_up, rest = x.shape[:first], x.shape[first:last], x.shape[last:]
    rank = len(x.shape)
    order = tuple(a - rank for a in (*range(first, last), *range(first), *range(last, rank)))
    table = x if first == 0 else ops.transpose(x, perm=order)
    entries, width = _size(looked_up), _size(lead + rest)
    rows = ops.embedding(reshape(table, (entries, width)), _flat_position(indices, looked_up), dtype=c.dtype)
    found = c.shape[first : len(c.shape) - len(rest)]
    if first == 0:
        return reshape(rows, c.shape)
    apart, n = reshape(rows, (*found, *lead, *rest)), len(c.shape)
    perm = (*range(len(found), len(found) + first), *range(len(found)), *range(len(found) + first, n))
    node: Node = ops.transpose(apart, perm=tuple(a - n for a in perm))
    return node


def _flat_position(indices: list[Node], extents: tuple[int, ...]) -> Node:
    """Row-major position of the indexed entry. Negative indices count from the end."""
    position: Node | None = None
    for i, extent in zip(indices, extents, strict=True):
        at = i if _non_negative(i) else ops.mod(i, number(extent, i.dtype), dtype=i.dtype)
        if position is None:
            position = at
        else:
            dtype = ops.promote(position.t, at.t)
            position = ops.add(ops.mul(position, number(extent, dtype), dtype=dtype), at, dtype=dtype)
    assert position is not None
    return position


def _non_negative(i: Node) -> bool:
    """Surely no negative index: made of iota and non-negative numbers."""
    if i.op == "const":
        return i.get("value") is not None and i["value"] >= 0
    counted = _SAME_ELEMENTS | {"cast", "add", "mul"}
    return i.op == "iota" or (i.op in counted and all(_non_negative(a) for a in i.operands))


def _size(shape: tuple[int, ...]) -> int:
    n = 1
    for extent in shape:
        n *= extent
    return n


# --- updates ------------------------------------------------------------------------------------------------------


def index_copy(c: Call, x: Node, dim: int, ids: Node, source: Node) -> Node:
    """x with source at the positions ids [n] of one axis"""
    axis = negative(dim, len(x.shape))
    return _place(x, cast(source, x.dtype), _first(ids), axis)


def index_put(c: Call, x: Node, indices: Sequence[Node | None], source: Node, accumulate: bool = False) -> Node:
    """x[..., ids, ...] = source, positions along one axis"""
    used = [n for n, i in enumerate(indices) if i is not None]
    if accumulate or len(used) != 1:
        raise Unsupported("an update at positions of several axes, or one that adds")
    ids = indices[used[0]]
    assert ids is not None
    axis = used[0] - len(x.shape)
    shape = list(x.shape)
    shape[axis] = ids.t.size
    return _place(x, broadcast(cast(source, x.dtype), tuple(shape)), _first(ids), axis)


def slice_scatter(
    c: Call,
    x: Node,
    source: Node,
    dim: int = 0,
    start: int | None = None,
    stop: int | None = None,
    step: int = 1,
) -> Node:
    """x with source at [start:stop] of one axis"""
    first, _, _ = slice(start, stop).indices(x.shape[dim])
    if step != 1:
        raise Unsupported(f"an update of every {step}th position")
    return _place(x, cast(source, x.dtype), ops.const(first, "i32"), negative(dim, len(x.shape)))


def select_scatter(c: Call, x: Node, source: Node, dim: int, at: int) -> Node:
    """x with source as entry `at` of one axis"""
    axis = negative(dim, len(x.shape))
    shape = list(x.shape)
    shape[axis] = 1
    first = ops.const(at if at >= 0 else at + x.shape[axis], "i32")
    return _place(x, reshape(cast(source, x.dtype), tuple(shape)), first, axis)


def copy(c: Call, x: Node, source: Node, *_: object) -> Node:
    """The whole of x replaced"""
    value = broadcast(cast(source, c.dtype), c.shape)
    return _place(x, value, ops.const(0, "i32"), -1) if x.op in VERSIONS else value


def _place(x: Node, value: Node, at: Node, axis: int) -> Node:
    """`value` from position `at` on along `axis`: the next version where x is one, else the pieces joined anew."""
    if x.op in VERSIONS:
        node: Node = ops.write(x, value, at, axis=axis)
        return node
    start, extent = at.get("value"), x.shape[axis]
    if at.op != "const" or start is None:
        raise Unsupported("an update at a computed position of a tensor that is not a buffer of the module")
    end = start + value.shape[axis]
    parts = [cut(x, axis, 0, start)] if start else []
    parts += [value] + ([cut(x, axis, end, extent)] if end < extent else [])
    joined: Node = parts[0] if len(parts) == 1 else ops.concat(*parts, axis=axis)
    return joined


def _first(ids: Node) -> Node:
    """The first of consecutive positions, as a scalar. Only what is surely consecutive is accepted."""
    found = _run_start(ids)
    if found is None:
        raise Unsupported("an update at positions that are not consecutive; write them as torch.arange(n) + start")
    return found


def _run_start(ids: Node) -> Node | None:
    """at, where ids is at, at + 1, ..."""
    if ids.t.size == 1:
        return reshape(ids, ())
    if ids.op == "iota":
        return ops.const(0, ids.dtype)
    x = ids.args[0] if ids.args else None
    if ids.op in ("reshape", "broadcast", "cast") and x is not None and x.t.size == ids.t.size:
        start = _run_start(x)
        return None if start is None else cast(start, ids.dtype)
    if ids.op == "slice" and x is not None and ids["step"] == 1:
        start = _run_start(x)
        return None if start is None else _sum(start, ops.const(ids["start"], ids.dtype), ids.dtype)
    if ids.op == "add":
        a, b = ids.operands
        run, offset = (a, b) if b.t.size == 1 else (b, a)
        start = _run_start(run) if offset.t.size == 1 else None
        return None if start is None else _sum(start, reshape(offset, ()), ids.dtype)
    return None


def _sum(a: Node, b: Node, dtype: str) -> Node:
    if a.op == b.op == "const":
        return ops.const(a["value"] + b["value"], dtype)
    for one, other in ((a, b), (b, a)):
        if one.op == "const" and one.get("value") == 0:
            return cast(other, dtype)
    node: Node = ops.add(a, b, dtype=dtype)
    return node


UPDATES: dict[str, Lowering] = {
    "index_copy.default": index_copy,
    "index_put.default": index_put,
    "slice_scatter.default": slice_scatter,
    "select_scatter.default": select_scatter,
    "copy.default": copy,
}
ATEN: dict[str, Lowering] = {
    "embedding.default": embedding,
    "index_select.default": index_select,
    "index.Tensor": index,
    **UPDATES,
}
