"""How latency grows with views, chunk, prompt budget and steps, in bf16 and FP8 with static scales, on one GPU.

    PYTHONPATH=. python3 -m bench.gpu_scale [--policy pi0] [--only TEXT] [--device cpu]

No checkpoint and no Plan is written: programs are compiled from a description of full size, all configurations at
once, and the weights are filled on the device with random bytes that are ordinary numbers in every float type. Time
does not depend on their values; that the results are finite is checked. Every row has what the cost model says of each
stage, so that bench/fit.py needs this file alone. `--device cpu` is a rehearsal at size tiny.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from bench import report
from bench.full_model import ARCH, STATIC, Shape, model_of, observation
from bench.gpu_bench import REHEARSAL, Counts, full_prompt, replay_of, times
from bench.gpu_model import graph_nodes
from bench.sites import precision_of
from frtc.codegen.build import build
from frtc.codegen.fusible import implements
from frtc.compiler import FAMILY_NAMES, families_for, target_named
from frtc.estimate import FITTED_PATH, Estimate, Fitted, calls_of_emitted, rounds_of_module
from frtc.lowering.ir import Module, fresh_nodes
from frtc.models import load_models
from frtc.passes.pipeline import Options, run_passes
from frtc.passes.standard import pipeline
from frtc.runtime.emulator import Emulator
from frtc.runtime.plan import Program
from frtc.runtime.session import Session
from frtc.trace import trace
from frtc.tuning.trial import fill_weights, known_weights, plan_in_memory

VALID = 48  # tokens of a prompt, where the budget has room for them; `full_us`: as many as the budget has
COUNTS = Counts(warm_up=30, replays=200, parts=40)
SECONDS = 150  # of the whole bench, on 16 cores beside one GPU


@dataclass(frozen=True, slots=True)
class Case:
    """A configuration."""

    shape: Shape
    steps: int = 10

    @property
    def label(self) -> str:
        return f"{self.shape}-s{self.steps} {self.shape.precision}"


def cases(policy: str, device: str) -> list[Case]:
    """One size at a time around two views, chunk 50, budget 48, ten steps, and two corners, in both precisions."""
    base = Shape(policy) if device == "cuda" else Shape(policy, 1, 12, 10, "tiny")
    budget, chunk = (200, 10) if device == "cuda" else (24, 5)
    shapes = [
        base,
        replace(base, views=1),
        replace(base, views=3),
        replace(base, horizon=chunk),
        replace(base, prompt=budget),
    ]
    corners = [replace(base, views=views, horizon=chunk) for views in (1, 3)] + [replace(base, views=3, prompt=budget)]
    found = [Case(s) for s in (*shapes, *corners)] + [Case(base, steps) for steps in (5, 20)]
    fast = [replace(case, shape=replace(case.shape, precision=STATIC)) for case in found]
    return list(dict.fromkeys([*fast, *found]))


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a process of its own made of a case.

    exact     (offset, bytes) of weights that are not random: made of constants alone (positions, times), and scales
    seconds   of tracing and passes, and of kernels
    """

    program: Program
    cubins: Mapping[str, bytes]
    exact: tuple[tuple[int, bytes], ...]
    estimate: dict[str, Any]
    vocab: int
    seconds: tuple[float, float]


@fresh_nodes()
def compiled(case: Case, family: str | None, device: str) -> Compiled:
    torch.set_num_threads(1)
    started, target = time.perf_counter(), target_named(ARCH)
    families, precision = families_for(target, family), precision_of(case.shape)
    module, vocab = traced(case)
    module = run_passes(module, pipeline(implements(target, families), precision), Options(check=0))[0]
    passed = time.perf_counter()
    built = build(module, target, families)
    seconds = (passed - started, time.perf_counter() - passed)
    rounds = rounds_of_module(module.schedule)
    calls = calls_of_emitted(built.emitted, rounds, target)
    estimate = Estimate.of(calls, target, case.shape.precision, rounds, Fitted.read(FITTED_PATH))
    return Compiled(built.program, dict(built.cubins), known_weights(built), estimate.to_json(), vocab, seconds)


def traced(case: Case) -> tuple[Module, int]:
    """On the meta device: no weight is made. And how many embeddings tokens may name."""
    model, shape = model_of(case.shape.policy), case.shape
    assert model.synthetic is not None
    config = model.synthetic.sizes[shape.size]()
    sizes = {"views": shape.views, "prompt": shape.prompt, "horizon": shape.horizon, "steps": case.steps}
    config = replace(config, **sizes)
    module = trace(model.name, model.stages(config, torch.bfloat16, False), model.schedule(config))
    return module, config.vocab


# ---- times ----------------------------------------------------------------------------------------------------------


def measured(case: Case, made: Compiled, device: str, counts: Counts) -> dict[str, Any]:
    plan = plan_in_memory(made.program, made.cubins, made.exact, device == "cpu")
    stream = torch.cuda.Stream() if device == "cuda" else None
    with closing(Session(plan, stream=stream) if stream else Emulator(plan)) as executor:
        if isinstance(executor, Session):
            fill_weights(executor, made.exact)
        inputs = observation(made.program.inputs, min(VALID, case.shape.prompt), made.vocab)
        for name, value in inputs.items():
            executor.set(name, value)
        executor.run()
        (output,) = executor.outputs
        assert np.isfinite(executor.get(output)).all(), f"{case.label}: actions are not finite"
        device_us = times(replay_of(executor), stream, counts, counts.replays).row()
        parts = executor.time(counts.parts, warm_up=1).parts
        row = row_of(case, made, device_us, {name: spread.row()["p50"] for name, spread in parts.items()})
        if case.shape.prompt > VALID:
            row["full_us"] = full_prompt(executor, case.shape.prompt, stream, counts).row()
    return row


def row_of(case: Case, made: Compiled, device_us: dict[str, float], p50_us: Mapping[str, float]) -> dict[str, Any]:
    """What was measured of each stage beside what the model says of it."""
    shape = case.shape
    stages = {
        part["stage"]: part
        | {"p50_us": p50_us[part["stage"]], "roofline_share": part["roofline_us"] / p50_us[part["stage"]]}
        for part in made.estimate["stages"]
    }
    return {
        "label": case.label,
        "views": shape.views,
        "prompt": shape.prompt,
        "valid": min(VALID, shape.prompt),
        "horizon": shape.horizon,
        "steps": case.steps,
        "precision": shape.precision,
        "graph_nodes": graph_nodes(made.program),
        "family": made.program.target.family,
        "device_us": device_us,
        "expected_us": made.estimate["expected_us"],
        "roofline_us": made.estimate["roofline_us"],
        "stages": stages,
        "compile_seconds": dict(zip(("passes", "kernels"), made.seconds, strict=True)),
    }


HEAD = f"{'':26s} {'p50 ms':>8} {'p99 ms':>8} {'nodes':>6} {'expected':>9} {'roofline':>9}   stages"


def line_of(row: Mapping[str, Any]) -> str:
    stages = "  ".join(f"{n} {s['p50_us'] / 1e3:.3f}" for n, s in row["stages"].items() if s["p50_us"] > 100)
    stages += f"  full {row['full_us']['p50'] / 1e3:.3f}" if "full_us" in row else ""
    times_us = (row["device_us"]["p50"], row["device_us"]["p99"], row["expected_us"], row["roofline_us"])
    p50, p99, expected, roofline = (f"{us / 1e3:8.3f}" for us in times_us)
    return f"{row['label']:26s} {p50} {p99} {row['graph_nodes']:6d} {expected:>9} {roofline:>9}   {stages}"


def compiling(wanted: Sequence[Case], family: str | None, device: str) -> Iterator[tuple[Case, Future[Compiled]]]:
    """All cases, a process each; they share the cache of kernels. Nothing is timed while others compile."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(wanted), os.cpu_count() or 1), mp_context=context) as pool:
        running = [(case, pool.submit(compiled, case, family, device)) for case in wanted]
    yield from running


def named(parser: argparse.ArgumentParser, known: Sequence[Case], text: str) -> list[Case]:
    """Cases whose label holds the text; none is a mistake, which ends the program."""
    found = [case for case in known if text in case.label]
    if not found:
        parser.error(f"--only {text!r}: no case's label holds this; they are: {', '.join(c.label for c in known)}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--policy", default="pi05", choices=list(load_models()))
    parser.add_argument("--family", choices=FAMILY_NAMES, help="default: what the compiler takes by itself")
    parser.add_argument("--only", default="", help="cases whose label holds this")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    arguments = parser.parse_args()
    device, started = arguments.device, time.perf_counter()
    wanted = named(parser, cases(arguments.policy, device), arguments.only)
    counts = COUNTS if device == "cuda" else REHEARSAL
    about = report.about("bench.gpu_scale", device) | {"policy": arguments.policy, "target": ARCH}
    about |= {"family": arguments.family}
    rows: list[dict[str, Any]] = []
    for case, made in compiling(wanted, arguments.family, device):
        if not rows:
            print(f"compiled in {time.perf_counter() - started:.1f} s\n{HEAD}", flush=True)
        rows.append(measured(case, made.result(), device, counts))
        print(line_of(rows[-1]), flush=True)
        seconds = time.perf_counter() - started
        report.write(name_of(wanted[0].shape, arguments.family), about | {"seconds": seconds, "rows": rows})
    print(f"{len(rows)} configurations in {seconds:.1f} s")
    return 0 if device == "cpu" or seconds <= SECONDS else 3


def name_of(shape: Shape, family: str | None) -> str:
    """Of the file of results."""
    words = ("" if shape.policy == "pi05" else shape.policy, family or "", "" if shape.size == "full" else shape.size)
    return "_".join(["gpu_scale", *filter(None, words)])


if __name__ == "__main__":
    sys.exit(main())
