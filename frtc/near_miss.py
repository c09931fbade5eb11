"""Why a rule did not fire: the first precondition that failed, with the value, its type and who reads it.

Rules are patterns, so one walk explains them all: it goes as deep as the pattern matches and reports what stopped it. A
rule is a near miss at a node when its root matches and so does something below. The passes that are not lists of
patterns have a question each, at the end of this file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from frtc.codegen.places import padded
from frtc.kernels.catalog import CATALOG, NoKernel
from frtc.kernels.spec import Operand, Site
from frtc.kernels.targets import Target
from frtc.lowering.ir import Graph, Node, Type
from frtc.lowering.ops import POINTWISE
from frtc.lowering.pattern import Call, Maybe, Once, Var, literal, match
from frtc.passes import canonical_gated, fold_linears, fold_norms, fuse_epilogues, fuse_rope_linear
from frtc.passes.fuse_pointwise import FEW
from frtc.passes.rewrite import Rules

PATTERN_RULES: dict[str, tuple[Rules, ...]] = {  # pass -> the lists whose misses are worth telling
    "canonicalize": (canonical_gated.RULES,),
    "fold_linears": (fold_linears.FACTORS, fold_linears.CHAINS),
    "fuse_epilogues": (fuse_epilogues.EPILOGUES,),
    "fuse_rope_linear": (fuse_rope_linear.RULES,),
}
NORMS = ("rms_norm", "layer_norm")
Readers = Mapping[Node, Sequence[Node]]


@dataclass(frozen=True, slots=True)
class Miss:
    """`rule` would have rewritten the node; `reason` says what stopped it. depth: how far the pattern matched."""

    rule: str
    reason: str
    depth: int = 1

    def __str__(self) -> str:
        return f"not by {self.rule}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Asked:
    """A graph before a pass, and for whom the pass would run."""

    graph: Graph
    target: Target
    families: tuple[str, ...]
    readers: Readers
    uses: Mapping[Node, int]

    @staticmethod
    def of(graph: Graph, target: Target, families: tuple[str, ...]) -> Asked:
        readers: dict[Node, list[Node]] = {}
        for node in graph.nodes:
            for a in node.operands:
                readers.setdefault(a, []).append(node)
        return Asked(graph, target, families, readers, graph.users())


def misses(asked: Asked, name: str) -> Iterator[tuple[Node, Miss]]:
    """Near misses of the pass `name` in a graph that the pass has run on (or is about to): node and what stopped it."""
    for node in asked.graph.nodes:
        if node.is_const:
            continue
        for rules in PATTERN_RULES.get(name, ()):
            found = [
                _missed(asked, rules, node, pattern, rule) for pattern, rule in rules.rules if pattern.op == node.op
            ]
            near = [miss for miss in found if miss is not None and miss.depth > 0]
            if near and None not in found:
                yield node, max(near, key=lambda miss: miss.depth)
        for question in QUESTIONS.get(name, ()):
            yield from ((node, miss) for miss in question(asked, node))


def _missed(asked: Asked, rules: Rules, node: Node, pattern: Call, rule: Callable[..., Node | None]) -> Miss | None:
    """None where the rule fires."""
    bound = next(match(pattern, node, asked.uses, {}), None)
    if bound is None:
        depth, reason = _stopped(asked, pattern, node, {})
        return Miss(rules.name, reason, depth)
    offered = {**bound, "node": node, "uses": asked.uses}
    made = rule(**{name: offered[name] for name in inspect.signature(rule).parameters})
    if made is None:
        values = ", ".join(f"{name} is {said(v)}" for name, v in bound.items() if isinstance(v, Node))
        return Miss(rules.name, f"the pattern matches, but not with these values: {values}", 9)
    refused = refusal(made, asked.target, asked.families)
    return Miss(rules.name, refused, 9) if refused else None


def refusal(node: Node, target: Target, families: tuple[str, ...]) -> str:
    """Why no kernel of the target runs the node; "" if one does."""
    types = node.type if isinstance(node.type, tuple) else (node.t,)
    operands = tuple(None if a is None else _operand(a.t) for a in node.args)
    try:
        CATALOG.select(Site(node.op, operands, tuple(map(_operand, types)), dict(node.attrs)), target, families)
    except NoKernel as fault:
        return f"{fault.what}: {'; '.join(f'{kernel}: {reason}' for kernel, reason in fault.rows)}"
    return ""


def _operand(type: Type) -> Operand:
    return Operand(type.dtype, type.shape, padded(type).strides)


def said(node: Node | None) -> str:
    """ "linear : bf16[5,64] at layers.0.mlp"."""
    if node is None:
        return "absent"
    where = node.get("name") or node.loc
    types = f"({', '.join(map(str, node.type))})" if isinstance(node.type, tuple) else str(node.type)
    return f"{node.op} : {types}" + (f" at {where}" if where else "")


# ---- patterns --------------------------------------------------------------------------------------------------------


def _stopped(asked: Asked, pattern: Any, node: Node | None, bound: dict[str, Any]) -> tuple[int, str]:
    """(levels that matched, what stopped the match) for a pattern that does not match."""
    if isinstance(pattern, Once):
        if (
            node is not None
            and asked.uses.get(node, 1) != 1
            and next(match(pattern.inner, node, asked.uses, bound), None)
        ):
            others = "; ".join(said(reader) for reader in asked.readers.get(node, ()))
            return 1, f"{said(node)} is read {asked.uses[node]} times, by {others or 'the result'}"
        return _stopped(asked, pattern.inner, node, bound)
    if isinstance(pattern, Maybe):
        return max(_stopped(asked, part, node, bound) for part in (pattern.inner, pattern.skip))
    if isinstance(pattern, Call):
        return _stopped_call(asked, pattern, node, bound)
    if isinstance(pattern, Var):
        return 0, _refused_value(pattern, node, bound)
    return 0, f"{said(node)} is not {'absent' if pattern is None else pattern}"


def _stopped_call(asked: Asked, pattern: Call, node: Node | None, bound: dict[str, Any]) -> tuple[int, str]:
    if node is None or node.op != pattern.op:
        return 0, f"{said(node)} is no {pattern.op}"
    for name, wanted in pattern.attrs:
        if not isinstance(wanted, Var) and node.get(name) != wanted:
            return 1, f"{said(node)} has {name}={node.get(name)}, not {wanted}"
    orders = [node.args, node.args[::-1]] if pattern.commutes else [node.args]
    return max(_stopped_args(asked, pattern, args, bound) for args in orders)


def _stopped_args(asked: Asked, pattern: Call, args: tuple[Node | None, ...], bound: dict[str, Any]) -> tuple[int, str]:
    """The first operand that does not match, given those before it. Holes match anything: they are no progress."""
    matched = 0
    for wanted, arg in zip(pattern.args, args, strict=True):
        extended = next(match(wanted, arg, asked.uses, bound), None)
        if extended is None:
            depth, reason = _stopped(asked, wanted, arg, bound)
            return matched + depth, reason
        matched += not (isinstance(wanted, Var) and wanted.where is None) and wanted is not None
        bound = extended
    return matched, "its values do not fit together"


def _refused_value(var: Var, node: Node | None, bound: Mapping[str, Any]) -> str:
    if node is None:
        return f"{var.name} is absent"
    if var.name in bound and bound[var.name] is not node:
        return f"{said(node)} is not {said(bound[var.name])}, which the rule needs here too"
    if var.const is not None and node.is_const != var.const:
        return f"{said(node)} is {'no' if var.const else 'a'} constant"
    if var.dtype is not None and node.t.dtype != var.dtype:
        return f"{said(node)} is not {var.dtype}"
    number = literal(node)
    return f"{said(node)}{'' if number is None else f' (the number {number})'} is not what {var.name} stands for"


# ---- passes that are no lists of patterns ----------------------------------------------------------------------------


def _pointwise(asked: Asked, node: Node) -> Iterator[Miss]:
    """A pointwise op that another one could have drawn in."""
    if node.op not in POINTWISE:
        return
    for a in dict.fromkeys(node.operands):
        if a.op not in POINTWISE or a.is_const:
            continue
        if a.shape != node.shape and node.t.size > FEW:
            yield Miss("fuse_pointwise", f"{said(a)} does not have the shape of the result, {list(node.shape)}")
        elif asked.uses[a] > sum(b is a for b in node.operands):
            others = [r for r in asked.readers[a] if r is not node]
            yield Miss("fuse_pointwise", f"{said(a)} is also read by {'; '.join(map(said, others)) or 'the result'}")


def _norm(asked: Asked, node: Node) -> Iterator[Miss]:
    """A norm that still has weights."""
    if node.op not in NORMS or not any(a is not None and a.is_const for a in node.args[1:]):
        return
    linears = ("linear", "gated_linear")
    others = [
        r for r in asked.readers.get(node, ()) if r.op not in linears or not all(w.is_const for w in r.operands[1:])
    ]
    if others or node in asked.graph.roots:
        by = "; ".join(map(said, others)) or "the result"
        yield Miss("fold_norms", f"{said(node)} is read by {by}: not a linear with constant weights")
    elif short := [r for r in asked.readers.get(node, ()) if fold_norms.rounds(r)]:
        yield Miss("fold_norms", f"{said(short[0])} has 16-bit weights, which hold no product with the norm's")


def _merge(asked: Asked, node: Node) -> Iterator[Miss]:
    """A linear beside another one over the same value."""
    if node.op != "linear" or node.args[0] is None or node.is_const:
        return
    for other in asked.readers.get(node.args[0], ()):
        if other is node or other.op != "linear" or other.args[0] is not node.args[0]:
            continue
        w, v = node.args[1], other.args[1]
        if w is not None and v is not None and not (w.is_const and v.is_const):
            yield Miss("merge_linears", f"{said(w if not w.is_const else v)} is no constant")
        elif node.dtype != other.dtype:
            yield Miss("merge_linears", f"{said(other)} reads the same value, but its type is not {node.dtype}")


QUESTIONS: dict[str, tuple[Callable[[Asked, Node], Iterator[Miss]], ...]] = {
    "fold_norms": (_norm,),
    "merge_linears": (_merge,),
    "fuse_pointwise": (_pointwise,),
}
