"""Finished products: what is served, configs, costs, cubins on every target; on a GPU results, times, sabotage."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from frtc.codegen.nvrtc import Job, compile_all
from frtc.kernels import smxx_finish_gemm, smxx_gemm
from frtc.kernels.catalog import CATALOG
from frtc.kernels.cubin import parameters_of
from frtc.kernels.product import Product, product_of
from frtc.kernels.smxx_finish_gemm import NORM_W, PANEL_ROWS
from frtc.kernels.spec import Config, Operand, Site
from frtc.kernels.targets import Target, load_targets
from tests.kernels import harness
from tests.kernels.device import Gpu
from tests.kernels.sites_finish import (
    GATED,
    awkward_sites,
    batched,
    expert_sites,
    fp8_sites,
    in_fp8,
    inputs,
    limited,
    linear_norm,
    packed,
    per_row,
    scaled_sites,
)
from tests.kernels.sites_gemm import flops_of, gated, linear

Array = NDArray[Any]
PLAIN = smxx_gemm.KERNELS[0]  # the others say the same of other ops
TARGETS = load_targets()
HOPPER = TARGETS["hopper"]
EVERY_TARGET = pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
SITES = [*expert_sites(), *fp8_sites(), *scaled_sites(), *awkward_sites()]


def product(site: Site) -> Product:
    found = product_of(smxx_finish_gemm.as_product(site))
    assert isinstance(found, Product), found
    return found


def served(site: Site, target: Target) -> bool:
    return not smxx_finish_gemm.refuse(site, target)


# ---- what is served -------------------------------------------------------------------------------------------------


def with_operand(site: Site, place: int, operand: Operand) -> Site:
    return replace(site, operands=tuple(operand if i == place else o for i, o in enumerate(site.operands)))


NORM = linear_norm(50, 64, 64, "ada")


@pytest.mark.parametrize(
    ("site", "reason"),
    [
        (linear(50, 64, 64), "has no finish"),
        (linear_norm(PANEL_ROWS + 1, 64, 64, "rms"),
         "65 rows; with more than 64 a norm of its own is quicker than waiting for all blocks"),
        (linear_norm(5, 4104, 64, "rms"), "rows of 4104 elements; at most 4096"),
        (per_row(linear(5, 16392, 64)), "rows of 16392 elements; at most 16384"),
        (linear_norm(5, 64, 64, "rms", out="f32"), "s is f32; needs bf16 or f16"),
        (linear_norm(5, 64, 64, "rms", "f32"),
         "x is f32 and w is f32; needs bf16 or f16 for both, e4m3 for both, or for w"),
        (with_operand(NORM, NORM_W, packed("f32", 50, 64)), "norm_w is not one dense row for all"),
        (with_operand(NORM, NORM_W, packed("e4m3", 64)), "norm_w is e4m3; needs one of bf16, f16, f32"),
        (linear_norm(50, 64, 64, "ada", y="e4m3"), "y is e4m3 without a scale"),
        (replace(per_row(linear(5, 64, 64)), results=(packed("bf16", 5, 64), packed("f32", 5, 1))),
         "y is bf16 with a scale"),
        (replace(per_row(gated(5, 64, 64)), operands=(packed("bf16", 5, 64), *[packed("bf16", 64, 64)] * 2)),
         "gate and up are two weights; needs their rows interleaved in one"),
    ],
)  # fmt: skip
def test_refusals(site: Site, reason: str) -> None:
    assert smxx_finish_gemm.refuse(site, HOPPER) == reason


def test_plain_products_leave_scaled_rows_alone() -> None:
    """One kernel serves each site: the unfinished ones refuse what has a finish."""
    for site in SITES:
        kernels = {choice.kernel.name for choice in CATALOG.candidates(site, HOPPER)}
        assert kernels == {f"smxx_{smxx_finish_gemm.NAMES[site.op]}"}


# ---- configs and launches -------------------------------------------------------------------------------------------


@EVERY_TARGET
def test_configs_fit_the_target(target: Target) -> None:
    for site in SITES:
        if not served(site, target):
            assert "fp8" not in target.has and product(site).x.dtype == "e4m3"
            continue
        found = smxx_finish_gemm.configs(site, target)
        assert found
        for config in found:
            for stage in smxx_finish_gemm.stages(site, config, target):
                assert stage.smem <= target.smem_per_block and stage.block <= 1024
            assert config["FINISH"] == "launch" or product(site).m <= PANEL_ROWS


def test_tall_panels_have_a_launch_of_their_own() -> None:
    tall, short = per_row(gated(560, 16384, 2048)), per_row(gated(PANEL_ROWS, 4096, 1024))
    assert {config["FINISH"] for config in smxx_finish_gemm.configs(tall, HOPPER)} == {"launch"}
    assert {config["FINISH"] for config in smxx_finish_gemm.configs(short, HOPPER)} == {"panel"}
    assert {config["FINISH"] for config in smxx_finish_gemm.configs(NORM, HOPPER)} == {"panel"}


def test_few_rows_of_a_panel_finish_sooner() -> None:
    """The finish is in the cost, so that tiles of few rows win where the product alone would take more."""
    site = linear_norm(50, 1024, 4096, "ada", **GATED)
    configs = smxx_finish_gemm.configs(site, HOPPER)
    panels_us = [smxx_finish_gemm.panel_us(site, smxx_gemm.Tile.of(config, product(site))) for config in configs]
    finish = {
        rows: min(us for config, us in zip(configs, panels_us, strict=True) if config["BM"] == rows)
        for rows in (16, 32, 64)
    }
    assert finish[16] < finish[32] < finish[64]
    for config, panel_us in zip(configs, panels_us, strict=True):
        bare_us = PLAIN.cost(smxx_finish_gemm.as_product(site), config, HOPPER)
        assert smxx_finish_gemm.cost(site, config, HOPPER) == bare_us + panel_us


@pytest.mark.parametrize("site", [linear_norm(50, 1024, 4096, "ada"), per_row(linear(50, 1000, 4096)),
                                  batched(per_row(linear(20, 200, 264, residual="f32")), 3)])  # fmt: skip
def test_workspace_holds_splits_panels_and_staged_rows(site: Site) -> None:
    p, inner = product(site), smxx_finish_gemm.as_product(site)
    staged = 0 if site.op == "linear_norm" else p.batch * p.m * -(-p.n // 8) * 16
    for config in smxx_finish_gemm.configs(site, HOPPER):
        panels = math.ceil(p.m / config["BM"]) * p.batch if config["FINISH"] == "panel" else 0
        assert smxx_finish_gemm.scratch(site, config) == PLAIN.scratch(inner, config) + staged
        assert smxx_finish_gemm.counters(site, config) == PLAIN.counters(inner, config) + 4 * panels


def jobs_of(sites: list[Site], target: Target, every: bool) -> dict[Job, tuple[str, ...]]:
    """The chosen kernels of the sites, or all that could be chosen, and the kinds of their parameters."""
    found: dict[Job, tuple[str, ...]] = {}
    for site in sites:
        if served(site, target):
            best = CATALOG.select(site, target).config
            for config in smxx_finish_gemm.configs(site, target) if every else [best]:
                for stage in smxx_finish_gemm.stages(site, config, target):
                    found[Job.of(stage, target)] = tuple(p.kind for p in stage.params)
    return found


def examine(jobs: dict[Job, tuple[str, ...]]) -> None:
    """Nothing is spilled, and the kernel takes what it is given."""
    for (job, kinds), cubin in zip(jobs.items(), compile_all(list(jobs)), strict=True):
        assert cubin.resources.local == 0, f"{job.entry} keeps {cubin.resources.local} bytes a thread in local memory"
        sizes = tuple(4 if kind in ("i32", "f32") else 8 for kind in kinds)
        assert parameters_of(cubin.image, cubin.symbol) == sizes, job.entry


REAL = [*fp8_sites(), *scaled_sites(), *expert_sites()[24:27]]


@EVERY_TARGET
def test_cubins(target: Target) -> None:
    examine(jobs_of(REAL if target is HOPPER else [REAL[1], REAL[3], REAL[6], REAL[-1]], target, every=False))


@pytest.mark.full
@EVERY_TARGET
def test_all_cubins(target: Target) -> None:
    examine(jobs_of(SITES, target, every=False))
    examine(jobs_of([expert_sites()[24], fp8_sites()[1], fp8_sites()[3], scaled_sites()[2]], target, every=True))


# ---- on a GPU -------------------------------------------------------------------------------------------------------

# Rows are rounded to bf16 before their scale is known: where the loudest of a row falls on the other side of a bf16
# number, its scale is 0.4 % another, and with it one in twenty of its elements rounds to another of e4m3, 6 % away.
STAGED_BAR = 1e-2


KERNELS = {kernel.op: kernel for kernel in smxx_finish_gemm.KERNELS}


def case_of(site: Site, config: Config) -> harness.Case:
    bar = STAGED_BAR if site.attrs["per_row"] else None
    return harness.Case(site, KERNELS[site.op], config, inputs, flops_of(site), bar)


def best_of(site: Site) -> harness.Case:
    return case_of(site, CATALOG.select(site, harness.TARGET).config)


def cases_of(site: Site, step: int = 1, **wanted: object) -> list[harness.Case]:
    """Every `step`-th config with the wanted values."""
    found = [c for c in smxx_finish_gemm.configs(site, harness.TARGET) if wanted.items() <= c.items()]
    return [case_of(site, config) for config in found[::step]]


ADA = linear_norm(50, 1024, 4096, "ada", **GATED)
SCALED = per_row(linear(50, 1000, 2040, bias="f32"))
TALL = per_row(linear(70, 1000, 2040, bias="f32"))  # too many rows for a panel: a second launch
CHOSEN = [best_of(site) for site in SITES]
# Of the experts' sites, the first 27 have every K, kind and way to store y, the others the remaining M and N.
QUICK_EXPERTS = [*CHOSEN[:27], *CHOSEN[27 : len(expert_sites()) : 3]]
PANELS = [
    case
    for site in (scaled_sites()[2], scaled_sites()[5], *awkward_sites()[12:])
    for case in cases_of(site, FINISH="panel")[-1:]
]
QUICK = [*QUICK_EXPERTS, *CHOSEN[len(expert_sites()) :]]
CONFIGS = [
    *cases_of(linear_norm(50, 136, 1021, "layer", bias="f32", residual="bf16"), 3),
    *cases_of(per_row(linear_norm(50, 1024, 1024, "ada", **GATED)), 7),
    *cases_of(SCALED, 7),
    *cases_of(TALL, 7),
    *cases_of(in_fp8(per_row(linear_norm(50, 1024, 2048, "rms")), x_scale=True), 7),
]
IN_PLACE = [replace(best_of(ADA), in_place=((0, 3),))]
ORDER = [
    case
    for site in (ADA, per_row(ADA), SCALED)
    for case in (*cases_of(site, BM=16, FINISH="panel")[::6], *cases_of(site, BM=64, FINISH="panel")[::6])
]  # some with split K
LATE = [harness.sabotaged(case, "FRTC_SABOTAGE_LATE_TILE") for case in ORDER]
EARLY = [harness.sabotaged(case, "FRTC_SABOTAGE_EARLY_PANEL") for case in ORDER]
NEIGHBOUR = [
    harness.sabotaged(case, "FRTC_SABOTAGE_NEIGHBOUR_SCALE")
    for case in (cases_of(per_row(ADA))[0], cases_of(SCALED, FINISH="panel")[0], cases_of(TALL, FINISH="launch")[0])
]
NORM_LIMITED = limited(linear_norm(50, 136, 1021, "layer", residual="bf16"))
LIMITED = [
    pytest.param(case, rows, marks=() if turn % 3 == place else pytest.mark.full)
    for site in (NORM_LIMITED, limited(SCALED), limited(TALL), limited(per_row(gated(50, 100, 600))))
    for turn, rows in enumerate((-1, 0, 1, 16, 17, 49, 50, 1000))
    for place, case in enumerate((cases_of(site, BM=16)[0], cases_of(site, BM=16)[-1], cases_of(site, BM=32)[-1]))
]


def wrong(gpu: Gpu, case: harness.Case, launches: int = 1, rows: int | None = None) -> list[str]:
    """Faults of the last of some launches in the `rows` that are read, and writes to panels that none of them is in."""
    operands = harness.operands_of(case)
    if rows is not None:
        operands = [np.array(rows, np.int32) if o and o.dtype == "i32" else v
                    for o, v in zip(case.site.operands, operands, strict=True)]  # fmt: skip
    with harness.Buffers(gpu, case, operands) as buffers:
        for _ in range(launches):  # each meets the counters that the one before left
            for launch in buffers.launches():
                gpu.launch(*launch)
        gpu.synchronize()
        got, want = buffers.results(), harness.expected(case, operands)
    m = product(case.site).m
    read = m if rows is None else min(max(rows, 0), m)
    computed = min(math.ceil(read / case.config["BM"]) * case.config["BM"], m)
    faults, _ = harness.faults(case, *([r[..., :read, :] for r in side] for side in (got, want))) if read else ([], 0.0)
    stray = [int(np.count_nonzero(~np.isnan(r[..., computed:, :].astype(np.float32)))) for r in got]
    return [*faults, *loudest(case, got, read), *(f"{n} elements beyond row {computed}" for n in stray if n)]


def loudest(case: harness.Case, results: list[Array], read: int) -> list[str]:
    """Rows with a scale of their own whose loudest element is not stored as 448."""
    if not case.site.attrs.get("per_row"):
        return []
    y = np.abs(results[-2][..., :read, :].astype(np.float32))
    quiet = int(np.count_nonzero(y.max(axis=-1, initial=0.0) != 448))
    return [f"{quiet} rows whose loudest element is not 448"] if quiet else []


@pytest.mark.gpu
@pytest.mark.parametrize("case", harness.swept([*CHOSEN, *PANELS], QUICK), ids=str)
def test_chosen(gpu: Gpu, case: harness.Case) -> None:
    harness.check(gpu, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", harness.swept([*CONFIGS, *IN_PLACE], [*CONFIGS[1::8], *IN_PLACE]), ids=str)
def test_configs(gpu: Gpu, case: harness.Case) -> None:
    found = wrong(gpu, case, launches=1 if case.in_place else 2)
    assert not found, found


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "rows"), LIMITED)
def test_rows_that_nothing_reads(gpu: Gpu, case: harness.Case, rows: int) -> None:
    found = wrong(gpu, case, launches=2, rows=rows)
    assert not found, found


@pytest.mark.gpu
@pytest.mark.parametrize("case", harness.swept(LATE, LATE[::6]), ids=str)
def test_the_last_block_waits_for_a_late_tile(gpu: Gpu, case: harness.Case) -> None:
    found = wrong(gpu, case, launches=2)
    assert not found, found


def test_early_panels_leave_a_tile_out() -> None:
    """A panel of one tile cannot be made too early; others are made without their first, which waits for that."""
    for case in EARLY:
        (stage,) = case.kernel.stages(case.site, case.config, harness.TARGET)
        assert stage.grid[1] > 1 and case.config["FINISH"] == "panel"


@pytest.mark.gpu
@pytest.mark.parametrize("case", harness.swept([*EARLY, *NEIGHBOUR], [*EARLY[::6], *NEIGHBOUR]), ids=str)
def test_sabotaged(gpu: Gpu, case: harness.Case) -> None:
    harness.check_fails(gpu, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", harness.swept(ORDER, ORDER[::6]), ids=str)
def test_same_bits_every_time(gpu: Gpu, case: harness.Case) -> None:
    """Blocks arrive in another order each time, and another one finishes; the rows may not notice."""
    assert len(harness.bits(gpu, case)) == 1
