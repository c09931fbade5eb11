"""Latency of the full-size Plan on a GPU beside its rivals, in one run: one CUDA graph, host to host, and stages.

    PYTHONPATH=. python3 -m bench.gpu_bench [--changing N] [--only WORD]

Every contender: 300 warm-ups, then replays one at a time, p50 to p99.9. A rival that does not run fails the bench.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo

from bench.full_model import Shape, compile_side_by_side, observation, plan_path
from bench.rivals import pi05_torch
from frtc.runtime.plan import unrolled
from frtc.runtime.plan_file import open_plan
from frtc.runtime.session import Session
from frtc.runtime.timing import Spread

WARM_UPS, REPLAYS = 300, 1000
SHAPES = (Shape(horizon=50), Shape(horizon=10), Shape(prompt=200, horizon=50))
P50_BAR_MS, BUDGET_BAR_MS, TAIL_BAR = 30.0, 1.5, 1.03


def device_times(replay: Callable[[], object], stream: torch.cuda.Stream, count: int) -> Spread:
    """Microseconds between events around each replay, one in flight."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    samples = []
    with torch.cuda.stream(stream):
        for i in range(WARM_UPS + count):
            start.record(stream)
            replay()
            end.record(stream)
            end.synchronize()
            if i >= WARM_UPS:
                samples.append(start.elapsed_time(end) * 1e3)
    return Spread.of(samples)


def ours(shape: Shape, valid: int, count: int) -> dict[str, Any]:
    plan = open_plan(plan_path(shape), verify=False)
    stream = torch.cuda.Stream()
    inputs = observation(shape, valid)
    launches = {s.name: sum(len(c.launches) for c in s.calls) for s in plan.program.stages}
    row: dict[str, Any] = {
        "contender": "frtc bf16 baseline",
        "shape": str(shape),
        "valid": valid,
        "plan_id": plan.plan_id,
    }
    row["graph_nodes"] = sum(launches[stage] for stage, _ in unrolled(plan.program.schedule))
    with Session(plan, stream=stream) as session:
        for name, value in inputs.items():
            session.set(name, value)
        session.warm()
        session.run()
        assert np.isfinite(session.get("actions")).all()
        row["device_us"] = device_times(session.replay, stream, REPLAYS).row()
        row["parts_us"] = {name: spread.row() for name, spread in session.time(300, 50).parts.items()}
        if count:
            row["changing_prompts_us"] = changing(session, shape, count).row() | {"count": count}
    return row


def changing(session: Session, shape: Shape, count: int) -> Spread:
    """Host to host, another prompt length and noise every time."""
    rng = np.random.default_rng(2)
    lengths = rng.integers(1, shape.prompt + 1, WARM_UPS + count)
    noise = rng.standard_normal((shape.horizon, 32)).astype(np.float32)
    samples = []
    for i, n in enumerate(lengths):
        session.set("n", np.array(n, np.int32))
        session.set("noise", np.roll(noise, i, 0))
        started = time.perf_counter_ns()
        session.run()
        samples.append((time.perf_counter_ns() - started) / 1e3)
    return Spread.of(samples[WARM_UPS:])


def rival(name: str, shape: pi05_torch.Shape, inductor: bool) -> dict[str, Any]:
    started = time.perf_counter()
    torch._dynamo.reset()
    with torch.no_grad():
        model = pi05_torch.Pi05(shape)
        if inductor:
            model.compile()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                model.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model.run()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.isfinite(model.out).all(), f"{name} gives no finite actions"
        build = time.perf_counter() - started
        spread = device_times(graph.replay, torch.cuda.current_stream(), REPLAYS // 2)
    row = {"contender": name, "shape": f"v{shape.views}-p{shape.prompt}-c{shape.horizon}", "build_seconds": build}
    return row | {"device_us": spread.row()}


def contenders(count: int) -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    """Label and measurement of each, ours first; `count` inferences with changing prompts."""
    tuned = {c: pi05_torch.Shape(horizon=c) for c in (50, 10)}
    fp8, natural = pi05_torch.Shape(fp8=True), pi05_torch.Shape(tuned=False)
    return [
        ("frtc c50", lambda: ours(SHAPES[0], 48, count)),
        ("frtc c10", lambda: ours(SHAPES[1], 48, 0)),
        ("frtc p200", lambda: ours(SHAPES[2], 48, 0)),
        ("tuned bf16 c50", lambda: rival("torch tuned bf16, Inductor + graph", tuned[50], True)),
        ("tuned bf16 c10", lambda: rival("torch tuned bf16, Inductor + graph", tuned[10], True)),
        ("tuned fp8 c50", lambda: rival("torch tuned FP8, Inductor + graph", fp8, True)),
        ("natural bf16 c50", lambda: rival("torch natural bf16, Inductor + graph", natural, True)),
    ]


def bars_of(rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """The bars that the rows so far can decide."""
    own = [r for r in rows if "graph_nodes" in r]
    p50 = [r["device_us"]["p50"] / 1e3 for r in own]
    bars = {f"p50 {r['shape']}": ms <= P50_BAR_MS for r, ms in zip(own, p50, strict=True)}
    bars["graph nodes"] = max(r["graph_nodes"] for r in own) <= 2000
    if len(own) == len(SHAPES):
        bars["budget 200 costs"] = p50[2] - p50[0] <= BUDGET_BAR_MS
    if "changing_prompts_us" in own[0]:
        tail = own[0]["changing_prompts_us"]
        bars["p99 over p50"] = tail["p99"] <= TAIL_BAR * tail["p50"]
    return bars


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--changing", type=int, default=10_000, help="inferences with changing prompts")
    parser.add_argument("--only", default="", help="contenders whose label holds this word, beside frtc's own")
    arguments = parser.parse_args()
    torch._dynamo.config.cache_size_limit = 64
    about: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": os.environ.get("FRTC_COMMIT", ""),
        "command": shlex.join(["python3", "-m", "bench.gpu_bench", *sys.argv[1:]]),
        "compile_seconds": {str(shape): seconds for shape, seconds in compile_side_by_side(SHAPES).items()},
    }
    folder = Path(os.environ.get("OUT") or "bench/results")
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    bars: dict[str, bool] = {}
    for label, measure in contenders(arguments.changing):
        if not label.startswith("frtc") and arguments.only not in label:
            continue
        rows.append(measure())
        at = rows[-1]["device_us"]
        print(f"{label:20s} p50 {at['p50'] / 1e3:7.3f} ms   p99 {at['p99'] / 1e3:7.3f} ms", flush=True)
        torch.cuda.empty_cache()
        bars = bars_of(rows)
        (folder / "gpu_bench.json").write_text(json.dumps(about | {"bars": bars, "rows": rows}, indent=1) + "\n")
    print(json.dumps(bars, indent=1))
    return 0 if all(bars.values()) else 3


if __name__ == "__main__":
    sys.exit(main())
