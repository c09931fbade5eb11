"""Products of few rows: who is served, where sums lie, cubins; on a GPU every config, at real and at awkward sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from frtc.kernels import sm90_few_gemm as few
from frtc.kernels.spec import Config, Site
from frtc.kernels.targets import Target, load_targets
from tests.kernels import harness, sites_rope_gemm
from tests.kernels.device import Gpu
from tests.kernels.sites_gemm import FULL, flops_of, gated, linear, scaled
from tests.kernels.sites_moments import (
    ADA,
    awkward_producers,
    awkward_readers,
    deferred,
    inputs,
    producer,
    real_producers,
    real_readers,
)
from tests.kernels.sites_rope_gemm import rope_qkv
from tests.kernels.test_sm90_gemm import NEAR, product_dtype

TARGETS = load_targets()
HOPPER = TARGETS["hopper"]
KERNELS = {k.op: k for k in few.KERNELS}

PLAIN = [
    scaled(linear(50, 1024, 2048, **FULL)), scaled(linear(7, 320, 4096, **FULL)), scaled(linear(1, 64, 272)),
    linear(50, 144, 1024, **FULL), linear(10, 96, 4096, residual="bf16"), linear(13, 64, 520, "f16"),
    scaled(linear(61, 208, 1040, **FULL), out="e4m3"), scaled(linear(33, 80, 1008, **FULL), x_scale=True),
    scaled(linear(64, 16, 1152, bias="f32", act="silu")), scaled(linear(24, 1024, 4304, residual="bf16")),
    scaled(gated(50, 4096, 1024), out="e4m3"), gated(10, 200, 1024),
    scaled(gated(41, 104, 520, act="silu"), x_scale=True),
    linear(50, 32, 1024, "bf16", bias="f32"), linear(17, 960, 960, gap=8),
]  # fmt: skip
EXPERT = [
    made
    for rows in (10, 50)
    for made in (
        deferred(rope_qkv(rows, 8, 1, 256, 1024, x="e4m3", alpha="each", bias="f32"), "rms"),
        deferred(scaled(gated(rows, 4096, 1024), out="e4m3"), "rms", "f32"),
        producer(rows, 1024, 2048, "rms", "e4m3", **ADA), producer(rows, 1024, 4096, "rms", "e4m3", **ADA),
        deferred(gated(rows, 4096, 1024), "rms", "f32"), producer(rows, 1024, 2048, "rms", **ADA),
    )
]  # fmt: skip
OTHERS = [*real_producers(), *real_readers(), *awkward_producers(), *awkward_readers(),
          *sites_rope_gemm.real_sites(), *sites_rope_gemm.fp8_sites(), *sites_rope_gemm.awkward_sites(),
          producer(50, 1040, 1040, "layer", "e4m3", bias="f32"), producer(7, 48, 4096, "layer", "f16")]  # fmt: skip
SITES = [*PLAIN, *EXPERT, *(s for s in OTHERS if not KERNELS[s.op].refuse(s, HOPPER))]


@pytest.mark.parametrize(
    ("site", "reason"),
    [
        (scaled(linear(50, 64, 128)), ""),
        (scaled(linear(64, 64, 128)), ""),
        (scaled(linear(65, 64, 128)), "65 rows, more than 64"),
        (scaled(linear(50, 72, 128)), "72 columns, not a multiple of 16"),
        (scaled(linear(50, 64, 128), "bf16"), "x is bf16 and w is e4m3; needs bf16, f16 or e4m3 for both"),
        (linear(50, 64, 16384), "no share of K fits in shared memory, all are too small, or too many blocks"),
        (linear(5, 20000, 1024), "no share of K fits in shared memory, all are too small, or too many blocks"),
    ],
)  # fmt: skip
def test_refusals(site: Site, reason: str) -> None:
    assert KERNELS[site.op].refuse(site, HOPPER) == reason


@pytest.mark.parametrize("target", [t for t in TARGETS.values() if t is not HOPPER], ids=lambda t: t.name)
def test_only_hopper_has_wgmma(target: Target) -> None:
    assert KERNELS["linear"].refuse(linear(50, 64, 128), target) == "needs wgmma"


def test_even_and_odd_rows_cover_w() -> None:
    """Accumulators of rows r and r + 8 of each sixteen are two columns side by side."""
    site = linear(50, 128, 64)
    (stage,) = KERNELS["linear"].stages(site, KERNELS["linear"].configs(site, HOPPER)[0], HOPPER)
    rows = harness.rows_in_order(stage.tensormaps[1], 2)
    assert sorted(rows) == list(range(128))
    assert all(rows[16 * s + r + 8] == rows[16 * s + r] + 1 == 16 * s + 2 * r + 1 for s in range(8) for r in range(8))


@pytest.mark.parametrize("unit", [8, 16])
def test_sums_are_read_where_they_were_sent(unit: int) -> None:
    """few_send and few_add of sm90_few_gemm.cuh: places of eight rows by 64 columns, in elements of unit / 4 bytes."""
    pair_bytes, size, sent = 32 * unit + 32, unit // 4, {}
    for thread in range(128):
        warp, column, row = thread // 32, thread % 32 // 4, thread % 4
        pair = warp * 8 + column ^ (warp if unit == 16 else warp & 2)
        for i, (r, c) in enumerate(((0, 0), (0, 1), (1, 0), (1, 1))):
            sent[row * pair_bytes + pair * unit + i * size] = (2 * row + r, 16 * warp + 2 * column + c)
    assert len(sent) == 8 * 64
    for row in range(8):
        for octet in range(8):
            at, second = row // 2 * pair_bytes, row % 2 * unit // 2
            pieces = [octet * 4 * unit + (i ^ octet // (32 // unit)) * 16 for i in range(unit // 4)]
            units = [piece + j * unit for piece in pieces for j in range(16 // unit)]
            assert [sent[at + u + second + j * size] for u in units for j in (0, 1)] == [
                (row, 8 * octet + j) for j in range(8)
            ]


def test_configs_fit() -> None:
    for site in SITES:
        kernel = KERNELS[site.op]
        assert kernel.refuse(site, HOPPER) == "" and kernel.configs(site, HOPPER)
        for config in kernel.configs(site, HOPPER):
            (stage,) = kernel.stages(site, config, HOPPER)
            assert stage.waits and stage.block == 128 and stage.grid[0] == config["SPLIT"]
            assert stage.smem <= HOPPER.smem_per_block
            assert not config["ALONE"] or 2 * (stage.smem + 1024) > HOPPER.smem_per_sm
            for made in stage.tensormaps:
                assert all(1 <= box <= 256 for box in made.box) and not any(step % 16 for step in made.strides)


def test_cubins() -> None:
    """Nothing spills, two blocks fit on an SM's registers, memory is as the estimate says, parameters as listed."""
    found = []
    for site in (*PLAIN[::3], *EXPERT[:4], *SITES[-2:]):
        kernel = KERNELS[site.op]
        for config in kernel.configs(site, HOPPER)[::3][:2]:
            found += kernel.stages(site, config, HOPPER)
    harness.examine(found, HOPPER, registers=168)


# ---- on a GPU -------------------------------------------------------------------------------------------------------


def case_of(site: Site, config: Config) -> harness.Case:
    near = NEAR if product_dtype(site) == "e4m3" else 0.0
    return harness.Case(site, KERNELS[site.op], config, inputs, flops_of(site), near=near)


def cases_of(sites: list[Site]) -> list[harness.Case]:
    return [case_of(site, config) for site in sites for config in KERNELS[site.op].configs(site, HOPPER)]


def waiting(cases: Sequence[harness.Case]) -> list[harness.Case]:
    """Each number of blocks that share K: when the next launch begins and how many an SM takes change nothing here."""
    return [case for case in cases if case.config["RELEASE"] == "waited" and not case.config["ALONE"]]


EVERY = cases_of(SITES)
QUICK = [*waiting([case for case in EVERY if case.site in (*PLAIN, *EXPERT)]), *waiting(EVERY)[::4]]
SABOTAGED = [
    harness.sabotaged(case, f"FRTC_SABOTAGE={defect}")
    for site, defects in (
        (PLAIN[0], ("last_k_tile", "neighbour_gate")), (PLAIN[7], ("neighbour_scale", "last_k_tile")),
        (EXPERT[10], ("last_moment", "neighbour_scale")), (EXPERT[8], ("quarter_moment", "last_k_tile")),
        (PLAIN[3], ("last_k_tile",)),
    )
    for case in waiting(cases_of([site]))[:2]
    for defect in defects
]  # fmt: skip
SHARED = [case for case in waiting(cases_of([*EXPERT[6:], PLAIN[9]])) if case.config["SPLIT"] > 1]


@pytest.mark.gpu
@pytest.mark.parametrize("case", harness.swept(EVERY, QUICK), ids=str)
def test_every_config(gpu: Gpu, case: harness.Case) -> None:
    harness.check(gpu, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SABOTAGED, ids=str)
def test_sabotaged(gpu: Gpu, case: harness.Case) -> None:
    harness.check_fails(gpu, case)


@pytest.mark.gpu
def test_same_bits_every_time(gpu: Gpu) -> None:
    """Sums are added in the order of the blocks."""
    assert SHARED and math.prod(len(harness.bits(gpu, case)) for case in SHARED) == 1
