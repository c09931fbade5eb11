"""Norms that can be made together with the value that they read, or after their readers: which ones, and an order in
which nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from frtc.lowering.ir import Graph, Node
from frtc.lowering.ops import OPS

KINDS = {"rms_norm": "rms", "layer_norm": "layer", "ada_rms_norm": "ada"}
DEFERRED = {"rms_norm": "rms", "layer_norm": "layer", "ada_rms_norm": "rms"}  # by their statistics


def norms_of(graph: Graph, sources: Callable[[Node], bool]) -> dict[Node, Node]:
    """Source -> the first norm that reads it and whose vectors can be computed before it."""
    found: dict[Node, Node] = {}
    for node in graph.nodes:
        source = node.args[0] if node.op in KINDS and _plain(node) else None
        if source is None or source in found or not sources(source):
            continue
        if source not in set(in_order(vectors_of(node), found)):
            found[source] = node
    return found


def _plain(norm: Node) -> bool:
    """Rounded once, and not to FP8 with a scale."""
    inv = norm.args[OPS[norm.op].operands.index("inv")]
    return norm.get("inner", "f32") == "f32" and inv is None and not norm["per_row"]


def bare(node: Node) -> bool:
    """A linear whose result is stored as it is, and that makes up for no norm of its own."""
    if node.op != "linear" or node.is_const or node["per_row"] or node["norm"] != "none":
        return False
    return node.args[OPS["linear"].operands.index("inv")] is None


@dataclass(frozen=True, slots=True)
class Unnormed:
    """What a product reads where it makes up for the norm of its x: s * (offset + w), or s where w is None."""

    s: Node
    w: Node | None
    offset: float


def unnormed_of(x: Node) -> Unnormed | None:
    """None where x is no norm that its readers could make up for. The weights of a layer_norm go into theirs."""
    s = x.args[0] if x.op in KINDS and _plain(x) else None
    if s is None or any(v.t.rank != 1 for v in vectors_of(x)):  # others differ by row
        return None
    w = None if x.op == "layer_norm" else x.args[1]
    offset = 1.0 if x.op == "ada_rms_norm" else x.get("offset", 0.0)
    assert isinstance(offset, float)
    return Unnormed(s, w, offset if w is not None else 0.0)


def vectors_of(norm: Node) -> list[Node]:
    return [a for a in norm.args[1:] if a is not None]


def in_order(roots: Iterable[Node], norms: Mapping[Node, Node]) -> Iterator[Node]:
    """Every node below the roots, operands first, and the vectors of a norm before the source that it is fused with."""
    seen: set[Node] = set()
    stack = [(r, False) for r in reversed(list(roots))]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
        elif node not in seen:
            seen.add(node)
            before = [*node.operands, *(vectors_of(norms[node]) if node in norms else ())]
            stack.append((node, True))
            stack.extend((a, False) for a in reversed(before) if a not in seen)
