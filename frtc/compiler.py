"""The compile driver: checkpoint -> traced module -> passes -> kernels -> Plan. Needs no GPU.

Imports torch: only the compile side loads this file.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import frtc
from frtc.codegen.build import Built, build
from frtc.codegen.fusible import implements
from frtc.codegen.write import write_plan
from frtc.errors import EnvironmentFault, UsageError, nearest
from frtc.kernels.targets import Target, load_targets
from frtc.lowering.ir import Module, Type
from frtc.models import detect
from frtc.models.checkpoint import Checkpoint, open_checkpoint
from frtc.models.evidence import Fact
from frtc.models.policies import FAMILIES
from frtc.models.stages import Model
from frtc.passes.pipeline import Report, run_passes
from frtc.passes.standard import pipeline
from frtc.policy_files import PolicyFiles, Sizes, read_policy_files
from frtc.policy_options import PolicyOptions
from frtc.runtime.policy import Policy
from frtc.trace import trace

PRECISIONS = {"bf16": torch.bfloat16, "f32": torch.float32}
FAMILY_NAMES = ("baseline", "native")
Progress = Callable[[str, float], None]  # (what is being done, share of it that is done)


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """What the user may choose. None means: as the checkpoint's files say.

    prompt     token budget; horizon, steps: actions of a chunk, Euler steps
    family     "native": the target's own instructions where kernels for them exist; "baseline" runs on all targets
    """

    policy: PolicyOptions = field(default_factory=PolicyOptions)
    precision: str = "bf16"
    family: str = "baseline"
    prompt: int | None = None
    horizon: int | None = None
    steps: int | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint with everything its files say about model and policy."""

    checkpoint: Checkpoint
    model: Model
    config: Any
    files: PolicyFiles
    facts: tuple[Fact, ...]
    keys: Mapping[str, str]  # parameter -> tensor


@dataclass(frozen=True, slots=True)
class Compiled:
    """What `compile_checkpoint` made; `seconds` by part."""

    path: Path
    plan_id: str
    opened: Opened
    built: Built
    policy: Policy
    report: Report
    seconds: Mapping[str, float]


def target_named(name: str) -> Target:
    targets = load_targets()
    if name not in targets:
        rows = [("known", ", ".join(targets)), ("nearest", nearest(name, targets) or "none")]
        raise UsageError("option.arch", f"there is no target {name}", rows)
    return targets[name]


def require_python() -> None:
    if sys.version_info < (3, 11):
        found = ".".join(map(str, sys.version_info[:3]))
        raise EnvironmentFault("env.python", f"compiling needs Python 3.11 or newer, this is {found}")


def open_model(path: Path, options: CompileOptions) -> Opened:
    """Read headers and side files; no weights are read, nothing is traced."""
    checkpoint = open_checkpoint(path)
    model = detect(checkpoint)
    files = read_policy_files(checkpoint.folder, FAMILIES[model.name], options.policy)
    chosen = {"prompt": options.prompt, "horizon": options.horizon, "steps": options.steps}
    choices = {k: v for k, v in chosen.items() if v is not None}
    config, facts = model.config(checkpoint, choices | {"views": len(files.cameras), "origin": files.origin})
    return Opened(checkpoint, model, config, files, facts, model.weights(checkpoint, config))


def import_module(
    opened: Opened, precision: str = "bf16", progress: Progress = lambda what, share: None, velocity: bool = False
) -> Module:
    """The traced module, weights bound to the checkpoint's tensors; with `velocity`, each step's is a result, too."""
    if precision not in PRECISIONS:
        raise UsageError("option.precision", f"there is no precision {precision}", [("known", ", ".join(PRECISIONS))])
    stages = opened.model.stages(opened.config, PRECISIONS[precision], velocity)
    tensors = {p: (key, _stored(opened.checkpoint, key)) for p, key in opened.keys.items()}
    names = list(stages)

    def starts(stage: str) -> None:
        progress(f"trace {stage}", names.index(stage) / len(names))

    return trace(opened.model.name, stages, opened.model.schedule(opened.config), tensors, starts)


def _stored(checkpoint: Checkpoint, key: str) -> Type:
    info = checkpoint.tensors[key]
    return Type(info.dtype, info.shape)


def compile_checkpoint(
    path: Path, arch: str, out: Path, options: CompileOptions, progress: Progress = lambda what, share: None
) -> Compiled:
    """Compile a checkpoint into a Plan file. Nothing is written before everything has been checked."""
    require_python()
    target = target_named(arch)
    if options.family not in FAMILY_NAMES:
        rows = [("known", ", ".join(FAMILY_NAMES))]
        raise UsageError("option.family", f"there is no kernel family {options.family}", rows)
    families = ("baseline",) if options.family == "baseline" else ("baseline", target.nvcc)
    clock = _Clock()
    opened = open_model(path, options)
    module = import_module(opened, options.precision, progress)
    policy = opened.files.policy(sizes_of(module))
    clock.lap("trace")
    module, report = run_passes(module, pipeline(implements(target, families)))
    clock.lap("passes")
    built = build(module, target, families, done=lambda share: progress("compile kernels", share))
    clock.lap("kernels")
    program = replace(built.program, policy=policy.to_json())
    evidence = {"frtc": frtc.__version__, "source": source_of(opened)}

    def written(done: int, total: int) -> None:
        progress("write weights", done / total)

    blobs = {"tokenizer": opened.files.tokenizer}
    plan_id = write_plan(out, built, program, opened.checkpoint.read, blobs, evidence, written)
    clock.lap("weights")
    return Compiled(out, plan_id, opened, built, policy, report, clock.seconds)


def sizes_of(module: Module) -> Sizes:
    """The sizes that the policy must agree with, from the module's inputs."""
    inputs = module.inputs
    tables = [n.args[0] for g in module.graphs for n in g.nodes if n.op == "embedding"]
    vocab = max((t.shape[0] for t in tables if t is not None), default=0)
    horizon, width = inputs["noise"].shape
    return Sizes(inputs["images"].shape[-2], inputs["tokens"].shape[-1], vocab, horizon, width)


def source_of(opened: Opened) -> dict[str, Any]:
    """Where the Plan came from: evidence, not program. Headers identify the files; contents are not hashed."""
    files = {f.name: hashlib.sha256(_header(f)).hexdigest() for f in opened.checkpoint.files}
    facts = [{"name": f.name, "value": f.value, "source": f.source} for f in (*opened.facts, *opened.files.facts)]
    return {"checkpoint": opened.checkpoint.path.name, "headers": files, "facts": facts}


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return file.read(length)


class _Clock:
    """Seconds since the last lap, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self._last = now - self._last, now
