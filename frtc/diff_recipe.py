"""A Plan's weights against a checkpoint: each is made anew of the checkpoint's tensors, by the recipe in the Plan.

Needs neither torch nor the passes. Where the Plan was compiled from these tensors, every weight is equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from frtc.codegen.recipe import recipe_of
from frtc.codegen.weights import pieces, share
from frtc.console import size
from frtc.diff_sides import Weight
from frtc.diff_weights import Moved, Weights, distance
from frtc.errors import FrtcError, nearest
from frtc.lowering.ir import Graph, Node, fresh_nodes, walk
from frtc.runtime.plan_file import Plan


@fresh_nodes()
def compare_with_recipe(
    plan: Plan,
    weights: Mapping[str, Weight],
    parameters: Mapping[str, Weight],
    progress: Callable[[str, float], None],
) -> Weights:
    """The Plan's `weights` beside those that its recipe makes of the parameters; differences relative to the Plan's."""
    expressions = recipe_of(plan)
    _require_parameters(expressions, parameters)
    shared, lookup = share(expressions, lambda parameter: parameters[parameter].array())
    total, done = max(plan.program.weights_nbytes, 1), 0
    moved: list[Moved] = []
    for name, weight in weights.items():
        progress(f"make and compare weights, {size(done)} of {size(total)}", done / total)
        done += weight.nbytes
        equal, relative, largest = distance(weight.array(), pieces(shared[name], lookup))
        if not equal:
            moved.append(Moved(name, weight.type, weight.type, relative, largest))
    ranked = tuple(sorted(moved, key=lambda m: m.rank))
    return Weights(len(weights), len(weights) - len(moved), ranked)


def _require_parameters(expressions: Mapping[str, Node], parameters: Mapping[str, Weight]) -> None:
    rows = list(_wrong(expressions, parameters))
    if rows:
        what = f"the checkpoint does not hold what the Plan is made of: {len(rows)} parameters are missing or differ"
        raise FrtcError("diff.parameters", what, rows[:5])


def _wrong(expressions: Mapping[str, Node], parameters: Mapping[str, Weight]) -> Iterator[tuple[str, str]]:
    leaves = [n for n in walk(Graph("weights", (), tuple(expressions.items())).roots) if n.op == "tensor"]
    for leaf in sorted(leaves, key=lambda n: str(n["key"])):
        name = str(leaf["key"])
        if name not in parameters:
            yield name, f"missing; nearest: {nearest(name, parameters) or 'none'}"
        elif parameters[name].shape != leaf.shape:
            yield name, f"the Plan {list(leaf.shape)}, the checkpoint {list(parameters[name].shape)}"
