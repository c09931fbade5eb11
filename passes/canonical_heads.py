"""What surrounds an attention and belongs into it: factors on queries and keys, repeated key heads, packed queries."""

from __future__ import annotations

from frtc.lowering.ir import Node, make
from frtc.lowering.ops import attention, reshape
from frtc.passes.canonical_chains import normal
from frtc.passes.canonical_pointwise import number
from frtc.passes.rewrite import Rules

_MOVES = ("reshape", "transpose", "broadcast")


def _again(node: Node, scale: float | None = None, **operands: Node | None) -> Node:
    """The attention with other operands and scale."""
    args = [operands.get(name, old) for name, old in zip(attention.operands, node.args, strict=True)]
    attrs = {**dict(node.attrs), "scale": node["scale"] if scale is None else scale}
    y: Node = attention(*args, dtype=node.dtype, **attrs)
    return y


def _factor(x: Node) -> tuple[Node, float] | None:
    """(y, c) where x = y * c, c a literal, perhaps below moves of elements"""
    moves = []
    while x.op in _MOVES:
        moves.append(x)
        x = x.operands[0]
    if x.op not in ("mul", "div"):
        return None
    y, c = x.operands
    value = number(c)
    if not value or y.shape != x.shape or y.dtype != x.dtype:
        return None
    for move in reversed(moves):
        y = make(move.op, (y,), dict(move.attrs), move.type, move.loc)
    return y, float(value) if x.op == "mul" else 1.0 / value


def _scaled_operand(node: Node) -> Node | None:
    """A factor on q or k belongs to the scale. (In 16 bits its rounding disappears.)"""
    for name, x in (("q", node.operands[0]), ("k", node.operands[1])):
        found = _factor(x)
        if found is not None:
            return _again(node, scale=node["scale"] * found[1], **{name: found[0]})
    return None


def _unrepeated(x: Node) -> tuple[Node, int] | None:
    """(y [..., Hkv, S, D], n) where x [..., Hkv * n, S, D] holds each head of y n times in a row"""
    joined = x.op == "reshape"
    spread = x.operands[0] if joined else x
    if spread.op != "broadcast":
        return None
    y = spread.operands[0]
    if not joined:  # one head for all
        same = y.t.rank == x.t.rank and y.shape == (*x.shape[:-3], 1, *x.shape[-2:])
        return (y, x.shape[-3]) if same else None
    if x.t.rank < 3 or spread.t.rank != x.t.rank + 1 or y.t.rank != spread.t.rank:
        return None
    *lead, heads, n, rows, size = spread.shape
    if x.shape != (*lead, heads * n, rows, size) or y.shape != (*lead, heads, 1, rows, size):
        return None
    return normal(reshape(y, shape=(*lead, heads, rows, size))), n


def _grouped(node: Node) -> Node | None:
    """Key heads that were repeated for groups of query heads are read as they are."""
    k, v = _unrepeated(node.operands[1]), _unrepeated(node.operands[2])
    if k is None or v is None or k[1] != v[1]:
        return None
    return _again(node, k=k[0], v=v[0])


def _unpacked(node: Node) -> Node | None:
    """One query position whose heads were laid out as rows: [..., Hkv, n, D] out of [..., Hkv * n, 1, D]."""
    q, k, mask = node.args[0], node.args[1], node.args[3]
    assert q is not None and k is not None
    if q.op != "reshape" or node["causal"] or q.shape[-3] != k.shape[-3] or q.shape[-2] < 2:
        return None
    *lead, heads, rows, size = q.shape
    if q.operands[0].shape != (*lead, heads * rows, 1, size):
        return None
    if mask is not None and any(extent != 1 for extent in mask.shape[-3:-1]):
        return None
    return reshape(_again(node, q=q.operands[0]), shape=node.shape)  # type: ignore[no-any-return]


RULES = Rules(
    "attention_heads",
    [
        (frozenset({"attention"}), _scaled_operand),
        (frozenset({"attention"}), _grouped),
        (frozenset({"attention"}), _unpacked),
    ],
)
