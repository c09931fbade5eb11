"""What `frtc run --profile` says: each launch with its time, its least work and its share of the target's roofline."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from frtc.console import table
from frtc.kernels.targets import load_targets
from frtc.runtime.plan import Call, Program
from frtc.runtime.profile import LaunchTime, Profile, rounds_in
from frtc.work import kind_of, work_of

FIRST = 30  # rows of the table of launches
PREFIX = "_ZN4frtc"
LENGTH = re.compile(r"\d+")  # in front of each name of a mangled path
NUMBER = re.compile(r"L[ij](\d+)E")  # an integer among the template's arguments


@dataclass(frozen=True, slots=True)
class Row:
    """One launch. Work is its call's: where a call has several launches, the first has it and the share is of them all.

    name            module path and source line
    count           times in an inference; everything else is of one time
    of              launches of the call
    kernel, config  device function and the integers of its template
    share           roof_us over in_graph_us, both of the whole call; None where the target is not known here
    """

    name: str
    stage: str
    call: int
    launch: int
    of: int
    count: int
    op: str
    kind: str
    kernel: str
    config: str
    grid: tuple[int, int, int]
    block: int
    smem: int
    alone_us: float
    in_graph_us: float
    group: int
    nbytes: int
    flops: float
    rate: str
    roof_us: float
    share: float | None

    @property
    def place(self) -> str:
        return f"{self.stage}/{self.call}" + (f".{self.launch}" if self.of > 1 else "")


@dataclass(frozen=True, slots=True)
class Sums:
    """Of a stage or a class of kernels, in a whole inference."""

    launches: int
    in_graph_us: float
    alone_us: float
    roof_us: float
    share: float | None
    nbytes: int
    flops: float


@dataclass(frozen=True, slots=True)
class Report:
    """All launches in order, each round of a repeated stage standing for all; sums by stage and by class of kernels."""

    profile: Profile
    rows: tuple[Row, ...]
    rounds: dict[str, int]
    stages: dict[str, Sums]
    kinds: dict[str, Sums]

    @property
    def sum_us(self) -> float:
        return self.profile.sum_us(self.rounds)

    def to_json(self) -> dict[str, Any]:
        p = self.profile
        return {
            "resolution_us": p.resolution_us,
            "start_us": p.start_us,
            "sum_us": self.sum_us,
            "replay_us": p.replay_us,
            "stages": {name: asdict(sums) for name, sums in self.stages.items()},
            "classes": {name: asdict(sums) for name, sums in self.kinds.items()},
            "launches": [asdict(row) for row in self.rows],
        }

    def __str__(self) -> str:
        slowest = sorted(self.rows, key=lambda row: -row.in_graph_us * row.count)[:FIRST]
        parts = [
            f"launches by time in the graph, the first {len(slowest)} of {len(self.rows)}; us of one round",
            table([LAUNCH_HEAD, *map(launch_cells, slowest)]),
            "by class of kernels, in a whole inference",
            table([SUMS_HEAD, *(sums_cells(*item) for item in self.kinds.items())]),
            "by stage, in a whole inference",
            table([SUMS_HEAD, *(sums_cells(*item) for item in self.stages.items())]),
            self.closing,
        ]
        return "\n".join(parts)

    @property
    def closing(self) -> str:
        """How far the figures can be trusted."""
        found, replay = self.sum_us / 1e3, self.profile.replay_us / 1e3
        return (
            f"what launches add sums to {found:.3f} ms, a replay takes {replay:.3f} ms on the device; "
            f"differences below {self.profile.resolution_us:.2f} us are noise"
        )


LAUNCH_HEAD = ("launch", "in graph", "alone", "times", "roof", "share", "op", "kernel", "grid", "block", "smem",
               "bytes", "FLOPs", "name")  # fmt: skip
SUMS_HEAD = ("", "launches", "in graph ms", "alone ms", "roof ms", "share", "bytes", "FLOPs")


def report_of(program: Program, profile: Profile) -> Report:
    rounds = rounds_in(program)
    rows = tuple(_rows(program, profile.launches, rounds))
    kinds = dict.fromkeys(row.kind for row in sorted(rows, key=lambda row: row.kind))
    return Report(
        profile,
        rows,
        rounds,
        {name: _sums(rows, lambda row, name=name: row.stage == name) for name in rounds},  # type: ignore[misc]
        {kind: _sums(rows, lambda row, kind=kind: row.kind == kind) for kind in kinds},  # type: ignore[misc]
    )


def _rows(program: Program, times: Sequence[LaunchTime], rounds: dict[str, int]) -> Iterable[Row]:
    took: dict[tuple[str, int], float] = {}
    for t in times:
        took[t.stage, t.call] = took.get((t.stage, t.call), 0.0) + t.in_graph_us
    for t in times:
        call = program.stage(t.stage).calls[t.call]
        yield _row(program, call, t, rounds[t.stage], took[t.stage, t.call])


def _row(program: Program, call: Call, t: LaunchTime, count: int, call_us: float) -> Row:
    launch, target = call.launches[t.launch], load_targets().get(program.target.name)
    work, first = work_of(call), t.launch == 0
    roof_us = work.roof_us(target) if target else 0.0
    share = roof_us / call_us if target and call_us > 0 else None
    kernel, config = kernel_of(program.kernels[launch.kernel].symbol)
    return Row(
        name=call.name, stage=t.stage, call=t.call, launch=t.launch, of=len(call.launches), count=count,
        op=call.op, kind=kind_of(call.op), kernel=kernel, config=config,
        grid=launch.grid, block=launch.block, smem=launch.smem,
        alone_us=t.alone_us, in_graph_us=t.in_graph_us, group=t.group,
        nbytes=work.nbytes * first, flops=work.flops * first, rate=work.rate, roof_us=roof_us * first, share=share,
    )  # fmt: skip


def kernel_of(symbol: str) -> tuple[str, str]:
    """("smxx_gemm", "64,64,64,32,32,4") of the mangled name of a template in namespace frtc; else the symbol itself."""
    if not symbol.startswith(PREFIX):
        return symbol, ""
    names, at = [], len(PREFIX)
    while found := LENGTH.match(symbol, at):
        at = found.end() + int(found[0])
        names.append(symbol[found.end() : at])
    return "::".join(names), ",".join(NUMBER.findall(symbol[at:]))


def _sums(rows: Sequence[Row], chosen: Callable[[Row], bool]) -> Sums:
    kept = [row for row in rows if chosen(row)]
    took, roof = (sum(getattr(row, name) * row.count for row in kept) for name in ("in_graph_us", "roof_us"))
    return Sums(
        launches=sum(row.count for row in kept),
        in_graph_us=took,
        alone_us=sum(row.alone_us * row.count for row in kept),
        roof_us=roof,
        share=roof / took if roof and took > 0 else None,
        nbytes=sum(row.nbytes * row.count for row in kept),
        flops=sum(row.flops * row.count for row in kept),
    )


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def short(number: float) -> str:
    """ "16.8 M", "2.10 G": three digits."""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:.0f}"


def launch_cells(row: Row) -> tuple[str, ...]:
    added = f"{row.in_graph_us:.2f}" + (f" ({row.group})" if row.group > 1 else "")
    kernel = f"{row.kernel}<{row.config}>" if row.config else row.kernel
    grid = "x".join(map(str, row.grid))
    work = (short(row.nbytes), short(row.flops))
    return (row.place, added, f"{row.alone_us:.2f}", f"{row.count}", f"{row.roof_us:.2f}", percent(row.share), row.op,
            kernel, grid, f"{row.block}", f"{row.smem}", *work, row.name)  # fmt: skip


def sums_cells(name: str, sums: Sums) -> tuple[str, ...]:
    times = (f"{us / 1e3:.3f}" for us in (sums.in_graph_us, sums.alone_us, sums.roof_us))
    return (name, f"{sums.launches}", *times, percent(sums.share), short(sums.nbytes), short(sums.flops))
