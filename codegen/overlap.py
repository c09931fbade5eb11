"""Stages beside each other: the calls of those that come first wait for calls, not for the end of the stage before.

A long stage leaves multiprocessors idle where its launches are small or end unevenly; what does not need its last
results runs there. The first round of a repeat needs the keys and values of one layer after the other, as the prefix
makes them. Each of these stages has bytes of the arena for itself, else it would wait for those that it shares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from frtc.codegen.dependences import verify_no_race, with_dependences
from frtc.runtime.plan import Overlap, Repeat, Run, Stage


def leading(schedule: Sequence[Run | Repeat]) -> tuple[str, ...]:
    """The stages up to the first round of the first repeat, or up to one that runs a second time."""
    names: list[str] = []
    for step in schedule:
        for run in [step] if isinstance(step, Run) else step.body:
            if not isinstance(run, Run) or run.stage in names:
                return tuple(names)
            names.append(run.stage)
        if isinstance(step, Repeat):
            break
    return tuple(names)


def overlap_of(names: Sequence[str], stages: Mapping[str, Stage], rounds: Mapping[str, int]) -> Overlap | None:
    """What the calls of these stages wait for, rounds: of the repeat around a stage. None: there are no two."""
    if len(names) < 2:
        return None
    calls = [call for name in names for call in stages[name].calls]
    often = [rounds.get(name, 1) for name in names for _ in stages[name].calls]
    ordered = with_dependences(calls, often)
    verify_no_race(ordered, often)
    return Overlap(tuple(names), tuple(call.after for call in ordered))
