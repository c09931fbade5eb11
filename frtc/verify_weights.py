"""Are a Plan's weights those that its recipe makes of a checkpoint? To the bit: both are computed the same way.

In 8 bits the bars of results are wide enough for another fine-tune to pass; this comparison has none.
"""

from __future__ import annotations

from collections.abc import Callable, Container

import numpy as np

from frtc.codegen.recipe import recipe_of
from frtc.codegen.weights import Lookup, pieces, share
from frtc.kernels.dtypes import DTYPES
from frtc.runtime.plan_file import Plan


def differing(
    plan: Plan, lookup: Lookup, progress: Callable[[str, float], None], among: Container[str] | None = None
) -> tuple[str, ...]:
    """Names of weights with other bytes, of all or of those `among` which to look.

    lookup   the checkpoint's parameters and the Plan's activation scales
    """
    expressions, values = share(recipe_of(plan), lookup)
    found = []
    for i, entry in enumerate(plan.program.weights):
        if among is not None and entry.name not in among:
            continue
        progress("compare weights", i / len(plan.program.weights))
        whole = np.ndarray(entry.stored_shape or (1,), DTYPES[entry.dtype].numpy, plan.weights, entry.offset)
        rows, at = whole[..., : entry.shape[-1]] if entry.shape else whole, 0
        for piece in pieces(expressions[entry.name], values):
            if rows[at : at + len(piece)].tobytes() != piece.tobytes():
                found.append(entry.name)
                break
            at += len(piece)
    return tuple(found)
