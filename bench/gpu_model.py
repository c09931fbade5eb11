"""A policy's Plan on a GPU against its modules in float32: velocity per step, end to end, determinism, memory.

    PYTHONPATH=. python3 -m bench.gpu_model [--policy pi0,smolvla] [--precision fp8|all] [--size tiny] [--device cpu]

Per step: x_k is the float32 trajectory's, both sides answer with x_{k+1}, and e_k is the relative error of the change,
which is the velocity's. The bars are those of docs/design.md, section 9, for the worst step: bf16 <= 1.5 x the error of
the serving-precision modules, and <= 2e-2; with weights in FP8 <= 6e-2, and with activations in FP8, too, <= 1.3 x the
error of the same program in PyTorch (bench/scaled_mm.py). `all`: every precision but bf16. One file of results for each
policy, written after each precision. With `--device cpu` the emulator runs the Plans: a rehearsal without figures.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from cuda.bindings import driver

from bench import report
from bench.calibrated import calibrated
from bench.eager import Eager
from bench.full_model import (
    PRECISIONS,
    ROWS,
    STATIC,
    Compiling,
    Shape,
    compile_report,
    eager,
    inputs_of,
    make_room,
    observation,
    plan_path,
)
from bench.scaled_mm import Yardstick, stage_errors
from frtc.compiler import FAMILY_NAMES
from frtc.errors import UsageError
from frtc.models import load_models
from frtc.runtime.driver import Driver
from frtc.runtime.emulator import Emulator
from frtc.runtime.executor import Executor
from frtc.runtime.plan import Program, unrolled
from frtc.runtime.plan_file import Plan, open_plan
from frtc.runtime.session import Session

Array = np.ndarray[Any, Any]
Inputs = dict[str, Array]
ABSOLUTE, RATIO, MEMORY = 2e-2, 1.5, 64 << 20
FP8_ABSOLUTE, FP8_RATIO, FP8_SHARE, FP8_NODES, PLAN_BYTES = 6e-2, 1.3, 0.97, 1400, 4.2e9
ROOM = 35 << 30  # bytes of disk: a checkpoint, and Plans of every precision
ALIKE = ("policy", "shape", "device", "torch", "commit", "command")
BUILDS = ("Alloc", "Create", "Load", "Instantiate", "Register", "Capture", "Retain", "Add", "SetParams")


def relative_error(y: Array, reference: Array) -> float:
    error = np.linalg.norm((y - reference).astype(np.float64)) / np.linalg.norm(reference.astype(np.float64))
    return float(error) if np.isfinite(error) else float("inf")


@dataclass(frozen=True, slots=True)
class Reference:
    """What PyTorch says on one observation.

    xs      the carried value in float32, before the first round and after each
    errors  of the serving precision, per round
    stage, carried, start, output   the loop's program and names
    """

    inputs: Inputs
    xs: list[Array]
    errors: list[float]
    stage: str
    carried: str
    start: str
    output: str

    def error(self, k: int, x_next: Array) -> float:
        """Of round k's change, given what came out of it."""
        return relative_error(x_next - self.xs[k], self.xs[k + 1] - self.xs[k])


def references(shape: Shape, lengths: tuple[int, ...], device: str) -> list[Reference]:
    """One for each length of the prompt; float32 first, then the serving precision, never both in memory."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    slots, vocab = inputs_of(shape)
    observed = [observation(slots, valid, vocab, seed) for seed, valid in enumerate(lengths)]
    exact = eager(shape, torch.float32, device)
    paths = [[x.cpu().numpy() for x in exact.trajectory(inputs)[1]] for inputs in observed]
    names = (exact.loop.stage, exact.carried, exact.start, exact.output)
    found = [Reference(inputs, xs, [], *names) for inputs, xs in zip(observed, paths, strict=True)]
    del exact
    serving = eager(shape, torch.bfloat16, device)
    for reference in found:
        reference.errors.extend(serving_errors(serving, reference))
    return found


def serving_errors(serving: Eager, reference: Reference) -> list[float]:
    prepared = serving.prepare(reference.inputs)
    starts = [torch.from_numpy(x).to(serving.device) for x in reference.xs[:-1]]
    return [reference.error(k, serving.step(prepared, x, k).cpu().numpy()) for k, x in enumerate(starts)]


def accuracy(executor: Executor, reference: Reference) -> dict[str, Any]:
    """Whole inference, then every round from the reference's x_k."""
    actions = infer(executor, reference.inputs)
    errors = []
    for k, x in enumerate(reference.xs[:-1]):
        executor.set(reference.start, x)
        executor.run_stage(f"let.{reference.carried}")
        executor.run_stage(reference.stage, k)
        errors.append(reference.error(k, executor.get(reference.output)))
    noise, end = reference.xs[0], reference.xs[-1]
    return {
        "valid_tokens": int(reference.inputs["n"]),
        "velocity_errors": errors,
        "eager_bf16_errors": reference.errors,
        "end_to_end_error": relative_error(actions - noise, end - noise),
    }


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


def steady(executor: Executor, plan: Plan, inputs: Inputs, counting: Counting, count: int) -> dict[str, Any]:
    """`count` inferences over eight prompts, lengths and noises: equal to fresh single runs, nothing built."""
    rng = np.random.default_rng(1)
    budget = len(inputs["tokens"])
    changed = [name for name in inputs if name not in ("images", "tokens", "n")]
    variants = [
        inputs
        | {"n": np.array(n, np.int32), "tokens": rng.permutation(inputs["tokens"])}
        | {name: rng.standard_normal(inputs[name].shape, np.float32) for name in changed}
        for n in rng.integers(1, budget + 1, 8)
    ]
    first = [alone(plan, v, executor) for v in variants]
    infer(executor, inputs)
    before = counting.calls.copy()
    order = rng.integers(0, len(variants), count)
    equal = all(np.array_equal(infer(executor, variants[i]), first[i]) for i in order)
    made = counting.calls - before
    return {
        "inferences": count,
        "equal": equal,
        "distinct": len({a.tobytes() for a in first}),
        "calls": dict(made),
        "builds": {name: times for name, times in made.items() if any(word in name for word in BUILDS)},
    }


def alone(plan: Plan, inputs: Inputs, like: Executor) -> Array:
    """One inference of a session of its own."""
    with Session(plan) if isinstance(like, Session) else Emulator(plan) as executor:
        return infer(executor, inputs)


def infer(executor: Executor, inputs: Inputs) -> Array:
    for name, value in inputs.items():
        executor.set(name, value)
    executor.run()
    (output,) = executor.outputs
    return executor.get(output)


def graph_nodes(program: Program) -> int:
    """Kernel launches of one inference."""
    launches = {s.name: sum(len(c.launches) for c in s.calls) for s in program.stages}
    return sum(launches[stage] for stage, _ in unrolled(program.schedule))


def check(plan: Plan, found: list[Reference], device: str, count: int) -> dict[str, Any]:
    """Everything that decides whether the Plan is right, by bf16's bars."""
    counting = Counting()
    executor = Session(plan, driver=Driver(api=counting)) if device == "cuda" else Emulator(plan)
    with executor:
        memory: dict[str, int] = {}
        if isinstance(executor, Session):
            executor.warm()
            memory = asdict(executor.memory())
        rows = [accuracy(executor, reference) for reference in found]
        runs = steady(executor, plan, found[0].inputs, counting, count)
    return {
        "plan_id": plan.plan_id,
        "family": plan.program.target.family,
        "graph_nodes": graph_nodes(plan.program),
        "accuracy": rows,
        "steady": runs,
        "memory": memory,
        "passed": {
            "absolute": worst(rows) <= ABSOLUTE,
            "ratio": all(max(r["velocity_errors"]) <= RATIO * max(r["eager_bf16_errors"]) for r in rows),
            "steady": runs["equal"] and not runs["builds"] and runs["distinct"] > 1,
            "memory": not memory or abs(memory["planned"] - memory["used"]) <= MEMORY,
        },
    }


def worst(rows: Sequence[dict[str, Any]], name: str = "velocity_errors") -> float:
    return max(float(error) for row in rows for error in row[name])


def check_8_bits(shape: Shape, result: dict[str, Any], scaled_mm: list[list[float]]) -> dict[str, Any]:
    """The result of `check` with the bars of a precision that stores 8 bits. scaled_mm: errors of the yardstick."""
    rows = result["accuracy"]
    if scaled_mm:
        rows = [row | {"scaled_mm_errors": errors} for row, errors in zip(rows, scaled_mm, strict=True)]
    precision, nbytes = compile_report(shape)["precision"], plan_path(shape).stat().st_size
    passed = {name: result["passed"][name] for name in ("steady", "memory")} | {
        "absolute": worst(rows) <= FP8_ABSOLUTE,
        "bytes of the Plan": nbytes <= PLAN_BYTES,
    }
    if scaled_mm:
        passed["ratio"] = all(max(r["velocity_errors"]) <= FP8_RATIO * max(r["scaled_mm_errors"]) for r in rows)
        passed["share of FP8"] = shape.size != "full" or precision["fp8_share"] >= FP8_SHARE
    if shape.precision == STATIC:  # a scale for each row takes a launch more where blocks share rows
        passed["graph nodes"] = result["graph_nodes"] <= FP8_NODES
    stays = {site: at["reason"] for site, at in precision["sites"].items() if at["reason"]}
    about = {name: precision[name] for name in ("meaning", "scales", "fp8_share", "stages")} | {
        "stay_in_16_bits": stays
    }
    return result | {"accuracy": rows, "plan_bytes": nbytes, "compiled": about, "passed": passed}


def lengths_of(shape: Shape) -> tuple[int, int]:
    """Valid tokens of the observations that decide: a full prompt, and one that leaves a hole in the keys."""
    return shape.prompt, max(1, shape.prompt // 4)


def file_name(kind: str, shape: Shape) -> str:
    precision = "" if shape.precision == "bf16" else f"_{shape.precision}"
    return f"{kind}_{shape.policy}{precision}" + ("" if shape.size == "full" else f"_{shape.size}")


def results_name(shapes: Sequence[Shape]) -> str:
    """Of a file: of one precision, or "gpu_model_pi0_all"."""
    return file_name("gpu_model", shapes[0] if len(shapes) == 1 else replace(shapes[0], precision="all"))


def measure(
    shapes: Sequence[Shape], device: str, count: int, started: float, stages: bool = False
) -> list[dict[str, Any]]:
    """Every precision of a policy: calibrated alone on the machine, then compiled while references are computed."""
    make_room(shapes[0].policy, ROOM if device == "cuda" else 0)
    calibrations = {shape: calibrated(shape, device) for shape in shapes if shape.precision == STATIC}
    for row in calibrations.values():
        print(f"{time.perf_counter() - started:6.1f} s  calibrated: {row['seconds']}", flush=True)
    compiling = Compiling(shapes)
    found = references(shapes[0], lengths_of(shapes[0]), device)
    yardsticks = {shape: Yardstick(shape) for shape in shapes if shape.precision in (STATIC, ROWS)}
    print(f"{time.perf_counter() - started:6.1f} s  references", flush=True)
    results = []
    for shape in shapes:
        result: dict[str, Any] = {"policy": shape.policy, "shape": str(shape), "precision": shape.precision}
        result |= {"compile_seconds": compiling.wait(shape)}
        plan = open_plan(plan_path(shape))
        result |= check(plan, found, device, count)
        if shape.precision != "bf16":
            scaled_mm = yardsticks[shape].errors(found, device) if shape in yardsticks else []
            result = check_8_bits(shape, result, scaled_mm)
        if shape in calibrations:
            result["calibration"] = calibrations[shape]
            result["passed"]["calibration"] = device != "cuda" or calibrations[shape]["passed"]
            result |= {"stage_errors": stage_errors(shape, found, device)} if stages else {}
        result |= report.about("bench.gpu_model", device) | {"seconds": time.perf_counter() - started}
        print(f"{result['seconds']:6.1f} s  {shape.policy} {shape.label} checked", flush=True)
        results.append(result)
        report.write(results_name(shapes), result if len(shapes) == 1 else together(results))
    return results


def together(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all results say alike is said once."""
    first = results[0]
    same = {k: v for k, v in first.items() if k in ALIKE and all(r.get(k) == v for r in results)}
    return same | {"results": [{k: v for k, v in r.items() if k not in same} for r in results]}


def table(results: Sequence[dict[str, Any]]) -> str:
    """One row a Plan; errors of the worst step."""
    names = ("policy", "precision", "nodes", "error", "yardstick", "x", "FP8", "Plan GB", "used - planned MB", "failed")
    lines = ["  ".join(f"{name:>10}" for name in names)]
    for r in results:
        rows, memory = r["accuracy"], r["memory"]
        yardstick = worst(rows, "scaled_mm_errors" if "scaled_mm_errors" in rows[0] else "eager_bf16_errors")
        found = [r["policy"], r["precision"], r["graph_nodes"], f"{worst(rows):.2e}", f"{yardstick:.2e}"]
        found += [f"{worst(rows) / yardstick:.2f}"]
        found += [f"{r['compiled']['fp8_share']:.2%}", f"{r['plan_bytes'] / 1e9:.2f}"] if "compiled" in r else ["", ""]
        found += [f"{(memory['used'] - memory['planned']) / 1e6:.1f}" if memory else ""]
        found += [", ".join(name for name, kept in r["passed"].items() if not kept) or "none"]
        lines.append("  ".join(f"{word:>10}" for word in found))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--policy", default="pi05", help=f"with commas, of {', '.join(load_models())}")
    parser.add_argument("--precision", default="bf16", choices=(*PRECISIONS, "all"))
    parser.add_argument("--size", default="full", choices=("full", "tiny"))
    parser.add_argument("--prompt", type=int, default=48)
    parser.add_argument("--horizon", type=int, default=50)
    parser.add_argument("--family", default="", choices=("", *FAMILY_NAMES), help="of kernels; as the compiler chooses")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--inferences", type=int, default=1000, help="of the check that all bits stay the same")
    parser.add_argument("--stages", action="store_true", help="with fp8: PyTorch's errors with one stage in FP8, too")
    arguments = parser.parse_args()
    started, results = time.perf_counter(), list[dict[str, Any]]()
    wanted = PRECISIONS[1:] if arguments.precision == "all" else (arguments.precision,)
    for policy in policies_of(arguments.policy):
        sizes = {"prompt": arguments.prompt, "horizon": arguments.horizon, "size": arguments.size}
        base = Shape(policy, **sizes, family=arguments.family)
        shapes = [replace(base, precision=precision) for precision in wanted]
        results += measure(shapes, arguments.device, arguments.inferences, started, arguments.stages)
    for result in results:
        failed = {name: kept for name, kept in result["passed"].items() if not kept}
        print(result["policy"], result["precision"], failed or "passed")
        for stage, errors in result.get("stage_errors", {}).items():
            print(f"  only {stage} in FP8: {max(map(max, errors)):.2e}")
    print(table(results))
    return 0 if all(all(result["passed"].values()) for result in results) else 3


def policies_of(text: str) -> list[str]:
    found = text.split(",")
    for policy in found:
        if policy not in load_models():
            raise UsageError("option.policy", f"there is no policy {policy!r}", [("known", ", ".join(load_models()))])
    return found


if __name__ == "__main__":
    sys.exit(main())
