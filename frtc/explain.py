"""What became of every node: rewritten or fused by which rule, a launch of which kernel, or nothing to run at all.

Each node of the imported module gets a number in its location; rewrites keep the location of what they replace, so that
the numbers can be found again in the final program. Every node has exactly one fate.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from frtc.codegen.emit import Emitted, Emitter
from frtc.codegen.placement import place_module
from frtc.codegen.places import new_place
from frtc.kernels.catalog import CATALOG, describe, label
from frtc.kernels.targets import Target
from frtc.lowering.ir import Module, Node, walk
from frtc.lowering.ops import SHAPE
from frtc.near_miss import Asked, misses
from frtc.passes.pipeline import Options, name_of, run_passes
from frtc.passes.rewrite import WATCH, Pass
from frtc.results import counters
from frtc.runtime.plan import WEIGHTS

MARK = " ##"  # between a location and the number of the imported node
LEAVES = ("input", "state", "const", "weight", "tensor", "item")
MOVES = SHAPE | {"concat"}  # at most an address in the end
ABSORBING = frozenset({  # passes that fuse without being lists of rules
    "attention_sites", "fold_norms", "merge_linears", "fuse_residual_norm", "defer_norms", "fuse_linear_norm",
    "fuse_rope_qkv", "fuse_pointwise", "join_pointwise",
})  # fmt: skip
REACH = 10
LAUNCH, FUSED, FREE, CONSTANT, UNNEEDED = "launch", "fused", "no launch", "constant", "unneeded"
OUTCOMES = {
    LAUNCH: "has a launch of its own",
    FUSED: "is part of another node's launch",
    FREE: "is an address: views, slices, writes in place",
    CONSTANT: "is evaluated when the Plan is written",
    UNNEEDED: "no result depends on it after a rewrite",
}


@dataclass(frozen=True, slots=True)
class Fate:
    """A node of the imported module. rules: those that touched it, in order; call: "denoise/7", where it runs."""

    program: str
    op: str
    type: str
    loc: str
    outcome: str
    rules: tuple[str, ...]
    call: str = ""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A call of the final program: its kernel, why not the others, and which rewrites it nearly had."""

    call: str
    site: str
    loc: str
    kernel: str
    cost_us: float
    rejected: tuple[tuple[str, str], ...]
    missed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    nodes: tuple[Fate, ...]
    calls: tuple[Chosen, ...]

    def counts(self) -> dict[str, int]:
        found = Counter(fate.outcome for fate in self.nodes)
        return {outcome: found[outcome] for outcome in OUTCOMES}

    def data(self) -> dict[str, Any]:
        return {**asdict(self), "counts": self.counts(), "total": len(self.nodes)}


@dataclass(slots=True)
class _Record:
    """What happened to the numbered nodes.

    rules    that touched each;  into: what swallowed it;  missed: what was nearly done to it
    gone     the pass after which no program holds it
    """

    rules: dict[int, list[str]] = field(default_factory=dict)
    into: dict[int, int] = field(default_factory=dict)
    missed: dict[int, list[str]] = field(default_factory=dict)
    gone: dict[int, str] = field(default_factory=dict)

    def watch(self, rule: str, old: Node, new: Node) -> None:
        """A rewrite: numbers below `old` that are not below `new` have been fused into `new`."""
        at = _number(new)
        for number in _below(old) - _below(new):
            self.touch(number, rule)
            if at is not None and at != number:
                self.into[number] = at
        if at is not None:
            self.touch(at, rule)

    def touch(self, number: int, rule: str) -> None:
        seen = self.rules.setdefault(number, [])
        if rule not in seen:
            seen.append(rule)

    def home(self, number: int) -> int:
        """The node that swallowed it in the end."""
        seen = {number}
        while number in self.into and self.into[number] not in seen:
            number = self.into[number]
            seen.add(number)
        return number


def explain(module: Module, passes: Sequence[Pass], target: Target, families: tuple[str, ...]) -> Explanation:
    """Runs the passes on the module and says what became of its nodes. Compiles nothing."""
    raw = [(g.name, n) for g in module.graphs for n in g.nodes if n.op not in LEAVES]
    places = {id(n): n.loc for _, n in raw}
    try:
        numbers = _give_numbers([n for _, n in raw])
        record = _Record()
        final = _run(module, passes, record, target, families)
        emitted = _emit(final, target, families)
        return _Explainer(raw, places, numbers, record, final, emitted).explanation()
    finally:
        for _, node in raw:  # nodes are shared: others must find their locations as they were
            node.loc = places[id(node)]


def _give_numbers(nodes: Sequence[Node]) -> dict[int, int]:
    """A number in each node's location; by the node's identity."""
    numbers: dict[int, int] = {}
    for node in nodes:
        if id(node) not in numbers:
            numbers[id(node)] = len(numbers)
            node.loc = f"{node.loc}{MARK}{numbers[id(node)]}"
    return numbers


def _number(node: Node) -> int | None:
    digits = node.loc.rpartition(MARK)[2] if MARK in node.loc else ""
    return int(digits) if digits.isdigit() else None


def _below(node: Node) -> set[int]:
    """Numbers of the node and of what lies up to REACH levels below it: further than any pattern looks."""
    found, level = set(), {node}
    for _ in range(REACH):
        found |= {number for n in level if (number := _number(n)) is not None}
        level = {a for n in level for a in n.operands}
    return found


def _run(module: Module, passes: Sequence[Pass], record: _Record, target: Target, families: tuple[str, ...]) -> Module:
    token = WATCH.set(record.watch)
    try:
        for one in passes:
            before, name = _present(module), name_of(one)
            module, report = run_passes(module, [one], Options(check=0))
            for number in before - _present(module):
                record.gone[number] = name if report.fired else ""
            for graph in module.graphs:
                for node, miss in misses(Asked.of(graph, target, families), name):
                    at = _number(node)
                    if at is not None:
                        record.missed.setdefault(at, []).append(_plain(str(miss)))
    finally:
        WATCH.reset(token)
    return module


def _present(module: Module) -> set[int]:
    return {number for g in module.graphs for n in g.nodes if (number := _number(n)) is not None}


def _emit(module: Module, target: Target, families: tuple[str, ...]) -> dict[str, list[Emitted]]:
    """Every program's calls with the kernels chosen for them."""
    placement, counting = place_module(module), dict(counters(module.schedule))
    found = {}
    for graph in module.graphs:
        counter = counting.get(graph.name, "")
        emitter = Emitter(graph, placement, target, CATALOG, families, counter, lambda n: new_place(WEIGHTS, n.t))
        found[graph.name] = emitter.run()
    return found


@dataclass(slots=True)
class _Explainer:
    """Puts the pieces together. raw: (program, node) of every imported node; places: their own locations."""

    raw: Sequence[tuple[str, Node]]
    places: Mapping[int, str]
    numbers: Mapping[int, int]
    record: _Record
    final: Module
    emitted: Mapping[str, Sequence[Emitted]]

    def explanation(self) -> Explanation:
        launched = {
            number: f"{stage}/{i}"
            for stage, calls in self.emitted.items()
            for i, call in enumerate(calls)
            if call.node is not None and (number := _number(call.node)) is not None
        }
        constant = {n for w in walk(self.final.weights.roots) if (n := _number(w)) is not None}
        present = {n: node for g in self.final.graphs for node in g.nodes if (n := _number(node)) is not None}
        readers: dict[int, list[int]] = {}
        for _, node in self.raw:
            for a in node.operands:
                if id(a) in self.numbers:
                    readers.setdefault(self.numbers[id(a)], []).append(self.numbers[id(node)])
        fates = tuple(self._fate(program, node, launched, constant, present, readers) for program, node in self.raw)
        return Explanation(fates, tuple(self._chosen()))

    def _fate(
        self,
        program: str,
        node: Node,
        launched: Mapping[int, str],
        constant: set[int],
        present: Mapping[int, Node],
        readers: Mapping[int, Sequence[int]],
    ) -> Fate:
        number = self.numbers[id(node)]
        rules = list(self.record.rules.get(number, ()))
        gone = self.record.gone.get(number, "")
        left = present.get(number)
        call = launched.get(number, "")
        if call:
            outcome = LAUNCH
        elif node.is_const or number in constant or (left is not None and left.is_const):
            outcome = CONSTANT
        elif left is not None or node.op in MOVES:
            outcome = FREE
        elif number in self.record.into or gone in ABSORBING:
            outcome, call = FUSED, _nearest_launch(self.record.home(number), launched, readers)
            rules += [gone] if gone in ABSORBING and gone not in rules else []
        else:
            outcome = UNNEEDED
            rules = rules or ([gone] if gone else [])
        return Fate(program, node.op, str(node.type), self.places[id(node)], outcome, tuple(rules), call)

    def _chosen(self) -> Iterator[Chosen]:
        missed_at: dict[int, list[str]] = {}  # by the node that swallowed the one that missed
        for number, reasons in self.record.missed.items():
            missed_at.setdefault(self.record.home(number), []).extend(reasons)
        for stage, calls in self.emitted.items():
            for i, call in enumerate(calls):
                at = None if call.node is None else _number(call.node)
                missed = () if at is None else tuple(dict.fromkeys(missed_at.get(at, ())))
                choice = call.choice
                yield Chosen(
                    f"{stage}/{i}",
                    describe(call.site),
                    _plain(call.name),
                    label(choice.kernel, choice.config),
                    choice.cost_us,
                    choice.rejected,
                    missed,
                )


def _nearest_launch(number: int, launched: Mapping[int, str], readers: Mapping[int, Sequence[int]]) -> str:
    """The call that computes a fused node: that of the first reader that has one."""
    level, seen = [number], {number}
    while level:
        for n in level:
            if n in launched:
                return launched[n]
        level = [r for n in level for r in readers.get(n, ()) if r not in seen]
        seen.update(level)
    return ""


def _plain(text: str) -> str:
    """Without the numbers, and without the place where it is nothing but a number."""
    return re.sub(rf"{MARK}\d+", "", re.sub(rf" at {MARK}\d+", "", text))
