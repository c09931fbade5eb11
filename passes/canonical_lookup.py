"""Rows of a table by known consecutive numbers are a slice of it: learned positions, and masks read through ranges."""

from __future__ import annotations

import numpy as np

from frtc.lowering.interpret import run
from frtc.lowering.ir import Graph, Node, walk
from frtc.lowering.ops import cast, reshape, slice_
from frtc.passes.rewrite import Rules

MAX_ROWS = 1 << 16


def _consecutive(node: Node) -> Node | None:
    table, ids = node.operands
    if not ids.is_const or not 0 < ids.t.size <= MAX_ROWS or any(n.op in ("weight", "tensor") for n in walk([ids])):
        return None
    rows = run(Graph("rows", (), (("out", ids),)), {})["out"].reshape(-1)
    first, last = int(rows[0]), int(rows[0]) + rows.size
    if first < 0 or last > table.shape[0] or not np.array_equal(rows, np.arange(first, last)):
        return None
    part = slice_(table, axis=-2, start=first, stop=last)
    return cast(reshape(part, shape=node.shape), dtype=node.dtype)  # type: ignore[no-any-return]


RULES = Rules("lookup", [(frozenset({"embedding"}), _consecutive)])
