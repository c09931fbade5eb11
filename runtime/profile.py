"""How long each launch of a Plan takes on the GPU, found in two ways.

alone      a graph of COPIES times this launch, each waiting for the one before, less an empty graph, over COPIES: warm
in graph   a graph of launches that ends with this one, less the graph that ends before it: what it adds where it stands
           (the two are replayed in turn: clocks that change do not count as its time)

Every graph records one event in front of its first launch and one behind its last. The stages are one line of launches
in the order of the schedule, a repeated stage once, with round 0. Graphs of the second kind start LEAD launches before
a window of WINDOW of them, from memory as the line has it there, and on caches that were overwritten where the Plan is
larger than they are: weights come from memory as in an inference, and noise does not grow with the length of the line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from frtc.kernels.targets import MiB, load_targets
from frtc.runtime.graph import Graph
from frtc.runtime.plan import ARENA, STATE, Call, Program, Stage, unrolled
from frtc.runtime.session import Session

WINDOW, LEAD = 16, 8  # launches
COPIES = 16
WARM_UP, REPLAYS = 2, 15  # of each graph; REPLAYS are timed
L2_MOST = 128 * MiB  # where the Plan's target is not known here


@dataclass(frozen=True, slots=True)
class LaunchTime:
    """Microseconds of launch `launch` of call `call` of a stage, in one round.

    group    how many launches share one difference, which is split evenly; apart, some are below the resolution
    """

    stage: str
    call: int
    launch: int
    alone_us: float
    in_graph_us: float
    group: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Microseconds.

    resolution    differences that are smaller are noise, or below the clock's step
    start_us      of a graph without launches
    replay_us     of the whole inference, from its first node to its last: what start_us and the differences add up to
    """

    launches: tuple[LaunchTime, ...]
    resolution_us: float
    start_us: float
    replay_us: float

    def sum_us(self, rounds: dict[str, int]) -> float:
        """What the differences say of the whole inference; `rounds`: runs of each stage in it."""
        return self.start_us + sum(t.in_graph_us * rounds[t.stage] for t in self.launches)


def rounds_in(program: Program) -> dict[str, int]:
    """How often one inference runs each stage, in the order of the schedule."""
    order = [name for name, _ in unrolled(program.schedule)]
    return {name: order.count(name) for name in dict.fromkeys(order)}


def profile(session: Session, done: Callable[[float], object] = lambda share: None) -> Profile:
    """Time all launches on the inputs that the session has. States are zero afterwards, outputs arbitrary."""
    session.run()
    session.reset()
    stages = [session.program.stage(name) for name in rounds_in(session.program)]
    places = [(s, c, k) for s in stages for c, call in enumerate(s.calls) for k in range(len(call.launches))]
    with session.driver.current(), _bench(session) as bench:
        start = middle(bench.time(Stage("", ())))
        order = [session.program.stage(name) for name, _ in unrolled(session.program.schedule)]
        whole = middle(bench.time(Stage("", Line.of(order).calls)))
        times = list(_windows(bench, Line.of(stages), start, done))
    session.reset()
    resolution = resolution_of([samples for window in times for samples in window.added])
    added = [share for window in times for share in shared([middle(samples) for samples in window.added], resolution)]
    alone = [us for window in times for us in window.alone]
    found = (LaunchTime(s.name, c, k, us, *share) for (s, c, k), us, share in zip(places, alone, added, strict=True))
    return Profile(tuple(found), resolution, start, whole)


@dataclass(frozen=True, slots=True)
class Line:
    """Calls of several stages as if of one, and (call, launch) of every launch in order."""

    calls: tuple[Call, ...]
    places: tuple[tuple[int, int], ...]

    @staticmethod
    def of(stages: Sequence[Stage]) -> Line:
        """A stage starts when the one before it is complete."""
        calls: list[Call] = []
        ends: tuple[int, ...] = ()
        for stage in stages:
            base, waited_for = len(calls), {j for call in stage.calls for j in call.after}
            calls += [replace(c, after=tuple(base + j for j in c.after) or ends) for c in stage.calls]
            ends = tuple(base + j for j in range(len(stage.calls)) if j not in waited_for) or ends
        return Line(tuple(calls), tuple((c, k) for c, call in enumerate(calls) for k in range(len(call.launches))))

    def part(self, first: int, last: int) -> Stage:
        """The launches from `first` to before `last`; what came before them is complete."""
        kept: dict[int, list[int]] = {}
        for call, launch in self.places[first:last]:
            kept.setdefault(call, []).append(launch)
        at = {call: i for i, call in enumerate(kept)}
        return Stage("", tuple(self._cut(call, ks[0], ks[-1] + 1, at) for call, ks in kept.items()))

    def alone(self, place: int, copies: int) -> Stage:
        """One launch, again and again; none starts early."""
        call, k = self.calls[self.places[place][0]], self.places[place][1]
        launch = replace(call.launches[k], early=False)
        return Stage("", (replace(call, after=(), launches=(launch,) * copies),))

    def _cut(self, call: int, first: int, last: int, at: dict[int, int]) -> Call:
        whole = self.calls[call]
        after = tuple(at[j] for j in whole.after if j in at)
        return replace(whole, after=after, launches=whole.launches[first:last])


@dataclass(frozen=True, slots=True)
class _Window:
    """Of each launch, microseconds; of what it adds every sample."""

    alone: list[float]
    added: list[list[float]]


def _windows(bench: _Bench, line: Line, start_us: float, done: Callable[[float], object]) -> Iterator[_Window]:
    count, saved_at = len(line.places), 0
    for first in range(0, count, WINDOW):
        lead = max(0, first - LEAD)
        if lead > saved_at:
            bench.advance(line.part(saved_at, lead))
        saved_at = lead
        last = min(first + WINDOW, count)
        added, alone = [], []
        for place in range(first, last):
            added.append(bench.added(line.part(lead, place), line.part(lead, place + 1)))
            chain = bench.time(line.alone(place, COPIES), restore=False)  # what it reads lies there as in the line
            alone.append(max(0.0, middle(chain) - start_us) / COPIES)
            done((place + 1) / count)
        yield _Window(alone, added)


class _Bench:
    """Graphs between two events, on memory that is put back before each replay.

    saved    copies of arena and states: (address, where it belongs, bytes)
    evict    memory to overwrite so that the caches forget the Plan's: (address, bytes)
    """

    def __init__(self, session: Session, saved: list[tuple[int, int, int]], evict: tuple[int, int]) -> None:
        self.session, self.saved, self.evict = session, saved, evict
        self.call, self.stream = session.driver.call, session.stream
        self.events = [self.call("cuEventCreate", 0) for _ in range(2)]
        self.save()

    def time(self, stage: Stage, restore: bool = True) -> list[float]:
        """Microseconds of each replay."""
        (samples,) = self._in_turn([stage], restore)
        return samples

    def added(self, before: Stage, stage: Stage) -> list[float]:
        """Microseconds of each replay of `stage` less those of the replay of `before` next to it."""
        return [b - a for a, b in zip(*self._in_turn([before, stage]), strict=True)]

    def _in_turn(self, stages: Sequence[Stage], restore: bool = True) -> list[list[float]]:
        """Microseconds of each replay of each."""
        graphs, samples = list[Graph](), list[list[float]]([] for _ in stages)
        try:
            graphs += (self._graph(stage, self.events) for stage in stages)
            for _ in range(WARM_UP + REPLAYS):
                for graph, of in zip(graphs, samples, strict=True):
                    if restore:
                        self.restore()
                    graph.launch(self.stream)
                    self.call("cuStreamSynchronize", self.stream)
                    of.append(float(self.call("cuEventElapsedTime", *self.events)) * 1e3)
        finally:
            for graph in graphs:
                graph.destroy()
        return [of[WARM_UP:] for of in samples]

    def advance(self, stage: Stage) -> None:
        """Memory is put back from now on to what it is behind these launches."""
        graph = self._graph(stage, ())
        try:
            self.restore()
            graph.launch(self.stream)
            self.save()
        finally:
            graph.destroy()

    def save(self) -> None:
        for copy, place, nbytes in self.saved:
            self.call("cuMemcpyDtoDAsync", copy, place, nbytes, self.stream)
        self.call("cuStreamSynchronize", self.stream)

    def restore(self) -> None:
        """After the caches: in an inference, too, they hold what was computed last."""
        address, nbytes = self.evict
        if nbytes:
            self.call("cuMemsetD8Async", address, 0, nbytes, self.stream)
        for copy, place, size in self.saved:
            self.call("cuMemcpyDtoDAsync", place, copy, size, self.stream)

    def close(self) -> None:
        for event in self.events:
            self.call("cuEventDestroy", event)

    def _graph(self, stage: Stage, events: Sequence[Any]) -> Graph:
        session = self.session
        return Graph(session.driver, session.functions, session.addresses, [(stage, 0)], events)


@contextmanager
def _bench(session: Session) -> Iterator[_Bench]:
    """With device memory of its own, given back at the end."""
    program, driver = session.program, session.driver
    sizes = {ARENA: program.arena_nbytes, STATE: program.state_nbytes}
    target = load_targets().get(program.target.name)
    cached = target.l2 if target else L2_MOST
    evicted = 2 * cached if program.weights_nbytes + sum(sizes.values()) > cached else 0
    held: list[int] = []
    try:
        for nbytes in (*sizes.values(), evicted):
            held.append(driver.alloc(nbytes))
        places = zip(held, sizes.items(), strict=False)
        saved = [(copy, session.addresses[space], nbytes) for copy, (space, nbytes) in places if nbytes]
        bench = _Bench(session, saved, (held[-1], evicted))
        try:
            yield bench
        finally:
            bench.close()
    finally:
        for address in held:
            driver.call("cuMemFree", address)


def middle(samples_us: Sequence[float]) -> float:
    """The mean of the middle half: as robust as p50, and finer than the clock's step."""
    ordered, cut = sorted(samples_us), len(samples_us) // 4
    kept = ordered[cut : len(ordered) - cut]
    return sum(kept) / len(kept)


def resolution_of(samples_us: Sequence[Sequence[float]]) -> float:
    """Two standard errors of a difference (p50 over the launches) by its samples, at least the clock's step."""
    errors, values = [], sorted({round(us, 3) for samples in samples_us for us in samples})
    for samples in samples_us:
        ordered, quarter = sorted(samples), len(samples) // 4
        deviation = (ordered[-1 - quarter] - ordered[quarter]) / 1.35  # half of a normal distribution lies within
        errors.append(2 * deviation / math.sqrt(len(samples)))
    step = min((b - a for a, b in pairwise(values)), default=0.0)
    return max(sorted(errors)[len(errors) // 2], step)


def shared(added_us: Sequence[float], resolution_us: float) -> list[tuple[float, int]]:
    """(microseconds, launches in its group) of each: neighbours are taken together until they reach the resolution."""
    groups: list[list[float]] = [[]]
    for us in added_us:
        groups[-1].append(us)
        if sum(groups[-1]) >= resolution_us:
            groups.append([])
    rest = groups.pop()
    if groups:
        groups[-1] += rest
    else:
        groups = [rest]
    return [(sum(group) / len(group), len(group)) for group in groups for _ in group]
