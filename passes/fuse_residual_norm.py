"""fuse_residual_norm: a residual sum and the norm that reads it become one launch.

    s = x + r;         y = rms_norm(s)           -> (s, y) = residual_norm(x, r)
    s = x + gate * r;  y = ada_rms_norm(s, ..)   -> (s, y) = residual_norm(x, r, gate, ..)

After fuse_epilogues: where a linear can add the residual itself, that is cheaper, since s is then never read back for
the sum. What remains here are sums whose parts come from elsewhere. The sum is rounded to x's type in both forms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from frtc.lowering.ir import Graph, Module, Node, item, make
from frtc.lowering.ops import residual_norm
from frtc.passes.rewrite import Implements, Pass, count

KINDS = {"rms_norm": "rms", "layer_norm": "layer", "ada_rms_norm": "ada"}


def fuse_residual_norm(implements: Implements) -> Pass:
    return partial(_run, implements=implements)


def _run(module: Module, implements: Implements) -> Module:
    return module.map(lambda graph: _fuse(graph, implements))


def _fuse(graph: Graph, implements: Implements) -> Graph:
    norms = _norms(graph)
    uses = graph.users()
    fused: dict[Node, Node] = {}
    done: dict[Node, Node] = {}
    for old in _walk(graph.roots, norms):
        args = tuple(None if a is None else done[a] for a in old.args)
        new = old if args == old.args else make(old.op, args, dict(old.attrs), old.type, old.loc)
        if old in norms:
            both = _both(old, new, norms[old], done, uses)
            if implements(both):
                fused[old] = both
                new = item(both, 0)
                count("fuse_residual_norm")
        elif old.args and old.args[0] in fused and norms[old.args[0]] is old:
            new = item(fused[old.args[0]], 1)
        done[old] = new
    return graph.replace(done)


def _norms(graph: Graph) -> dict[Node, Node]:
    """Sum -> the first norm that reads it and whose vectors can be computed before it."""
    found: dict[Node, Node] = {}
    for node in graph.nodes:
        source = node.args[0] if node.op in KINDS and node.get("inner", "f32") == "f32" else None
        if source is None or source.op != "add" or source in found or not _sums(source):
            continue
        if source not in set(_walk(_vectors(node), found)):
            found[source] = node
    return found


def _vectors(norm: Node) -> list[Node]:
    return [a for a in norm.args[1:] if a is not None]


def _walk(roots: Iterable[Node], norms: Mapping[Node, Node]) -> Iterator[Node]:
    """Every node below the roots, operands first, and the vectors of a norm before the sum that it is fused with."""
    seen: set[Node] = set()
    stack = [(r, False) for r in reversed(list(roots))]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
        elif node not in seen:
            seen.add(node)
            before = [*node.operands, *(_vectors(norms[node]) if node in norms else ())]
            stack.append((node, True))
            stack.extend((a, False) for a in reversed(before) if a not in seen)


def _sums(node: Node) -> bool:
    """Two values of the sum's own type and shape, neither of them constant."""
    return all(a.type == node.type and not a.is_const for a in node.operands)


def _both(old: Node, new: Node, norm: Node, done: dict[Node, Node], uses: dict[Node, int]) -> Node:
    """residual_norm for the sum `new`, which was `old`, and its norm."""
    x, r = new.operands
    gate = None
    gated = _gated(old.operands[1], uses) or _gated(old.operands[0], uses)
    if gated is not None:
        inner = done[gated]
        x = next(a for a in new.operands if a is not inner)
        gate, r = sorted(inner.operands, key=lambda a: a.t.rank)
    result: Node = residual_norm(
        x,
        r,
        gate,
        *(None if a is None else done[a] for a in norm.args[1:]),
        kind=KINDS[norm.op],
        eps=norm["eps"],
        offset=norm.get("offset", 0.0),
        dtype=norm.dtype,
        loc=norm.loc,
    )
    return result


def _gated(node: Node, uses: dict[Node, int]) -> Node | None:
    """`gate * r` that only the sum reads, the gate one value per column."""
    if node.op != "mul" or uses.get(node) != 1:
        return None
    gate, r = sorted(node.operands, key=lambda a: a.t.rank)
    return node if r.shape == node.shape and gate.shape == r.shape[-1:] != r.shape else None
