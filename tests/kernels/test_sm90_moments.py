"""Norms that readers make up for: who takes such products, launches, cubins; on a GPU results, sabotage, counts."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from frtc.kernels import moments, sm90_few_gemm, sm90_gemm, sm90_moments_gemm, sm90_rope_gemm
from frtc.kernels.catalog import CATALOG
from frtc.kernels.product import Product, product_of
from frtc.kernels.smxx_rope_gemm import as_linear as rope_as_linear
from frtc.kernels.spec import Operand, Site, Stage
from frtc.kernels.targets import Target, load_targets
from tests.kernels import harness, sites_finish
from tests.kernels.device import Gpu
from tests.kernels.sites_gemm import flops_of, gated, linear, scaled
from tests.kernels.sites_moments import (
    ADA,
    VISION,
    awkward_producers,
    awkward_readers,
    deferred,
    inputs,
    inputs_of_rows,
    limited,
    packed,
    producer,
    real_producers,
    real_readers,
    with_operand,
)
from tests.kernels.sites_rope_gemm import rope_qkv
from tests.kernels.test_sm90_gemm import NEAR, best, product_dtype

TARGETS = load_targets()
HOPPER = TARGETS["hopper"]
KERNELS = {k.op: k for k in (*sm90_gemm.KERNELS, *sm90_rope_gemm.KERNELS, *sm90_moments_gemm.KERNELS)}
SITES = [*real_producers(), *real_readers(), *awkward_producers(), *awkward_readers()]


def product(site: Site) -> Product:
    views = {"linear_rope_qkv": rope_as_linear, "linear_moments": moments.as_linear}
    found = product_of(views.get(site.op, lambda site: site)(site))
    assert isinstance(found, Product), found
    return found


# ---- what is served -------------------------------------------------------------------------------------------------

PLAIN = producer(50, 64, 128, "rms")


@pytest.mark.parametrize(
    ("site", "reason"),
    [
        (PLAIN, ""),
        (producer(50, 64, 128, "rms", out="f32"), "s is f32; needs one of bf16, f16"),
        (producer(50, 60, 128, "rms"),
         "rows of 60 columns or an operand beside them are no groups of 8 that move as vectors"),
        (with_operand(PLAIN, 8, replace(packed("f32", 64), aligned=False)),
         "rows of 64 columns or an operand beside them are no groups of 8 that move as vectors"),
        (with_operand(PLAIN, 8, packed("f32", 50, 64)), "norm_w is not one dense row for all"),
        (with_operand(PLAIN, 8, packed("e4m3", 64)), "norm_w is e4m3; needs one of f32, bf16, f16"),
        (with_operand(PLAIN, 9, packed("f32")), "z is bf16 with inv"),
        (replace(PLAIN, results=(*PLAIN.results[:2], packed("f32", 50, 64))), "z is f32 without inv"),
        (replace(PLAIN, results=(PLAIN.results[0], Operand("f32", (50, 2), (4, 2)), PLAIN.results[2])),
         "moments are strided, or not f32"),
        (producer(50, 64, 128, "rms", "f32"), "x is f32 and w is f32; needs bf16, f16 or e4m3 for both"),
    ],
)  # fmt: skip
def test_refusals(site: Site, reason: str) -> None:
    assert KERNELS["linear_moments"].refuse(site, HOPPER) == reason


OURS = [
    deferred(linear(50, 64, 128), "rms"), deferred(gated(50, 64, 128), "rms", "f32"),
    deferred(scaled(linear(50, 64, 128)), "layer"), deferred(rope_qkv(50, 2, 1, 64, 128), "layer"),
]  # fmt: skip
NOBODYS = [
    deferred(scaled(linear(50, 64, 128), "bf16"), "rms"), deferred(sites_finish.per_row(linear(50, 64, 128)), "rms"),
    deferred(sites_finish.per_row(gated(50, 64, 128)), "rms"),
]  # fmt: skip


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_no_other_kernel_takes_moments_for_factors(target: Target) -> None:
    """Whoever has not read of them would multiply by the first moment of a row. In fp32: test_smxx_f32_moments.py."""
    for site in (*OURS, *NOBODYS):
        kernels = CATALOG.kernels_for(site.op)
        served = {kernel.name for kernel in kernels if not kernel.refuse(site, target)}
        few = {kernel.name for kernel in sm90_few_gemm.KERNELS if kernel.op == site.op}
        assert served == ({KERNELS[site.op].name, *few} if target is HOPPER and site in OURS else set())
    assert {kernel.family for kernel in CATALOG.kernels_for("linear")} == {"baseline", "sm_90a", "sm_110a", "sm_120a"}


def test_pairs_of_moments_lie_together() -> None:
    site = deferred(linear(50, 64, 128), "layer")
    apart = with_operand(site, 7, Operand("f32", (50, 8), (9, 1)))
    assert KERNELS["linear"].refuse(site, HOPPER) == ""
    assert KERNELS["linear"].refuse(apart, HOPPER) == "pairs of moments are not at multiples of 8 bytes"


@pytest.mark.parametrize(
    ("width", "norm", "step", "wanted"),
    [(1152, "rms", 36, 4), (1152, "layer", 72, 4), (4304, "layer", 270, 2), (720, "rms", 23, 1), (2048, "rms", 66, 2)],
)
def test_moments_move_as_widely_as_they_lie(width: int, norm: str, step: int, wanted: int) -> None:
    site = deferred(linear(50, 64, width), norm)
    count = site.operands[7].shape[-1]  # type: ignore[union-attr]
    p = product(with_operand(site, 7, Operand("f32", (50, count), (step, 1))))
    assert p.moments_at_once == wanted
    assert f"frtc::MomentFactors<{width}, {str(norm == 'layer').lower()}, {wanted}>" in p.epilogue()
    assert p.arguments()[-1].param.value == p.eps == 1e-6


def test_gated_products_have_a_bias_everywhere() -> None:
    """For each row of w; b of one half's width would repeat."""
    site = with_operand(gated(50, 64, 128), 7, packed("f32", 128))
    for target in TARGETS.values():
        choice = CATALOG.select(site, target)
        (stage,) = choice.kernel.stages(site, choice.config, target)
        assert "frtc::Epilogue<__nv_bfloat16, float," in stage.entry
    assert product_of(with_operand(site, 7, packed("f32", 64))) == "b repeats along the last axis"
    assert sites_finish.per_row(site).operands[7] is not None
    finished = CATALOG.select(sites_finish.per_row(site), HOPPER)
    entries = [s.entry for s in finished.kernel.stages(sites_finish.per_row(site), finished.config, HOPPER)]
    assert "frtc::Epilogue<__nv_bfloat16, float," in entries[0]


# ---- launches -------------------------------------------------------------------------------------------------------


def test_configs_fit_beside_the_factors() -> None:
    for site in SITES:
        kernel = KERNELS[site.op]
        assert kernel.refuse(site, HOPPER) == "" and kernel.configs(site, HOPPER)
        for config in kernel.configs(site, HOPPER):
            (stage,) = kernel.stages(site, config, HOPPER)
            factors = sm90_gemm.FACTOR_BYTES * (product(site).norm != "none")
            assert stage.smem + factors <= HOPPER.smem_per_block
            if product(site).m <= sm90_gemm.FEW_ROWS:
                two_fit = 2 * (stage.smem + factors + 1024) <= HOPPER.smem_per_sm
                assert two_fit or math.prod(stage.grid) <= sm90_gemm.CLUSTERED[config["SPLIT"]]


def stages(sites: list[Site], count: int = 99) -> list[Stage]:
    """Of the `count` cheapest configs."""
    chosen = [(KERNELS[site.op], site, config) for site in sites for config in best(KERNELS[site.op], site, count)]
    return [stage for kernel, site, config in chosen for stage in kernel.stages(site, config, HOPPER)]


def test_cubins() -> None:
    sites = [*real_producers()[::2], *real_readers()[::3], *awkward_producers()[::3], *awkward_readers()[::3]]
    harness.examine(stages(sites, 1), HOPPER)


@pytest.mark.full
def test_every_cubin() -> None:
    """Of tiles of three warpgroups, which have 128 registers for a while, some keep a pair of addresses in memory."""
    harness.examine(stages([*real_producers(), *real_readers()]), HOPPER, local=16)


# ---- on a GPU -------------------------------------------------------------------------------------------------------


def case_of(site: Site, config: dict[str, object], rows: int | None = None) -> harness.Case:
    near = NEAR if product_dtype(site) == "e4m3" else 0.0
    made = inputs if rows is None else inputs_of_rows(rows)
    return harness.Case(site, KERNELS[site.op], config, made, flops_of(site), near=near)


def cases_of(sites: list[Site], count: int = 99) -> list[harness.Case]:
    return [case_of(site, config) for site in sites for config in best(KERNELS[site.op], site, count)]


def with_parts(site: Site, rows: int | None = None, **wanted: object) -> harness.Case:
    found = [c for c in best(KERNELS[site.op], site, 99) if wanted.items() <= c.items()]
    return case_of(site, found[0], rows)


def each_way_once(cases: list[harness.Case]) -> list[harness.Case]:
    """Each tile, alone and sharing K, of each op."""
    tiles = ("BLOCKS", "WN", "PARTS", "WARPGROUPS")
    found = {(*(c.config[n] for n in tiles), c.config["SPLIT"] > 1, c.kernel.op): c for c in cases}
    return list(found.values())


BEST = cases_of(SITES, 1)
EVERY = cases_of([
    producer(561, 2040, 1040, "layer", "e4m3", "", **VISION), producer(50, 1024, 4096, "rms", "e4m3", **ADA),
    producer(7, 712, 4096, "rms", "f16", residual="f16"), producer(1200, 4104, 264, "rms", residual="bf16"),
    deferred(scaled(linear(561, 2040, 1040, act="gelu_tanh"), out="e4m3"), "layer", "f32"),
    deferred(linear(50, 1000, 4304), "rms"), deferred(gated(700, 2000, 600), "layer", "bf16"),
    deferred(scaled(gated(50, 4096, 1024)), "rms", "f32"), deferred(rope_qkv(130, 8, 1, 64, 2048), "rms"),
])  # fmt: skip
TURNS, SPLIT = producer(1200, 4104, 264, "rms", residual="bf16"), producer(50, 1024, 4096, "rms", **ADA)
READS, GATED = deferred(linear(50, 1024, 1024), "rms"), deferred(gated(700, 4000, 1024), "layer", "bf16")
ROPED = deferred(rope_qkv(50, 8, 1, 256, 1024), "layer")
SABOTAGED = [
    *(harness.sabotaged(with_parts(site, **ways), f"FRTC_SABOTAGE={defect}")
      for site, ways, defects in (
          (TURNS, {"PARTS": "turns"}, ("quarter_moment", "last_k_tile")),
          (SPLIT, {"SPLIT": 4}, ("quarter_moment", "last_k_tile")),
          (SPLIT, {"SPLIT": 1}, ("quarter_moment",)),
          (READS, {"SPLIT": 1}, ("last_moment", "neighbour_scale", "last_k_tile")),
          (READS, {"SPLIT": 2}, ("last_moment", "neighbour_scale")),
          (GATED, {"PARTS": "turns"}, ("last_moment", "neighbour_scale")),
          (ROPED, {}, ("last_moment", "neighbour_scale")),
      )
      for defect in defects),
]  # fmt: skip
COUNTED = [
    with_parts(limited(site), rows, **ways)
    for site, ways in (
        (producer(300, 1000, 1024, "layer", residual="bf16"), {"PARTS": "rows", "SPLIT": 1}),
        (producer(300, 72, 4096, "rms", residual="bf16"), {"SPLIT": 4}),
        (producer(1200, 4104, 264, "rms", residual="bf16"), {"PARTS": "turns"}),
        (deferred(gated(1200, 2000, 264), "rms", "f32"), {"PARTS": "turns"}),
        (deferred(linear(300, 72, 4096), "layer"), {"SPLIT": 2}),
        (deferred(rope_qkv(300, 2, 1, 64, 1024, rows=True), "rms"), {}),
    )
    for rows in (-1, 0, 1, 63, 64, 65, 300, 5000)
]
SHARED = [with_parts(producer(50, 712, 4096, "layer", **ADA), SPLIT=8), with_parts(READS, SPLIT=2)]
IN_PLACE = [replace(case_of(SPLIT, best(KERNELS["linear_moments"], SPLIT)[0]), in_place=((0, 3),))]


@pytest.mark.parametrize("site", [s for s in SITES if math.prod(s.operands[1].shape) < 1 << 19], ids=str)  # type: ignore[union-attr]
def test_inputs_suit_the_references(site: Site) -> None:
    case = case_of(site, best(KERNELS[site.op], site)[0])
    for value, result in zip(harness.expected(case, harness.operands_of(case)), site.results, strict=True):
        assert value.shape == result.shape and np.isfinite(value.astype(np.float32)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("case", harness.swept(BEST, [*BEST[::2], *BEST[len(BEST) // 2 :]]), ids=str)
def test_best(gpu: Gpu, case: harness.Case) -> None:
    harness.check(gpu, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", harness.swept([*EVERY, *IN_PLACE], [*each_way_once(EVERY), *IN_PLACE]), ids=str)
def test_every_config(gpu: Gpu, case: harness.Case) -> None:
    wrong, _, _ = harness.run(gpu, case)
    assert not wrong, wrong


@pytest.mark.gpu
@pytest.mark.parametrize("case", SABOTAGED, ids=str)
def test_sabotaged(gpu: Gpu, case: harness.Case) -> None:
    harness.check_fails(gpu, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", harness.swept(COUNTED, COUNTED[::3]), ids=str)
def test_rows_that_nothing_reads(gpu: Gpu, case: harness.Case) -> None:
    operands = harness.operands_of(case)
    p = product(case.site)
    read, bm = min(max(harness.counted(case, operands), 0), p.m), sm90_gemm.Tile.of(case.config, p).bm
    harness.check_counted(gpu, case, operands, read, min(math.ceil(read / bm) * bm, p.m))


@pytest.mark.gpu
def test_same_bits_every_time(gpu: Gpu) -> None:
    for case in SHARED:
        assert len(harness.bits(gpu, case)) == 1
