"""A Plan as a control loop has it: ten thousand replays without a pause, and inferences at the loop's rate.

    PYTHONPATH=. python3 -m bench.paced PLAN [--replays 10000] [--rate 30] [--count 300]

Paced inferences take raw frames, another state and prompt each time, and the GPU idles between them: clocks fall,
caches cool, the host sleeps. Microseconds from `infer` to actions; `gap` is how long nothing ran before each. `late`
counts those that took longer than a period. The same without pauses stands beside it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import report
from bench.frames_times import spreads
from bench.gpu_bench import Counts, replay_of, times
from frtc import observation
from frtc.policy import Policy
from frtc.runtime.emulator import Emulator
from frtc.runtime.plan_file import open_plan
from frtc.runtime.session import Session
from frtc.runtime.timing import Spread

PROMPTS = ("pick up the red cube", "put the spoon on the towel", "close the drawer", "wipe the table with the cloth")
WARM_UP = 50
Row = dict[str, Any]


def observations(policy: Policy) -> Iterator[Mapping[str, Any]]:
    """One after the other: the same frames, another state and prompt."""
    seen, rng = dict(observation.seeded(policy.steps)), np.random.default_rng(3)
    for i in range(1 << 62):
        changed = {"prompt": PROMPTS[i % len(PROMPTS)]} if "prompt" in seen else {}
        if "state" in seen:
            changed["state"] = (seen["state"] * rng.uniform(0.9, 1.0, seen["state"].shape)).astype(seen["state"].dtype)
        yield seen | changed


def paced(policy: Policy, rate: float, count: int) -> Row:
    """At `rate` inferences a second; 0: one after the other."""
    period, samples, gaps = 1 / rate if rate else 0.0, [], []
    source = observations(policy)
    due = ended = time.perf_counter()
    for seen in (next(source) for _ in range(count)):
        due += period
        time.sleep(max(0.0, due - time.perf_counter()))
        began = time.perf_counter()
        samples.append(policy.infer(seen).latency_us)
        gaps.append((began - ended) * 1e6)
        ended = time.perf_counter()
    late = sum(s["total"] > period * 1e6 for s in samples) if rate else 0
    return {"rate": rate, "count": count, "late": late, "gap": Spread.of(gaps).row(), **spreads(samples)}


def measured(path: Path, device: str, replays: int, rate: float, count: int) -> Row:
    plan, stream = open_plan(path), torch.cuda.Stream() if device == "cuda" else None
    with Policy(plan, Session(plan, stream=stream) if stream else Emulator(plan)) as policy:
        policy.warm()
        executor, source = policy.executor, observations(policy)
        for _ in range(WARM_UP if stream else 1):
            policy.infer(next(source))
        rows = [paced(policy, 0.0, count), paced(policy, rate, count)]
        spread = times(replay_of(executor), stream, Counts(warm_up=WARM_UP if stream else 0), replays)
    about = {"plan_id": plan.plan_id, "target": plan.program.target.name}
    return about | {"replays": {"count": replays} | spread.row(), "inferences": rows}


def show(row: Row) -> str:
    def line(name: str, spread: Row) -> str:
        return f"{name:34s}" + "".join(f"{spread[p] / 1e3:9.3f}" for p in ("p50", "p90", "p99", "p99.9", "max"))

    lines = [f"{'milliseconds':34s}" + "".join(f"{p:>9}" for p in ("p50", "p90", "p99", "p99.9", "max"))]
    lines.append(line(f"{row['replays']['count']} replays", row["replays"]))
    for each in row["inferences"]:
        name = f"{each['rate']:g} Hz, {each['late']} of {each['count']} late" if each["rate"] else "without pauses"
        lines += [line(f"{name}: {part}", each[part]) for part in ("total", "launch", "gap") if part in each]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("--replays", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=30.0, help="inferences a second")
    parser.add_argument("--count", type=int, default=300, help="inferences, with pauses and without")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args(arguments)
    row = measured(options.plan, options.device, options.replays, options.rate, options.count)
    print(show(row))
    report.write("paced", report.about("bench.paced", options.device) | row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
