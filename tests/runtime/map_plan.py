"""A Program whose kernel reads through tensor maps: y = x * row k of a table, in three rounds, k = 0, 1, 2.

The last round stays in y. Boxes are larger than the matrix, so the accelerator fills in zeros.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from frtc.codegen.nvrtc import Job, compile_all
from frtc.codegen.plan_writer import PlanWriter
from frtc.kernels.cubin import parameters_of
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
    TensorMap,
    WeightEntry,
)
from tests.runtime.null_driver import NullApi
from tests.runtime.small_plan import Array

SOURCE = """
struct alignas(64) Map { unsigned long long words[16]; };
extern "C" __global__ void small_box(const __grid_constant__ Map x, const __grid_constant__ Map row, float* y,
                                     int m, int n) {
    __shared__ alignas(128) float a[4 * 16];
    __shared__ alignas(128) float b[16];
    __shared__ alignas(8) unsigned long long arrived;
    const auto at = [](const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); };
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(at(&arrived)));
        asm volatile("fence.proxy.async;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 320;" ::"r"(at(&arrived)) : "memory");
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %2}], [%3];" ::"r"(at(a)), "l"(&x), "r"(0), "r"(at(&arrived)) : "memory");
        asm volatile("cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2}], [%3];" ::"r"(at(b)), "l"(&row), "r"(0), "r"(at(&arrived)) : "memory");
    }
    __syncthreads();
    for (int done = 0; !done;)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; selp.b32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(at(&arrived)) : "memory");
    for (int i = threadIdx.x; i < 64; i += blockDim.x)
        if (i / 16 < m && i % 16 < n) y[i / 16 * n + i % 16] = a[i] * b[i % 16];
}
"""
M, N, ROUNDS, BOX_N, BOX_M = 3, 12, 3, 16, 4
ROW = N * 4  # bytes


def table() -> Array:
    return np.random.default_rng(3).standard_normal((ROUNDS, N), np.float32)


def inputs(seed: int = 0) -> dict[str, Array]:
    return {"x": np.random.default_rng(seed).standard_normal((M, N), np.float32)}


def program(target: str = "hopper") -> Program:
    about = load_targets()[target]
    x = Ref("slot", 0, "f32", (M, N), (N, 1), slot="x")
    y = Ref("slot", 0, "f32", (M, N), (N, 1), slot="y")
    row = Ref("weights", 0, "f32", (N,), (1,), step=ROW)
    maps = (
        TensorMap(("operand", 0), "f32", (N, M), (ROW,), (BOX_N, BOX_M)),
        TensorMap(("operand", 1), "f32", (N,), (), (BOX_N,)),
    )
    params = (("tensormap", 0), ("tensormap", 1), ("result", 0), ("i32", M), ("i32", N))
    launch = Launch(0, (1, 1, 1), 64, 0, params, maps, early=True)
    return Program(
        model="maps",
        target=BuiltFor(about.name, about.sm, about.nvcc, about.min_driver, "baseline", about.evidence),
        weights_nbytes=ROUNDS * ROW,
        arena_nbytes=0,
        state_nbytes=0,
        kernels=(Entry("cubin.000", "small_box", 0),),
        weights=(WeightEntry("table", 0, "f32", (ROUNDS, N)),),
        inputs=(Slot("x", "f32", (M, N)),),
        outputs=(Slot("y", "f32", (M, N)),),
        stages=(Stage("step", (Call("step.0", "mul", {}, (x, row), (y,), (launch,)),)),),
        schedule=(Repeat(ROUNDS, (Run("step"),)),),
    )


def cubin(target: str = "hopper") -> bytes:
    return compile_all([Job(SOURCE, "small_box", load_targets()[target])])[0].image


def null_api() -> NullApi:
    return NullApi({"small_box": parameters_of(cubin(), "small_box")})


def write(path: Path, target: str = "hopper") -> None:
    with PlanWriter(path, program(target), {"cubin.000": cubin(target)}) as writer:
        writer.write_weight("table", table(), 0)
