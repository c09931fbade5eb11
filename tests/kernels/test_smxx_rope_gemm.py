"""linear_rope_qkv on tensor cores: what it accepts, its launch and cubins; on a GPU results and times."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from frtc.codegen.nvrtc import Job, compile_all
from frtc.kernels import smxx_gemm, smxx_rope_gemm
from frtc.kernels.catalog import CATALOG
from frtc.kernels.product import Product, product_of
from frtc.kernels.spec import Operand, Site
from frtc.kernels.targets import Target, load_targets
from tests.kernels import harness
from tests.kernels.device import Gpu
from tests.kernels.sites_rope_gemm import (
    ROWS,
    awkward_sites,
    flops_of,
    fp8_sites,
    inputs,
    real_sites,
    rope_qkv,
)

TARGETS = load_targets()
HOPPER = TARGETS["hopper"]
COMPILED = ("hopper",)  # always; `-m full` compiles for all
EVERY_TARGET = pytest.mark.parametrize(
    "target",
    [pytest.param(t, marks=() if name in COMPILED else pytest.mark.full) for name, t in TARGETS.items()],
    ids=list(TARGETS),
)
SITE = rope_qkv(50, 8, 1, 256, 1024)
WITH_ALL = rope_qkv(50, 8, 1, 256, 1024, x="e4m3", bias="f32", alpha="each", x_scale=True, rows=True)


def with_result(site: Site, result: Operand) -> Site:
    return replace(site, results=(*site.results[:2], result))


# ---- what it accepts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("site", "reason"),
    [
        (rope_qkv(7, 2, 1, 24, 64), "heads of 24 elements, not a multiple of 16"),
        (rope_qkv(7, 2, 1, 32, 64, "f32"), "results are f32, f32, f32; needs one of bf16, f16"),
        (with_result(SITE, Operand.packed("f16", 1, 50, 256)), "results are bf16, bf16, f16; needs one of bf16, f16"),
        (rope_qkv(7, 2, 1, 32, 64, angles="f64"), "cos is f64 and sin is f64; needs one of f32, bf16, f16"),
        (with_result(SITE, Operand("bf16", (1, 50, 256), (1, 1, 50))), "the last axis of a table or result is strided"),
        (rope_qkv(7, 2, 1, 32, 100), "rows of x are 100 elements apart (batches 0), not a multiple of 16 bytes"),
        (rope_qkv(7, 2, 1, 32, 64, bias="f64"), "the epilogue has no f64"),
        (rope_qkv(7, 2, 1, 32, 64, x="f32"), "x is f32 and w is f32; needs bf16 or f16 for both"),
        (SITE, ""),
        (WITH_ALL, ""),
    ],
)
def test_refusals(site: Site, reason: str) -> None:
    assert smxx_rope_gemm.refuse(site, HOPPER).partition(",")[0] == reason.partition(",")[0]


def test_its_product_is_that_of_a_linear_over_the_same_operands() -> None:
    p = product_of(smxx_rope_gemm.as_linear(WITH_ALL))
    assert isinstance(p, Product)
    assert (p.m, p.n, p.k, p.batch, p.rows) == (50, 2560, 1024, 1, 5)
    places = {name: getattr(p, name).index for name in ("x", "w", "bias", "alpha", "x_scale")}
    assert places == {"x": 0, "w": 1, "bias": 2, "alpha": 6, "x_scale": 7}
    assert p.residual is p.gate is p.inv is None


def test_one_launch_writes_q_and_the_caches() -> None:
    site = rope_qkv(50, 8, 1, 256, 1024, bias="bf16", behind=560)
    choice = CATALOG.select(site, HOPPER)
    (stage,) = choice.kernel.stages(site, choice.config, HOPPER)
    assert choice.kernel.name == "smxx_rope_gemm" and stage.source == "smxx_rope_gemm.cuh"
    numbers = "256, frtc::Alpha::none, frtc::NoFactors, true"
    assert f"frtc::RopeEpilogue<__nv_bfloat16, __nv_bfloat16, float, {numbers}>" in stage.entry
    pointers, numbers = stage.params[-19:-11], stage.params[-11:]
    assert [p.kind for p in pointers] == ["operand"] * 3 + ["i64"] * 2 + ["result"] * 3
    assert [p.value for p in pointers] == [2, 3, 4, 0, 0, 0, 1, 2]
    heads, rows = 610 * 256, 256
    assert [p.value for p in numbers] == [8, 1, 128, 128, 0, 50 * 256, rows, heads, rows, heads, rows]


# ---- cubins ---------------------------------------------------------------------------------------------------------


def jobs_of_every_tile(target: Target, registers: int) -> dict[str, Job]:
    """Tiles that need at least so many registers, with everything in the epilogue that there can be."""
    found: dict[str, Job] = {}
    for m in (512, 40, 13):
        site = rope_qkv(m, 8, 1, 256, 2048, bias="f32", rows=True)
        for config in smxx_rope_gemm.configs(site, target):
            p = product_of(smxx_rope_gemm.as_linear(site))
            assert isinstance(p, Product)
            if smxx_gemm.Tile.of(config, p).registers >= registers:
                (stage,) = smxx_rope_gemm.stages(site, config, target)
                found[stage.entry] = Job.of(stage, target)
    return found


@EVERY_TARGET
@pytest.mark.parametrize("registers", [180, pytest.param(0, marks=pytest.mark.full)])
def test_cubins_do_not_spill(target: Target, registers: int) -> None:
    found = jobs_of_every_tile(target, registers)
    assert len(found) >= (20 if registers == 0 else 6)
    used = {entry: cubin.resources for entry, cubin in zip(found, compile_all(list(found.values())), strict=True)}
    assert not {entry: r for entry, r in used.items() if r.local}


@EVERY_TARGET
def test_chosen_cubins_do_not_spill(target: Target) -> None:
    """Of every third site that is none of 16 bits alone; the others are in the test above."""
    sites = [site for site in (*fp8_sites(), *awkward_sites()) if not smxx_rope_gemm.refuse(site, target)][::3]
    jobs = [job for site in sites for job in jobs_chosen(site, target)]
    assert jobs and not [job.entry for job, cubin in zip(jobs, compile_all(jobs), strict=True) if cubin.resources.local]


def jobs_chosen(site: Site, target: Target) -> list[Job]:
    choice = CATALOG.select(site, target)
    return [Job.of(stage, target) for stage in choice.kernel.stages(site, choice.config, target)]


# ---- on a GPU -------------------------------------------------------------------------------------------------------

SITES = [*real_sites(), *fp8_sites(), *awkward_sites()]
CHOSEN = [harness.chosen(site, inputs=inputs, flops=flops_of(site)) for site in SITES]  # real: the policies' sites
EVERY_CONFIG = [
    case
    for site in (
        rope_qkv(130, 3, 1, 64, 1000, bias="f32", gap=8), rope_qkv(13, 3, 1, 64, 1000, bias="bf16"),
        rope_qkv(61, 3, 1, 64, 1008, x="e4m3", alpha="each", x_scale=True, bias="f32"),
        rope_qkv(61, 3, 1, 64, 1008, w="e4m3", alpha="each", bias="f32"),
    )
    for case in harness.every_config(site, inputs=inputs)
]  # fmt: skip
SABOTAGED = [
    harness.sabotaged(harness.chosen(site, inputs=inputs), macro)
    for site in (rope_qkv(50, 8, 1, 256, 1024), rope_qkv(7, 0, 3, 32, 512, x="e4m3", alpha="each"))
    for macro in ("FRTC_SABOTAGE_SWAPPED_PAIR", "FRTC_SABOTAGE_NEIGHBOUR_ANGLE", "FRTC_SABOTAGE=last_k_tile")
]
LIMITED = [(read, splits) for read in (-1, 0, 1, 100, 128, 129, 300, 1000) for splits in (False, True)]


def of_rows(read: int, splits: bool) -> harness.Case:
    """A site of 300 rows of which only `read` rows are read; with split K where asked."""

    def counted(site: Site, generator: np.random.Generator) -> list[NDArray[Any] | None]:
        values = inputs(site, generator)
        values[ROWS] = np.array(read, np.int32)
        return values

    cases = harness.every_config(rope_qkv(300, 2, 1, 64, 2048, rows=True), inputs=counted)
    return next(case for case in cases if (case.config["SPLITS"] > 2) == splits)


@pytest.mark.parametrize("site", [site for site in SITES if math.prod(site.operands[1].shape) < 1 << 20], ids=str)  # type: ignore[union-attr]
def test_inputs_suit_the_reference(site: Site) -> None:
    case = harness.chosen(site, inputs=inputs)
    for value, result in zip(harness.expected(case, harness.operands_of(case)), site.results, strict=True):
        assert value.shape == result.shape and np.isfinite(value.astype(np.float32)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("case", harness.swept(CHOSEN, CHOSEN[len(real_sites()) :]), ids=str)
def test_chosen(gpu: Gpu, case: harness.Case) -> None:
    harness.check(gpu, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", harness.swept(EVERY_CONFIG, harness.once(EVERY_CONFIG, splits=1)), ids=str)
def test_every_config(gpu: Gpu, case: harness.Case) -> None:
    wrong, _, _ = harness.run(gpu, case)
    assert not wrong, wrong


@pytest.mark.gpu
@pytest.mark.parametrize("case", SABOTAGED, ids=str)
def test_sabotaged(gpu: Gpu, case: harness.Case) -> None:
    harness.check_fails(gpu, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [of_rows(*which) for which in LIMITED], ids=[str(which) for which in LIMITED])
def test_rows_that_nothing_reads(gpu: Gpu, case: harness.Case) -> None:
    """Right in the rows that are read, untouched in tiles beyond them."""
    operands = harness.operands_of(case)
    count = operands[ROWS]
    assert count is not None
    with harness.Buffers(gpu, case, operands) as buffers:
        for _ in range(2):  # the second run meets the counters that the first one left
            for launch in buffers.launches():
                gpu.launch(*launch)
        gpu.synchronize()
        found, want = buffers.results(), harness.expected(case, operands)
    length = found[0].shape[-2]
    read = min(max(int(count), 0), length)
    computed = min(math.ceil(read / case.config["BM"]) * case.config["BM"], length)
    if read:
        wrong, _ = harness.faults(case, [r[:, :read] for r in found], [r[:, :read] for r in want])
        assert not wrong, wrong
    assert all(np.isnan(r[:, computed:].astype(np.float32)).all() for r in found)
