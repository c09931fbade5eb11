"""The recipe of a Plan: how each weight is made of the model's parameters, as IR text. docs/plan-format.md

One graph holds the expressions of all weights, so that what they share is written once. No file's names, types or
layout are in it: `frtc update` evaluates it for another checkpoint of the same model.
"""

from __future__ import annotations

from collections.abc import Mapping

from frtc.errors import FrtcError
from frtc.lowering.ir import Graph, Node
from frtc.lowering.text import parse, show

RECIPE = "recipe"  # name of the blob


def recipe_text(expressions: Mapping[str, Node]) -> bytes:
    """The expressions of the weights in the order of the Plan."""
    return show(Graph("weights", (), tuple(expressions.items())), locations=False).encode()


def read_recipe(text: bytes) -> dict[str, Node]:
    """Inverse of recipe_text."""
    try:
        return dict(parse(text.decode()).outputs)
    except (FrtcError, UnicodeDecodeError) as fault:
        raise FrtcError("plan.recipe", f"the recipe of this Plan cannot be read: {fault}") from None
