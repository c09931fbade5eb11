"""Logic: literals, double negation, opposite comparisons, truth values that went through numbers. All exact."""

from __future__ import annotations

from frtc.lowering.ir import Node
from frtc.lowering.ops import OPS, and_, not_
from frtc.lowering.pattern import literal
from frtc.passes.canonical_pointwise import fit, number
from frtc.passes.rewrite import Rules

_OPPOSITE = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}


def _opposite(condition: Node) -> Node | None:
    """not not c; not (a < b) where no operand can be a NaN"""
    if condition.op == "not":
        return condition.operands[0]
    if condition.op not in _OPPOSITE or any(a.t.is_float for a in condition.operands):
        return None
    opposite: Node = OPS[_OPPOSITE[condition.op]](*condition.operands)
    return opposite


def _logic(node: Node) -> Node | None:
    """and, or with a literal or twice the same; not of not; where with a literal condition or equal branches."""
    args = node.operands
    if node.op == "not":
        return _opposite(args[0])
    if node.op == "where":
        known = literal(args[0])
        chosen = args[1] if known or args[1] is args[2] else args[2] if known is not None else None
        return None if chosen is None else fit(chosen, node)
    if args[0] is args[1]:
        return args[0]
    for this, other in (args, args[::-1]):
        known = literal(this)
        if known is not None:
            neutral = bool(known) == (node.op == "and")
            return fit(other if neutral else this, node)
    return None


def _product(node: Node) -> Node | None:
    """Truth values multiplied"""
    out: Node | None = and_(*node.operands) if all(a.dtype == "bool" for a in (node, *node.operands)) else None
    return out


def _truth_test(node: Node) -> Node | None:
    """cast(c: bool, int) != 0 -> c; == 0 -> not c; a cast of such a number to bool -> c"""
    value, against = node.operands
    if number(against) != 0 or value.op != "cast" or value.operands[0].dtype != "bool":
        return None
    condition: Node = value.operands[0] if node.op == "ne" else not_(value.operands[0])
    return fit(condition, node)


RULES = Rules(
    "logic",
    [
        (frozenset({"and", "or", "not", "where"}), _logic),
        (frozenset({"eq", "ne"}), _truth_test),
        (frozenset({"mul"}), _product),
    ],
)
