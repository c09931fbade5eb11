"""Some hundred small launches that depend on each other: norms, products, attention, sums; forks and joins; a loop.

Built from IR, so that the kernels, and which of their launches are early, are what compiled policies get.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from frtc.codegen.build import Built, build
from frtc.codegen.nvrtc import Job
from frtc.codegen.write import write_plan
from frtc.kernels.targets import load_targets
from frtc.lowering.ir import Module
from frtc.lowering.text import parse_module

Array = np.ndarray[Any, Any]

LAYERS, ROUNDS = 6, 6
X = (50, 256)
WEIGHTS = {"a": (512, 256), "b": (512, 256), "c": (256, 512), "q": (768, 256), "t": (ROUNDS, 256)}

# y = x + c (gelu(a n) * (b n)) + softmax(n) + attention in n, with n = rms_norm(x)
LAYER = """
  %N.0 = rms_norm(%X, eps=1e-06) : bf16[50,256]
  %N.1 = linear(%N.0, @a, act=gelu_tanh) : bf16[50,512]
  %N.2 = linear(%N.0, @b) : bf16[50,512]
  %N.3 = mul(%N.1, %N.2) : bf16[50,512]
  %N.4 = linear(%N.3, @c, _, %X) : bf16[50,256]
  %N.5 = linear(%N.0, @q) : bf16[50,768]
  %N.6 = view(%N.5, shape=[4,50,64], strides=[64,768,1], offset=0) : bf16[4,50,64]
  %N.7 = view(%N.5, shape=[4,50,64], strides=[64,768,1], offset=256) : bf16[4,50,64]
  %N.8 = view(%N.5, shape=[4,50,64], strides=[64,768,1], offset=512) : bf16[4,50,64]
  %N.9 = attention(%N.6, %N.7, %N.8, scale=0.125) : bf16[4,50,64]
  %N.10 = view(%N.9, shape=[50,4,64], strides=[64,3200,1], offset=0) : bf16[50,4,64]
  %N.11 = softmax(%N.0) : bf16[50,256]
  %N.12 = add(%N.4, %N.11) : bf16[50,256]
  %N.13 = view(%N.12, shape=[50,4,64], strides=[256,64,1], offset=0) : bf16[50,4,64]
  %N.14 = add(%N.13, %N.10) : bf16[50,4,64]
  %N.15 = view(%N.14, shape=[50,256], strides=[256,1], offset=0) : bf16[50,256]"""
NODES = 16  # of a layer


def text() -> str:
    """The module: `ROUNDS` rounds of `LAYERS` layers, row k of a table added at the start of each."""
    leaves, made = [], []
    for i, (name, shape) in enumerate(WEIGHTS.items()):
        leaves += [f"  %{2 * i} = tensor(key={name}) : f32[{shape[0]},{shape[1]}]"]
        leaves += [f"  %{2 * i + 1} = cast(%{2 * i}) : bf16[{shape[0]},{shape[1]}]"]
        made.append(f"{name}=%{2 * i + 1}")
    used = [f"  @{name} : bf16[{shape[0]},{shape[1]}]" for name, shape in WEIGHTS.items()]
    layers = ["  %0 = index(@t, %k) : bf16[256]", "  %1 = add(%z, %0) : bf16[50,256]"]
    last = 1
    for _ in range(LAYERS):
        layer = LAYER.replace("%X", f"%{last}")
        for i in reversed(range(NODES)):
            layer = layer.replace(f"%N.{i} ", f"%{last + 1 + i} ").replace(f"%N.{i},", f"%{last + 1 + i},")
            layer = layer.replace(f"%N.{i})", f"%{last + 1 + i})")
        layers.append(layer.strip("\n"))
        last += NODES
    parts = ["module early", "", "graph weights() {", *leaves, f"  return {', '.join(made)}", "}", ""]
    parts += ["graph step(z: bf16[50,256], k: i32[]) {", *used, *layers, f"  return z=%{last}", "}", ""]
    parts += [
        "schedule {",
        "  let z = noise",
        f"  repeat {ROUNDS} k {{",
        "    run step",
        "  }",
        "  return actions=z",
        "}",
    ]
    return "\n".join(parts) + "\n"


def module() -> Module:
    return parse_module(text())


def tensors(key: str) -> Array:
    shape = WEIGHTS[key]
    values = np.random.default_rng(len(key) + ord(key)).standard_normal(shape, np.float32)
    return np.asarray(values / np.sqrt(np.float32(shape[1])))


def noise(seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(X, np.float32)


def made(target: str, families: tuple[str, ...] = ("baseline",)) -> Built:
    return build(module(), load_targets()[target], families)


@contextmanager
def defined(macro: str) -> Iterator[None]:
    """All kernels are compiled with the macro."""
    plain = Job.of

    def job_of(*arguments: Any) -> Job:
        return replace(plain(*arguments), defines=(macro,))

    with mock.patch.object(Job, "of", staticmethod(job_of)):
        yield


def write(path: Path, built: Built) -> None:
    write_plan(path, built.program, built.expressions, tensors, built.cubins, lambda _: {})
