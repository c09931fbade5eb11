"""The distinct sites of a built module, most expensive first, each with the candidates worth a measurement: alone, and
in their place in the whole program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from frtc.codegen.build import Built
from frtc.kernels.catalog import Catalog, Choice, label
from frtc.kernels.spec import Site
from frtc.kernels.tactic import Tactic, key_of
from frtc.kernels.targets import Target
from frtc.runtime.plan import WEIGHTS, unrolled

# In the chain: at most so many candidates, of those that take up to so many times the least, alone or by estimate.
MOST, NEAR_ALONE, NEAR = 8, 1.3, 1.6
# Entries of a config that mean nothing alone: when the next launch may begin, whether it finds room beside this one.
NEIGHBOURLY = ("RELEASE", "ALONE")
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


@dataclass(frozen=True, slots=True)
class Place:
    """Which of these makes the programs that hold the site quickest?

    calls        program -> calls of the site in an inference
    shares       program -> share of its time, by estimate
    most         the largest share of a program's time or calls
    candidates   with estimates in microseconds, the chosen one first
    """

    key: str
    calls: Mapping[str, int]
    shares: Mapping[str, float]
    most: float
    candidates: tuple[Tactic, ...]


# Site -> candidate -> microseconds in a chain of its own; None: failed.
Alone = Mapping[str, Mapping[str, "float | None"]]


def places_of(
    built: Built, target: Target, families: Sequence[str], catalog: Catalog, alone: Alone, most: int = MOST
) -> list[Place]:
    """Of the sites that more than one candidate serves."""
    rounds = Counter(stage for stage, _ in unrolled(built.program.schedule))
    totals = {name: sum(c.choice.cost_us for c in calls) for name, calls in built.emitted.items()}
    counts, first = dict[str, Counter[str]](), dict[str, tuple[Site, Choice]]()
    for stage, calls in built.emitted.items():
        for call in calls:
            counts.setdefault(key_of(call.site), Counter())[stage] += 1
            first.setdefault(key_of(call.site), (call.site, call.choice))
    places = []
    for key, (site, choice) in first.items():
        found = worth_trying(list(catalog.candidates(site, target, families)), choice, alone.get(key, {}), most)
        if len(found) > 1:
            shares = {name: n * choice.cost_us / max(totals[name], 1e-9) for name, n in counts[key].items()}
            largest = max(max(shares[name], n / len(built.emitted[name])) for name, n in counts[key].items())
            tactics = tuple(Tactic(key, c.kernel.name, c.config, c.cost_us) for c in found)
            calls_of = {name: n * rounds[name] for name, n in counts[key].items()}
            places.append(Place(key, calls_of, shares, largest, tactics))
    return places


def worth_trying(
    found: Sequence[Choice], chosen: Choice, alone: Mapping[str, float | None], most: int = MOST
) -> tuple[Choice, ...]:
    """The chosen one; those near the quickest alone; what differs from the best of these only beside neighbours; those
    near the cheapest by estimate."""
    named = {label(c.kernel, c.config): c for c in found}
    times = {name: us for name, us in alone.items() if us is not None and name in named}
    quick = [name for name in sorted(times, key=times.__getitem__) if times[name] <= NEAR_ALONE * min(times.values())]
    own, cheap = label(chosen.kernel, chosen.config), sorted(named, key=lambda name: named[name].cost_us)
    near = [name for name in cheap if named[name].cost_us <= NEAR * named[cheap[0]].cost_us]
    best = dict.fromkeys(_apart_from_neighbours(named[name]) for name in (own, *(quick or cheap)[:1]) if name in named)
    alike = [name for kind in best for name in named if _apart_from_neighbours(named[name]) == kind]
    failed = {name for name, us in alone.items() if us is None}
    wanted = [name for name in dict.fromkeys((*quick, *alike, *near)) if name != own and name not in failed]
    return (chosen, *(named[name] for name in wanted[:most]))


def _apart_from_neighbours(choice: Choice) -> tuple[str, tuple[tuple[str, object], ...]]:
    return choice.kernel.name, tuple((k, v) for k, v in choice.config.items() if k not in NEIGHBOURLY)
