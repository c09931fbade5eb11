"""The distinct sites of a built module, most expensive first, each with the candidates worth a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from frtc.codegen.build import Built
from frtc.kernels.catalog import Catalog, Choice, label
from frtc.kernels.spec import Site
from frtc.kernels.tactic import key_of
from frtc.kernels.targets import Target
from frtc.runtime.plan import WEIGHTS, unrolled

BEST = 6  # candidates by estimated time; the best of every kernel, and what is chosen without measuring, come on top


@dataclass(frozen=True, slots=True)
class Question:
    """Which of these is the fastest?

    weights      places of the operands that are weights at some call
    us           estimated time of all its calls in one inference
    candidates   the first one is what is chosen without measuring
    """

    key: str
    site: Site
    weights: frozenset[int]
    us: float
    candidates: tuple[Choice, ...]


def questions_of(
    built: Built, target: Target, families: Sequence[str], catalog: Catalog, best: int = BEST
) -> list[Question]:
    """Of the sites that more than one candidate serves."""
    rounds: dict[str, int] = {}
    for stage, _ in unrolled(built.program.schedule):
        rounds[stage] = rounds.get(stage, 0) + 1
    us, weights, first = dict[str, float](), dict[str, set[int]](), dict[str, tuple[Site, Choice]]()
    for stage, calls in built.emitted.items():
        for call in calls:
            key = key_of(call.site)
            first.setdefault(key, (call.site, call.choice))
            us[key] = us.get(key, 0.0) + call.choice.cost_us * rounds.get(stage, 0)
            read = {i for i, place in enumerate(call.operands) if place and place.buffer.space == WEIGHTS}
            weights.setdefault(key, set()).update(read)
    asked = []
    for key, (site, choice) in first.items():
        candidates = worth_it(list(catalog.candidates(site, target, families)), choice, best)
        if len(candidates) > 1:
            asked.append(Question(key, site, frozenset(weights[key]), us[key], candidates))
    return sorted(asked, key=lambda question: -question.us)


def worth_it(found: Sequence[Choice], chosen: Choice, best: int) -> tuple[Choice, ...]:
    """The chosen one, the `best` cheapest by estimate, and the cheapest of every kernel."""
    cheapest = sorted(found, key=lambda choice: choice.cost_us)
    of_kernels = {choice.kernel.name: choice for choice in reversed(cheapest)}
    wanted: dict[str, Choice] = {}
    for choice in (chosen, *cheapest[:best], *of_kernels.values()):
        wanted.setdefault(label(choice.kernel, choice.config), choice)
    return tuple(wanted.values())
