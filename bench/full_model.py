"""The full-size Pi0.5 on disk: a synthetic checkpoint, Plans compiled from it, the eager module with its weights."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from frtc.compiler import CompileOptions, compile
from frtc.models import pi05
from frtc.models.checkpoint import open_checkpoint
from frtc.models.synthetic import write_checkpoint
from frtc.models.weights import load
from frtc.policy_options import PolicyOptions
from frtc.report import CompileReport

Array = np.ndarray[Any, Any]
SCRATCH = Path(os.environ.get("FRTC_SCRATCH", "/tmp/frtc-bench"))  # 20 GB


@dataclass(frozen=True, slots=True)
class Shape:
    """What a Plan is compiled for: camera views, prompt budget, actions of a chunk."""

    views: int = 2
    prompt: int = 48
    horizon: int = 50

    def __str__(self) -> str:
        return f"v{self.views}-p{self.prompt}-c{self.horizon}"


def checkpoint(size: str = "full") -> Path:
    """A synthetic openpi checkpoint in bf16, written once."""
    folder = SCRATCH / f"pi05-{size}"
    if not folder.exists():
        SCRATCH.mkdir(parents=True, exist_ok=True)
        write_checkpoint(folder, "openpi", size, 0, "bf16", os.cpu_count() or 1)
    return folder


def compiled(shape: Shape, arch: str = "hopper", size: str = "full") -> CompileReport:
    """A Plan without self-test vectors."""
    policy = PolicyOptions(views=shape.views, state_in_prompt=False)  # 48 tokens hold no 14 numbers
    options = CompileOptions(policy, prompt=shape.prompt, horizon=shape.horizon, self_test=False)
    return compile(checkpoint(size), arch, plan_path(shape, arch, size), options)


def plan_path(shape: Shape, arch: str = "hopper", size: str = "full") -> Path:
    return SCRATCH / f"{size}-{arch}-{shape}.plan"


def compile_side_by_side(shapes: Sequence[Shape]) -> dict[Shape, float]:
    """Plans of several shapes, each compiled by a process of its own; wall seconds of each."""
    checkpoint()
    started = time.perf_counter()
    running = {s: subprocess.Popen([sys.executable, "-m", "bench.full_model", *map(str, astuple(s))]) for s in shapes}
    seconds = {}
    for shape, process in running.items():
        if process.wait():
            raise RuntimeError(f"compiling {shape} failed")
        seconds[shape] = time.perf_counter() - started
    return seconds


def config_of(shape: Shape, size: str = "full") -> pi05.Pi05Config:
    choices = {"views": shape.views, "prompt": shape.prompt, "horizon": shape.horizon}
    return pi05.config(open_checkpoint(checkpoint(size)), choices)[0]


def eager(shape: Shape, dtype: torch.dtype, size: str = "full", device: str = "cuda") -> pi05.Pi05:
    """Our module with the checkpoint's weights: float32 is the reference, bfloat16 the serving precision."""
    opened, config = open_checkpoint(checkpoint(size)), config_of(shape, size)
    model = pi05.Pi05(config, dtype).eval()
    load(model, opened, pi05.weights(opened, config))
    return model.to(device)


def observation(
    shape: Shape, valid: int, seed: int = 0, edge: int = 224, width: int = 32, vocab: int = 257152
) -> dict[str, Array]:
    """Random device inputs: smooth frames with noise, `valid` random tokens, Gaussian noise."""
    rng = np.random.default_rng(seed)
    ramp = np.linspace(0, 255, edge)[None, :, None, None] * rng.uniform(0, 1, (shape.views, 1, edge, 3))
    frames = np.clip(ramp + rng.normal(0, 40, (shape.views, edge, edge, 3)), 0, 255).astype(np.uint8)
    tokens = np.zeros(shape.prompt, np.int32)
    tokens[:valid] = rng.integers(4, vocab, valid)
    noise = rng.standard_normal((shape.horizon, width)).astype(np.float32)
    return {"images": frames, "tokens": tokens, "n": np.array(valid, np.int32), "noise": noise}


if __name__ == "__main__":
    compiled(Shape(*map(int, sys.argv[1:])))
