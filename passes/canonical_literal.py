"""Small arithmetic on literals is done here and now: shapes, offsets, comparisons of short ranges, scalar factors.

Exactly as typed, with ops that every machine rounds alike; anything else (tables, exponentials) is left to
`fold_constants`, which works in float64. Device scalars are not literals and stay.
"""

from __future__ import annotations

import numpy as np

from frtc.lowering.interpret import run
from frtc.lowering.ir import Graph, Node, walk
from frtc.lowering.ops import const
from frtc.passes.rewrite import Rules

MAX_ELEMENTS = 4096  # of any literal that takes part
_EXACT_FLOAT = frozenset({"add", "sub", "mul", "div", "neg", "sqrt", "abs", "minimum", "maximum", "where", "cast"})
_EXACT_INT = frozenset(
    "add sub mul floor_div mod neg abs minimum maximum cast eq ne lt le gt ge and or not where cumsum reduce_sum "
    "reduce_max reduce_any reduce_all reshape transpose broadcast slice concat pad embedding index".split()
)


def _is_exact(node: Node) -> bool:
    """Is it a literal, or an op on such whose result is the same on every machine?"""
    if node.t.size > MAX_ELEMENTS:
        return False
    return node.op in ("const", "iota") or node.op in (_EXACT_FLOAT if node.t.is_float else _EXACT_INT)


def _fold(node: Node) -> Node | None:
    """Only where all elements are equal: a longer literal says less than the op that made it."""
    if node.op == "iota" and node.shape != (1,):
        return None
    if not node.is_const or (node.t.is_float and node.t.size != 1) or not all(map(_is_exact, walk([node]))):
        return None
    value = run(Graph("literal", (), (("out", node),)), {})["out"]
    if value.size == 0 or not np.all(value == value.flat[0]):
        return None
    return const(value.flat[0].item(), node.dtype, node.shape)


RULES = Rules("literals", [(_EXACT_FLOAT | _EXACT_INT | {"iota"}, _fold)])
