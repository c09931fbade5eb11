"""The rewriter: lists of (pattern, function) applied to a graph until none fires.

A pattern is a graph with holes, or a frozenset of op names: every node of these ops. A function gets the pattern's
variables by name (and, if it asks for them, `node`, the matched root, and `uses`, how many read each node) and returns
the replacement, or None to decline. A replacement must have the type of what it replaces.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from frtc.lowering.ir import Graph, Module, Node, make, walk
from frtc.lowering.pattern import Call, Maybe, Once, match
from frtc.lowering.verify import Invalid

FIRED: ContextVar[Counter[str] | None] = ContextVar("FIRED", default=None)  # set by whoever wants to count
Watcher = Callable[[str, Node, Node], None]  # (rule, what it matched, what it made)
WATCH: ContextVar[Watcher | None] = ContextVar("WATCH", default=None)  # set by whoever wants to see each rewrite
MAX_SWEEPS = 64
Pass = Callable[[Module], Module]
Implements = Callable[[Node], bool]  # does some kernel of the target run this node? What fusing passes ask


@dataclass(frozen=True, slots=True)
class Rules:
    """Rewrites under one name: what the log, the counter and `frtc explain` print."""

    name: str
    rules: Sequence[tuple[Any, Callable[..., Node | None]]]


def rewrite(graph: Graph, *rule_lists: Rules, allow: Callable[[Node], bool] = lambda node: True) -> Graph:
    """Apply the rules bottom-up, in order, until none fires. `allow` may veto a replacement."""
    by_op = _index(rule_lists)
    for _ in range(MAX_SWEEPS):
        sweep = _Sweep(graph, by_op, allow)
        graph = graph.replace(sweep.done)
        if not sweep.fired:
            return graph
    raise Invalid(f"graph {graph.name}: rules {[r.name for r in rule_lists]} do not come to an end")


def count(name: str) -> None:
    """Record that the rule `name` fired once."""
    counter = FIRED.get()
    if counter is not None:
        counter[name] += 1


def record(name: str, old: Node, new: Node) -> None:
    """As `count`, and whoever watches sees the rewrite."""
    count(name)
    if (watch := WATCH.get()) is not None:
        watch(name, old, new)


def _index(rule_lists: Sequence[Rules]) -> dict[str, list[tuple[str, Any, Callable[..., Node | None], set[str]]]]:
    table: dict[str, list[tuple[str, Any, Callable[..., Node | None], set[str]]]] = {}
    for rules in rule_lists:
        for pattern, function in rules.rules:
            wanted = set(inspect.signature(function).parameters)
            for op in _roots(pattern):
                table.setdefault(op, []).append((rules.name, pattern, function, wanted))
    return table


def _roots(pattern: Any) -> list[str]:
    if isinstance(pattern, frozenset):
        return sorted(pattern)
    if isinstance(pattern, Call):
        return [pattern.op]
    if isinstance(pattern, Once):
        return _roots(pattern.inner)
    assert isinstance(pattern, Maybe), f"a rule's pattern must be an op, not {pattern}"
    return _roots(pattern.inner) + _roots(pattern.skip)


class _Sweep:
    """One pass over the graph, operands first."""

    def __init__(self, graph: Graph, by_op: dict[str, Any], allow: Callable[[Node], bool]) -> None:
        self.by_op, self.allow, self.fired = by_op, allow, False
        self.uses = graph.users()
        self.done: dict[Node, Node] = {}
        for node in graph.nodes:
            args = tuple(None if a is None else self.done[a] for a in node.args)
            new = node if args == node.args else make(node.op, args, dict(node.attrs), node.type, node.loc)
            if new is not node:
                self.uses[new] = max(self.uses.get(new, 0), self.uses.get(node, 1))
            self.done[node] = self._settle(new)

    def _settle(self, node: Node) -> Node:
        """Apply rules at this node until none fires."""
        for _ in range(MAX_SWEEPS):
            new = self._step(node)
            if new is None:
                return node
            self.fired = True
            self.uses[new] = max(self.uses.get(new, 0), self.uses.get(node, 1))
            node = new
        raise Invalid(f"rules do not come to an end at {node.op} : {node.type}")

    def _step(self, node: Node) -> Node | None:
        for name, pattern, function, wanted in self.by_op.get(node.op, ()):
            found = ({},) if isinstance(pattern, frozenset) else match(pattern, node, self.uses, {})
            for bound in found:
                offered = {**bound, "node": node, "uses": self.uses}
                new = function(**{k: offered[k] for k in wanted})
                if new is None or new is node or not self.allow(new):
                    continue
                if new.type != node.type:
                    raise Invalid(f"rule {name} changes {node.op} : {node.type} into {new.op} : {new.type}")
                new = _located(new, node)
                record(name, node, new)
                return new
        return None


def _located(new: Node, old: Node) -> Node:
    """New nodes take the location of the node they replace. Nodes are interned: a known node keeps its own."""
    if old.loc:
        known = set(walk(old.operands))
        stack = [new]
        while stack:
            node = stack.pop()
            if not node.loc and node not in known and node.op not in ("const", "weight", "tensor", "input", "state"):
                node.loc = old.loc
                stack.extend(node.operands)
    return new
