"""name_weights: every constant expression that a program reads becomes a named weight of the module.

    linear(%x, concat(@q, @k, @v))  ->  linear(%x, @layers.0.attn.q|k|v)     weights: concat(tensor(..), ..)

The expression over the model's parameters is kept in the module's `weights`: it is what writes the Plan, what `update`
evaluates again for another checkpoint, and what `explain` shows. Scalar literals stay where they are.
"""

from __future__ import annotations

from dataclasses import replace

from frtc.lowering.ir import Graph, Module, Node, rebuild, weight

MAX_NAME = 120


def name_weights(module: Module) -> Module:
    known = dict(module.weights.outputs)
    named: dict[Node, str] = {}  # expression -> name
    taken: set[str] = set()
    for graph in module.graphs:
        for expression in _constants(graph):
            if expression not in named:
                named[expression] = unique(_describe(expression), taken)
    outputs = tuple(sorted((name, e) for e, name in named.items()))
    weights = rebuild(Graph("weights", (), outputs), lambda old, new: known[old["name"]] if old.op == "weight" else new)
    fresh = {e: weight(name, e.t) for e, name in named.items()}
    graphs = tuple(rebuild(g, lambda old, new: fresh.get(old, new)) for g in module.graphs)
    return replace(module, graphs=graphs, weights=weights)


def _constants(graph: Graph) -> list[Node]:
    """Maximal constant expressions, in the order of their readers; scalar literals are none.

    Tables of which a round takes an entry come last: such as are made of a product's weights leave it the name.
    """
    found: dict[Node, None] = {}
    for tables in (False, True):
        for node in graph.nodes:
            if not node.is_const and (node.op == "index") == tables:
                found.update((a, None) for a in node.operands if a.is_const and not _is_scalar(a))
    found.update((r, None) for r in graph.roots if r.is_const)
    return list(found)


def _is_scalar(node: Node) -> bool:
    return node.op == "const" and node.shape == ()


def _describe(expression: Node) -> str:
    """The names of the nearest weights, their common part written once; the op for expressions over literals. A matrix
    is called after matrices, if any are in it.
    """
    names = (_nearest(expression, 2) if len(expression.shape) >= 2 else []) or _nearest(expression, 0)
    shared = common_part(names)
    return (shared + "|".join(n[len(shared) :] for n in names))[:MAX_NAME] if names else f"table.{expression.op}"


def _nearest(expression: Node, rank: int) -> list[str]:
    """Names of the nearest weights of at least this rank."""
    level, seen = [expression], set[Node]()
    while level:
        names = list(dict.fromkeys(n["name"] for n in level if n.op == "weight" and n.t.rank >= rank))
        if names:
            return names
        seen.update(level)
        level = list(dict.fromkeys(a for n in level for a in n.operands if a not in seen))
    return []


def common_part(names: list[str]) -> str:
    """The leading parts that all names have, up to a point; "" or ends with one."""
    shared = ""
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared += f"{parts[0]}."
    return shared


def unique(name: str, taken: set[str]) -> str:
    """The name, or with a number behind it where it is taken; then it is taken, too."""
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}~{number}"
    taken.add(candidate)
    return candidate
