"""A policy on disk, full size or tiny: a synthetic checkpoint, Plans compiled from it, its modules with its weights.

A Plan of precision "fp8" has the activation scales of a calibration, whose file bench/calibrated.py leaves beside the
checkpoint; one of "fp8-rows" finds them for each row as it runs.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from bench.eager import Eager
from frtc.compiler import CompileOptions, compile, open_model
from frtc.kernels.dtypes import DTYPES
from frtc.models import load_models
from frtc.models.stages import Model, Repeat
from frtc.models.synthetic import write_checkpoint
from frtc.policy_options import PolicyOptions
from frtc.runtime.plan import Slot
from frtc.scales import Scales
from frtc.scales_file import read_scales

Array = np.ndarray[Any, Any]
SCRATCH = Path(os.environ.get("FRTC_SCRATCH", "/tmp/frtc-bench"))  # 20 GB
ARCH = "hopper"
STATIC, ROWS = "fp8", "fp8-rows"  # FP8 by the kind of its activation scales
PRECISIONS = ("bf16", STATIC, ROWS, "w8a16")
TYPES = {torch.uint8: "u8", torch.float32: "f32", torch.int32: "i32"}


@dataclass(frozen=True, slots=True)
class Shape:
    """What a Plan is compiled for: the policy, camera views, prompt budget, actions of a chunk, one of PRECISIONS.

    family   of --family; "": what the compiler takes by itself
    """

    policy: str = "pi05"
    views: int = 2
    prompt: int = 48
    horizon: int = 50
    size: str = "full"
    precision: str = "bf16"
    family: str = ""

    def __str__(self) -> str:
        return f"v{self.views}-p{self.prompt}-c{self.horizon}"

    @property
    def label(self) -> str:
        """With the precision and a chosen family, for tables."""
        return f"{self} {self.precision} {self.family}".rstrip()


def model_of(policy: str) -> Model:
    return load_models()[policy]


def checkpoint(policy: str, size: str = "full") -> Path:
    """A synthetic checkpoint in bf16, in the first layout that its model declares; written once."""
    folder, synthetic = SCRATCH / f"{policy}-{size}", model_of(policy).synthetic
    assert synthetic is not None
    if not folder.exists():
        SCRATCH.mkdir(parents=True, exist_ok=True)
        write_checkpoint(folder, synthetic.layouts[0], size, 0, "bf16", os.cpu_count() or 1, policy)
    return folder


def options(shape: Shape) -> CompileOptions:
    """Without self-test vectors. A budget of 48 tokens holds no state in the prompt."""
    policy = PolicyOptions(views=shape.views, state_in_prompt=False)
    kind = "fp8" if shape.precision == ROWS else shape.precision
    sizes: dict[str, Any] = {"prompt": shape.prompt, "horizon": shape.horizon}
    family = {"family": shape.family} if shape.family else {}
    return CompileOptions(policy, precision=kind, self_test=False, **sizes, **family)


def plan_path(shape: Shape) -> Path:
    return SCRATCH / f"{shape.policy}-{shape.size}-{shape.label.replace(' ', '-')}.plan"


def scales_path(shape: Shape) -> Path:
    """Of a calibration: any precision's."""
    return SCRATCH / f"{shape.policy}-{shape.size}-{shape}.scales"


def scales_of(shape: Shape) -> Scales | None:
    """What its Plan is compiled with: static scales where the precision has them."""
    return read_scales(scales_path(shape)) if shape.precision == STATIC else None


def compiled(shape: Shape) -> None:
    """A Plan for ARCH, and beside it what compiling took and what became of the products."""
    path = plan_path(shape)
    folder, scales = checkpoint(shape.policy, shape.size), scales_of(shape)
    report = compile(folder, ARCH, path, options(shape), scales=scales)
    about = {"plan_id": report.plan_id, "seconds": dict(report.seconds), "precision": report.precision.to_json()}
    path.with_suffix(".json").write_text(json.dumps(about))


class Compiling:
    """Plans of several shapes, each compiled by a process of its own while this one does something else.

    The processes of a shape start when its checkpoint is written, those of the next one a little later; at most `most`
    Plans are there or under way, so that the disk holds them. A calibration has to be there for static scales.
    """

    def __init__(self, shapes: Iterable[Shape], most: int = 8) -> None:
        self.running: dict[Shape, subprocess.Popen[bytes]] = {}
        self.queued, self.most, self.dropped = list[Shape](), most, set[Shape]()
        self.start(shapes)

    def start(self, shapes: Iterable[Shape]) -> None:
        self.queued += shapes
        while self.queued and len(self.running) < self.most:
            self._begin(self.queued.pop(0))

    def __contains__(self, shape: Shape) -> bool:
        return shape in self.running or shape in self.queued or shape in self.dropped

    def wait(self, shape: Shape) -> dict[str, float]:
        """Seconds that its compilation took, by part."""
        if shape in self.queued:
            self.queued.remove(shape)
            self._begin(shape)
        if self.running[shape].wait():
            raise RuntimeError(f"compiling {shape.policy} {shape.label} failed")
        seconds: dict[str, float] = compile_report(shape)["seconds"]
        return {name: round(took, 2) for name, took in seconds.items()}

    def drop(self, shape: Shape) -> None:
        """The Plan is not needed any more."""
        self.dropped.add(shape)
        if shape in self.running:
            self.running.pop(shape).wait()
        plan_path(shape).unlink(missing_ok=True)
        self.start(())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No process compiles meanwhile: what is timed has the machine for itself."""
        stopped = [process for process in self.running.values() if process.poll() is None]
        for process in stopped:
            process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for process in stopped:
                process.send_signal(signal.SIGCONT)

    def _begin(self, shape: Shape) -> None:
        checkpoint(shape.policy, shape.size)
        plan_path(shape).unlink(missing_ok=True)
        command = [sys.executable, "-m", "bench.full_model", *map(str, astuple(shape))]
        self.running[shape] = subprocess.Popen(command, env={**os.environ, "FRTC_SCRATCH": str(SCRATCH)})


def make_room(policy: str, nbytes: int) -> None:
    """Checkpoints and Plans of other policies go where the disk has fewer bytes left."""
    SCRATCH.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(SCRATCH).free >= nbytes:
        return
    for path in SCRATCH.iterdir():
        if path.name.split("-")[0] in load_models().keys() - {policy}:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def compile_report(shape: Shape) -> dict[str, Any]:
    """What `compiled` left beside the Plan."""
    found: dict[str, Any] = json.loads(plan_path(shape).with_suffix(".json").read_text())
    return found


def eager(shape: Shape, dtype: torch.dtype, device: str = "cuda") -> Eager:
    """The policy's modules with the checkpoint's weights: float32 is the reference, bfloat16 the serving precision."""
    opened = open_model(checkpoint(shape.policy, shape.size), options(shape))
    return Eager(opened.model, opened.config, dtype, opened.checkpoint, device)


def inputs_of(shape: Shape) -> tuple[list[Slot], int]:
    """The device inputs of the policy, and how many embeddings its tokens may name."""
    opened = open_model(checkpoint(shape.policy, shape.size), options(shape))
    stages, schedule = opened.model.stages(opened.config, torch.bfloat16, False), opened.model.schedule(opened.config)
    leaves = {n: x for s in stages.values() for n, x in zip(s.inputs, pytree.tree_leaves(s.args), strict=True)}
    leaves |= {
        start: leaves[name] for step in schedule.steps if isinstance(step, Repeat) for name, start in step.carry.items()
    }
    slots = [Slot(name, TYPES[leaves[name].dtype], tuple(leaves[name].shape)) for name in schedule.inputs]
    return slots, opened.config.vocab


def observation(inputs: Sequence[Slot], valid: int, vocab: int, seed: int = 0) -> dict[str, Array]:
    """Random device inputs by name: frames that are smooth with noise, `valid` random tokens, the rest Gaussian."""
    rng = np.random.default_rng(seed)
    found: dict[str, Array] = {}
    for slot in inputs:
        if slot.name == "images":
            found[slot.name] = frames(slot, rng)
        elif slot.name == "tokens":
            found[slot.name] = np.where(np.arange(slot.shape[0]) < valid, rng.integers(4, vocab, slot.shape), 0)
        elif slot.name == "n":
            found[slot.name] = np.array(valid)
        else:
            found[slot.name] = rng.standard_normal(slot.shape)
    return {slot.name: found[slot.name].astype(DTYPES[slot.dtype].numpy) for slot in inputs}


def frames(slot: Slot, rng: np.random.Generator) -> Array:
    """[V, edge, edge, 3]: bytes, or numbers in [0, 1] where the policy takes floats."""
    views, edge = slot.shape[:2]
    ramp = np.linspace(0, 255, edge)[None, :, None, None] * rng.uniform(0, 1, (views, 1, edge, 3))
    pixels = np.clip(ramp + rng.normal(0, 40, slot.shape), 0, 255)
    return pixels if slot.dtype == "u8" else pixels / 255


if __name__ == "__main__":
    policy, views, prompt, horizon, *words = sys.argv[1:]
    compiled(Shape(policy, int(views), int(prompt), int(horizon), *words))
