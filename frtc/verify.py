"""A Plan against its checkpoint: every program, from where the Plan stood, beside the traced model in fp32.

The reference is the model as it was traced, before any pass, run widened by the interpreter. Each program gets the
Plan's own values as inputs, so that errors do not add up and the first program that departs is the guilty one; a value
carried from round to round is compared by its change (for a flow-matching policy that is the velocity). Then one whole
inference, from the same inputs to robot units.

Imports torch: only the compile side loads this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from frtc.compiler import CompileOptions, Opened, Progress, import_module, open_model
from frtc.errors import FrtcError, UsageError
from frtc.lowering.interpret import run, run_module
from frtc.lowering.ir import Graph, Module
from frtc.lowering.ir import walk as walk_nodes
from frtc.passes.attention_sites import attention_sites
from frtc.passes.canonicalize import canonicalize
from frtc.passes.limit_rows import returned_rows
from frtc.passes.pipeline import Options, run_passes
from frtc.passes.row_needs import Rows
from frtc.policy import Policy
from frtc.precision import ActivationScales, parameters
from frtc.probe import read
from frtc.recorded import kept_tokenizer, recorded_options, recorded_scales, results_in
from frtc.results import counters
from frtc.runtime.plan import unrolled
from frtc.runtime.plan_file import Plan
from frtc.runtime.policy_steps import Prepared
from frtc.selftest import ref_of, relative_error
from frtc.verified import Difference, Sample, Verified, bars_of
from frtc.verify_weights import differing

Array = np.ndarray[Any, Any]
Weights = Callable[[str], Array]


@dataclass(frozen=True, slots=True)
class Reference:
    """The checkpoint as a traced module, and its weights, evaluated when they are read."""

    opened: Opened
    options: CompileOptions
    module: Module

    def weights(self, module: Module, mode: str, scales: ActivationScales | None = None) -> Weights:
        expressions, values = dict(module.weights.outputs), parameters(self.opened.read, scales)

        def weight(name: str) -> Array:
            value = run(Graph("weight", (), (("out", expressions[name]),)), {}, values, "exact")["out"]
            return value.astype(np.float32) if mode == "wide" and value.dtype == np.float64 else value

        return weight


def reference_of(plan: Plan, checkpoint: Path, progress: Progress, adapter: Path | None = None) -> Reference:
    """The checkpoint, traced with the options that the Plan was compiled with."""
    options = replace(recorded_options(plan), adapter=adapter)
    with kept_tokenizer(plan) as tokenizer:
        options = replace(options, policy=replace(options.policy, tokenizer=tokenizer, strict=False))
        opened = open_model(checkpoint, options)
    if opened.model.name != plan.program.model:
        what = f"the Plan is a {plan.program.model}, the checkpoint a {opened.model.name}"
        raise UsageError("verify.model", what, [("checkpoint", str(checkpoint))])
    module = import_module(opened, progress=progress)
    _require_same_inputs(plan, module)
    return Reference(opened, options, module)


def _require_same_inputs(plan: Plan, module: Module) -> None:
    ours = {s.name: f"{s.dtype}[{','.join(map(str, s.shape))}]" for s in plan.program.inputs}
    theirs = {name: str(type) for name, type in module.inputs.items()}
    if ours != theirs:
        rows = [(name, f"Plan {ours.get(name)}, checkpoint {theirs.get(name)}") for name in sorted({*ours, *theirs})]
        raise FrtcError("verify.inputs", "Plan and checkpoint take different inputs", rows)


def verify(policy: Policy, reference: Reference, observed: Sequence[Mapping[str, Any]], progress: Progress) -> Verified:
    """Compare on some observations; noise is the draw of the observation's number."""
    samples = [_sample(policy, reference, one, draw, progress) for draw, one in enumerate(observed)]
    cut = policy.steps.cut
    lookup = parameters(reference.opened.read, recorded_scales(policy.plan))
    weights = differing(policy.plan, lookup, progress)
    return Verified(tuple(samples), *bars_of(policy.plan.program), cut.names if cut else (), weights)


def _sample(policy: Policy, reference: Reference, observed: Mapping[str, Any], draw: int, progress: Progress) -> Sample:
    prepared = policy.steps.prepare(observed, draw=draw)
    inputs = {name: array.copy() for name, array in prepared.inputs.items()}
    differences = tuple(d for d, _ in walk(policy, reference, inputs, progress, prepared))
    progress("reference", 0.0)
    weights = reference.weights(reference.module, "wide")
    expected = run_module(reference.module, inputs, weights, "wide")[policy.output]
    found = policy.executor.get(policy.output)
    noise = inputs.get("noise", np.zeros((), np.float32))
    whole = relative_error(found - noise, expected - noise)
    return Sample(differences, whole, _cosine(found, expected), _units(policy, prepared, found, expected))


def _units(policy: Policy, prepared: Prepared, found: Array, expected: Array) -> Array:
    """|difference| of two outputs of the model in robot units [horizon, dim]; infinite where one is not finite."""
    try:
        a, b = (policy.steps.finish(x.astype(np.float32), prepared) for x in (found, expected))
    except FrtcError as fault:
        if fault.code != "output.nonfinite":
            raise
        cut = policy.steps.cut
        return np.full((cut.horizon, cut.dim) if cut else found.shape, np.inf)
    return np.abs(a.astype(np.float64) - b)


def walk(
    policy: Policy,
    reference: Reference,
    inputs: Mapping[str, Array],
    progress: Progress,
    prepared: Prepared | None = None,
) -> Iterator[tuple[Difference, dict[str, Array]]]:
    """Runs the Plan program by program: each result's difference, and the environment that its program started from.

    prepared   where `inputs` came from: for errors in robot units
    """
    program, module = policy.plan.program, reference.module
    places = {stage: {k: ref_of(r) for k, r in named.items()} for stage, named in results_in(policy.plan).items()}
    graphs, counting = {g.name: g for g in module.graphs}, dict(counters(module.schedule))
    read_of = returned_rows(run_passes(module, (canonicalize, attention_sites), Options(check=0))[0])
    weights, bars, carried = reference.weights(module, "wide"), bars_of(program), dict(module.outputs)[policy.output]
    policy.reset()
    for name, array in inputs.items():
        policy.executor.set(name, array)
    env: dict[str, Array] = dict(inputs)
    order = unrolled(program.schedule)
    for i, (stage, round) in enumerate(order):
        progress("verify", i / len(order))
        before = dict(env)
        policy.executor.run_stage(stage, round)
        found = {name: read(policy.executor, ref, round) for name, ref in places.get(stage, {}).items()}
        env |= {name: _only_read(value, read_of.get((stage, name)), inputs) for name, value in found.items()}
        if stage not in graphs:
            continue
        before[counting.get(stage, "")] = np.array(round, np.int32)
        expected = run(graphs[stage], before, weights, "wide")
        for name, value in expected.items():
            if name in places.get(stage, {}):
                start = before[name].astype(np.float64) if name in before else 0.0
                value = _only_read(value, read_of.get((stage, name)), inputs)
                error = relative_error(env[name] - start, value - start)
                velocity = name == carried
                units = _units(policy, prepared, env[name], value) if velocity and prepared else None
                yield Difference(stage, round, name, error, bars[not velocity], velocity, units), before


def _only_read(value: Array, rows: Rows | None, inputs: Mapping[str, Array]) -> Array:
    """The value with zeros where no program reads it: a Plan may leave anything there."""
    if rows is None:
        return value
    needed = tuple(n for n in walk_nodes([rows.length]) if n.op == "input")
    length = int(run(Graph("length", needed, (("length", rows.length),)), inputs)["length"])
    j = np.arange(value.shape[rows.axis])
    kept = (j < length) | ((j >= rows.resume) if rows.resume >= 0 else np.False_)
    return np.where(kept.reshape(-1, *(1,) * (-rows.axis - 1)), value, np.zeros((), value.dtype))


def _cosine(a: Array, b: Array) -> float:
    x, y = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(x @ y / max(float(np.linalg.norm(x) * np.linalg.norm(y)), 1e-30))
