"""The compile driver: checkpoint -> traced module -> passes -> kernels -> Plan. Needs no GPU.

Imports torch: only the compile side loads this file.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

import frtc
from frtc import debug, observation, selftest
from frtc.codegen.build import Built
from frtc.codegen.frames import frames_cubin
from frtc.codegen.fusible import implements
from frtc.codegen.plan_writer import require_replaceable
from frtc.codegen.recipe import RECIPE, recipe_text
from frtc.codegen.write import write_plan
from frtc.console import size
from frtc.errors import EnvironmentFault, FrtcError, UsageError, nearest
from frtc.families import family_notes
from frtc.kernels.targets import Target, load_targets
from frtc.laps import Laps
from frtc.lowering.ir import Graph, Module, fresh_nodes
from frtc.models import detect, load_families
from frtc.models.checkpoint import Checkpoint, open_checkpoint
from frtc.models.evidence import Fact
from frtc.models.stages import Model
from frtc.passes.pipeline import Options, Report, run_passes
from frtc.passes.precision import Precision
from frtc.passes.quantize import Note
from frtc.passes.standard import pipeline
from frtc.policy import TOKENIZER
from frtc.policy import Policy as Running
from frtc.policy_files import PolicyFiles, Sizes, read_policy_files
from frtc.policy_options import PolicyOptions
from frtc.precision import (
    ActivationScales,
    Asked,
    PrecisionReport,
    default_kind,
    parameters,
    require_known,
    require_no_fallen,
    require_possible,
    require_used,
)
from frtc.report import CompileReport
from frtc.results import RESULTS, results_of
from frtc.runtime.emulator import Emulator
from frtc.runtime.paths import path_of
from frtc.runtime.plan import Program
from frtc.runtime.plan_file import open_plan
from frtc.runtime.policy import Assumption, Policy
from frtc.runtime.policy_steps import PolicySteps
from frtc.trace import trace
from frtc.tuning.options import Tuning
from frtc.tuning.tuned import prepare, tuned_build

TRACED = {"bf16": torch.bfloat16, "f32": torch.float32}  # as it is served, and what the model means, for verify
FAMILY_NAMES = ("baseline", "native")
SIZE_FLAGS = {"prompt": "--prompt-tokens", "horizon": "--horizon", "steps": "--steps"}
Progress = Callable[[str, float], None]  # (what is being done, share of it that is done)


def silent(what: str, share: float) -> None:
    """Progress that nobody watches."""


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """What the user may choose. None means: as the checkpoint's files say.

    precision  "bf16", "fp8" or "w8a16"; None: the GPU's default. stages, keep: docs/numerics.md
    prompt     token budget; horizon, steps: actions of a chunk, Euler steps
    adapter    folder of a LoRA adapter that is merged into the checkpoint
    family     "native": the target's own instructions where kernels for them exist; "baseline" runs on all targets;
               None: the target's default
    self_test  make the vectors of the self-test; without them the Plan proves nothing on the robot
    """

    policy: PolicyOptions = field(default_factory=PolicyOptions)
    precision: str | None = None
    stages: tuple[tuple[str, str], ...] = ()
    keep: tuple[str, ...] = ()
    family: str | None = None
    prompt: int | None = None
    horizon: int | None = None
    steps: int | None = None
    self_test: bool = True
    adapter: Path | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint with everything its files say about model and policy.

    facts     of model and policy, each with its source
    assumed   of the model's sizes; the policy's own are in `files`
    keys      parameter of the model -> tensor of the checkpoint
    """

    checkpoint: Checkpoint
    model: Model
    config: Any
    files: PolicyFiles
    facts: tuple[Fact, ...]
    assumed: tuple[Assumption, ...]
    keys: Mapping[str, str]

    def read(self, parameter: str) -> np.ndarray[Any, Any]:
        """The value of a parameter, in the float type that it is stored in."""
        return self.checkpoint.read(self.keys[parameter])

    def policy(self, sizes: Sizes) -> Policy:
        """The policy for a model of these sizes, everything assumed in it."""
        policy = self.files.policy(sizes)
        return replace(policy, assumed=(*policy.assumed, *self.assumed))


def target_named(name: str) -> Target:
    targets = load_targets()
    if not name:
        raise UsageError("option.arch", "the name of a target is empty", [("known", ", ".join(targets))])
    if name not in targets:
        rows = [("known", ", ".join(targets)), ("nearest", nearest(str(name), targets) or "none")]
        raise UsageError("option.arch", f"there is no target {name}", rows)
    return targets[name]


def require_python() -> None:
    if sys.version_info < (3, 11):
        found = ".".join(map(str, sys.version_info[:3]))
        raise EnvironmentFault("env.python", f"compiling needs Python 3.11 or newer, this is {found}")


def families_for(target: Target, family: str | None) -> tuple[str, ...]:
    """The kernel families that a choice of --family allows."""
    if family not in (None, *FAMILY_NAMES):
        raise UsageError("option.family", f"there is no kernel family {family}", [("known", ", ".join(FAMILY_NAMES))])
    return target.families(family)


def open_model(path: Path, options: CompileOptions) -> Opened:
    """Read headers and side files; no weights are read, nothing is traced."""
    checkpoint = open_checkpoint(path, options.adapter)
    model = detect(checkpoint)
    files = read_policy_files(checkpoint.folder, load_families()[model.name], options.policy)
    chosen = {name: getattr(options, name) for name in SIZE_FLAGS if getattr(options, name) is not None}
    config, facts = model.config(checkpoint, chosen | {"views": len(files.cameras), "origin": files.origin})
    facts = tuple(f for f in facts if f.name not in ("views", "origin"))  # the policy's files said these, with sources
    assumed = tuple(_assumption(model, f) for f in facts if f.assumed)
    if options.policy.strict and assumed:
        rows = [(a.field, f"{a.value} ({a.why}); confirm with {a.option}") for a in assumed]
        raise UsageError("policy.assumed", f"--strict, and {len(rows)} values are assumed", rows)
    known = (*checkpoint.facts, *facts, *files.facts)
    return Opened(checkpoint, model, config, files, known, assumed, model.weights(checkpoint, config))


def _assumption(model: Model, fact: Fact) -> Assumption:
    option = f"{SIZE_FLAGS.get(fact.name, '--' + fact.name)} {fact.value}"
    return Assumption(fact.name, str(fact.value), f"no file says; the published default of {model.name}", option)


def import_module(opened: Opened, dtype: str = "bf16", progress: Progress = silent, velocity: bool = False) -> Module:
    """The traced module, its weights the model's parameters; with `velocity`, each step's is a result, too."""
    stages = opened.model.stages(opened.config, TRACED[dtype], velocity)
    names = list(stages)

    def starts(stage: str) -> None:
        progress(f"trace {stage}", names.index(stage) / len(names))

    module = trace(opened.model.name, stages, opened.model.schedule(opened.config), starts)
    require_mapped(module.weights, opened)
    return module


def require_mapped(weights: Graph, opened: Opened) -> None:
    """Every parameter that weights are made of is a tensor of its shape: what the model's weight map promises."""
    for leaf in (n for n in weights.nodes if n.op == "tensor"):
        name, key = leaf["key"], opened.keys.get(leaf["key"])
        if key is None:
            rows = [("nearest", nearest(name, opened.keys) or "none")]
            raise FrtcError("lowering.weight", f"no checkpoint tensor is mapped to {name} : {leaf.type}", rows)
        if (found := opened.checkpoint.tensors[key]).shape != leaf.shape:
            what = f"{name} wants {leaf.type}, checkpoint tensor {key} is {found}"
            raise FrtcError("lowering.weight", what, [("checkpoint", str(opened.checkpoint))])


@dataclass(frozen=True, slots=True)
class Optimised:
    """A module after all passes for a target, and what the passes and the policy's reader found."""

    module: Module
    policy: Policy
    report: Report
    precision: PrecisionReport


def optimise(
    opened: Opened,
    target: Target,
    options: CompileOptions,
    settings: Options,
    progress: Progress = silent,
    scales: ActivationScales | None = None,
) -> Optimised:
    """Trace the model and run all passes for the target."""
    asked = resolved(options, target)
    module = import_module(opened, progress=progress)
    policy = opened.policy(sizes_of(module))
    notes: list[Note] = []
    fallen = scales.fallen() if scales is not None else {}
    precision = Precision(asked.kind or "bf16", dict(asked.stages), asked.keep, scales is not None, fallen)

    def named(front: Module) -> Module:
        require_known(asked, front)
        if scales is not None:
            scales.require(opened, front)
        return front

    if options.policy.strict:
        require_no_fallen(precision)
    families = families_for(target, options.family)
    passes = pipeline(implements(target, families), precision, notes.append, named)
    module, report = run_passes(module, passes, settings)
    made = PrecisionReport.of(precision, target.multiplies_fp8(families), module, notes)
    return Optimised(module, policy, report, made)


def resolved(options: CompileOptions, target: Target, scales: bool = False) -> Asked:
    """The precision that was asked for, or the GPU's default; refused where the GPU cannot, or it uses no scales."""
    kind = options.precision or default_kind(target, families_for(target, options.family))
    asked = Asked(kind, options.stages, options.keep)
    require_possible(asked, target)
    if scales:
        require_used(replace(asked, kind=options.precision), target, options.family)
    return asked


@fresh_nodes()
def compile(
    checkpoint: str | Path,
    arch: str,
    out: str | Path,
    options: CompileOptions | None = None,
    settings: Options | None = None,
    progress: Progress = silent,
    scales: ActivationScales | None = None,
    tuning: Tuning | None = None,
) -> CompileReport:
    """Compile a checkpoint into a Plan file for the GPU `arch`. The file appears when it is complete, or not at all.

    settings   debugging (docs/debugging.md); by default what the FRTC_* variables say
    progress   called with (what is being done, share of it that is done)
    scales     activation scales of a calibration of this checkpoint; None: FP8 finds one for each row as it runs
    tuning     measured kernels from a file, or measure here; None: the target's table and the cost model choose
    """
    require_python()
    checkpoint, out = path_of("the checkpoint", checkpoint), path_of("the Plan", out)
    options, settings = options or CompileOptions(), settings or Options.from_environment()
    target, clock = target_named(arch), Laps()
    asked = resolved(options, target, scales is not None)
    options = replace(options, precision=asked.kind)
    families = families_for(target, options.family)
    require_folder(out)
    prepared = prepare(tuning or Tuning(), target)
    opened = open_model(checkpoint, options)
    clock.lap("read")
    made = optimise(opened, target, options, settings, progress, scales)
    module, policy, report = made.module, made.policy, made.report
    if settings.stop:
        raise UsageError("compile.stopped", f"stopped after pass {settings.stop}: no Plan was written")
    clock.lap("trace", report.passes)
    inputs = require_room(policy, opened.files.tokenizer)
    built, tuned = tuned_build(prepared, module, families, progress, inputs)
    clock.lap("kernels")
    debug.show_kernels(built, target, settings)
    program = replace(built.program, policy=policy.to_json())

    def evidence(written: Path) -> dict[str, Any]:
        clock.lap("weights")
        places = results_of(module, built)
        test = {"self_test": self_test(written, places, progress)} if options.self_test else {RESULTS: places}
        return evidence_of(opened, options) | calibration_of(scales, made.precision) | tuned.evidence() | test

    cubins = {**built.cubins, **frames_cubin(policy, target)}
    blobs = {**cubins, RECIPE: recipe_text(built.expressions), TOKENIZER: opened.files.tokenizer}
    watch = bytes_written(program, progress)
    leaves = parameters(opened.read, scales)
    plan_id = write_plan(out, program, built.expressions, leaves, blobs, evidence, watch)
    clock.lap("self-test" if options.self_test else "finish")
    about = (opened.model.title, opened.facts, policy, program, costs_of(built), report.fired, clock.seconds)
    notes = family_notes(target, options.family)
    return CompileReport.of(out, plan_id, *about, made.precision, tuned, notes)


def costs_of(built: Built) -> dict[str, float]:
    """Microseconds of each program by the cost model."""
    return {name: sum(c.choice.cost_us for c in calls) for name, calls in built.emitted.items()}


def require_room(policy: Policy, tokenizer: bytes) -> Mapping[str, np.ndarray[Any, Any]]:
    """A short prompt fits, with the state in it where the policy writes it; found out early. The inputs of one."""
    steps = PolicySteps(policy, tokenizer)
    return steps.prepare(observation.seeded(steps)).inputs


def calibration_of(scales: ActivationScales | None, made: PrecisionReport) -> dict[str, Any]:
    """What a Plan says of its activation scales: of which sites, how they were found."""
    if scales is None:
        return {"calibration": {"scales": made.scales}} if made.scales else {}
    used = [n.scale for n in made.notes if n.kind == "fp8"]
    sites = {site: scales.of(site).tolist() for site in used}
    found = {"scales": "static", "sites": sites, "fallen": dict(scales.fallen())}
    return {"calibration": found | scales.about()}


def require_folder(out: Path) -> None:
    if not out.parent.is_dir():
        raise UsageError(
            "output.folder", f"there is no folder {out.parent}", hint="create it, or choose another with -o"
        )
    if out.is_dir():
        raise UsageError("output.folder", f"{out} is a folder", hint=f"name a file: -o {out / 'policy.plan'}")
    require_replaceable(out)


def bytes_written(program: Program, progress: Progress) -> Callable[[int, int], None]:
    """Weights written, as bytes."""
    done = list(accumulate(w.nbytes for w in program.weights))

    def written(count: int, total: int) -> None:
        progress(f"write weights, {size(done[count - 1])} of {size(done[-1])}", done[count - 1] / max(done[-1], 1))

    return written


def self_test(written: Path, places: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    """Vectors from the finished file, so that what is tested is what was written. places: of results.results_of"""
    plan = open_plan(written, verify=False)
    with Running(plan, Emulator(plan)) as policy:
        return selftest.make(policy, places, progress)


def evidence_of(opened: Opened, options: CompileOptions) -> dict[str, Any]:
    """What a Plan says of how it was made."""
    source, chosen = source_of(opened), options_json(options)
    return {"frtc": frtc.__version__, "source": source, "options": chosen, "config": config_json(opened.config)}


def options_json(options: CompileOptions) -> dict[str, Any]:
    """What was chosen, without any path: a later verify or update makes the same model again."""
    policy = {name: getattr(options.policy, name) for name in PolicyOptions.__dataclass_fields__ if name != "tokenizer"}
    fields = CompileOptions.__dataclass_fields__.keys() - {"policy", "adapter"}
    return {"policy": policy, **{name: getattr(options, name) for name in sorted(fields)}}


def config_json(config: Any) -> Any:
    """A model's configuration as JSON has it: what two checkpoints must have in common to share a program."""
    return json.loads(json.dumps(asdict(config) if is_dataclass(config) else config, default=str))  # type: ignore[arg-type]


def options_of(data: Mapping[str, Any]) -> CompileOptions:
    """Inverse of options_json."""
    policy = dict(data["policy"])
    policy["camera"] = tuple((role, key) for role, key in policy["camera"])
    rest = {k: v for k, v in data.items() if k != "policy"}
    rest["stages"] = tuple((stage, kind) for stage, kind in rest.get("stages", ()))
    rest["keep"] = tuple(rest.get("keep", ()))
    return CompileOptions(PolicyOptions(**policy), **rest)


def sizes_of(module: Module) -> Sizes:
    """The sizes that the policy must agree with, from the module's inputs."""
    tables = [n.args[0] for g in module.graphs for n in g.nodes if n.op == "embedding"]
    vocab = max((t.shape[0] for t in tables if t is not None), default=0)
    return sizes_in({name: type.shape for name, type in module.inputs.items()}, vocab)


def sizes_in(inputs: Mapping[str, tuple[int, ...]], vocab: int) -> Sizes:
    """From the shapes of a program's inputs."""
    horizon, width = inputs["noise"]
    state = inputs["state"][-1] if "state" in inputs else 0
    return Sizes(inputs["images"][-2], inputs["tokens"][-1], vocab, horizon, width, state)


def source_of(opened: Opened) -> dict[str, Any]:
    """Where the Plan came from: evidence, not program. Headers identify the files; contents are not hashed."""
    files = {f.name: hashlib.sha256(opened.checkpoint.header(f)).hexdigest() for f in opened.checkpoint.files}
    facts = [{"name": f.name, "value": f.value, "source": f.source} for f in opened.facts]
    return {"checkpoint": opened.checkpoint.path.name, "headers": files, "facts": facts}
