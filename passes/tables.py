"""Vectors that are constant in each round of a repeat: constants, or entries of constant tables."""

from __future__ import annotations

from frtc.lowering.ir import Node
from frtc.lowering.ops import index


def table_of(vector: Node) -> tuple[Node, Node | None] | None:
    """A constant and None; the constant table that the vector is an entry of, and the round; or None."""
    if vector.is_const:
        return vector, None
    if vector.op != "index" or not vector.operands[0].is_const:
        return None
    table, round = vector.operands
    return table, round


def entry_of(table: Node, round: Node | None) -> Node:
    """The other way round."""
    if round is None:
        return table
    entry: Node = index(table, round)
    return entry
