"""Where the named results of each program lie: what self-test, verify and bisection read back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from frtc.codegen.build import Built
from frtc.codegen.emit import Emitted
from frtc.codegen.places import Place
from frtc.lowering.ir import Module, Node, Repeat, Run, Step
from frtc.lowering.strided import Strided

RESULTS = "results"  # in the evidence of a Plan without a self-test: what `results_of` found


def counters(steps: tuple[Step, ...]) -> Iterator[tuple[str, str]]:
    """(program, name of the input that counts the rounds of the repeat around it)."""
    for step in steps:
        if isinstance(step, Repeat):
            yield from ((s.program, step.index) for s in step.body if isinstance(s, Run))
            yield from counters(step.body)


def results_of(module: Module, built: Built) -> dict[str, dict[str, Any]]:
    """Program -> name of a result -> its Ref, as JSON."""
    outputs = {g.name: g.outputs for g in module.graphs}
    found: dict[str, dict[str, Any]] = {}
    for stage, emitted in built.emitted.items():
        if stage in outputs:
            places = {name: _place(name, node, emitted) for name, node in outputs[stage]}
        else:  # a `let`: one copy
            places = {stage.partition(".")[2]: emitted[0].results[0]}
        found[stage] = {name: asdict(place.ref()) for name, place in places.items() if place is not None}
    return found


def _place(name: str, node: Node, emitted: tuple[Emitted, ...]) -> Place | None:
    """Where a program leaves a result: where a last copy put it, else where it was computed, seen through views."""
    copied = next((c.results[0] for c in emitted if c.node is None and c.name == f"result {name}"), None)
    made = {(c.node, i): place for c in emitted if c.node is not None for i, place in enumerate(c.results)}
    return copied or _seen(node, made)


def _seen(node: Node, made: Mapping[tuple[Node, int], Place]) -> Place | None:
    if (node, 0) in made:
        return made[node, 0]
    source = node.args[0] if node.args else None
    if source is None:
        return None
    if node.op == "item":
        return made.get((source, node["index"]))
    inner = _seen(source, made)
    if inner is None or node.op not in ("view", "reshape"):
        return None
    packed = node.op == "reshape"
    return inner.view(Strided.packed(node.shape) if packed else Strided(node["shape"], node["strides"], node["offset"]))
