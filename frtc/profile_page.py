"""The page of `frtc run --report`: when each launch runs, how near to the roofline it comes, what memory holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from frtc import page
from frtc.arena_map import lifetimes
from frtc.console import size
from frtc.kernels.targets import Target, load_targets
from frtc.profile import LAUNCH_HEAD, SUMS_HEAD, Report, Row, Sums, launch_cells, percent, short, sums_cells
from frtc.runtime.plan import Program, Stage, unrolled
from frtc.work import KINDS, OTHER, kind_of

COLOURS = dict(zip((*KINDS, OTHER), ("#4e86c6", "#e8862e", "#4fa653", "#b56fb5", "#a08468"), strict=True))
WIDTH = 1150  # of drawings that need no more
LANE, GAP = 30, 6  # height of a row of boxes, and between rows
LEFT, TOP, BOTTOM = 70, 24, 34  # margins of the drawings with axes
PLOT, MAP = 420, 380  # height of the roofline and of the arena
DECADES = 6  # of TFLOP/s at most: what is slower lies on the lowest line
LEAST = 5.0  # pixels of a launch, on average: a lane with more is wider than the page


Place = Callable[[float, float], tuple[float, float]]  # pixels of FLOPs per byte and TFLOP/s


def html_of(program: Program, report: Report, device: Mapping[str, Any]) -> str:
    """A page without network, scripts or other files. `device`: its name and memory (frtc/device.py)."""
    target = load_targets().get(program.target.name)
    parts = [
        page.paragraph(f"{program.target.family} kernels for {program.target.name} on {device['name']}"),
        page.paragraph(report.closing),
        page.legend(COLOURS.items()),
        *_timeline(program, report),
        *(_roofline(report.rows, target) if target else ()),
        *_memory(program, device["memory"]),
        *_tables(report),
    ]
    return page.page(f"{program.model}: one inference", parts)


# ---- time ------------------------------------------------------------------------------------------------------------


def _timeline(program: Program, report: Report) -> Iterator[str]:
    yield page.heading("Timeline")
    yield page.paragraph("Each launch as wide as the time it adds in the graph; one round stands for all. Point at it.")
    yield _whole(program, report)
    for name, sums in report.stages.items():
        rows = [row for row in report.rows if row.stage == name]
        rounds = report.rounds[name]
        often = f", one of {rounds} rounds" if rounds > 1 else ""
        yield page.heading(f"{name}: {sums.in_graph_us / rounds / 1e3:.3f} ms, {len(rows)} launches{often}", 3)
        scale = max(WIDTH, LEAST * len(rows)) / max(sum(_us(row) for row in rows), 1e-3)
        yield page.drawing(max(WIDTH, LEAST * len(rows)), LANE + 2 * GAP, _boxes(rows, 0.0, GAP, scale, True))


def _whole(program: Program, report: Report) -> str:
    """Stages above, launches below."""
    by_stage = {name: [row for row in report.rows if row.stage == name] for name in report.rounds}
    order = [name for name, _ in unrolled(program.schedule)]
    took = {name: sum(map(_us, rows)) for name, rows in by_stage.items()}
    scale = WIDTH / max(sum(took[name] for name in order), 1e-3)
    marks, at = [], 0.0
    for i, name in enumerate(order):
        width = took[name] * scale
        colour = "#7f8b99" if i % 2 else "#5f6b79"
        marks.append(page.box(at, GAP, width, LANE, colour, f"{name}: {took[name]:.1f} us"))
        if width > 7 * len(name):
            marks.append(f'<g style="color:#fff;pointer-events:none">{page.words(at + 4, GAP + 19, name)}</g>')
        marks += _boxes(by_stage[name], at, 2 * GAP + LANE, scale, False)
        at += width
    return page.drawing(WIDTH, 2 * LANE + 3 * GAP, marks)


def _boxes(rows: Sequence[Row], x: float, y: float, scale: float, told: bool) -> Iterator[str]:
    for row in rows:
        yield page.box(x, y, _us(row) * scale, LANE, COLOURS[row.kind], _about(row) if told else "")
        x += _us(row) * scale


def _us(row: Row) -> float:
    """A box cannot be narrower than nothing."""
    return max(row.in_graph_us, 0.0)


def _about(row: Row) -> str:
    shared = f" (shared by {row.group} launches)" if row.group > 1 else ""
    lines = [
        f"{row.place}  {row.op}  {row.name}",
        f"{row.in_graph_us:.2f} us in the graph{shared}, {row.alone_us:.2f} us alone, {row.count} times",
        f"{row.kernel} {row.config}",
        f"grid {'x'.join(map(str, row.grid))}, block {row.block}, {row.smem} B of shared memory",
        f"{short(row.nbytes)}B, {short(row.flops)}FLOP, roofline {row.roof_us:.2f} us: {percent(row.share)}",
    ]
    return "\n".join(lines)


# ---- roofline --------------------------------------------------------------------------------------------------------


def _roofline(rows: Sequence[Row], target: Target) -> Iterator[str]:
    """Log-log: TFLOP/s over FLOPs per byte; a call is a dot, at the time of all of its launches."""
    took: dict[tuple[str, int], float] = {}
    for row in rows:
        took[row.stage, row.call] = took.get((row.stage, row.call), 0.0) + row.in_graph_us
    dots = [(row, took[row.stage, row.call]) for row in rows if row.flops and row.nbytes]
    points = [(row, row.flops / row.nbytes, row.flops / us / 1e6) for row, us in dots if us > 0]
    yield page.heading("Roofline")
    yield page.paragraph(
        f"{target.title}: {target.dram / 1e12:.2f} TB/s and dense tensor-core rates, nominal. "
        "A dot is a call; the line is what the GPU could do at that many operations per byte."
    )
    yield page.drawing(WIDTH, PLOT, _plot(points, target))


def _plot(points: Sequence[tuple[Row, float, float]], target: Target) -> Iterator[str]:
    ridge = max(target.tflops.values()) * 1e12 / target.dram  # FLOPs per byte
    across = _decades([x for _, x, _ in points] + [1.0, ridge])
    lowest, top = _decades([y for _, _, y in points] + [1.0, max(target.tflops.values())])
    up = (max(lowest, top - DECADES), top)

    def place(x: float, y: float) -> tuple[float, float]:
        right = (math.log10(x) - across[0]) / (across[1] - across[0])
        height = max(0.0, (math.log10(y) - up[0]) / (up[1] - up[0]))
        return LEFT + right * (WIDTH - LEFT - 20), PLOT - BOTTOM - height * (PLOT - TOP - BOTTOM)

    xs, ys = ([10.0**i for i in range(low, high + 1)] for low, high in (across, up))
    yield from _axes(xs, ys, place)
    for row, x, y in points:
        yield page.dot(*place(x, y), COLOURS[row.kind], f"{_about(row)}\n{y:.3g} TFLOP/s at {x:.3g} FLOPs per byte")
    yield from _roofs(xs, ys, target, place)  # its names lie where most dots do


def _axes(xs: Sequence[float], ys: Sequence[float], place: Place) -> Iterator[str]:
    for x in xs:
        yield page.line([place(x, ys[0]), place(x, ys[-1])], "grid")
        yield page.words(place(x, ys[0])[0], PLOT - BOTTOM + 14, f"{x:g}", "middle", True)
    for y in ys:
        yield page.line([place(xs[0], y), place(xs[-1], y)], "grid")
        yield page.words(LEFT - 6, place(xs[0], y)[1] + 4, f"{y:g}", "end", True)
    yield page.words(WIDTH / 2, PLOT - 5, "FLOPs per byte", "middle", True)
    yield page.words(4, TOP - 11, "TFLOP/s", "start", True)


def _roofs(xs: Sequence[float], ys: Sequence[float], target: Target, place: Place) -> Iterator[str]:
    """One slope of the memory, one level for each rate."""
    tera, most = target.dram / 1e12, max(target.tflops.values())  # TFLOP/s at one FLOP per byte, and at many
    start = max(xs[0], ys[0] / tera)
    yield page.line([place(start, start * tera), place(most / tera, most)], "roof")
    for i, rate in enumerate(sorted(set(target.tflops.values()), reverse=True)):
        names = ", ".join(name for name, value in target.tflops.items() if value == rate)
        yield page.line([place(rate / tera, rate), place(xs[-1], rate)], "roof")
        yield page.words(WIDTH - 24, place(xs[0], rate)[1] + (13 if i else -4), f"{names}: {rate:g}", "end")


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """The powers of ten around all values, at least one decade."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


# ---- memory ----------------------------------------------------------------------------------------------------------


def _memory(program: Program, used: Mapping[str, int]) -> Iterator[str]:
    yield page.heading("Memory")
    parts = [("weights", program.weights_nbytes), ("scratch", program.arena_nbytes), ("states", program.state_nbytes)]
    rows = [(name, size(nbytes)) for name, nbytes in (*parts, ("planned, with inputs and outputs", used["planned"]))]
    yield page.table(("of the device", "size"), rows, ("of the device",))
    stages = [program.stage(name) for name in dict.fromkeys(name for name, _ in unrolled(program.schedule))]
    if program.arena_nbytes and any(stage.calls for stage in stages):
        yield page.paragraph("The arena: offset upwards, calls to the right; a box lasts as long as its value.")
        count = sum(len(stage.calls) for stage in stages)
        width = max(float(WIDTH), LEFT + LEAST * count)
        marks = _arena(stages, program.arena_nbytes, (width - LEFT - 10) / count)
        yield page.drawing(width, MAP, marks)


def _arena(stages: Sequence[Stage], nbytes: int, step: float) -> Iterator[str]:
    height, x = MAP - TOP - BOTTOM, float(LEFT)
    yield page.words(LEFT - 6, TOP + 8, size(nbytes), "end", True)
    yield page.words(LEFT - 6, MAP - BOTTOM, "0", "end", True)
    for stage in stages:
        yield page.line([(x, TOP), (x, MAP - BOTTOM)], "grid")
        if len(stage.calls) * step > 7 * len(stage.name):
            yield page.words(x + 3, MAP - BOTTOM + 15, stage.name, faint=True)
        for held in lifetimes(stage):
            nbytes_held = held.end - held.start
            about = f"{held.op}  {held.name}\n{size(nbytes_held)} at {held.start}, calls {held.first} to {held.last}"
            top = TOP + height * (1 - held.end / nbytes)
            span = ((held.last - held.first + 1) * step, height * nbytes_held / nbytes)
            yield page.box(x + held.first * step, top, *span, COLOURS[kind_of(held.op)], about)
        x += len(stage.calls) * step


# ---- tables ----------------------------------------------------------------------------------------------------------


def _tables(report: Report) -> Iterator[str]:
    for title, sums in (("By class of kernels", report.kinds), ("By stage", report.stages)):
        yield page.heading(f"{title}, of a whole inference")
        yield _sums_table(sums)
    yield page.heading("Launches, us of one round")
    rows = (launch_cells(row) for row in report.rows)
    yield page.table(LAUNCH_HEAD, rows, ("launch", "op", "kernel", "grid", "name"))


def _sums_table(sums: Mapping[str, Sums]) -> str:
    return page.table(SUMS_HEAD, (sums_cells(*item) for item in sums.items()), ("",))
