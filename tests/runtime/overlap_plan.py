"""A long stage that makes keys layer by layer, and rounds of a short one that attend to them: they overlap.

Built from IR, so that kernels, edges and memory are what compiled policies get.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from frtc.codegen.build import Built, build
from frtc.codegen.write import write_plan
from frtc.kernels.targets import load_targets
from frtc.lowering.text import parse_module
from frtc.runtime.plan import Overlap, Program

Array = np.ndarray[Any, Any]

LAYERS, ROUNDS, LONG, SHORT, WIDTH = 6, 3, 700, 50, 256
WEIGHTS = {"q": (WIDTH, WIDTH), "kv": (2 * WIDTH, WIDTH), "o": (WIDTH, WIDTH), "t": (ROUNDS, WIDTH)}


def layer(x: int, rows: int, keys: int) -> tuple[list[str], int]:
    """(lines, number of the result) of x + o attention(norm(x)); `keys`: of the long stage come first, or none."""
    n, t = x + 1, f"bf16[{rows},{WIDTH}]"
    own, seen = f"bf16[{rows},{2 * WIDTH}]", f"bf16[{rows + keys},{2 * WIDTH}]"
    lines = [
        f"%{n} = rms_norm(%{x}, eps=1e-06) : {t}",
        f"%{n + 1} = linear(%{n}, @q) : {t}",
        f"%{n + 2} = linear(%{n}, @kv) : {own}",
    ]
    last = n + 2
    if keys:
        lines.append(f"%{n + 3} = concat(%KEYS, %{last}, axis=-2) : {seen}")
        last = n + 3
    views = [(n + 1, rows, WIDTH, 0), (last, rows + keys, 2 * WIDTH, 0), (last, rows + keys, 2 * WIDTH, WIDTH)]
    for i, (of, count, step, at) in enumerate(views, last + 1):
        heads = f"4,{count},64"
        lines.append(f"%{i} = view(%{of}, shape=[{heads}], strides=[64,{step},1], offset={at}) : bf16[{heads}]")
    a = last + 4
    lines.append(f"%{a} = attention(%{a - 3}, %{a - 2}, %{a - 1}, scale=0.125) : bf16[4,{rows},64]")
    lines.append(
        f"%{a + 1} = view(%{a}, shape=[{rows},4,64], strides=[64,{64 * rows},1], offset=0) : bf16[{rows},4,64]"
    )
    lines.append(f"%{a + 2} = reshape(%{a + 1}, shape=[{rows},{WIDTH}]) : {t}")
    lines.append(f"%{a + 3} = linear(%{a + 2}, @o, _, %{x}) : {t}")
    return lines, a + 3


def text() -> str:
    weights, made = [], []
    for i, (name, shape) in enumerate(WEIGHTS.items()):
        size = f"[{shape[0]},{shape[1]}]"
        weights += [f"%{2 * i} = tensor(key={name}) : f32{size}", f"%{2 * i + 1} = cast(%{2 * i}) : bf16{size}"]
        made.append(f"{name}=%{2 * i + 1}")
    used = [f"@{name} : bf16[{shape[0]},{shape[1]}]" for name, shape in WEIGHTS.items()]
    long, keys, last = [f"%0 = neg(%x) : bf16[{LONG},{WIDTH}]"], [], 0
    for i in range(LAYERS):
        lines, end = layer(last, LONG, 0)
        keys.append(f"k{i}=%{last + 3}")
        long, last = long + lines, end
    short = [f"%0 = index(@t, %k) : bf16[{WIDTH}]", f"%1 = add(%z, %0) : bf16[{SHORT},{WIDTH}]"]
    end = 1
    for i in range(LAYERS):
        lines, end = layer(end, SHORT, LONG)
        short += [line.replace("%KEYS", f"%k{i}") for line in lines]
    inputs = ", ".join(f"k{i}: bf16[{LONG},{2 * WIDTH}]" for i in range(LAYERS))
    graphs = {
        "weights()": (weights, ", ".join(sorted(made))),
        f"long(x: bf16[{LONG},{WIDTH}])": ([*used[:3], *long], ", ".join(keys)),
        f"short(z: bf16[{SHORT},{WIDTH}], {inputs}, k: i32[])": ([*used, *short], f"z=%{end}"),
    }
    parts = ["module overlap", ""]
    for head, (lines, results) in graphs.items():
        parts += [f"graph {head} {{", *(f"  {line}" for line in lines), f"  return {results}", "}", ""]
    parts += ["schedule {", "  run long", "  let z = noise", f"  repeat {ROUNDS} k {{", "    run short", "  }"]
    return "\n".join([*parts, "  return actions=z", "}", ""])


def made(target: str, families: tuple[str, ...] = ("baseline",)) -> Built:
    return build(parse_module(text()), load_targets()[target], families)


def careless(program: Program) -> Program:
    """Calls wait for those of their own stage alone."""
    assert program.overlap
    after: list[tuple[int, ...]] = []
    for name in program.overlap.stages:
        base = len(after)
        after += [tuple(base + j for j in call.after) for call in program.stage(name).calls]
    return replace(program, overlap=Overlap(program.overlap.stages, tuple(after)))


def tensors(key: str) -> Array:
    shape = WEIGHTS[key]
    return np.random.default_rng(len(key) + ord(key[0])).standard_normal(shape, np.float32) / np.float32(
        shape[1] ** 0.5
    )


def inputs(seed: int) -> dict[str, Array]:
    generator = np.random.default_rng(seed)
    return {
        name: generator.standard_normal((rows, WIDTH), np.float32) for name, rows in (("x", LONG), ("noise", SHORT))
    }


def write(path: Path, built: Built) -> None:
    write_plan(path, built.program, built.expressions, tensors, built.cubins, lambda _: {})
