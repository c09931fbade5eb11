"""The recipe of a Plan: how each weight is made of the model's parameters, as IR text. docs/plan-format.md

One graph holds the expressions of all weights, so that what they share is written once. No file's names, types or
layout are in it: `frtc update` evaluates it for another checkpoint of the same model.
"""

from __future__ import annotations

from collections.abc import Mapping

from frtc.errors import FrtcError
from frtc.lowering.ir import Graph, Node
from frtc.lowering.text import parse, show
from frtc.runtime.plan_file import Plan

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


def recipe_of(plan: Plan) -> dict[str, Node]:
    """The expression of each weight in a Plan, of the type that its program gives it."""
    text = plan.files().get(RECIPE)
    if text is None:
        hint = "compile the Plan again with this frtc"
        raise FrtcError("plan.recipe", "the Plan holds no recipe of its weights", [("plan", str(plan.path))], hint)
    expressions = read_recipe(bytes(text))
    makes = {name: (node.dtype, node.shape) for name, node in expressions.items()}
    wants = {w.name: (w.dtype, w.shape) for w in plan.program.weights}
    if makes != wants:
        first = next(name for name in {**wants, **makes} if makes.get(name) != wants.get(name))
        rows = [("weight", first), ("program", str(wants.get(first))), ("recipe", str(makes.get(first)))]
        raise FrtcError("plan.recipe", "the recipe of this Plan makes other weights than its program reads", rows)
    return expressions
