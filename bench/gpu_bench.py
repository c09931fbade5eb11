"""Latency of the full-size Plan on a GPU beside its rivals, in one run: one CUDA graph, host to host, and stages.

    PYTHONPATH=. python3 -m bench.gpu_bench [--quick]

Every contender: 300 warm-ups, then replays one at a time, p50 to p99.9. A rival that does not run fails the bench.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
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
LONG = 10_000  # replays with changing prompts, for the tail
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


def ours(shape: Shape, valid: int, long: bool) -> dict[str, Any]:
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
        if long:
            row["changing_prompts_us"] = changing(session, shape).row()
    return row


def changing(session: Session, shape: Shape) -> Spread:
    """Host to host, another prompt length and noise every time."""
    rng = np.random.default_rng(2)
    lengths = rng.integers(1, shape.prompt + 1, LONG)
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


def contenders(quick: bool) -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    tuned = {c: pi05_torch.Shape(horizon=c) for c in (50, 10)}
    found: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("frtc c50", lambda: ours(SHAPES[0], 48, long=not quick)),
        ("frtc c10", lambda: ours(SHAPES[1], 48, long=False)),
        ("frtc p200", lambda: ours(SHAPES[2], 48, long=False)),
        ("tuned bf16 c50", lambda: rival("torch tuned bf16, Inductor + graph", tuned[50], True)),
        ("tuned bf16 c10", lambda: rival("torch tuned bf16, Inductor + graph", tuned[10], True)),
    ]
    if not quick:
        fp8, natural = pi05_torch.Shape(fp8=True), pi05_torch.Shape(tuned=False)
        found += [
            ("tuned fp8 c50", lambda: rival("torch tuned FP8, Inductor + graph", fp8, True)),
            ("natural bf16 c50", lambda: rival("torch natural bf16, Inductor + graph", natural, True)),
        ]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rivals and no 10,000 replays")
    quick = parser.parse_args().quick
    torch._dynamo.config.cache_size_limit = 64
    compile_seconds = {str(shape): seconds for shape, seconds in compile_side_by_side(SHAPES).items()}
    rows = []
    for label, measure in contenders(quick):
        rows.append(measure())
        at = rows[-1]["device_us"]
        print(f"{label:20s} p50 {at['p50'] / 1e3:7.3f} ms   p99 {at['p99'] / 1e3:7.3f} ms", flush=True)
        torch.cuda.empty_cache()
    base, short, wide = (r["device_us"]["p50"] / 1e3 for r in rows[:3])
    bars = {
        "p50 c50": base <= P50_BAR_MS,
        "p50 c10": short <= P50_BAR_MS,
        "budget 200 costs": wide - base <= BUDGET_BAR_MS,
        "graph nodes": max(r["graph_nodes"] for r in rows[:3]) <= 2000,
    }
    if "changing_prompts_us" in rows[0]:
        tail = rows[0]["changing_prompts_us"]
        bars["p99 over p50"] = tail["p99"] <= TAIL_BAR * tail["p50"]
    about: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": os.environ.get("FRTC_COMMIT", ""),
    }
    folder = Path(os.environ.get("OUT") or "bench/results")
    folder.mkdir(parents=True, exist_ok=True)
    about |= {"compile_seconds": compile_seconds, "bars": bars, "rows": rows}
    (folder / "gpu_bench.json").write_text(json.dumps(about, indent=1) + "\n")
    print(json.dumps(bars, indent=1))
    return 0 if all(bars.values()) else 3


if __name__ == "__main__":
    sys.exit(main())
