"""Products whose tokens take wgmma's N side: who is served, where sums lie, cubins; on a GPU every tile."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from frtc.kernels import sm90_turned_gemm as turned
from frtc.kernels.catalog import CATALOG
from frtc.kernels.spec import Config, Operand, Site
from frtc.kernels.targets import Target, load_targets
from tests.kernels import harness
from tests.kernels.device import Gpu
from tests.kernels.sites_gemm import FULL, flops_of, linear, scaled
from tests.kernels.sites_moments import (
    ADA,
    VISION,
    deferred,
    inputs,
    inputs_of_rows,
    limited,
    producer,
    with_operand,
)
from tests.kernels.test_sm90_gemm import NEAR, product_dtype

TARGETS = load_targets()
HOPPER = TARGETS["hopper"]
KERNELS = {k.op: k for k in turned.KERNELS}

DOWN = [limited(producer(rows, 2048, 16384, "rms", x, residual="bf16"))
        for x in ("e4m3", "bf16") for rows in (304, 560, 816)]  # fmt: skip
# Rows of every height, N and K that no tile divides, every epilogue; the last ones have operands that are no vectors.
AWKWARD = [
    scaled(linear(65, 96, 520, **FULL), x_scale=True), scaled(linear(112, 160, 1040), out="e4m3"),
    scaled(linear(160, 224, 1008, **FULL), out="e4m3"), linear(224, 480, 264, "f16", act="silu"),
    linear(561, 2016, 1032, **FULL), scaled(linear(304, 1120, 2064, residual="bf16")),
    linear(240, 96, 4096, bias="f32"), scaled(linear(304, 992, 1040, act="gelu_tanh"), out="e4m3"),
    linear(700, 480, 600, "f16", bias="f16"), scaled(linear(816, 1504, 528, act="silu")),
    producer(561, 2016, 1040, "layer", "e4m3", "", **VISION), producer(816, 2048, 528, "rms", "e4m3", residual="bf16"),
    producer(97, 96, 4096, "rms", "f16", residual="f16"), producer(250, 1056, 1040, "rms", **ADA),
    producer(816, 480, 1096, "layer", residual="bf16"), producer(450, 224, 2064, "rms", "e4m3", "bf16", **ADA),
    with_operand(linear(130, 96, 520, bias="f32"), 3, Operand("bf16", (130, 96), (97, 1))),
    with_operand(scaled(linear(193, 160, 2064)), 3, Operand("f32", (193, 160), (163, 1))),
]  # fmt: skip
SITES = [*DOWN, *AWKWARD]


@pytest.mark.parametrize(
    ("site", "reason"),
    [
        (scaled(linear(65, 64, 128)), ""),
        (linear(816, 2048, 16384, "f16"), ""),
        (scaled(linear(64, 64, 128)), "64 rows; up to 64 are few"),
        (scaled(linear(65, 80, 128)), "80 columns, not a multiple of 32"),
        (scaled(linear(65, 64, 128), "bf16"), "x is bf16 and w is e4m3; needs bf16, f16 or e4m3 for both"),
        (linear(816, 16384, 2048), "more tiles than SMs"),
        (deferred(linear(65, 64, 128), "rms"),
         "x_scale has moments of x's rows (norm rms), which this kernel makes no factors of"),
    ],
)  # fmt: skip
def test_refusals(site: Site, reason: str) -> None:
    assert KERNELS[site.op].refuse(site, HOPPER) == reason


@pytest.mark.parametrize("target", [t for t in TARGETS.values() if t is not HOPPER], ids=lambda t: t.name)
def test_only_hopper_has_wgmma(target: Target) -> None:
    assert KERNELS["linear"].refuse(linear(65, 64, 128), target) == "needs wgmma"


def test_wgmma_has_every_height() -> None:
    widths = re.findall(r"^FRTC_WGMMA\((\d+),", (Path(turned.__file__).parent / "sm90.cuh").read_text(), re.MULTILINE)
    assert set(turned.HEIGHTS) <= {int(width) for width in widths}


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        (65, {80}),
        (304, {152, 104, 80}),
        (560, {192, 144, 112, 96, 80}),
        (561, {192, 144, 128, 96, 80}),
        (816, {208, 176, 144, 128, 104, 96, 80}),
    ],
)
def test_tiles_are_as_high_as_a_share_of_the_rows(rows: int, wanted: set[int]) -> None:
    site = linear(rows, 256, 1024)
    assert {config["ROWS"] for config in KERNELS["linear"].configs(site, HOPPER)} == wanted


def test_down_of_three_views_has_all_sms() -> None:
    """Four tiles of 208 rows by sixteen of 128 columns, K shared by two: what the model takes for the quickest."""
    found = sorted(CATALOG.candidates(DOWN[2], HOPPER, HOPPER.families()), key=lambda choice: choice.cost_us)
    (stage,) = found[0].kernel.stages(DOWN[2], found[0].config, HOPPER)
    assert found[0].config == {"ROWS": 208, "STAGES": 4, "SPLIT": 2} and stage.grid == (4, 16, 2)


def test_tiles_that_leave_no_row_empty_cost_least() -> None:
    """More rows, the same tiles: the same time. One row more than they hold: more."""
    costs = {rows: min(KERNELS["linear"].cost(site, c, HOPPER) for c in KERNELS["linear"].configs(site, HOPPER))
             for rows in (800, 816, 833) for site in [scaled(linear(rows, 2048, 16384))]}  # fmt: skip
    assert costs[800] == pytest.approx(costs[816], rel=1e-3) and costs[833] > 1.04 * costs[816]


def test_even_and_odd_rows_cover_w() -> None:
    """Accumulators of rows r and r + 8 of each sixteen are two columns side by side."""
    site = linear(65, 128, 64)
    (stage,) = KERNELS["linear"].stages(site, KERNELS["linear"].configs(site, HOPPER)[0], HOPPER)
    rows = harness.rows_in_order(stage.tensormaps[1], 2)
    assert sorted(rows) == list(range(128))
    assert all(rows[16 * s + r + 8] == rows[16 * s + r] + 1 == 16 * s + 2 * r + 1 for s in range(8) for r in range(8))
    assert stage.tensormaps[1].box[1:] == (8, 2, 2, 4) and math.prod(stage.tensormaps[1].box[1:]) == turned.COLUMNS


PAIR, EIGHT = 64 * 16 + 32, 4 * (64 * 16 + 32)  # bytes of the sums of two rows, of eight


@pytest.mark.parametrize(("height", "split", "present"), [(208, 2, 208), (208, 2, 130), (152, 4, 152), (80, 4, 9),
                                                          (104, 1, 104), (176, 2, 1)])  # fmt: skip
def test_sums_are_read_where_they_were_sent(height: int, split: int, present: int) -> None:
    """turned_send and turned_part of sm90_turned_gemm.cuh: who sends what where, and who adds and stores it."""
    tile = turned.Tile(height, 4, split)
    eights, memory = math.ceil(present / 8), {}
    arrived: Counter[int] = Counter()
    for rank in range(split):
        for thread in range(256):
            warp, column, row = thread // 32, thread % 32 // 4, thread % 4
            within = row * PAIR + (warp * 8 + (column ^ warp % 4)) * 16
            for e in range(eights):
                owner, own = e % split, e // split
                place = -1 if owner == rank else rank - (rank > owner)
                arrived[owner] += 16 * (owner != rank)
                for i, (r, c) in enumerate(((0, 0), (0, 1), (1, 0), (1, 1))):
                    at = (owner, place, own * EIGHT + within + 4 * i)
                    assert at not in memory and own * EIGHT + within + 16 <= tile.eights * EIGHT
                    memory[at] = (rank, 8 * e + 2 * row + r, 16 * warp + 2 * column + c)
    assert tile.received == (split - 1) * tile.eights * EIGHT
    stored: Counter[tuple[int, int]] = Counter()
    for rank in range(split):
        mine = (eights - rank + split - 1) // split
        assert arrived[rank] == (split - 1) * mine * 8 * 128 * 4
        for thread in range(256):
            octet, row, half, group = thread % 8, thread // 8 % 8, thread % 128 // 64, thread // 128
            for own in range(half, mine, 2):
                assert own < 2 * math.ceil(tile.eights / 2)  # of its passes
                for sender in range(split):
                    place = -1 if sender == rank else sender - (sender > rank)
                    at = own * EIGHT + row // 2 * PAIR + group * 512 + octet * 64 + row % 2 * 8
                    read = [memory[rank, place, at + (i ^ octet // 2) * 16 + 4 * j] for i in range(4) for j in (0, 1)]
                    token, column = (rank + own * split) * 8 + row, group * 64 + octet * 8
                    assert read == [(sender, token, column + j) for j in range(8)]
                stored.update((token, column + j) for j in range(8))
    assert stored == Counter({(row, column): 1 for row in range(8 * eights) for column in range(128)})


def test_configs_fit() -> None:
    for site in SITES:
        kernel = KERNELS[site.op]
        assert kernel.refuse(site, HOPPER) == "" and kernel.configs(site, HOPPER)
        for config in kernel.configs(site, HOPPER):
            (stage,) = kernel.stages(site, config, HOPPER)
            assert stage.waits and stage.block == 384 and config["STAGES"] >= 3
            assert stage.smem <= HOPPER.smem_per_block
            assert math.prod(stage.grid) <= turned.CLUSTERED[config["SPLIT"]]
            for made in stage.tensormaps:
                assert all(1 <= box <= 256 for box in made.box) and not any(step % 16 for step in made.strides)


def test_cubins() -> None:
    """Nothing spills, memory is as the estimate says, parameters as listed."""
    found = []
    for site in (*DOWN, *AWKWARD[:16:2], AWKWARD[16]):
        kernel = KERNELS[site.op]
        for config in sorted(kernel.configs(site, HOPPER), key=lambda c: -c["ROWS"])[:2]:
            found += kernel.stages(site, config, HOPPER)
    harness.examine(found, HOPPER, registers=168)
    assert all(f"TurnedTile<{stage.tensormaps[0].box[1]}, " in stage.entry for stage in found)


# ---- on a GPU -------------------------------------------------------------------------------------------------------


def case_of(site: Site, config: Config, rows: int | None = None) -> harness.Case:
    near = NEAR if product_dtype(site) == "e4m3" else 0.0
    made = inputs if rows is None else inputs_of_rows(rows)
    return harness.Case(site, KERNELS[site.op], config, made, flops_of(site), near=near)


def cases_of(sites: list[Site], **wanted: object) -> list[harness.Case]:
    return [case_of(site, config) for site in sites for config in KERNELS[site.op].configs(site, HOPPER)
            if wanted.items() <= config.items()]  # fmt: skip


def each_way_once(cases: list[harness.Case]) -> list[harness.Case]:
    """Each tile of each number of blocks that share K, of each op and type, at sites that take turns."""
    found: dict[object, list[harness.Case]] = {}
    for case in cases:
        path = case.config["ROWS"], case.config["SPLIT"], case.kernel.op, product_dtype(case.site)
        found.setdefault(path, []).append(case)
    return [same[i % len(same)] for i, same in enumerate(found.values())]


def quickest(site: Site) -> harness.Case:
    kernel = KERNELS[site.op]
    return case_of(site, min(kernel.configs(site, HOPPER), key=lambda config: kernel.cost(site, config, HOPPER)))


REAL = [quickest(site) for site in DOWN]
EVERY = cases_of(AWKWARD)
QUICK = [*each_way_once(EVERY), *EVERY[-2:]]
COUNTED = [
    replace(case, inputs=inputs_of_rows(rows))
    for site in (producer(300, 96, 4096, "rms", residual="bf16"), producer(816, 224, 1040, "layer", "e4m3", **VISION))
    for case in cases_of([limited(site)])[:3]
    for rows in (-1, 0, 1, 80, 81, 208, 299, 5000)
]
# One row in the last tile, of four blocks one has it; 32 columns; fewer chunks of K than stages, or one.
EDGES = cases_of([
    scaled(linear(161, 32, 520, **FULL), x_scale=True), linear(65, 32, 64, "f16", act="silu"),
    linear(129, 64, 72), producer(161, 96, 528, "layer", "e4m3", residual="bf16"), producer(241, 32, 144, "rms", **ADA),
])  # fmt: skip
SHARED = [*cases_of([producer(97, 96, 4096, "layer", **ADA)], SPLIT=4), *cases_of([AWKWARD[11]], SPLIT=2)]
IN_PLACE = [replace(case, in_place=((0, 3),)) for case in cases_of([AWKWARD[11], AWKWARD[13]])]
SABOTAGED = [
    harness.sabotaged(case, f"FRTC_SABOTAGE={defect}")
    for site, defects in (
        (AWKWARD[0], ("last_k_tile", "neighbour_gate", "neighbour_scale")),
        (AWKWARD[11], ("quarter_moment", "last_k_tile")), (AWKWARD[7], ("last_k_tile",)),
        (limited(AWKWARD[14]), ("row_tile",)),
    )
    for split in (1, 2)
    for case in cases_of([site], SPLIT=split)[:1]
    for defect in defects
]  # fmt: skip


def test_every_tile_is_run() -> None:
    run = {(case.config["ROWS"], case.config["SPLIT"]) for case in QUICK}
    assert {rows for rows, _ in run} == set(turned.HEIGHTS)
    assert {split for _, split in run} == set(turned.SPLITS)
    assert {case.config["SPLIT"] for case in SABOTAGED} == {1, 2} and len(SHARED) > 2
    assert {case.config["SPLIT"] for case in EDGES} == set(turned.SPLITS)


@pytest.mark.gpu
@pytest.mark.parametrize("case", harness.swept(EVERY, QUICK), ids=str)
def test_every_config(gpu: Gpu, case: harness.Case) -> None:
    harness.check(gpu, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*REAL, *IN_PLACE, *EDGES], ids=str)
def test_real(gpu: Gpu, case: harness.Case) -> None:
    harness.check(gpu, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SABOTAGED, ids=str)
def test_sabotaged(gpu: Gpu, case: harness.Case) -> None:
    harness.check_fails(gpu, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", COUNTED, ids=str)
def test_rows_that_nothing_reads(gpu: Gpu, case: harness.Case) -> None:
    operands = harness.operands_of(case)
    m, height = case.site.results[0].shape[-2], case.config["ROWS"]
    read = min(max(harness.counted(case, operands), 0), m)
    harness.check_counted(gpu, case, operands, read, min(math.ceil(read / height) * height, m))


@pytest.mark.gpu
def test_same_bits_every_time(gpu: Gpu) -> None:
    """Sums are added in the order of the blocks."""
    assert math.prod(len(harness.bits(gpu, case)) for case in SHARED) == 1
