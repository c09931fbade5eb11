"""The full-size Plan on a GPU against the eager module in float32: velocity per step, end to end, determinism, memory.

    PYTHONPATH=. python3 -m bench.gpu_model [--size tiny]

Per step: x_k is the float32 trajectory's, both sides answer with a velocity, e_k = ||v - v*|| / ||v*||. The bars are
those of docs/design.md, section 9: e_k <= 1.5 x the error of the serving-precision eager module, and <= 2e-2.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cuda.bindings import driver

from bench.full_model import SCRATCH, Shape, compiled, config_of, eager, observation
from frtc.runtime.driver import Driver
from frtc.runtime.plan import unrolled
from frtc.runtime.plan_file import Plan, open_plan
from frtc.runtime.session import Session

Array = np.ndarray[Any, Any]
Step = Callable[[Array, int], Array]  # (x_k, k) -> x_{k+1}
ABSOLUTE, RATIO = 2e-2, 1.5


def relative_error(y: Array, reference: Array) -> float:
    error = np.linalg.norm((y - reference).astype(np.float64)) / np.linalg.norm(reference.astype(np.float64))
    return float(error) if np.isfinite(error) else float("inf")


class Eager:
    """The PyTorch module on the same inputs."""

    def __init__(self, shape: Shape, dtype: torch.dtype, size: str, inputs: dict[str, Array]) -> None:
        self.model = eager(shape, dtype, size)
        self.n = torch.tensor(int(inputs["n"]), dtype=torch.int32, device="cuda")
        with torch.no_grad():
            image_tokens = self.model.vision(torch.from_numpy(inputs["images"]).cuda())
            self.kv = self.model.prefix(image_tokens, torch.from_numpy(inputs["tokens"]).cuda(), self.n)

    def velocity(self, x: Array, k: int) -> Array:
        with torch.no_grad():
            t = torch.tensor(self.model.config.times[k], device="cuda")
            v: Array = self.model.denoise.velocity(torch.from_numpy(x).cuda(), t, self.n, self.kv).cpu().numpy()
        return v


def trajectory(reference: Eager, noise: Array, steps: int) -> tuple[list[Array], list[Array]]:
    """x_k and v_k of the Euler loop in float32."""
    xs, vs = [noise], []
    for k in range(steps):
        vs.append(reference.velocity(xs[-1], k))
        xs.append(xs[-1] - vs[-1] / np.float32(steps))
    return xs, vs


def plan_velocity(session: Session, x: Array, k: int, steps: int) -> Array:
    """One denoise step of the Plan from x: the velocity is the change over dt."""
    session.set("noise", x)
    session.run_stage("let.x_t")
    session.run_stage("denoise", k)
    return (x - session.get("actions")) * np.float32(steps)


def check(shape: Shape, size: str, valid: int) -> dict[str, Any]:
    made, config = compiled(shape, size=size), config_of(shape, size)
    inputs = observation(shape, valid, 0, config.vision.image, config.action_width, config.vocab)
    reference = Eager(shape, torch.float32, size, inputs)
    xs, vs = trajectory(reference, inputs["noise"], config.steps)
    serving = Eager(shape, torch.bfloat16, size, inputs)
    eager_errors = [relative_error(serving.velocity(x, k), v) for k, (x, v) in enumerate(zip(xs, vs, strict=False))]
    del reference, serving
    torch.cuda.empty_cache()
    plan = open_plan(made.path)
    counting = Counting()
    with Session(plan, driver=Driver(api=counting)) as session:
        session.warm()
        memory = session.memory()
        actions = infer(session, inputs)
        errors = [
            relative_error(plan_velocity(session, x, k, config.steps), v)
            for k, (x, v) in enumerate(zip(xs, vs, strict=False))
        ]
        steady = runs(session, plan, inputs, counting)
    end_to_end = relative_error(actions - inputs["noise"], xs[-1] - inputs["noise"])
    launches = {s.name: sum(len(c.launches) for c in s.calls) for s in plan.program.stages}
    return {
        "shape": str(shape),
        "valid_tokens": valid,
        "plan_id": made.plan_id,
        "compile_seconds": dict(made.seconds),
        "graph_nodes": sum(launches[stage] for stage, _ in unrolled(plan.program.schedule)),
        "velocity_errors": errors,
        "eager_bf16_errors": eager_errors,
        "end_to_end_error": end_to_end,
        "steady": steady,
        "memory": {name: getattr(memory, name) for name in ("planned", "used", "weights", "arena", "state", "slots")},
        "passed": {
            "absolute": max(errors) <= ABSOLUTE,
            "ratio": max(errors) <= RATIO * max(eager_errors),
            "steady": steady["equal"] and not steady["builds"],
            "memory": abs(memory.planned - memory.used) <= 64 << 20,
        },
    }


BUILDS = ("Alloc", "Create", "Load", "Instantiate", "Register", "Capture", "Retain", "Add", "SetParams")


class Counting:
    """The driver's bindings with every call counted."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        found = getattr(driver, name)
        if not name.startswith("cu"):
            return found

        def call(*arguments: Any) -> Any:
            self.calls[name] += 1
            return found(*arguments)

        return call


def runs(
    session: Session, plan: Plan, inputs: dict[str, Array], counting: Counting, count: int = 1000
) -> dict[str, Any]:
    """`count` inferences over eight prompts, lengths and noises: equal to fresh single runs, nothing built."""
    rng = np.random.default_rng(1)
    budget = len(inputs["tokens"])
    variants = [
        inputs
        | {
            "n": np.array(n, np.int32),
            "tokens": rng.permutation(inputs["tokens"]),
            "noise": rng.standard_normal(inputs["noise"].shape).astype(np.float32),
        }
        for n in rng.integers(1, budget + 1, 8)
    ]
    first = [alone(plan, v) for v in variants]
    infer(session, inputs)
    before = counting.calls.copy()
    order = rng.integers(0, len(variants), count)
    equal = all(np.array_equal(infer(session, variants[i]), first[i]) for i in order)
    made = counting.calls - before
    return {
        "inferences": count,
        "equal": equal,
        "calls": dict(made),
        "builds": {name: times for name, times in made.items() if any(word in name for word in BUILDS)},
    }


def alone(plan: Plan, inputs: dict[str, Array]) -> Array:
    """One inference of a session of its own."""
    with Session(plan) as session:
        return infer(session, inputs)


def infer(session: Session, inputs: dict[str, Array]) -> Array:
    for name, value in inputs.items():
        session.set(name, value)
    session.run()
    return session.get("actions")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", default="full", choices=("full", "tiny"))
    parser.add_argument("--horizon", type=int, default=50)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    started = time.perf_counter()
    result = check(Shape(horizon=arguments.horizon), arguments.size, valid=48)
    result |= {"device": torch.cuda.get_device_name(), "commit": os.environ.get("FRTC_COMMIT", "")}
    result["seconds"] = time.perf_counter() - started
    folder = Path(os.environ.get("OUT") or "bench/results")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"gpu_model_{arguments.size}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0 if all(result["passed"].values()) else 3


if __name__ == "__main__":
    SCRATCH.mkdir(parents=True, exist_ok=True)
    sys.exit(main())
