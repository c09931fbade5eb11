"""A small Program made by hand, its kernels compiled from a few lines, its weights and its answer in plain NumPy.

stage "in"     t = silu(x @ w0.T + b): two launches; beside it u = x @ w0.T; then h = t + u: rows are padded
stage "step"   h = h * row k of table, in place; y = h @ w1.T; three rounds
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from frtc.codegen.nvrtc import Job, compile_all
from frtc.codegen.plan_writer import PlanWriter
from frtc.kernels.targets import load_targets
from frtc.runtime.plan import (
    BuiltFor,
    Call,
    Entry,
    Launch,
    Program,
    Ref,
    Repeat,
    Run,
    Slot,
    Stage,
    WeightEntry,
)

Array = np.ndarray[Any, Any]

SOURCE = """
extern "C" __global__ void small_linear(const float* x, const float* w, const float* b, float* y,
                                        int m, int n, int k, int ldx, int ldw, int ldy) {
    for (int i = threadIdx.x; i < m * n; i += blockDim.x) {
        float sum = b ? b[i % n] : 0.0f;
        for (int j = 0; j < k; ++j) sum += x[i / n * ldx + j] * w[i % n * ldw + j];
        y[i / n * ldy + i % n] = sum;
    }
}
extern "C" __global__ void small_silu(float* y, int m, int n, int ldy) {
    for (int i = threadIdx.x; i < m * n; i += blockDim.x) {
        float v = y[i / n * ldy + i % n];
        y[i / n * ldy + i % n] = v / (1.0f + expf(-v));
    }
}
extern "C" __global__ void small_scale(const float* x, const float* s, float* y, int m, int n, int ld) {
    for (int i = threadIdx.x; i < m * n; i += blockDim.x) y[i / n * ld + i % n] = x[i / n * ld + i % n] * s[i % n];
}
extern "C" __global__ void small_add(const float* a, const float* b, float* y, int m, int n, int ld) {
    for (int i = threadIdx.x; i < m * n; i += blockDim.x) {
        int at = i / n * ld + i % n;
        y[at] = a[at] + b[at];
    }
}
"""
M, K, N, LDN, OUT = 3, 8, 10, 12, 4  # rows of N floats are padded to LDN
ROUNDS = 3
KERNELS = ("small_linear", "small_silu", "small_scale", "small_add")


def cubins(target: str = "hopper") -> dict[str, bytes]:
    """One cubin with all kernels."""
    return {"cubin.000": compile_all([Job(SOURCE, KERNELS[0], load_targets()[target])])[0].image}


def weights() -> dict[str, Array]:
    generator = np.random.default_rng(7)
    shapes = {"w0": (N, K), "b": (N,), "table": (ROUNDS, N), "w1": (OUT, N)}
    return {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def inputs(seed: int = 0) -> dict[str, Array]:
    return {"x": np.random.default_rng(seed).standard_normal((M, K), np.float32)}


def answer(x: Array) -> Array:
    w = weights()
    u = x @ w["w0"].T
    t = u + w["b"]
    h = t / (1 + np.exp(-t)) + u
    for k in range(ROUNDS):
        h = h * w["table"][k]
    return np.asarray(h @ w["w1"].T)


def entries() -> tuple[tuple[WeightEntry, ...], int]:
    """The weights block: (entries, bytes)."""
    at, found = 0, []
    for name, array in weights().items():
        entry = WeightEntry(name, at, "f32", array.shape)
        found.append(entry)
        at += -(-entry.nbytes // 256) * 256
    return tuple(found), at


def program(target: str = "hopper") -> Program:
    about = load_targets()[target]
    block, nbytes = entries()
    at = {entry.name: entry.offset for entry in block}
    x = Ref("slot", 0, "f32", (M, K), (K, 1), slot="x")
    y = Ref("slot", 0, "f32", (M, OUT), (OUT, 1), slot="y")
    w0 = Ref("weights", at["w0"], "f32", (N, K), (K, 1))
    b = Ref("weights", at["b"], "f32", (N,), (1,))
    row = Ref("weights", at["table"], "f32", (N,), (1,), step=LDN * 4)
    w1 = Ref("weights", at["w1"], "f32", (OUT, N), (LDN, 1))
    h = Ref("state", 256, "f32", (M, N), (LDN, 1))
    t = Ref("arena", 0, "f32", (M, N), (LDN, 1))
    u = Ref("arena", 256, "f32", (M, N), (LDN, 1))
    linear = (("operand", 0), ("operand", 1), ("operand", 2), ("result", 0))
    binary = (("operand", 0), ("operand", 1), ("result", 0), *_ints(M, N, LDN))
    stage_in = (
        Call("in.0", "linear", {"act": "silu"}, (x, w0, b), (t,),
             (_launch(0, *linear, *_ints(M, N, K, K, K, LDN)), _launch(1, ("result", 0), *_ints(M, N, LDN)))),
        Call("in.1", "linear", {}, (x, w0, None), (u,), (_launch(0, *linear, *_ints(M, N, K, K, K, LDN)),),
             counters=(0, 4)),
        Call("in.2", "add", {}, (t, u), (h,), (_launch(3, *binary),), after=(0, 1)),
    )  # fmt: skip
    stage_step = (
        Call("step.0", "mul", {}, (h, row), (h,), (_launch(2, *binary),)),
        Call("step.1", "linear", {}, (h, w1, None), (y,), (_launch(0, *linear, *_ints(M, OUT, N, LDN, LDN, OUT)),),
             after=(0,), scratch=(0, 64)),
    )  # fmt: skip
    return Program(
        model="small",
        target=BuiltFor(about.name, about.sm, about.nvcc, about.min_driver, "baseline", about.evidence),
        weights_nbytes=nbytes,
        arena_nbytes=512,
        state_nbytes=512,
        kernels=tuple(Entry("cubin.000", name, 0) for name in KERNELS),
        weights=block,
        inputs=(Slot("x", "f32", (M, K)),),
        outputs=(Slot("y", "f32", (M, OUT)),),
        stages=(Stage("in", stage_in), Stage("step", stage_step)),
        schedule=(Run("in"), Repeat(ROUNDS, (Run("step"),))),
    )


def _launch(kernel: int, *params: tuple[str, int | float]) -> Launch:
    return Launch(kernel, (1, 1, 1), 64, 0, params)


def _ints(*values: int) -> tuple[tuple[str, int | float], ...]:
    return tuple(("i32", value) for value in values)


def write(path: Path, made: Program | None = None, evidence: dict[str, Any] | None = None) -> str:
    """The Plan of `made` (or of the small program) at `path`; returns its plan_id."""
    made = made or program()
    blobs = {**cubins(made.target.name), "tokenizer.json": b"{}" * 700}
    with PlanWriter(path, made, blobs) as writer:
        for name, array in reversed(weights().items()):
            half = len(array) // 2
            writer.write_weight(name, array[half:], half)
            writer.write_weight(name, array[:half], 0)
        return writer.finish(evidence or {"source": {"checkpoint": "none"}})
