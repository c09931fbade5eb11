"""attention_sites: each attention says in its attributes which keys its queries see, instead of reading a mask.

A mask that is made of ranges, comparisons and one device scalar is computed here, as the threshold of that scalar from
which each (query, key) is visible, and compared with what kernels do without a mask:

    full      every key                            no operand
    causal    j <= i + Sk - Sq                     causal
    length    j < s + c                            length
    hole      j < s + c or j >= R                  length, resume=R

and causal with length or hole. What does not follow from the graph stays a mask, whole or in part, and the counter says
why (`site.dense: depends on valid`). Needs canonical attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from frtc.lowering.ir import Graph, Module, Node, rebuild
from frtc.lowering.ops import add, and_, attention, cast, const, maximum, minimum, reshape
from frtc.passes.mask_values import value_of
from frtc.passes.rewrite import count
from frtc.passes.thresholds import NEVER, Array, Bools, Unknown, Value


@dataclass(frozen=True, slots=True)
class Site:
    """What the queries see: keys before `length` (None: all), keys from `resume` on (-1: none), causally or not."""

    causal: bool
    length: Node | None
    resume: int

    @property
    def kind(self) -> str:
        keys = "" if self.length is None else "length" if self.resume < 0 else "hole"
        return "+".join(["causal"] * self.causal + [keys] * bool(keys)) or "full"


def attention_sites(module: Module) -> Module:
    return module.map(_with_sites)


def _with_sites(graph: Graph) -> Graph:
    known: dict[Node, Value] = {}

    def visit(old: Node, new: Node) -> Node:
        return _selected(new, known) if new.op == "attention" and new.args[3] is not None else new

    return rebuild(graph, visit)


def _selected(node: Node, known: dict[Node, Value]) -> Node:
    mask = node.args[3]
    assert mask is not None
    if node.args[4] is not None:
        count("site.dense: has a length already")
        return node
    rows, keys = node.shape[-2], node.operands[1].shape[-2]
    try:
        site, rest = classify(mask, rows, keys, known), None
    except Unknown as reason:
        count(f"site.dense: {reason}")
        parts = _partly(mask, rows, keys, known)
        if parts is None:
            return node
        site, rest = parts
    count(f"site.{site.kind}" if rest is None else f"site.{site.kind}+mask")
    attrs = {**dict(node.attrs), "causal": site.causal or node["causal"], "resume": site.resume}
    y: Node = attention(*node.args[:3], rest, site.length, dtype=node.dtype, loc=node.loc, **attrs)
    return y


def _partly(mask: Node, rows: int, keys: int, known: dict[Node, Value]) -> tuple[Site, Node] | None:
    """One conjunct of the mask as a site, the others as what remains."""
    conjuncts = _conjuncts(mask)
    for one in conjuncts if len(conjuncts) > 1 else []:
        try:
            site = classify(one, rows, keys, known)
        except Unknown:
            continue
        rest = [c for c in conjuncts if c is not one]
        remaining = rest[0]
        for c in rest[1:]:
            remaining = and_(remaining, c)
        return site, remaining
    return None


def _conjuncts(mask: Node) -> list[Node]:
    return [c for a in mask.operands for c in _conjuncts(a)] if mask.op == "and" else [mask]


def classify(mask: Node, rows: int, keys: int, known: dict[Node, Value]) -> Site:
    """The site of a mask over scores [..., rows, keys]. Raises Unknown with the reason."""
    value = value_of(mask, known)
    assert isinstance(value, Bools)
    if not value.rising:
        raise Unknown("hides the first keys")
    at = _matrix(value.at, rows, keys)
    causal = False
    if not (at == at[:1]).all():
        ahead = np.arange(keys) > np.arange(rows)[:, None] + keys - rows
        causal = bool((at == np.where(ahead, NEVER, at[-1])).all())
        if not causal:
            steps = np.arange(keys) - np.arange(rows)[:, None]
            moved = bool((at - steps == at[0, 0]).all())
            raise Unknown("causal from a device position" if moved else "differs between queries, not causally")
    length, resume = _bounds(at[-1], value.s)
    return Site(causal, length, resume)


def _matrix(at: Array, rows: int, keys: int) -> Array:
    """Thresholds [rows, keys] of a mask that broadcasts to [..., rows, keys]; leading axes must not matter."""
    at = at.reshape((1,) * (2 - at.ndim) + at.shape)
    first = at.reshape(-1, *at.shape[-2:])[:1]
    if not (at == first).all():
        raise Unknown("differs between heads or batches")
    return np.broadcast_to(first[0], (rows, keys))


def _bounds(at: Array, s: Node | None) -> tuple[Node | None, int]:
    """(length, resume) of thresholds [keys]: visible up to a; from a to b where j < s + c; hidden up to resume."""
    bounded = np.flatnonzero(at != -NEVER)
    if bounded.size == 0:
        return None, -1
    a, resume = int(bounded[0]), int(bounded[-1]) + 1
    seen = np.flatnonzero(at[:resume] != NEVER)
    b = int(seen[-1]) + 1 if seen.size else 0
    a = min(a, b)
    if a == b:
        return const(a, "i32"), resume if resume < at.size else -1
    assert s is not None
    c = a + 1 - int(at[a])
    if not (at[a:b] == np.arange(a, b) + 1 - c).all():
        raise Unknown("is no run of keys up to a length")
    length = _scalar(s, c)
    length = maximum(length, const(a, "i32")) if a else length
    length = minimum(length, const(b, "i32")) if b < resume else length
    return length, resume if resume < at.size else -1


def _scalar(s: Node, c: int) -> Node:
    """s + c as i32[]"""
    s = s if s.t.rank == 0 else reshape(s, shape=())
    s = s if s.dtype == "i32" else cast(s, dtype="i32")
    out: Node = add(s, const(c, "i32")) if c else s
    return out
