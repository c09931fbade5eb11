"""The epilogue of a product as a launch of its own: what runs behind a library's product where nothing is fused.

    behind = separate(site, target)      # of a product in bf16 [M, N], operand `product` of behind.site

A linear, a gated_linear, a linear_rope_qkv or a linear_moments ends in one launch of a thread for eight columns of a
row, with the very epilogue that the fused kernel has. Where that finds factors of rows from moments, a block of the
launch has 32 rows and as many columns as leave no block for a second wave, and finds their factors once. A linear_norm
ends in the norm's own kernel, which adds the residual; its bias is left out, in favour of the library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from frtc.codegen.nvrtc import Job
from frtc.kernels import moments, smxx_rope_gemm
from frtc.kernels.catalog import CATALOG
from frtc.kernels.mainloop import Mainloop
from frtc.kernels.product import Argument, Product, params_of, product_of, types_of
from frtc.kernels.spec import Operand, Param, Site, Stage
from frtc.kernels.targets import Target

THREADS, COLUMNS = 256, 8
ROWS, WIDTH = 32, 256  # of a block that finds factors: rows, and columns of one row that a warp has at once
SOURCE = """#include "epilogue_rope.cuh"
#include "moments.cuh"
#include "ptx.cuh"

namespace frtc {

template <typename EPILOGUE, typename... ARGUMENTS>
__global__ void __launch_bounds__(256) epilogue_apart(const bf16* product, int m, int n, ARGUMENTS... given) {
    grid_wait(), grid_release();
    const int group = blockIdx.x * 256 + threadIdx.x, row = group / (n / 8), column = group % (n / 8) * 8;
    if (row >= m) return;
    float acc[8];
    load_f32(acc, product + static_cast<long long>(row) * n + column);
    EPILOGUE(m, n, 0, given...).store(row, column, acc);
}

// All lanes of a warp store, and four have 32 columns of a row: n is a multiple of 32. Rows beyond m are not stored.
template <typename EPILOGUE, typename... ARGUMENTS>
__global__ void __launch_bounds__(256) moments_apart(const bf16* product, int m, int n, ARGUMENTS... given) {
    grid_wait(), grid_release();
    const int group = blockIdx.x * 256 + threadIdx.x, row = group / (n / 8), column = group % (n / 8) * 8;
    const EPILOGUE epilogue(m, n, 0, given...);
    float acc[8];
    load_f32(acc, product + static_cast<long long>(min(row, m - 1)) * n + column);
    epilogue.template store<true>(row, column, acc, epilogue.template columns_at<true>(column),
                                  epilogue.template row_at<true>(row, column));
}

// Each 128 threads find the factors of all 32 rows of the block, since they store parts of each.
template <typename EPILOGUE, typename... ARGUMENTS>
__global__ void __launch_bounds__(256) factors_apart(const bf16* product, int m, int n, int width, ARGUMENTS... given) {
    grid_wait(), grid_release();
    const int first = blockIdx.y * 32, to = min(static_cast<int>(blockIdx.x + 1) * width, n), half = threadIdx.x / 128;
    EPILOGUE epilogue(m, n, 0, given...);
    epilogue.factors.template find<32>(first, half);
    epilogue.factors.origin = half * 32 - first;
    for (int column = blockIdx.x * width + threadIdx.x % 32 * 8; column < to; column += 256) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = first + i * 8 + threadIdx.x / 32;
            if (row >= m) break;
            float acc[8];
            load_f32(acc, product + static_cast<long long>(row) * n + column);
            epilogue.store(row, column, acc);
        }
    }
}

}  // namespace frtc
"""


@dataclass(frozen=True, slots=True)
class Separate:
    """One launch. product: the place of the product among the operands of `site`."""

    site: Site
    product: int
    stage: Stage
    job: Job


def separate(site: Site, target: Target) -> Separate:
    if site.op == "linear_norm":
        return _norm(site, target)
    if site.op == "linear_rope_qkv":
        (stage,) = smxx_rope_gemm.stages(site, {}, target, READ)
    elif site.op == "linear_moments":
        (stage,) = moments.stages(site, {}, target, READ)
    else:
        p = product_of(site)
        assert isinstance(p, Product), p
        stage = _stage(p, None, target, p.epilogue(), p.arguments())
    operands = (product_operand(site), None, *site.operands[2:])
    return Separate(replace(site, operands=operands), 0, stage, Job(SOURCE, stage.entry, target))


def product_operand(site: Site) -> Operand:
    """bf16 [M, N]"""
    x, w = site.operands[:2]
    assert x is not None and w is not None
    return Operand.packed("bf16", math.prod(x.shape[:-1]), w.shape[0])


def _stage(p: Product, tile: Any, target: Target, epilogue: str, arguments: Sequence[Argument]) -> Stage:
    assert p.n % COLUMNS == 0 and p.batch == 1
    sizes = [p.m, p.n]
    grid, kernel = (math.ceil(p.m * p.n / COLUMNS / THREADS), 1, 1), "epilogue_apart"
    if p.norm != "none":
        sizes.append(_width(p, target))
        grid, kernel = (math.ceil(p.n / sizes[-1]), math.ceil(p.m / ROWS), 1), "factors_apart"
    elif "WithMoments" in epilogue:
        assert p.n % 32 == 0, "four lanes have 32 columns of a row together"
        kernel = "moments_apart"
    return Stage(
        source="",
        entry=f"frtc::{kernel}<{epilogue}, {types_of(arguments)}>",
        grid=grid,
        block=THREADS,
        smem=0,
        params=(Param("operand", 0), *(Param("i32", size) for size in sizes), *params_of(arguments)),
        waits=True,
    )


def _width(p: Product, target: Target) -> int:
    """Columns of a block: the fewest with which all blocks are on the SMs at once, two on each."""
    columns = max(1, 2 * target.sms // math.ceil(p.m / ROWS))  # of blocks
    return math.ceil(p.n / WIDTH / columns) * WIDTH


# A mainloop that multiplies nothing: it reads the product.
READ = Mainloop(
    "bench", "separate", lambda p, target: "", lambda p, target: (), lambda config, p: None,
    lambda p, tile, target: 0.0, _stage, lambda p, tile: 0, lambda p, tile: 0,
)  # fmt: skip


def _norm(site: Site, target: Target) -> Separate:
    """residual_norm of residual + alpha * product, alpha for each column in the place of a gate."""
    residual, alpha, norm_w, norm_b, inv = (site.operands[place] for place in (3, 6, 8, 9, 10))
    assert residual is not None
    product = Operand.packed("bf16", *residual.shape)
    gate = replace(alpha, shape=residual.shape[-1:], strides=(1,)) if alpha and alpha.shape else None
    attrs = {name: site.attrs[name] for name in ("kind", "eps", "offset", "per_row")}
    norm = Site("residual_norm", (residual, product, gate, norm_w, norm_b, inv), site.results, attrs)
    choice = CATALOG.select(norm, target)
    (stage,) = choice.kernel.stages(norm, choice.config, target)
    return Separate(norm, 1, stage, Job.of(stage, target))
