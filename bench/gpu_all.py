"""The policies beside Pi0.5 in one GPU run of at most nine minutes: checks of `gpu_model`, times of `gpu_bench`.

    PYTHONPATH=. python3 -m bench.gpu_all [--policies pi0 smolvla] [--minutes 9]

Plans are compiled by processes of their own while this one computes the references and builds the rivals. Every result
is written when it is there; what fails is reported and the rest goes on. `--device cpu`: a rehearsal at size tiny.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from bench import report
from bench.calibrated import compiling
from bench.full_model import Compiling, Shape, plan_path
from bench.gpu_bench import REHEARSAL, RIVALS, Built, Counts, bench, built, shapes_of
from bench.gpu_model import Reference, check, file_name, lengths_of, references
from frtc.models import load_models
from frtc.runtime.plan_file import open_plan

CHANGING = 2000  # inferences with changing prompts, while there is time
MODULE = "bench.gpu_all"


@dataclass(slots=True)
class Clock:
    """Minutes left, and what did not work."""

    deadline: float
    started: float = field(default_factory=time.perf_counter)
    failed: list[str] = field(default_factory=list)

    def left(self) -> float:
        """Seconds."""
        return self.deadline - (time.perf_counter() - self.started)

    def attempt(self, label: str, action: Callable[[], Any], least: float = 0.0) -> Any:
        """What the action returns; None where it fails or fewer than `least` seconds are left."""
        if self.left() < least:
            self.failed.append(f"{label}: no time")
            return None
        begun = time.perf_counter()
        try:
            return action()
        except Exception:  # one policy's fault must not cost the other's figures
            traceback.print_exc()
            self.failed.append(label)
            return None
        finally:
            now = time.perf_counter()
            print(f"{now - self.started:6.1f} s  {label}, {now - begun:.1f} s", flush=True)


@dataclass(slots=True)
class Job:
    """One policy: what is under way and what is ready."""

    policy: str
    shapes: tuple[Shape, ...]
    compiling: Compiling | None = None
    references: list[Reference] | None = None
    rivals: list[Built] = field(default_factory=list)


def start(job: Job, device: str, clock: Clock) -> None:
    begun = clock.attempt(f"{job.policy}: checkpoint, calibrations", partial(compiling, job.shapes, device))
    job.compiling = begun[0] if begun is not None else None


def prepare(job: Job, device: str, clock: Clock) -> None:
    """Everything that needs no Plan."""
    if job.compiling is None:
        return
    shape = job.shapes[0]
    label = f"{job.policy}: references"
    job.references = clock.attempt(label, partial(references, shape, lengths_of(shape), device), 200)
    if device == "cuda":
        torch.cuda.empty_cache()
    for name, (title, make) in RIVALS[job.policy].items():
        rival = clock.attempt(f"{job.policy}: build {name}", partial(built, title, name, make, device), 200)
        job.rivals += [rival] if rival is not None else []


def measure(job: Job, device: str, clock: Clock, inferences: int) -> None:
    """The checks, then the times."""
    if job.compiling is None:
        return
    wait, shape = job.compiling.wait, job.shapes[0]
    seconds = {s.label: clock.attempt(f"{job.policy}: compile {s.label}", partial(wait, s)) for s in job.shapes}
    shapes = [s for s in job.shapes if seconds[s.label] is not None]
    about = report.about(MODULE, device) | {"compile_seconds": seconds}
    if shape not in shapes:
        return

    def checks() -> dict[str, Any]:
        result = about | {"policy": job.policy, "shape": str(shape)}
        result |= check(open_plan(plan_path(shape)), job.references or [], device, inferences)
        report.write(file_name("gpu_model", shape), result)
        return dict(result["passed"])

    def times() -> dict[str, bool]:
        counts = replace(Counts(), changing=CHANGING if clock.left() > 150 else 0) if device == "cuda" else REHEARSAL
        return bench(job.policy, shapes, job.rivals, device, counts, about)

    for label, action in (("checks", checks), ("times", times)):
        bars = clock.attempt(f"{job.policy}: {label}", action, 20)
        clock.failed += [f"{job.policy}: {name}" for name, kept in (bars or {}).items() if not kept]
    job.rivals.clear()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--policies", nargs="+", default=["pi0", "smolvla"], choices=list(load_models()))
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--inferences", type=int, default=1000, help="of the check that all bits stay the same")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    arguments = parser.parse_args()
    clock, device = Clock(arguments.minutes * 60), arguments.device
    jobs = [Job(policy, shapes_of(policy, device)) for policy in arguments.policies]
    for job in jobs:
        start(job, device, clock)
    for job in jobs:
        prepare(job, device, clock)
    for job in jobs:
        measure(job, device, clock, arguments.inferences)
    print(f"{len(clock.failed)} failed", *clock.failed, sep="\n")
    return 3 if clock.failed else 0


if __name__ == "__main__":
    sys.exit(main())
