"""What two Plans launch and how much memory they take: counts by program, ops that come or go, other tiles.

Calls are matched by op and by the place in the model that they came from, in order.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from frtc.runtime.plan import Call, Program, Stage, unrolled
from frtc.runtime.plan_file import Plan

Used = tuple[tuple[str, tuple[int, int, int], int], ...]  # of each launch: symbol, grid, block


@dataclass(frozen=True, slots=True)
class Changed:
    """A count, or bytes, on both sides."""

    name: str
    a: int
    b: int


@dataclass(frozen=True, slots=True)
class Retiled:
    """Calls of one op that another kernel computes, or the same one with other numbers."""

    op: str
    a: str
    b: str
    calls: int
    first: str


@dataclass(frozen=True, slots=True)
class StageDiff:
    """launches: once through the program; ops, kernels: those whose counts of calls and launches differ."""

    name: str
    launches: Changed
    ops: tuple[Changed, ...]
    kernels: tuple[Changed, ...]
    retiled: tuple[Retiled, ...]

    @property
    def differs(self) -> bool:
        return bool(self.launches.a != self.launches.b or self.ops or self.kernels or self.retiled)


@dataclass(frozen=True, slots=True)
class Launches:
    """whole: launches of one inference; kernels: different ones; overlap: stages whose calls wait for calls, if any."""

    whole: Changed
    kernels: Changed
    overlap: Changed
    stages: tuple[StageDiff, ...]

    @property
    def differ(self) -> bool:
        counts = (self.whole, self.kernels, self.overlap)
        return any(c.a != c.b for c in counts) or any(s.differs for s in self.stages)

    def data(self) -> dict[str, Any]:
        return asdict(self)


def compare_launches(a: Plan, b: Plan) -> Launches:
    """All programs of both; one that is missing on a side has no calls there."""
    names = dict.fromkeys(s.name for s in (*a.program.stages, *b.program.stages))
    stages = tuple(_stage(name, a.program, b.program) for name in names)
    whole = (_in_all(p.program) for p in (a, b))
    return Launches(
        Changed("one inference", *whole),
        Changed("kernels", len(a.program.kernels), len(b.program.kernels)),
        Changed("stages that overlap", *(len(p.program.overlap.stages) if p.program.overlap else 0 for p in (a, b))),
        stages,
    )


def compare_memory(a: Program, b: Program) -> tuple[Changed, ...]:
    """Bytes on the device, by part, and together."""
    parts = [(p.weights_nbytes, p.arena_nbytes, p.state_nbytes) for p in (a, b)]
    rows = [(*part, sum(part)) for part in parts]
    return tuple(Changed(*row) for row in zip(("weights", "scratch", "states", "together"), *rows, strict=True))


def _in_all(program: Program) -> int:
    count = {s.name: sum(len(c.launches) for c in s.calls) for s in program.stages}
    return sum(count[name] for name, _ in unrolled(program.schedule))


def _stage(name: str, a: Program, b: Program) -> StageDiff:
    calls = [_calls(name, p.stages) for p in (a, b)]
    launches = (sum(len(c.launches) for c in side) for side in calls)
    ops = [Counter(c.op for c in side) for side in calls]
    kernels = [
        Counter(gist(p.kernels[n.kernel].symbol) for c in side for n in c.launches)
        for p, side in zip((a, b), calls, strict=True)
    ]
    return StageDiff(name, Changed(name, *launches), _counts(*ops), _counts(*kernels), _retiled(a, b, *calls))


def _calls(name: str, stages: Iterable[Stage]) -> tuple[Call, ...]:
    return next((s.calls for s in stages if s.name == name), ())


def _counts(a: Counter[str], b: Counter[str]) -> tuple[Changed, ...]:
    return tuple(Changed(name, a[name], b[name]) for name in sorted({*a, *b}) if a[name] != b[name])


def _retiled(a: Program, b: Program, ours: tuple[Call, ...], theirs: tuple[Call, ...]) -> tuple[Retiled, ...]:
    """Pairs of calls whose kernels, grids or blocks differ, those with the same ones together."""
    waiting: defaultdict[tuple[str, str], list[Call]] = defaultdict(list)
    for call in reversed(theirs):
        waiting[call.op, call.name].append(call)
    found: dict[tuple[str, Used, Used], list[str]] = {}
    for call in ours:
        if not (same := waiting[call.op, call.name]):
            continue
        before, after = _used(a, call), _used(b, same.pop())
        if before != after:
            found.setdefault((call.op, before, after), []).append(call.name)
    return tuple(Retiled(op, _text(x), _text(y), len(names), names[0]) for (op, x, y), names in found.items())


def _used(program: Program, call: Call) -> Used:
    return tuple((program.kernels[n.kernel].symbol, n.grid, n.block) for n in call.launches)


def _text(used: Used) -> str:
    return " + ".join(f"{gist(symbol)}, grid {'x'.join(map(str, grid))} of {block}" for symbol, grid, block in used)


def gist(symbol: str) -> str:
    """The kernel's name and the numbers among its template arguments, in order: "smxx_gemm 128 256 64"."""
    found = re.match(r"_ZN4frtc(\d+)", symbol)
    if not found:
        return symbol
    start, length = found.end(), int(found[1])
    arguments = symbol[start + length :].partition("EvP")[0] if symbol[start + length :].startswith("I") else ""
    numbers = re.findall(r"L[ijlmxy](\d+)E", arguments)
    return " ".join([symbol[start : start + length], *numbers])
