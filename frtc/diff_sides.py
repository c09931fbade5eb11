"""One side of `frtc diff`: a checkpoint or a Plan, as names with values and weights that are read when they are needed.

A checkpoint's weights go by the model's parameters, so that files of different layouts compare; those of a Plan by the
names they have in the Plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from frtc.console import size
from frtc.errors import FrtcError, UsageError
from frtc.kernels.dtypes import DTYPES
from frtc.policy_options import PolicyOptions
from frtc.report import flat
from frtc.runtime.plan import Program, Repeat
from frtc.runtime.plan_file import Plan, open_plan
from frtc.runtime.policy import Assumption, Images, Noise, Policy, Tokens

if TYPE_CHECKING:
    from frtc.models.stages import Model, Stage
    from frtc.policy_files import Sizes

Array = np.ndarray[Any, Any]
HEAD = 4096  # bytes at the start of a file that tell a Plan from other safetensors files


@dataclass(frozen=True, slots=True)
class Weight:
    """digest: of the bytes, "" where nobody computed it; array: all of it, mapped where the file allows."""

    dtype: str
    shape: tuple[int, ...]
    array: Callable[[], Array]
    digest: str = ""

    @property
    def type(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def nbytes(self) -> int:
        return DTYPES[self.dtype].itemsize * int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Side:
    """config     names with values: sizes, steps, what the files said, for which GPU
    policy     None where the files do not make one; `notes` says why
    weights    by name
    plan       None for a checkpoint
    """

    path: Path
    about: str
    model: str
    config: Mapping[str, Any]
    policy: Policy | None
    weights: Mapping[str, Weight]
    plan: Plan | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def kind(self) -> str:
        return "checkpoint" if self.plan is None else "Plan"


def is_plan(path: Path) -> bool:
    """By what the file begins with; a broken .plan is opened as one, so that the error says what is broken."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
    except OSError as fault:
        raise FrtcError("input.file", f"{path} cannot be read: {fault.strerror}") from None
    return path.suffix == ".plan" or (b'"program"' in head and b"plan_id" in head)


def open_side(path: Path, options: PolicyOptions, adapter: Path | None = None) -> Side:
    """options, adapter: of checkpoints; a Plan has its own policy, and weights that are merged already."""
    plan = open_plan(path, verify=False) if is_plan(path) else None
    if plan is None:
        return of_checkpoint(path, options, adapter)
    if adapter is not None:
        raise UsageError("diff.inputs", f"--adapter is of a checkpoint, {path} is a Plan")
    return of_plan(plan)


def of_plan(plan: Plan) -> Side:
    program = plan.program
    policy = Policy.from_json(program.policy) if program.policy else None
    weights = {
        w.name: Weight(w.dtype, w.shape, _in_plan(plan, i), plan.sha256[i]) for i, w in enumerate(program.weights)
    }
    about = f"Plan of {program.model} for {program.target.name}, {size(program.weights_nbytes)} of weights"
    return Side(plan.path, about, program.model, _plan_config(plan, policy), policy, weights, plan, plan.notes)


def _in_plan(plan: Plan, index: int) -> Callable[[], Array]:
    def array() -> Array:
        entry = plan.program.weights[index]
        dtype = DTYPES[entry.dtype].numpy
        stored: Array = np.ndarray(entry.stored_shape, dtype, plan.data, entry.offset)
        return stored[..., : entry.shape[-1]] if entry.shape else stored

    return array


def _plan_config(plan: Plan, policy: Policy | None) -> dict[str, Any]:
    """What the evidence says of the checkpoint, then what the program itself proves."""
    program, source, options = plan.program, plan.evidence.get("source"), plan.evidence.get("options")
    said = source.get("facts") if isinstance(source, dict) else None
    config = {str(f["name"]): f.get("value") for f in said or () if isinstance(f, dict) and "name" in f}
    if isinstance(options, dict) and "precision" in options:
        config["precision"] = options["precision"]
    if policy:
        noise, tokens, images = policy.find(Noise), policy.find(Tokens), policy.find(Images)
        config |= {"horizon": noise.horizon} if noise else {}
        config |= {"prompt": tokens.budget} if tokens else {}
        config |= {"views": len(images.cameras)} if images else {}
    config |= {"steps": count} if (count := _rounds(program)) else {}
    about = program.target
    target = {"GPU": about.name, "compiled for": about.nvcc, "kernels": about.family, "evidence": about.evidence}
    return {"model": program.model, **config, **{f"target: {k}": v for k, v in target.items()}}


def _rounds(program: Program) -> int:
    return max((step.count for step in program.schedule if isinstance(step, Repeat)), default=0)


def of_checkpoint(path: Path, options: PolicyOptions, adapter: Path | None) -> Side:
    """Headers and side files. Imports the models, and torch with them."""
    from frtc.models import detect, load_families
    from frtc.models.checkpoint import open_checkpoint
    from frtc.policy_files import PolicyFiles, read_policy_files

    checkpoint = open_checkpoint(path, adapter)
    model, notes = detect(checkpoint), list[str]()
    files: PolicyFiles | None = None
    try:
        files = read_policy_files(checkpoint.folder, load_families()[model.name], options)
    except FrtcError as fault:
        notes.append(_without_policy(path, fault))
    chosen = {"views": len(files.cameras), "origin": files.origin} if files else {}
    config, facts = model.config(checkpoint, chosen)
    said = (*checkpoint.facts, *facts, *(files.facts if files else ()))
    named = {"model": model.name} | {f.name: f.value for f in said}
    policy: Policy | None = None
    try:
        policy = files.policy(_sizes(model, config)) if files else None
    except FrtcError as fault:
        notes.append(_without_policy(path, fault))
    if policy:  # sizes that no file says, as compile adds them
        guessed = (Assumption(f.name, str(f.value), f.source, "") for f in facts if f.assumed)
        policy = replace(policy, assumed=(*policy.assumed, *guessed))
    weights: dict[str, Weight] = {}
    for parameter, key in model.weights(checkpoint, config).items():
        info = checkpoint.tensors[key]
        weights[parameter] = Weight(info.dtype, info.shape, lambda key=key: checkpoint.read(key))  # type: ignore[misc]
    held = size(sum(t.nbytes for t in checkpoint.tensors.values()))
    about = f"checkpoint of {model.title}, {len(checkpoint.tensors)} tensors, {held}"
    return Side(path, about, model.name, named | dict(flat(config)), policy, weights, None, tuple(notes))


def _without_policy(path: Path, fault: FrtcError) -> str:
    return f"{path}: its policy is not compared: {fault.what} [{fault.code}]"


def _sizes(model: Model, config: Any) -> Sizes:
    """What the traced module would say (compiler.sizes_of), from the stages' example inputs: tracing takes minutes."""
    import torch

    from frtc.compiler import sizes_in
    from frtc.models.stages import Repeat as Loop

    stages, schedule = model.stages(config, torch.bfloat16, False), model.schedule(config)
    shapes = {name: tuple(leaf.shape) for stage in stages.values() for name, leaf in _leaves(stage)}
    for step in schedule.steps:
        if isinstance(step, Loop):
            shapes |= {outside: shapes[name] for name, outside in step.carry.items()}
    tables = [m for s in stages.values() for m in s.module.modules() if isinstance(m, torch.nn.Embedding)]
    vocab = max((table.num_embeddings for table in tables), default=0)
    return sizes_in({name: shapes[name] for name in schedule.inputs}, vocab)


def _leaves(stage: Stage) -> Iterator[tuple[str, Any]]:
    from torch.utils import _pytree

    return zip(stage.inputs, _pytree.tree_leaves(stage.args), strict=True)


def flat_policy(policy: Policy) -> Iterator[tuple[str, Any]]:
    """(name, value) of every field of a policy, vectors by element: "state.norm.mean_or_low[3]"."""
    data = policy.to_json()
    for step in (*data["prepare"], *data["finish"]):
        yield from _elements({k: v for k, v in step.items() if k != "step"}, step["step"])
    for assumption in data["assumed"]:
        yield f"assumed.{assumption['field']}", assumption["value"]


def _elements(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _elements(inner, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            yield from _elements(inner, f"{name}[{i}]")
    else:
        yield name, value
