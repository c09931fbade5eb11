"""Latency of a policy's Plans on a GPU beside its rivals, in one run: one CUDA graph, host to host, and stages.

    PYTHONPATH=. python3 -m bench.gpu_bench [--policy pi0] [--changing N] [--only WORD]

Every contender: 300 warm-ups, then replays one at a time, p50 to p99.9. Pi0.5 runs in all precisions, those with
static scales after a calibration of their own. Rivals are built while the Plans are compiled and timed when that is
done. A rival that does not run fails the bench. `--device cpu` is a rehearsal at size tiny.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch._dynamo
from torch import Tensor

from bench import report
from bench.calibrated import compiling
from bench.full_model import ROWS, STATIC, Shape, inputs_of, observation, plan_path
from bench.gpu_model import FP8_NODES, file_name, graph_nodes
from bench.rivals import pi0_torch, pi05_torch
from bench.rivals.modules_torch import Modules
from frtc.models import load_models
from frtc.runtime.emulator import Emulator
from frtc.runtime.executor import Executor
from frtc.runtime.plan_file import open_plan
from frtc.runtime.session import Session
from frtc.runtime.timing import Spread, took_us

P50_BAR_MS, BUDGET_BAR_MS, TAIL_BAR, NODES_BAR = 30.0, 1.5, 1.03, 2000


@dataclass(frozen=True, slots=True)
class Counts:
    """How often things run.

    warm_up    before the first sample of a contender
    tail       replays of a policy's first shape, whose p99.9 counts; `replays` of everything else
    parts      inferences with an event after each stage
    changing   inferences of the first shape from host to host, another prompt length and noise each time
    """

    warm_up: int = 300
    tail: int = 1000
    replays: int = 300
    parts: int = 40
    changing: int = 10_000


REHEARSAL = Counts(1, 2, 2, 2, 3)


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
        Shape("pi05"),  # bf16, the one with changing prompts: what replaying costs beside the kernels is alike for all
        Shape("pi05", horizon=10),
        Shape("pi05", prompt=200),
        Shape("pi05", precision=STATIC),
        Shape("pi05", horizon=10, precision=STATIC),
        Shape("pi05", precision=ROWS),
        Shape("pi05", precision="w8a16"),
    ),
    "pi0": (Shape("pi0"), Shape("pi0", horizon=10)),
    "smolvla": (Shape("smolvla"),),
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


def ours(shape: Shape, device: str, counts: Counts, tail: bool) -> dict[str, Any]:
    """One Plan; `tail`: enough replays for its p99.9, and the inferences with changing prompts."""
    plan = open_plan(plan_path(shape), verify=False)
    slots, vocab = inputs_of(shape)
    row: dict[str, Any] = {
        "contender": f"frtc {shape.precision} baseline",
        "shape": str(shape),
        "valid": min(48, shape.prompt),
        "plan_id": plan.plan_id,
        "graph_nodes": graph_nodes(plan.program),
    }
    stream = torch.cuda.Stream() if device == "cuda" else None
    with Session(plan, stream=stream) if stream else Emulator(plan) as executor:
        for name, value in observation(slots, row["valid"], vocab).items():
            executor.set(name, value)
        executor.run()
        (output,) = executor.outputs
        assert np.isfinite(executor.get(output)).all()
        replay = executor.replay if isinstance(executor, Session) else executor.run
        row["device_us"] = times(replay, stream, counts, counts.tail if tail else counts.replays).row()
        row["parts_us"] = {name: part.row() for name, part in executor.time(counts.parts).parts.items()}
        if tail and counts.changing:
            row["changing_prompts_us"] = changing(executor, counts.changing).row() | {"count": counts.changing}
    return row


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


def bars_of(rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """The bars that the rows so far can decide."""
    own = [(label_of(r), r) for r in rows if "graph_nodes" in r]
    p50 = {label: r["device_us"]["p50"] / 1e3 for label, r in own}
    bars = {f"p50 {label}": ms <= P50_BAR_MS for label, ms in p50.items()}
    bars |= {f"graph nodes {label}": r["graph_nodes"] <= nodes_bar(label) for label, r in own}
    short, long = (p50.get(f"v2-p{budget}-c50 bf16") for budget in (48, 200))
    if short is not None and long is not None:
        bars["budget 200 costs"] = long - short <= BUDGET_BAR_MS
    for tail in (r["changing_prompts_us"] for _, r in own if "changing_prompts_us" in r):
        bars["p99 over p50"] = tail["p99"] <= TAIL_BAR * tail["p50"]
    return bars


def label_of(row: dict[str, Any]) -> str:
    """As Shape.label."""
    return f"{row['shape']} {row['contender'].split()[1]}"


def nodes_bar(label: str) -> int:
    return FP8_NODES if label.split()[-1] == STATIC else NODES_BAR


def bench(
    policy: str, shapes: Sequence[Shape], rivals: Sequence[Built], device: str, counts: Counts, about: dict[str, Any]
) -> dict[str, bool]:
    """Times everything that is ready, and writes after each contender."""
    rows: list[dict[str, Any]] = []
    bars: dict[str, bool] = {}
    own = [(f"frtc {s.label}", partial(ours, s, device, counts, s is shapes[0])) for s in shapes]
    theirs = [(f"{r.name} {r.shape}", partial(r.time, device, counts)) for r in rivals]
    for label, measure in (*own, *theirs):
        rows.append(measure())
        at = rows[-1]["device_us"]
        print(f"{policy} {label:56s} p50 {at['p50'] / 1e3:7.3f} ms   p99 {at['p99'] / 1e3:7.3f} ms", flush=True)
        bars = bars_of(rows)
        report.write(file_name("gpu_bench", shapes[0]), about | {"policy": policy, "bars": bars, "rows": rows})
    return bars


def shapes_of(policy: str, device: str) -> tuple[Shape, ...]:
    return tuple(s if device == "cuda" else rehearsed(s) for s in SHAPES[policy])


def rehearsed(shape: Shape) -> Shape:
    """Small enough for the emulator."""
    return replace(shape, size="tiny", prompt=shape.prompt // 4, horizon=shape.horizon // 5)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--policy", default="pi05", choices=list(load_models()))
    parser.add_argument("--changing", type=int, default=10_000, help="inferences with changing prompts")
    parser.add_argument("--only", default="", help="rivals whose label holds this word, beside frtc's own Plans")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    arguments = parser.parse_args()
    policy, device = arguments.policy, arguments.device
    counts = replace(Counts(), changing=arguments.changing) if device == "cuda" else REHEARSAL
    shapes = shapes_of(policy, device)
    begun, calibrations = compiling(shapes, device)
    wanted = {label: row for label, row in RIVALS[policy].items() if arguments.only in label}
    rivals = [built(name, label, make, device) for label, (name, make) in wanted.items()]
    seconds = {shape.label: begun.wait(shape) for shape in shapes}
    about = report.about("bench.gpu_bench", device) | {"compile_seconds": seconds, "calibrations": calibrations}
    bars = bench(policy, shapes, rivals, device, counts, about)
    print(bars)
    return 0 if all(bars.values()) else 3


if __name__ == "__main__":
    sys.exit(main())
