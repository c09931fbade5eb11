"""Norms deferred through products in fp32, on every target: who takes them, cubins; on a GPU results and sabotage."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from frtc.kernels import smxx_linear_f32, smxx_tf32_gemm
from frtc.kernels.catalog import CATALOG, Choice
from frtc.kernels.moments import as_linear
from frtc.kernels.product import Product, product_of
from frtc.kernels.spec import Operand, Site, Stage
from frtc.kernels.targets import Target, load_targets
from tests.kernels import harness
from tests.kernels.device import Gpu
from tests.kernels.sites_gemm import flops_of, linear
from tests.kernels.sites_moments import (
    deferred,
    f32_producers,
    f32_readers,
    inputs,
    inputs_of_rows,
    limited,
    mixed,
    producer,
    with_operand,
)
from tests.kernels.tier import COMPILED

TARGETS = load_targets()
HOPPER = TARGETS["hopper"]
MAKES, READS = f32_producers(), f32_readers()
SITES = [*MAKES, *READS]
OURS = (*smxx_linear_f32.KERNELS, *smxx_tf32_gemm.KERNELS)
FIRST = producer(10, 1024, 32, "rms", "f32", inv=True, bias="f32", out="bf16")
SECOND = producer(50, 1024, 1024, "rms", "f32", inv=True, bias="f32", out="bf16")
LAST = mixed(deferred(linear(50, 32, 1024, "f32", bias="f32", residual="f32"), "rms"))


def candidates(site: Site, target: Target = HOPPER) -> list[Choice]:
    return [c for c in CATALOG.candidates(site, target, target.families()) if c.kernel in OURS]


def stages_of(site: Site, target: Target) -> list[Stage]:
    return [stage for c in candidates(site, target) for stage in c.kernel.stages(site, c.config, target)]


# ---- what is served -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_both_ends_are_served_on_every_target(target: Target) -> None:
    for site in SITES:
        assert candidates(site, target)


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_sixteen_bits_are_left_to_tensor_cores(target: Target) -> None:
    """A warp for eight columns would make a norm deferred that costs less where it is."""
    for site in (deferred(linear(50, 64, 128), "rms"), producer(50, 64, 128, "rms")):
        assert not candidates(site, target)


@pytest.mark.parametrize(
    ("site", "reason"),
    [
        (FIRST, ""),
        (producer(50, 64, 128, "rms", "f32"), "s is f32; needs one of bf16, f16"),
        (producer(50, 60, 128, "rms", "f32", out="bf16"),
         "rows of 60 columns or an operand beside them are no groups of 8 that move as vectors"),
        (producer(50, 64, 128, "rms"), "tensor cores can do it"),
    ],
)  # fmt: skip
def test_refusals(site: Site, reason: str) -> None:
    kernel = next(k for k in OURS if k.name == "smxx_f32_moments_gemm")
    assert kernel.refuse(site, HOPPER) == reason


def test_batches_of_rows() -> None:
    """A residual that all images share."""
    x, w = Operand.packed("f32", 2, 16, 64), Operand.packed("f32", 32, 64)
    y = Operand.packed("bf16", 2, 16, 32)
    operands = (x, w, None, Operand.packed("f32", 16, 32), *[None] * 6)
    site = Site("linear_moments", operands, (y, Operand.packed("f32", 2, 16, 1), y), {"norm": "rms"})
    reasons = {kernel.refuse(site, HOPPER) for kernel in OURS if kernel.op == "linear_moments"}
    assert reasons == {"2 batches of rows; moments and z have one step from row to row"}


def test_pairs_of_moments_lie_together() -> None:
    site = mixed(deferred(linear(50, 64, 128, "f32"), "layer"))
    apart = with_operand(site, 7, Operand("f32", (50, 8), (9, 1)))
    assert smxx_linear_f32.refuse(site, HOPPER) == ""
    assert smxx_linear_f32.refuse(apart, HOPPER) == "pairs of moments are not at multiples of 8 bytes"


def test_kernels_of_a_step() -> None:
    """Its ends take a warp for eight columns; the product between takes tensor cores."""
    names = [CATALOG.select(site, HOPPER, HOPPER.families()).kernel.name for site in (FIRST, SECOND, LAST)]
    assert names == ["smxx_f32_moments_gemm", "smxx_tf32_moments_gemm", "smxx_linear_f32"]


def test_deferring_costs_less_than_a_launch() -> None:
    for site in (FIRST, SECOND, LAST):
        plain = as_linear(site) if site.op == "linear_moments" else replace(site, attrs={"act": "none"})
        plain = plain if plain.op != "linear" or site is not LAST else with_operand(plain, 7, None)
        both = [min(c.cost_us for c in CATALOG.candidates(s, HOPPER, HOPPER.families())) for s in (plain, site)]
        assert both[0] < both[1] < both[0] + 0.5


# ---- launches -------------------------------------------------------------------------------------------------------


def test_every_moment_has_a_block() -> None:
    for site in MAKES:
        p = product_of(as_linear(site))
        assert isinstance(p, Product)
        for c in candidates(site):
            (stage,) = c.kernel.stages(site, c.config, HOPPER)
            rows, columns = (c.config["BM"], c.config["BN"]) if "BM" in c.config else (c.config["ROWS"] or 1, 128)
            columns = 32 if c.config.get("ROWS") == 0 else columns
            assert columns % 32 == 0 and stage.grid[0] * rows >= p.m and stage.grid[1] * columns >= p.n
            assert stage.smem <= HOPPER.smem_per_block
            assert c.kernel.scratch(site, c.config) > 0 or c.config.get("SPLITS", 1) == 1


def test_warps_that_store_together_share_no_row() -> None:
    """Of four warps for eight columns none would have the other 24."""
    site = producer(3, 64, 2048, "rms", "f32", out="bf16")
    (stage,) = next(c.kernel.stages(site, c.config, HOPPER) for c in candidates(site) if c.config.get("ROWS") == 0)
    assert stage.grid == (3, 2, 1) and "smxx_dot_f32<float, float, 1," in stage.entry
    (plain,) = smxx_linear_f32.stages(as_linear(site), {"ROWS": 0}, HOPPER)
    assert plain.grid == (3, 8, 1) and "smxx_dot_f32<float, float, 4," in plain.entry


@pytest.mark.parametrize("target", COMPILED)
def test_cubins_do_not_spill(target: Target) -> None:
    found = [stage for site in (SECOND, MAKES[4], LAST, READS[3]) for stage in stages_of(site, target)]
    harness.examine(found, target)


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_a_step_compiles_for_every_target(target: Target) -> None:
    chosen = [(site, CATALOG.select(site, target, target.families())) for site in (FIRST, SECOND, LAST)]
    harness.examine([stage for site, c in chosen for stage in c.kernel.stages(site, c.config, target)], target)


# ---- on a GPU -------------------------------------------------------------------------------------------------------


def cases_of(sites: list[Site]) -> list[harness.Case]:
    return [harness.Case(s, c.kernel, c.config, inputs, flops_of(s)) for s in sites for c in candidates(s)]


def case_of(site: Site, kernel: str, **wanted: int) -> harness.Case:
    return next(c for c in cases_of([site]) if c.kernel.name == kernel and wanted.items() <= c.config.items())


EVERY = cases_of(SITES)
REAL = [
    min(cases_of([site]), key=lambda c: c.kernel.cost(c.site, c.config, HOPPER)) for site in (*MAKES[:4], *READS[:3])
]
WIDE = mixed(deferred(linear(50, 130, 1024, "f32"), "rms"))
LONG = producer(50, 96, 1024, "layer", "f32", out="bf16")
DOT, TF32, PLAIN = "smxx_f32_moments_gemm", "smxx_tf32_moments_gemm", "smxx_linear_f32"
SABOTAGED = [
    harness.sabotaged(case, f"FRTC_SABOTAGE={defect}")
    for case, defects in (
        (case_of(FIRST, DOT, ROWS=0), ("quarter_moment", "last_k_tile")),
        (case_of(LONG, DOT, ROWS=32), ("quarter_moment", "last_k_tile")),
        (case_of(LONG, TF32, BM=16, BN=32, SPLITS=1), ("quarter_moment", "last_k_tile")),
        (case_of(LONG, TF32, BM=64, BN=96, SPLITS=4), ("quarter_moment",)),
        (case_of(LAST, PLAIN, ROWS=0), ("last_moment", "neighbour_scale", "last_k_tile")),
        (case_of(WIDE, PLAIN, ROWS=0), ("last_moment", "neighbour_scale")),
        (case_of(WIDE, PLAIN, ROWS=64), ("last_moment", "neighbour_scale")),
    )
    for defect in defects
]
COUNTED = [
    (harness.Case(limited(site), c.kernel, c.config, inputs_of_rows(rows)), rows)
    for site in (producer(150, 72, 333, "rms", "f32", out="bf16"), mixed(deferred(linear(150, 33, 333, "f32"), "rms")))
    for c in {choice.kernel.name + str(choice.config.get("ROWS")): choice for choice in candidates(site)}.values()
    for rows in (0, 64, 97, 150)
]


@pytest.mark.parametrize("site", SITES, ids=str)
def test_inputs_suit_the_references(site: Site) -> None:
    case = cases_of([site])[0]
    for value, result in zip(harness.expected(case, harness.operands_of(case)), site.results, strict=True):
        assert value.shape == result.shape and np.isfinite(value.astype(np.float32)).all()


def test_defects_have_a_case_each() -> None:
    assert len(SABOTAGED) == 14 and {case.kernel for case, _ in COUNTED} == {
        kernel for kernel in OURS if kernel.op != "gated_linear" and kernel.name != "smxx_tf32_gemm"
    }


@pytest.mark.gpu
@pytest.mark.parametrize("case", REAL, ids=str)
def test_real(gpu: Gpu, case: harness.Case) -> None:
    harness.check(gpu, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", harness.swept(EVERY, harness.once(EVERY, splits=2)), ids=str)
def test_every_config(gpu: Gpu, case: harness.Case) -> None:
    wrong, _, _ = harness.run(gpu, case)
    assert not wrong, wrong


@pytest.mark.gpu
@pytest.mark.parametrize("case", SABOTAGED, ids=str)
def test_sabotaged(gpu: Gpu, case: harness.Case) -> None:
    harness.check_fails(gpu, case)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "rows"), COUNTED, ids=str)
def test_rows_that_nothing_reads(gpu: Gpu, case: harness.Case, rows: int) -> None:
    tile = case.config.get("BM", case.config.get("ROWS") or 1)
    computed = min(math.ceil(rows / tile) * tile, 150)
    harness.check_counted(gpu, case, harness.operands_of(case), rows, computed)


@pytest.mark.gpu
def test_same_bits_every_time(gpu: Gpu) -> None:
    for case in (case_of(LONG, TF32, BM=64, BN=96, SPLITS=4), case_of(LAST, PLAIN, ROWS=0)):
        assert len(harness.bits(gpu, case)) == 1
