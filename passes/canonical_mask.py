"""Additive masks as conditions: a float tensor that is 0 where a key is visible and hugely negative where it is not.

A blocked score is at most -1e9: e^(-1e9 + anything a model computes) is zero in fp32. A query that sees no key at all
is the exception: the sources then average over garbage, `attention` yields zeros; such rows are never read.
"""

from __future__ import annotations

from frtc.lowering.ir import Node, Type, make
from frtc.lowering.ops import and_, broadcast, const, not_
from frtc.passes.canonical_pointwise import number

BLOCKED = -1e9


def _blocks(node: Node) -> bool:
    value = number(node)
    return value is not None and value <= BLOCKED


def _passes(node: Node) -> bool:
    return number(node) == 0


def shown(condition: Node, mask: Node) -> Node:
    """`condition` in the shape of the mask it came from."""
    out: Node = condition if condition.shape == mask.shape else broadcast(condition, shape=mask.shape)
    return out


def visible(mask: Node) -> Node | None:
    """The condition (bool, same shape) under which the mask lets a score pass; None if it is no such mask."""
    if _passes(mask) or _blocks(mask):
        return const(_passes(mask), "bool", mask.shape)
    if mask.op == "where":
        return _of_where(mask)
    if mask.op == "add":
        both = [visible(a) for a in mask.operands]
        return None if None in both else shown(and_(*both), mask)
    if mask.op == "mul":
        return _of_product(mask)
    if mask.op == "cast" and mask.operands[0].t.is_float:
        return visible(mask.operands[0])
    if mask.op in ("reshape", "broadcast", "transpose", "slice", "concat"):
        parts = [visible(a) for a in mask.operands]
        moved = None if None in parts else make(mask.op, parts, dict(mask.attrs), Type("bool", mask.shape), mask.loc)
        return moved
    return None


def _of_where(mask: Node) -> Node | None:
    """where(c, 0, -huge), where(c, -huge, 0), and the same with a further mask in place of the 0"""
    condition, a, b = mask.operands
    if _blocks(b):
        rest = visible(a)
        return None if rest is None else shown(and_(condition, rest), mask)
    if _blocks(a):
        rest = visible(b)
        return None if rest is None else shown(and_(not_(condition), rest), mask)
    return None


def _of_product(mask: Node) -> Node | None:
    """(1 - c) * -huge and (not c) * -huge, c a truth value as a number"""
    for flag, huge in (mask.operands, mask.operands[::-1]):
        if not _blocks(huge):
            continue
        if flag.op == "cast" and flag.operands[0].dtype == "bool":
            return shown(not_(flag.operands[0]), mask)
        if flag.op == "sub" and number(flag.operands[0]) == 1:
            known = flag.operands[1]
            if known.op == "cast" and known.operands[0].dtype == "bool":
                return shown(known.operands[0], mask)
    return None
