"""From raw camera frames to actions: what the host does before the launch, the wait, and the kernel that resizes.

    PYTHONPATH=. python3 -m bench.frames_times [--policy pi05] [--size tiny] [--precision bf16] [--runs 500]

Two views of 480 x 640 and three of 1080 x 1920, each with frames in pageable memory, as views that are mirrored, in
pinned memory and on the device; the same from the host's own image step. Microseconds, p50 and p99. `launch` is what
the host does beside copying frames until the device has everything; `over` is the p50 of the total less that of the
replay. With pageable frames also what each driver call takes the host, and the same inference where inputs and outputs
are copied by calls beside the graph instead of by nodes in it. About 90 s at size tiny, and 60 s more for each of the
two full-size Plans that are not there yet.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bench import report
from bench.full_model import Shape, compiled, plan_path
from frtc import observation
from frtc.console import table
from frtc.policy import Policy
from frtc.runtime.driver import Driver
from frtc.runtime.executor import Executor
from frtc.runtime.graph import Graph
from frtc.runtime.plan import unrolled
from frtc.runtime.plan_file import Plan, open_plan
from frtc.runtime.session import Session
from frtc.runtime.timing import Spread, took_us

PARTS = ("total", "copy", "launch", "wait", "finish")  # of a policy's latency, where it has them
SETS = ((2, (480, 640)), (3, (1080, 1920)))  # views, and the size of their frames
WARM_UP = 50
CHAIN = 20  # launches of the kernel in one graph
BAR_OVER_US, BAR_LAUNCH_US = 600.0, 100.0  # p50 of the total over that of the replay; p99 of `launch`
Row = dict[str, Any]
Array = np.ndarray[Any, Any]


def from_frames(plan: Plan, executor: Executor, count: int, warm_up: int = 0) -> Row:
    """Host to host on an executor that is there: raw 480 x 640 frames, state and prompt to actions, other noise
    each time. Spreads of the parts."""
    policy = Policy(plan, executor)
    return latency(policy, observation.seeded(policy.steps), count, warm_up)


def latency(policy: Policy, seen: Mapping[str, Any], count: int, warm_up: int) -> Row:
    for _ in range(warm_up):
        policy.infer(seen)
    return spreads([policy.infer(seen).latency_us for _ in range(count)])


def spreads(samples: Sequence[Mapping[str, float]]) -> Row:
    """Of the parts of latencies."""
    return {name: Spread.of([s[name] for s in samples]).row() for name in PARTS if name in samples[0]}


def bars_of(frames: Row, replay_p50_us: float) -> dict[str, bool]:
    """What a policy on a GPU has to hold; nothing where the host resized."""
    if "launch" not in frames:
        return {}
    over = frames["total"]["p50"] - replay_p50_us
    return {"frames over replay": over <= BAR_OVER_US, "host until launch": frames["launch"]["p99"] <= BAR_LAUNCH_US}


def kinds() -> dict[str, Callable[[Array], Any]]:
    """How a frame lies in memory."""
    import torch

    return {
        "pageable": lambda frame: frame,
        "mirrored": lambda frame: frame[:, ::-1],
        "pinned": lambda frame: torch.from_numpy(frame).pin_memory().numpy(),
        "device": lambda frame: torch.from_numpy(frame).cuda(),
    }


def of_plan(plan: Plan, size: tuple[int, int], count: int) -> list[Row]:
    """All kinds of frames of one size through one Plan."""
    rows: list[Row] = []
    with Policy(plan, Session(plan)) as policy:
        policy.warm()
        session, seen = policy.executor, observation.seeded(policy.steps)
        assert isinstance(session, Session) and session.frames is not None
        frames = {role: picture(size, i) for i, role in enumerate(policy.cameras)}
        policy.infer(seen | frames)
        replay = Spread.of([took_us(lambda: replayed(session)) for _ in range(count + WARM_UP)][WARM_UP:]).row()
        for kind, place in kinds().items():
            given = seen | {role: place(frame) for role, frame in frames.items()}
            rows.append({"frames": kind} | latency(policy, given, count, WARM_UP))
        by_calls = copied_by_calls(policy, seen | frames, count)
        kernel = kernel_us(session)
        step, session.frames = session.frames, None  # the host's own step
        rows.append({"frames": "resized by the host"} | latency(policy, seen | frames, max(count // 10, 1), 3))
        session.frames = step
    height, width = size
    about = {"size": f"{len(frames)} x {height} x {width}", "replay_us": replay, "kernel_us": kernel}
    rows[0] |= {"copied_by_calls": by_calls, "calls_us": calls_us(plan, session.driver.api, seen | frames, count)}
    return [about | row for row in rows]


def copied_by_calls(policy: Policy, seen: Mapping[str, Any], count: int) -> Row:
    """Latency where inputs and outputs are copied by the driver's calls beside a graph that does not copy."""
    session = policy.executor
    assert isinstance(session, Session) and session.frames is not None
    steps = [(session.program.stage(name), round) for name, round in unrolled(session.program.schedule)]
    with session.driver.current():
        parts = (session.driver, session.functions, session.addresses, steps, (), session.frames.lead)
        graph = Graph(*parts, overlap=session.program.overlap)
        graph.upload(session.stream)
    launch, session._launch_from_frames = session._launch_from_frames, session._with_copies(graph)
    try:
        return latency(policy, seen, count, WARM_UP)
    finally:
        session._launch_from_frames = launch
        with session.driver.current():
            graph.destroy()


class Timed:
    """The driver's bindings; microseconds on the host of every call by the function's name."""

    def __init__(self, bindings: Any) -> None:
        self.bindings, self.samples = bindings, defaultdict[str, list[float]](list)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.bindings, name)
        if not name.startswith("cu") or isinstance(found, type):
            return found

        def call(*arguments: Any) -> Any:
            started = time.perf_counter_ns()
            try:
                return found(*arguments)
            finally:
                self.samples[name].append((time.perf_counter_ns() - started) / 1e3)

        return call


def calls_us(plan: Plan, bindings: Any, seen: Mapping[str, Any], count: int) -> Row:
    """What each function of the driver takes the host in an inference; what is called twice counts twice."""
    api = Timed(bindings)
    with Policy(plan, Session(plan, driver=Driver(api=api))) as policy:
        policy.warm()
        for i in range(WARM_UP + count):
            if i == WARM_UP:
                api.samples.clear()
            policy.infer(seen)
        taken = {name: (Spread.of(us).row(), len(us) / count) for name, us in api.samples.items()}
    return {name: spread | {"calls": calls} for name, (spread, calls) in taken.items()}


def replayed(session: Session) -> None:
    session.replay()
    session.synchronize()


def picture(size: tuple[int, int], seed: int) -> Array:
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


def kernel_us(session: Session) -> float:
    """The kernel on the frames that are there, of CHAIN launches one after the other in a graph."""
    driver, frames = session.driver, session.frames
    assert frames is not None
    with driver.current():
        graph, after = driver.call("cuGraphCreate", 0), list[Any]()
        for _ in range(CHAIN):
            lead = frames.lead
            after = [driver.add_kernel(graph, after, lead.function, lead.launch, lead.addresses)]
        executable = driver.call("cuGraphInstantiate", graph, 0)
        start, end = (driver.call("cuEventCreate", 0) for _ in range(2))
        samples = []
        for _ in range(30):
            driver.call("cuEventRecord", start, session.stream)
            driver.call("cuGraphLaunch", executable, session.stream)
            driver.call("cuEventRecord", end, session.stream)
            driver.call("cuStreamSynchronize", session.stream)
            samples.append(float(driver.call("cuEventElapsedTime", start, end)) * 1e3 / CHAIN)
        driver.call("cuGraphExecDestroy", executable)
        driver.call("cuGraphDestroy", graph)
    return sorted(samples)[len(samples) // 2]


def copies_us(size: tuple[int, int]) -> Row:
    """One frame: by the CPU into pinned memory, and by the driver from each kind of memory, until it is there."""
    import torch

    frame, room = torch.from_numpy(picture(size, 0)), torch.empty((*size, 3), dtype=torch.uint8, device="cuda")
    stage = torch.empty((*size, 3), dtype=torch.uint8, pin_memory=True)
    source, target = frame.numpy(), stage.numpy()

    def copied(tensor: Any) -> None:
        room.copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()

    ways: dict[str, Callable[[], object]] = {
        "host to pinned": lambda: np.copyto(target, source),
        "pinned to device": lambda: copied(stage),
        "pageable to device": lambda: copied(frame),
    }
    return {name: Spread.of([took_us(way) for _ in range(230)][30:]).row() for name, way in ways.items()}


def shown(rows: list[Row]) -> str:
    """Microseconds."""
    lines = [("frames", "size", "kernel", "replay p50", "over", *(f"{p} {q}" for p in PARTS for q in ("p50", "p99")))]
    for row in rows:
        over = row["total"]["p50"] - row["replay_us"]["p50"]
        parts = [f"{row[p][q]:.0f}" if p in row else "" for p in PARTS for q in ("p50", "p99")]
        replay = f"{row['replay_us']['p50']:.0f}"
        lines.append((row["frames"], row["size"], f"{row['kernel_us']:.1f}", replay, f"{over:.0f}", *parts))
    return table(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--policy", default="pi05")
    parser.add_argument("--size", default="tiny", choices=("tiny", "full"))
    parser.add_argument("--precision", default="bf16", help="bf16, fp8-rows or w8a16: without a calibration")
    parser.add_argument("--runs", type=int, default=500)
    arguments = parser.parse_args()
    rows: list[Row] = []
    for views, size in SETS:
        shape = replace(Shape(arguments.policy), views=views, size=arguments.size, precision=arguments.precision)
        if not plan_path(shape).exists():
            compiled(shape)
        rows += of_plan(open_plan(plan_path(shape), verify=False), size, arguments.runs)
    copies = {f"{h} x {w}": copies_us((h, w)) for _, (h, w) in SETS}
    print(shown(rows))
    ways = {"nodes of the graph": rows[0], "calls beside it": rows[0]["copied_by_calls"]}
    print("inputs and outputs copied by: p50 and p99 us of an inference with pageable frames")
    lines = [
        (way, *(f"{part} {at[part]['p50']:.0f} {at[part]['p99']:.0f}" for part in PARTS)) for way, at in ways.items()
    ]
    print(table(lines))
    print("driver calls of an inference, pageable frames: times, p50 and p99 us on the host")
    called = rows[0]["calls_us"].items()
    print(table([(name, f"{at['calls']:g}", f"{at['p50']:.1f}", f"{at['p99']:.1f}") for name, at in called]))
    print(*(f"{size}: {way} {at['p50']:.0f} us" for size, ways in copies.items() for way, at in ways.items()), sep="\n")
    bars = bars_of(rows[0], rows[0]["replay_us"]["p50"])
    found = {"rows": rows, "copies_us": copies, "bars": bars}
    print(
        report.write(f"frames_times_{arguments.policy}_{arguments.size}", report.about(__spec__.name, "cuda") | found)
    )
    print(*(f"failed: {bar}" for bar, ok in bars.items() if not ok), sep="\n")
    return 0 if all(bars.values()) else 3


if __name__ == "__main__":
    sys.exit(main())
