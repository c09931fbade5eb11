"""`frtc inspect PLAN`: what a Plan says. Opens and checks it; needs neither a GPU nor the compiler."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import asdict
from typing import Any

from frtc.console import Result, size, table
from frtc.options import pathname
from frtc.policy import notes
from frtc.products import precision_data, precision_line, precision_rows, products_of
from frtc.report import launches_of, memory_rows
from frtc.runtime.frames import step_of
from frtc.runtime.plan import Repeat, Run, unrolled
from frtc.runtime.plan_file import Plan, open_plan
from frtc.runtime.policy import Images, Policy
from frtc.trust import proof_rows, trust_of

PARTS = ("calls", "kernels", "sites", "weights")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=pathname)
    for part in PARTS:
        parser.add_argument(f"--{part}", action="store_true", help=f"list all {part}")


def run(args: argparse.Namespace) -> Result:
    plan = open_plan(args.plan)
    lists = {"calls": _calls, "kernels": _kernels, "sites": _sites, "weights": _weights}
    wanted = [part for part in PARTS if getattr(args, part)]
    text = [_summary(plan), *(f"{part}\n{table(lists[part](plan))}" for part in wanted)]
    return Result("\n".join(text), _data(plan))


def frames_on(plan: Plan) -> str:
    """Where a session on a GPU resizes camera frames; "" where the policy has no cameras."""
    if not plan.program.policy or Policy.from_json(plan.program.policy).find(Images) is None:
        return ""
    return "device" if step_of(plan.program, plan.files()) else "host, compile again to have the device do it"


def _summary(plan: Plan) -> str:
    p = plan.program
    count = launches_of(p)
    stages = [(s.name, f"{count[s.name]} launches", _ops(s.calls)) for s in p.stages]
    slots = [(s.name, f"{s.dtype}{list(s.shape)}", what) for what in ("inputs", "outputs") for s in getattr(p, what)]
    source = plan.evidence.get("source", {})
    lines = [
        f"{plan.path}: {p.model} for {p.target.name} ({p.target.nvcc}, driver {p.target.min_driver} or newer), "
        f"{p.target.family} kernels, {p.target.evidence}",
        table([("plan", plan.plan_id), ("from", str(source.get("checkpoint", "unknown"))), *proof_rows(plan)]),
        *notes(plan),
        "inputs and outputs of the device",
        table([(name, type, what.rstrip("s")) for name, type, what in slots]),
        *([f"camera frames: resized on the {where}"] if (where := frames_on(plan)) else []),
        "programs",
        table(stages),
        f"schedule: {_schedule(p.schedule)}, {sum(count[name] for name, _ in unrolled(p.schedule))} launches in all",
        *([f"overlap, up to the first repetition: {', '.join(p.overlap.stages)}"] if p.overlap else []),
        precision_line(p),
        table(precision_rows(p)),
        "memory on the device",
        table(memory_rows(p.weights_nbytes, p.arena_nbytes, p.state_nbytes)),
        f"{len(p.weights)} weights, {len(p.kernels)} kernels; --weights, --kernels, --sites, --calls list them",
        "policy",
        table(_policy(p.policy)),
    ]
    return "\n".join(lines)


def _ops(calls: Any) -> str:
    return ", ".join(f"{n} {op}" for op, n in Counter(c.op for c in calls).most_common())


def _schedule(steps: tuple[Run | Repeat, ...]) -> str:
    return ", ".join(
        step.stage if isinstance(step, Run) else f"{step.count} x ({_schedule(step.body)})" for step in steps
    )


def _policy(policy: dict[str, Any]) -> list[tuple[str, str]]:
    """One row per step: its name and its fields, long vectors shortened."""
    rows = []
    for step in (*policy.get("prepare", ()), *policy.get("finish", ())):
        fields = (f"{k}={_short(v)}" for k, v in step.items() if k != "step")
        rows.append((step["step"], ", ".join(fields)))
    return rows


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return f"({', '.join(f'{k}={_short(v)}' for k, v in value.items())})"
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], (int, float)):
        return f"[{len(value)} numbers]"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_short, value))}]"
    return repr(value) if isinstance(value, str) else str(value)


def _calls(plan: Plan) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for stage in plan.program.stages:
        for i, call in enumerate(stage.calls):
            results = ", ".join(f"{r.dtype}{list(r.shape)}" for r in call.results)
            used = ", ".join(f"kernel {n.kernel} grid {'x'.join(map(str, n.grid))}" for n in call.launches)
            rows.append((f"{stage.name}/{i}", call.op, results, used, call.name))
    return rows


def _kernels(plan: Plan) -> list[tuple[str, ...]]:
    p = plan.program
    uses = Counter(n.kernel for s in p.stages for c in s.calls for n in c.launches)
    return [(str(i), k.cubin, f"{uses[i]} launches", f"{k.smem} B smem", k.symbol) for i, k in enumerate(p.kernels)]


def _sites(plan: Plan) -> list[tuple[str, ...]]:
    """Each product by weights: what it multiplies, and whose scales its activations have."""
    return [(f"{p.stage}/{p.index}", p.kind, p.scales, p.site) for p in products_of(plan.program)]


def _weights(plan: Plan) -> list[tuple[str, ...]]:
    """Each weight with the expression over the model's parameters that makes it."""
    from frtc.codegen.recipe import RECIPE, read_recipe
    from frtc.lowering.ir import Graph
    from frtc.lowering.text import show

    made = read_recipe(bytes(plan.files()[RECIPE]))
    rows: list[tuple[str, ...]] = []
    for w in plan.program.weights:
        text = show(Graph("weight", (), (("out", made[w.name]),)))
        expression = " ".join(line.strip() for line in text.splitlines()[1:-1])
        rows.append((w.name, f"{w.dtype}{list(w.shape)}", size(w.nbytes), expression))
    return rows


def _data(plan: Plan) -> dict[str, Any]:
    p = plan.program
    return {
        "plan_id": plan.plan_id,
        "model": p.model,
        "target": asdict(p.target),
        "notes": list(notes(plan)),
        "trust": trust_of(plan),
        "precision": precision_data(p),
        "inputs": [asdict(s) for s in p.inputs],
        "outputs": [asdict(s) for s in p.outputs],
        "launches": launches_of(p),
        "graph_nodes": sum(launches_of(p)[name] for name, _ in unrolled(p.schedule)),
        "overlap": list(p.overlap.stages) if p.overlap else [],
        "frames": frames_on(plan).split(",")[0] or None,
        "memory": {"weights": p.weights_nbytes, "arena": p.arena_nbytes, "state": p.state_nbytes},
        "kernels": [asdict(k) for k in p.kernels],
        "weights": [asdict(w) for w in p.weights],
        "policy": p.policy,
        "evidence": plan.evidence,
    }
