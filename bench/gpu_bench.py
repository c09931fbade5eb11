"""Latency of a policy's Plans on a GPU beside its rivals, in one run: one CUDA graph, host to host, and stages.

    PYTHONPATH=. python3 -m bench.gpu_bench [--policy pi0] [--shapes "c50 fp8,c10 fp8"] [--family baseline,native]
                                            [--changing N] [--replays N] [--only WORD] [--no-profile]

Every contender: 300 warm-ups, then replays one at a time, p50 to p99.9. Plans are compiled by processes of their own,
in the order of the shapes, each is timed as soon as it is there, and whatever still compiles is stopped meanwhile.
Static scales come from a calibration of their own. Rivals follow the first row, so that a run that is cut short has
both. Results are written after each contender; one that fails costs no other row, but fails the bench. `--device cpu`
is a rehearsal at size tiny.

Seconds on an H200 with 16 cores, Pi0.5 (bench/NOTES.md): checkpoint 22, first Plan 40, then a row 15 to 33 (its
profile 8), four rivals 35 to build and 43 to time, a further calibration 17, 10,000 changing prompts 10,000 x p50.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch._dynamo
from torch import Tensor

from bench import report
from bench.calibrated import calibrated
from bench.frames_times import from_frames
from bench.full_model import ROWS, STATIC, Compiling, Shape, inputs_of, make_room, observation, plan_path
from bench.gpu_model import file_name, graph_nodes
from bench.gpu_table import bars_of, line_of, table
from bench.plan_work import classes_of, stages_of
from bench.rivals import pi0_torch, pi05_torch
from bench.rivals.modules_torch import Modules
from frtc.errors import UsageError
from frtc.models import load_models
from frtc.runtime.emulator import Emulator
from frtc.runtime.executor import Executor
from frtc.runtime.plan_file import Plan, open_plan
from frtc.runtime.profile import profile
from frtc.runtime.session import Session
from frtc.runtime.timing import Spread, took_us

FAR = 3  # shapes that are calibrated before their turn, while the Plan that is wanted now compiles
ROOM = 50 << 30  # bytes of disk: a checkpoint and eight Plans


@dataclass(frozen=True, slots=True)
class Counts:
    """How often things run.

    warm_up    before the first sample of a contender
    tail       replays of a policy's first shape, whose p99.9 counts; `replays` of everything else; as many host to host
    parts      inferences with an event after each stage
    changing   inferences of the first shape from host to host, another prompt length and noise each time
    profile    time each launch of the first Plan of a precision and family, for the shares of classes of kernels
    """

    warm_up: int = 300
    tail: int = 1000
    replays: int = 300
    parts: int = 100
    changing: int = 10_000
    profile: bool = True


REHEARSAL = Counts(1, 2, 2, 2, 3, profile=False)


class Rival(Protocol):
    """`run` is one inference on what lies on the device already, to `out`."""

    out: Tensor

    def run(self) -> None: ...
    def compile(self) -> None: ...


def sizes(device: str, **about: Any) -> pi05_torch.Shape:
    """On a CPU two layers."""
    few = {} if device == "cuda" else {"vision_layers": 2, "layers": 2, "steps": 2, "views": 1}
    return pi05_torch.Shape(device=device, **{**about, **few})


SHAPES = {
    "pi05": (
        Shape("pi05", precision=STATIC),  # the one with changing prompts: what replaying costs is alike for all
        Shape("pi05", horizon=10, precision=STATIC),
        Shape("pi05"),
        Shape("pi05", prompt=200, precision=STATIC),
        Shape("pi05", views=1, horizon=10, precision=STATIC),
        Shape("pi05", views=3, horizon=10, precision=STATIC),
        Shape("pi05", precision=ROWS),
        Shape("pi05", precision="w8a16"),
        Shape("pi05", horizon=10),
        Shape("pi05", prompt=200),
    ),
    "pi0": (Shape("pi0"), Shape("pi0", horizon=10), Shape("pi0", precision=STATIC)),
    "smolvla": (Shape("smolvla"), Shape("smolvla", precision=STATIC)),
}
INDUCTOR = "Inductor + graph"
RIVALS: dict[str, dict[str, tuple[str, Callable[[str], Rival]]]] = {
    "pi05": {
        "tuned bf16 c50": (f"torch tuned bf16, {INDUCTOR}", lambda device: pi05_torch.Pi05(sizes(device))),
        "tuned bf16 c10": (f"torch tuned bf16, {INDUCTOR}", lambda device: pi05_torch.Pi05(sizes(device, horizon=10))),
        "tuned fp8 c50": (f"torch tuned FP8, {INDUCTOR}", lambda device: pi05_torch.Pi05(sizes(device, fp8=True))),
        "natural bf16 c50": (
            f"torch natural bf16, {INDUCTOR}",
            lambda device: pi05_torch.Pi05(sizes(device, tuned=False)),
        ),
    },
    "pi0": {
        "tuned bf16 c50": (f"torch tuned bf16, {INDUCTOR}", lambda device: pi0_torch.Pi0(sizes(device))),
        "tuned bf16 c10": (f"torch tuned bf16, {INDUCTOR}", lambda device: pi0_torch.Pi0(sizes(device, horizon=10))),
    },
    "smolvla": {
        "own modules bf16 c50": (
            f"own torch modules bf16, layers by {INDUCTOR}",
            lambda device: Modules(shapes_of("smolvla", device)[0], device),
        ),
    },
}


def times(replay: Callable[[], object], stream: Any, counts: Counts, count: int) -> Spread:
    """Microseconds between events around each replay, one in flight; by the host's clock where there is no stream."""
    if stream is None:
        return Spread.of([took_us(replay) for _ in range(count)])
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    samples = []
    with torch.cuda.stream(stream):
        for _ in range(counts.warm_up + count):
            start.record(stream)
            replay()
            end.record(stream)
            end.synchronize()
            samples.append(start.elapsed_time(end) * 1e3)
    return Spread.of(samples[counts.warm_up :])


def replay_of(executor: Executor) -> Callable[[], object]:
    """One inference on the inputs that its memory has; the emulator's copies them."""
    return executor.replay if isinstance(executor, Session) else executor.run


def full_prompt(executor: Executor, tokens: int, stream: Any, counts: Counts) -> Spread:
    """Replays with as many valid tokens as the budget has."""
    executor.set("n", np.array(tokens, np.int32))
    executor.run()  # a replay copies no inputs
    return times(replay_of(executor), stream, counts, counts.replays)


def ours(shape: Shape, device: str, counts: Counts, count: int, profiled: bool) -> dict[str, Any]:
    """One Plan: `count` replays and as many inferences from host to host, from the model's inputs and from raw frames,
    its stages, its classes of kernels."""
    with opened(shape, device) as (plan, executor, stream):
        row: dict[str, Any] = {
            "contender": f"frtc {shape.precision} {plan.program.target.family}",
            "shape": str(shape),
            "valid": min(48, shape.prompt),
            "plan_id": plan.plan_id,
            "graph_nodes": graph_nodes(plan.program),
        }
        row["device_us"] = times(replay_of(executor), stream, counts, count).row()
        row["gpu"] = report.gpu() if stream else {}  # still warm: clocks under load
        row["host_us"] = Spread.of([took_us(executor.run) for _ in range(count)]).row()
        timed = executor.time(counts.parts).parts
        row["parts_us"] = {name: part.row() for name, part in timed.items()}
        row["stages"] = stages_of(plan.program, timed)
        if shape.prompt > row["valid"]:
            row["full_us"] = full_prompt(executor, shape.prompt, stream, counts).row()
        found = profile(executor) if profiled and isinstance(executor, Session) else None
        row["classes"] = classes_of(plan.program, found)
        row["frames_us"] = from_frames(plan, executor, count, min(counts.warm_up, 50))  # last: it sets other inputs
    return row


@contextmanager
def opened(shape: Shape, device: str) -> Iterator[tuple[Plan, Executor, Any]]:
    """The Plan on the device, with an observation of at most 48 tokens, once run; and its stream."""
    plan = open_plan(plan_path(shape), verify=False)
    os.sync()  # gigabytes that still go to the disk would share the host's memory with what is timed
    slots, vocab = inputs_of(shape)
    stream = torch.cuda.Stream() if device == "cuda" else None
    with Session(plan, stream=stream) if stream else Emulator(plan) as executor:
        for name, value in observation(slots, min(48, shape.prompt), vocab).items():
            executor.set(name, value)
        executor.run()
        (output,) = executor.outputs
        assert np.isfinite(executor.get(output)).all()
        yield plan, executor, stream


def changing(executor: Executor, count: int) -> Spread:
    """Host to host on a warm executor, another prompt length and noise every time."""
    rng = np.random.default_rng(2)
    (budget,), horizon = executor.inputs["tokens"].shape, executor.inputs["noise"].shape
    lengths = rng.integers(1, budget + 1, count)
    noise = rng.standard_normal(horizon).astype(np.float32)
    samples = []
    for i, n in enumerate(lengths):
        executor.set("n", np.array(n, np.int32))
        executor.set("noise", np.roll(noise, i, 0))
        samples.append(took_us(executor.run))
    return Spread.of(samples)


@dataclass(frozen=True, slots=True)
class Built:
    """A rival that is ready to replay; `rival` keeps its memory."""

    name: str
    shape: str
    rival: Rival
    replay: Callable[[], object]
    seconds: float

    def time(self, device: str, counts: Counts) -> dict[str, Any]:
        stream = torch.cuda.current_stream() if device == "cuda" else None
        spread = times(self.replay, stream, counts, counts.replays)
        assert torch.isfinite(self.rival.out).all(), f"{self.name} gives no finite actions"
        row = {"contender": self.name, "shape": self.shape, "build_seconds": self.seconds}
        return row | {"device_us": spread.row()}


@torch.no_grad()
def built(name: str, label: str, make: Callable[[str], Rival], device: str) -> Built:
    """The rival compiled and captured (on a CPU: as it is)."""
    started = time.perf_counter()
    torch._dynamo.reset()
    torch._dynamo.config.cache_size_limit = 64
    rival = make(device)
    replay: Callable[[], object] = rival.run
    if device == "cuda":
        rival.compile()
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3):
                rival.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rival.run()
        replay = graph.replay
    replay()
    horizon = label.rpartition(" ")[2]
    return Built(name, f"v2-p48-{horizon}", rival, replay, time.perf_counter() - started)


class Bench:
    """The rows so far, written after each."""

    def __init__(self, policy: str, first: Shape, device: str, counts: Counts, about: dict[str, Any]) -> None:
        self.policy, self.first, self.device, self.counts, self.about = policy, first, device, counts, about
        self.rows: list[dict[str, Any]] = []
        self.profiled: set[tuple[str, str]] = set()
        self.failed: list[str] = []
        self.first_row: dict[str, Any] = {}

    def attempt(self, label: str, action: Callable[[], Any]) -> Any:
        """What the action returns; None where it fails: one fault must not cost the other rows."""
        try:
            return action()
        except Exception:
            traceback.print_exc()
            self.failed.append(label)
            self._write()
            return None

    @property
    def bars(self) -> dict[str, bool]:
        return bars_of(self.rows, self.policy)

    def own(self, shape: Shape) -> None:
        kind = shape.precision, shape.family  # other shapes of a kind have the same classes of kernels
        profiled = self.counts.profile and kind not in self.profiled
        self.profiled.add(kind)
        row = ours(shape, self.device, self.counts, self._count(shape), profiled)
        self.first_row = row if shape == self.first else self.first_row
        self._add(row)

    def rival(self, rival: Built) -> None:
        self._add(rival.time(self.device, self.counts))

    def changing(self) -> None:
        """Of the first shape, behind everything else; it is in that shape's row."""
        count, row = self.counts.changing, self.first_row
        if not row or not count:
            return
        with opened(self.first, self.device) as (_, executor, _):
            row["changing_prompts_us"] = changing(executor, count).row() | {"count": count}
        self._write()

    def _count(self, shape: Shape) -> int:
        return self.counts.tail if shape == self.first else self.counts.replays

    def _add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(self.policy, line_of(row), flush=True)
        self._write()

    def _write(self) -> None:
        found = {"policy": self.policy, "failed": self.failed, "bars": self.bars, "rows": self.rows}
        report.write(file_name("gpu_bench", replace(self.first, precision="bf16")), self.about | found)


def bench(
    policy: str, shapes: Sequence[Shape], rivals: Sequence[Built], device: str, counts: Counts, about: dict[str, Any]
) -> dict[str, bool]:
    """Times everything that is ready."""
    found = Bench(policy, shapes[0], device, counts, about)
    for shape in shapes:
        found.own(shape)
    for rival in rivals:
        found.rival(rival)
    found.changing()
    return found.bars


def shapes_of(policy: str, device: str) -> tuple[Shape, ...]:
    return tuple(s if device == "cuda" else rehearsed(s) for s in SHAPES[policy])


def rehearsed(shape: Shape) -> Shape:
    """Small enough for the emulator."""
    return replace(shape, size="tiny", prompt=shape.prompt // 4, horizon=shape.horizon // 5)


def chosen(shapes: Sequence[Shape], wanted: str, families: Sequence[str] = ()) -> list[Shape]:
    """In the order of `wanted`, labels with commas between them: "c50 fp8" has all shapes with both words.

    Each in every family. Nothing wanted: bf16 and static FP8.
    """
    found = [s for s in shapes if s.precision in ("bf16", STATIC)]
    if wanted:
        found = [s for label in wanted.split(",") for s in shapes if set(label.split()) <= words_of(s)]
    if not found:
        known = [("known", ", ".join(s.label for s in shapes))]
        raise UsageError("option.shapes", f"no shape has the words of {wanted!r}", known)
    return [replace(s, family=family) for s in dict.fromkeys(found) for family in families or ("",)]


def words_of(shape: Shape) -> set[str]:
    return {str(shape), *str(shape).split("-"), shape.precision}


def measure(found: Bench, shapes: Sequence[Shape], rivals: Callable[[], list[Built]]) -> None:
    """Compiles and times: the first Plan, the rivals, then Plan after Plan; scales are made while others compile."""
    begun = Compiling([s for s in shapes if s.precision != STATIC])
    for i, shape in enumerate(shapes):
        ahead = [s for s in shapes[: i + 1 + FAR] if s.precision == STATIC and s not in begun]
        found.attempt(shape.label, partial(_timed, found, begun, shape, ahead))
        if i:
            begun.drop(shape)
            continue
        built_now = found.attempt("rivals", rivals) or []
        with begun.paused():
            for rival in built_now:
                found.attempt(rival.name, partial(found.rival, rival))
    found.attempt("changing prompts", found.changing)


def _timed(found: Bench, begun: Compiling, shape: Shape, ahead: Sequence[Shape]) -> None:
    """One Plan; before that the calibrations that it or the next one needs."""
    calibrations = found.about["calibrations"]
    for static in ahead:
        if str(static) not in calibrations:
            calibrations[str(static)] = calibrated(static, found.device)
        begun.start([static])
    found.about["compile_seconds"][shape.label] = begun.wait(shape)
    with begun.paused():
        found.own(shape)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--policy", default="pi05", choices=list(load_models()))
    parser.add_argument(
        "--shapes", default="", help='labels, with commas between them: "c50 fp8,c10 fp8"; in this order'
    )
    parser.add_argument("--family", default="", help="families of kernels, with commas; each is a contender of its own")
    parser.add_argument("--changing", type=int, default=Counts().changing, help="inferences with changing prompts")
    parser.add_argument("--replays", type=int, help="of each Plan and rival, instead of 1,000 of the first and 300")
    parser.add_argument("--only", default="", help="rivals whose label holds this word, beside frtc's own Plans")
    parser.add_argument("--no-profile", action="store_true", help="do not time each launch")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    arguments = parser.parse_args()
    policy, device = arguments.policy, arguments.device
    counts = replace(Counts(), changing=arguments.changing, profile=not arguments.no_profile)
    if arguments.replays:
        counts = replace(counts, replays=arguments.replays, tail=arguments.replays)
    counts = counts if device == "cuda" else REHEARSAL
    families = [family for family in arguments.family.split(",") if family]
    shapes = chosen(SHAPES[policy], arguments.shapes, families)
    shapes = shapes if device == "cuda" else [rehearsed(s) for s in shapes]
    about = report.about("bench.gpu_bench", device) | {"compile_seconds": {}, "calibrations": {}}
    found = Bench(policy, shapes[0], device, counts, about)
    wanted = {label: row for label, row in RIVALS[policy].items() if arguments.only in label}
    make_room(policy, ROOM if device == "cuda" else 0)
    measure(found, shapes, lambda: [built(name, label, make, device) for label, (name, make) in wanted.items()])
    print(table(found.rows))
    print(*(f"failed: {label}" for label in (*found.failed, *(b for b, ok in found.bars.items() if not ok))), sep="\n")
    return 0 if all(found.bars.values()) and not found.failed else 3


if __name__ == "__main__":
    sys.exit(main())
