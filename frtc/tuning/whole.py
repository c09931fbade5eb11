"""The search in the whole chain: each candidate in its place, and the programs that hold it timed as a whole.

A launch shares the device with its neighbours: their weights are on their way while it works, and their blocks wait for
room beside its own. No chain of one site shows that. So each site of a program, those with the most time first, takes
each of its candidates; the whole is compiled with it and timed; what is quickest stays, if it is so a second time.

A GPU near its limit of power is some percent slower at one moment than at another. So what is chosen is timed anew for
each site, first of all, and once more beside a candidate that seems quicker.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from frtc.kernels.tactic import Tactic
from frtc.tuning.builders import Builders
from frtc.tuning.questions import Place
from frtc.tuning.search import FAR, Progress, differs
from frtc.tuning.worker import Tried, Worker

SHARE = 0.03  # of the launches or the time of a program: a site with less of both is left as it is
LEAST = 0.01  # of the time of all programs: one that takes less is left as it is
GAIN = 0.998  # what is kept is quicker than this share of the time before
OUTPUTS_FAR = 0.1  # relative error of outputs after all rounds of all programs
BASE_S, TRIAL_S, TIMES = 180.0, 20.0, 5  # for the first trial; for others at least, and so many times the first's
US_LEAST = 1e-3
Chosen = dict[str, Tactic]


class NoBase(Exception):
    """There is nothing to compare with; the text says why."""


class _Over(Exception):
    """The time is over."""


@dataclass(frozen=True, slots=True)
class Decided:
    """What became of a site.

    times    candidate -> microseconds by part; failed: candidate -> why
    cut      the time was over before all candidates had their turn
    """

    program: str
    place: Place
    times: Mapping[str, Mapping[str, float]]
    failed: Mapping[str, str]
    before: str
    chosen: str = ""
    cut: bool = False

    def us(self, name: str) -> float:
        """Of the programs that hold the site."""
        return self.us_of(self.times[name])

    def us_of(self, times: Mapping[str, float]) -> float:
        return sum(times.get(program, 0.0) for program in self.place.calls)

    def row(self) -> dict[str, Any]:
        tried = [{"kernel": name, "us": round(self.us(name), 2)} for name in self.times if name not in self.failed]
        failed = [{"kernel": name, "failed": why} for name, why in self.failed.items()]
        about = {"program": self.program, "site": self.place.key, "candidates": [*tried, *failed]}
        return about | {"before": self.before, "chosen": self.chosen, **({"cut": True} if self.cut else {})}


@dataclass(slots=True)
class Whole:
    """A search under way.

    until    time.monotonic() after which nothing is begun
    chosen   what every trial has: found, or known before
    before   microseconds by part, of the first of the starts
    now      those of what is chosen; `seen` is what it computed
    left     (program, site) that the time did not reach, or not all candidates of
    refused  why the second of the starts is none
    """

    builders: Builders
    worker: Worker
    until: float
    chosen: Chosen = field(default_factory=dict)
    before: Mapping[str, float] = field(default_factory=dict)
    seen: Tried = field(default_factory=Tried)
    left: list[tuple[str, str]] = field(default_factory=list)
    refused: str = ""
    _limit: float = BASE_S
    _took: float = 0.0
    _keys: tuple[str, ...] = ()
    _own: Path | None = None  # the trial of what is chosen
    _searched: dict[str, tuple[str, Place]] = field(default_factory=dict)
    _ahead: dict[str, tuple[Chosen, list[Future[Path | str]]]] = field(default_factory=dict)

    @property
    def now(self) -> Mapping[str, float]:
        return self.seen.times

    def begin(self, starts: Sequence[Chosen], keys: Sequence[str]) -> None:
        """Take the quickest of the starts, the first where none is much quicker. keys: the sites that will be searched.

        Raises NoBase where the first one cannot be measured.
        """
        self._keys = tuple(keys)
        futures, files = [self.builders.start(start.values()) for start in starts], dict[str, Path]()
        for i, (start, future) in enumerate(zip(starts, futures, strict=True)):
            try:
                tried = self._run(future, self._keys, files, str(i))
            except _Over:
                tried = Tried(failed="there was no time for it (--tune-seconds)")
            if not i and (why := tried.failed or _not_finite(tried)):
                raise NoBase(why)
            if not i:
                self._limit = max(TRIAL_S, TIMES * self._took)
                self.before, self.seen, self.chosen, self._own = tried.times, tried, dict(start), files["0"]
            elif why := tried.failed or self._wrong(tried):
                self.refused = why
            elif tried.times["replay"] < GAIN * self.now["replay"]:
                self.seen, self.chosen, self._own = tried, dict(start), files[str(i)]

    def programs(self) -> list[str]:
        """Most time first; without those that take next to none."""
        parts = self.row(self.now)
        least = LEAST * parts.pop("replay")
        return sorted((name for name in parts if parts[name] >= least), key=lambda name: -parts[name])

    @staticmethod
    def row(times: Mapping[str, float]) -> dict[str, float]:
        """For the log: the programs and the replay of all of them."""
        return {name: round(us, 2) for name, us in times.items() if name not in ("total", "input", "output")}

    def run(self, places: Sequence[Place], programs: Sequence[str], progress: Progress) -> Iterator[Decided]:
        """Site by site; what is found is in `chosen` when the site is yielded."""
        order, known = list[tuple[str, Place]](), set[str]()
        for program in programs:
            for place in sorted(places, key=lambda place: -place.shares.get(program, 0.0)):
                if program in place.calls and place.key not in known:
                    known.add(place.key)
                    order.append((program, place))
        for i, (program, place) in enumerate(order):
            progress(f"tune in the chain, {program}, site {i + 1} of {len(order)}", i / len(order))
            following = order[i + 1][1] if i + 1 < len(order) else None
            if self._left() <= 0:
                self.left += [(name, waiting.key) for name, waiting in order[i:]]
                return
            decided = self._site(program, place, following)
            if decided.cut:
                self.left.append((program, place.key))
            yield decided

    def tactics(self) -> list[Tactic]:
        """All that is chosen; of what was searched, with microseconds: its share of its program's, by the estimates."""
        return [self._timed(tactic) for tactic in self.chosen.values()]

    def _timed(self, tactic: Tactic) -> Tactic:
        if tactic.site not in self._searched:
            return tactic
        program, place = self._searched[tactic.site]
        share = place.shares[program] / place.calls[program] * tactic.us / place.candidates[0].us
        return replace(tactic, us=max(share * self.now[program], US_LEAST))

    def _candidates(self, place: Place) -> tuple[Tactic, ...]:
        """What is chosen now, and the others."""
        own = self.chosen.get(place.key, place.candidates[0])
        here = next((tactic for tactic in place.candidates if str(tactic) == str(own)), own)
        return (here, *(tactic for tactic in place.candidates if str(tactic) != str(own)))

    def _site(self, program: str, place: Place, following: Place | None) -> Decided:
        own, *others = self._candidates(place)
        self.chosen[place.key], self._searched[place.key] = own, (program, place)
        futures = self._started(place)
        if following:
            self._ahead[following.key] = dict(self.chosen), self._starts(following)
        times, failed, files = {str(own): self._timed_anew()}, dict[str, str](), dict[str, Path]()
        cut = False
        for tactic, future in zip(others, futures, strict=True):
            name = str(tactic)
            try:
                tried = self._run(future, (place.key,), files, name)
            except _Over:
                cut = True
                break
            if why := tried.failed or self._wrong(tried, place.key):
                failed[name] = why
            else:
                times[name] = tried.times
        best = self._confirmed(str(own), Decided(program, place, times, failed, str(own)), files, failed)
        self.chosen[place.key] = next(tactic for tactic in (own, *others) if str(tactic) == best)
        if best in files and self._own:
            files[str(own)], self._own = self._own, files.pop(best)
        for path in files.values():
            path.unlink(missing_ok=True)
        return Decided(program, place, times, failed, str(own), best, cut)

    def _timed_anew(self) -> Mapping[str, float]:
        """Of what is chosen, at this moment."""
        assert self._own is not None
        again = self.worker.run(self._own, self._keys, self._limit) if self._left() > 0 else Tried(failed="no time")
        if not again.failed and not self._wrong(again):
            self.seen = again
        return self.now

    def _confirmed(self, own: str, found: Decided, files: Mapping[str, Path], failed: dict[str, str]) -> str:
        """The quickest, where it is quicker than what was there by more than noise, and again so beside it."""
        best = min(found.times, key=found.us)
        if best == own or found.us(best) >= GAIN * found.us(own):
            return own
        before = [self.now, self._timed_anew()]
        again = self.worker.run(files[best], self._keys, self._limit)
        if why := again.failed or self._wrong(again, found.place.key):
            failed[best] = why
            return own
        us = [found.us_of(times) for times in (found.times[best], again.times)]
        if us[1] >= GAIN * found.us_of(before[1]) or sum(us) >= GAIN * sum(map(found.us_of, before)):
            return own
        self.seen = again
        return best

    # ---- trials ----

    def _starts(self, place: Place) -> list[Future[Path | str]]:
        _, *others = self._candidates(place)
        return [self.builders.start((self.chosen | {place.key: tactic}).values()) for tactic in others]

    def _started(self, place: Place) -> list[Future[Path | str]]:
        """Builds of all candidates but the chosen one; those begun ahead, where nothing has changed since."""
        chosen, futures = self._ahead.pop(place.key, ({}, []))
        if futures and chosen == self.chosen:
            return futures
        for future in futures:
            future.cancel()
        return self._starts(place)

    def _run(
        self, future: Future[Path | str], probes: Sequence[str], files: dict[str, Path] | None = None, name: str = ""
    ) -> Tried:
        """Built and measured; its file is kept in `files`, where there are some."""
        try:
            made = future.result(timeout=max(self._left(), 0.0))
        except TimeoutError:
            raise _Over from None
        if isinstance(made, str):
            return Tried(failed=made)
        if files is not None:
            files[name] = made
        if self._left() <= 0:
            raise _Over
        began = time.monotonic()
        tried = self.worker.run(made, probes, self._limit)
        self._took = time.monotonic() - began
        return tried

    def _wrong(self, tried: Tried, key: str = "") -> str:
        """Why these are not the results of the same programs, or "". key: the one site that differs, if it is one.

        Its first call has the same operands as before. Those of calls behind it are apart by roundings, which weights
        that nobody trained may enlarge.
        """
        if key in self.seen.probes and (why := differs(tried.probes.get(key, ()), self.seen.probes[key], FAR)):
            return why
        return differs(tried.outputs, self.seen.outputs, OUTPUTS_FAR).replace("its results", "its outputs", 1)

    def _left(self) -> float:
        return self.until - time.monotonic()


def _not_finite(tried: Tried) -> str:
    finite = all(x == x and abs(x) != float("inf") for some in tried.outputs for x in some)
    return "" if finite else "on weights that nobody trained its outputs are not finite"
