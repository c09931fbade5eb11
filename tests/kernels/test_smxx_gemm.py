"""The tensor-core GEMM: what it accepts, its configs and cubins on every target; on a GPU results and times."""

from __future__ import annotations

import math

import numpy as np
import pytest

from frtc.codegen.nvrtc import Job, compile_all
from frtc.kernels import smxx_gemm
from frtc.kernels.product import Product, product_of
from frtc.kernels.spec import Operand, Param, Site
from frtc.kernels.targets import Target, load_targets
from tests.kernels import harness
from tests.kernels.device import Gpu
from tests.kernels.sites_gemm import (
    FULL,
    awkward_sites,
    flops_of,
    gated,
    inputs_of,
    inputs_with_rows,
    limited,
    linear,
    matmul,
    real_sites,
    rows,
    scaled,
)
from tests.kernels.tier import COMPILED

PLAIN = smxx_gemm.KERNELS[0]  # the others say the same of other ops
TARGETS = load_targets()
EVERY_TARGET = pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
SITES = [case.site for case in (*real_sites(), *awkward_sites())]


def served(site: Site, target: Target) -> bool:
    return not PLAIN.refuse(site, target)


# ---- what it accepts ------------------------------------------------------------------------------------------------


def product(site: Site) -> Product:
    found = product_of(site)
    assert isinstance(found, Product), found
    return found


def test_leading_axes_become_rows() -> None:
    x, w, y = Operand.packed("bf16", 2, 3, 5, 64), rows("bf16", 16, 64), Operand.packed("bf16", 2, 3, 5, 16)
    p = product(Site("linear", (x, w, None, None, None), (y,)))
    assert (p.batch, p.m, p.n, p.k, p.x.ld, p.y.ld) == (1, 30, 16, 64, 64, 16)


def test_a_residual_that_repeats_becomes_a_batch() -> None:
    x, w, y = Operand.packed("bf16", 3, 5, 64), rows("bf16", 16, 64), Operand.packed("bf16", 3, 5, 16)
    p = product(Site("linear", (x, w, None, Operand.packed("f32", 5, 16), None), (y,)))
    assert (p.batch, p.m) == (3, 5)
    assert p.residual is not None
    assert (p.x.batch, p.residual.batch, p.residual.ld, p.y.batch) == (320, 0, 16, 80)


def test_one_gate_for_all_rows_has_stride_zero() -> None:
    gates = [product(linear(5, 16, 64, gate="f32", per_row=per_row)).gate for per_row in (False, True)]
    assert [gate.ld for gate in gates if gate] == [0, 16]


@pytest.mark.parametrize("site", [linear(5, 16, 64), gated(5, 8, 64)], ids=["linear", "gated_linear"])
def test_rows_are_counted_by_the_last_operand(site: Site) -> None:
    whole, some = product(site), product(limited(site))
    assert whole.params()[2] == Param("i64", 0)
    assert some.params()[2] == Param("operand", len(site.operands))


def test_rows_that_a_block_cannot_count() -> None:
    """All are computed where the axis is one of several that form the rows, and where the count is no i32."""
    x, y = Operand.packed("bf16", 3, 5, 64), Operand.packed("bf16", 3, 5, 16)
    site = limited(Site("linear", (x, rows("bf16", 16, 64), None, None, None), (y,)))
    assert (product(site).m, product(site).rows) == (15, None)
    assert product(limited(linear(5, 16, 64), "i64")).rows is None


@pytest.mark.parametrize(
    ("site", "reason"),
    [
        (linear(5, 16, 64, gap=4), "rows of x are 68 elements apart (batches 0), not a multiple of 16 bytes"),
        (linear(5, 16, 64, "f32"), "x is f32 and w is f32; needs bf16 or f16 for both, e4m3 for both, or for w"),
        (linear(5, 16, 64, residual="f64"), "the epilogue has no f64"),
        (Site("gated_linear", (*gated(5, 8, 64).operands[:2], rows("bf16", 16, 64)), (rows("bf16", 5, 16),)),
         "gate and up are two weights; needs their rows interleaved in one"),
        (Site("linear", (Operand("bf16", (4, 3, 8), (8, 64, 1)), rows("bf16", 16, 8)),
              (Operand.packed("bf16", 4, 3, 16),)), ""),
        (Site("linear", (Operand("bf16", (4, 64), (1, 8)), rows("bf16", 16, 64)), (rows("bf16", 4, 16),)),
         "last axis of x has stride 8, needs 1"),
        (Site("linear", (rows("bf16", 4, 64), rows("bf16", 16, 64), None, Operand.packed("f32", 4, 1)),
              (rows("bf16", 4, 16),)), "residual repeats along the last axis"),
    ],
)  # fmt: skip
def test_refusals(site: Site, reason: str) -> None:
    assert PLAIN.refuse(site, TARGETS["hopper"]) == reason


# ---- configs --------------------------------------------------------------------------------------------------------


@EVERY_TARGET
def test_configs_fit_the_target(target: Target) -> None:
    for site in SITES:
        if not served(site, target):
            continue
        p, found = product(site), PLAIN.configs(site, target)
        assert found
        for config in found:
            tile = smxx_gemm.Tile.of(config, product(site))
            (stage,) = PLAIN.stages(site, config, target)
            assert stage.smem <= target.smem_per_block and stage.block <= 1024
            k_tiles = math.ceil(p.k / tile.bk)
            assert (tile.splits - 1) * math.ceil(k_tiles / tile.splits) < k_tiles, "every split has work"
            assert stage.grid[0] * tile.bm >= p.m and stage.grid[1] * tile.bn >= p.n


def test_split_k_has_room_for_its_sums() -> None:
    site = linear(50, 1024, 4096)
    for config in PLAIN.configs(site, TARGETS["hopper"]):
        tile = smxx_gemm.Tile.of(config, product(site))
        tiles = math.ceil(50 / tile.bm) * math.ceil(1024 / tile.bn)
        wanted = (tiles * tile.splits * tile.bm * tile.bn * 4, tiles * 4) if tile.splits > 1 else (0, 0)
        assert (PLAIN.scratch(site, config), PLAIN.counters(site, config)) == wanted


def cheapest(site: Site, target: Target) -> smxx_gemm.Tile:
    best = min(PLAIN.configs(site, target), key=lambda c: PLAIN.cost(site, c, target))
    return smxx_gemm.Tile.of(best, product(site))


def test_few_rows_spread_over_the_device_and_many_rows_use_large_tiles() -> None:
    hopper = TARGETS["hopper"]
    for m in (10, 50):
        tile = cheapest(linear(m, 1024, 4096), hopper)
        assert tile.bm < 2 * m and math.prod(tile.grid(product(linear(m, 1024, 4096)))) > hopper.sms // 2
    assert cheapest(gated(968, 16384, 2048), hopper).bm == 128


def test_rows_that_may_not_be_read_count_half() -> None:
    """A tile in one wave takes as long for fewer rows; split K does not."""
    hopper, site = TARGETS["hopper"], linear(712, 2048, 16384, residual="bf16")
    assert cheapest(site, hopper).splits == 1
    assert cheapest(limited(site), hopper).splits > 1
    for m in (560, 712):  # as before where all rows are read and the prompt fits its budget
        same = gated(m, 16384, 2048)
        assert cheapest(limited(same), hopper) == cheapest(same, hopper)


def jobs_of_every_tile(target: Target, registers: int) -> dict[str, Job]:
    """Tiles that need at least so many registers, with the epilogue that needs most, with and without split K."""
    found: dict[str, Job] = {}
    for m in (512, 40, 13):
        site = linear(m, 1024, 4096, **FULL)
        for config in PLAIN.configs(site, target):
            if smxx_gemm.Tile.of(config, product(site)).registers >= registers:
                (stage,) = PLAIN.stages(site, config, target)
                found[stage.entry] = Job.of(stage, target)
    return found


@pytest.mark.parametrize("target", COMPILED)
@pytest.mark.parametrize("registers", [180, pytest.param(0, marks=pytest.mark.full)])
def test_cubins_do_not_spill(target: Target, registers: int) -> None:
    """The stack frame of a thread is empty."""
    found = jobs_of_every_tile(target, registers)
    assert len(found) >= (20 if registers == 0 else 6)
    used = {entry: cubin.resources for entry, cubin in zip(found, compile_all(list(found.values())), strict=True)}
    assert not {entry: r for entry, r in used.items() if r.local}


# ---- on a GPU -------------------------------------------------------------------------------------------------------

CHOSEN = {
    case.name: harness.chosen(case.site, inputs=inputs_of, flops=flops_of(case.site))
    for case in (*real_sites(), *awkward_sites())
}
# The other real ones are among the sites of the policies.
QUICK = [CHOSEN[name] for name in CHOSEN if name.endswith(("968 tokens", "chunk 10"))]
QUICK += [CHOSEN[case.name] for case in awkward_sites()]
EVERY_CONFIG = [
    case
    for site in (
        linear(130, 200, 1000, **FULL), linear(50, 136, 1021, **FULL), linear(10, 136, 1021, **FULL),
        gated(61, 100, 600), matmul((2,), 130, 203, 77),
    )
    for case in harness.every_config(site, inputs=inputs_of, flops=flops_of(site))
]  # fmt: skip
SPLIT = [case for case in EVERY_CONFIG if case.config.get("SPLITS", 1) > 2]
BY_ROW = harness.chosen(linear(50, 1024, 4096, **FULL), inputs=inputs_of)
SABOTAGED = [
    *(harness.sabotaged(case, "FRTC_SABOTAGE=last_k_tile") for case in (BY_ROW, SPLIT[0], SPLIT[-1])),
    harness.sabotaged(harness.chosen(gated(50, 4096, 1024), inputs=inputs_of), "FRTC_SABOTAGE=last_k_tile"),
    harness.sabotaged(harness.chosen(linear(70, 130, 588, "f32"), inputs=inputs_of), "FRTC_SABOTAGE=last_k_tile"),
    harness.sabotaged(harness.chosen(linear(50, 32, 1024, "f32"), inputs=inputs_of), "FRTC_SABOTAGE=last_k_tile"),
    *(harness.sabotaged(case, "FRTC_SABOTAGE=neighbour_gate") for case in (BY_ROW, SPLIT[0])),
]


def of_rows(site: Site, rows: int, splits: bool = False) -> harness.Case:
    """A site of which only `rows` rows are read; with split K where asked."""
    cases = harness.every_config(limited(site), inputs=inputs_with_rows(rows))
    return next(case for case in cases if (case.config["SPLITS"] > 2) == splits)


M_LIMITED = (
    300  # rows of tiles of 128 and 64: none, some in the middle of a tile, to its edge, all, more than there are
)
LIMITED = [
    of_rows(site, rows, splits)
    for rows in (-1, 0, 1, 100, 128, 129, 256, M_LIMITED, 1000)
    for site, splits in ((linear(M_LIMITED, 136, 1021, **FULL), False), (gated(M_LIMITED, 100, 600), False))
]
LIMITED_SPLIT = [of_rows(linear(M_LIMITED, 136, 2040, residual="bf16"), rows, True) for rows in (0, 96, 97, M_LIMITED)]
LIMITED_SCALED = [
    of_rows(scaled(linear(M_LIMITED, 136, 2040, **FULL), x, x_scale=True), rows)
    for x in ("e4m3", "bf16")
    for rows in (0, 97, M_LIMITED)
]
LIMITED_F32 = harness.every_config(limited(linear(M_LIMITED, 136, 200, "f32")), inputs=inputs_with_rows(97))
TILE_TOO_FEW = [
    harness.sabotaged(c, "FRTC_SABOTAGE=row_tile") for c in (LIMITED[6], LIMITED_SPLIT[-1], LIMITED_SCALED[-1])
]


def wrong_rows(gpu: Gpu, case: harness.Case) -> list[str]:
    """Faults in the rows that are read, and rows that were written in tiles beyond them."""
    operands = harness.operands_of(case)
    rows = product(case.site).rows
    assert rows is not None
    count = operands[rows]
    assert count is not None
    with harness.Buffers(gpu, case, operands) as buffers:
        for _ in range(2):  # the second run meets the counters that the first one left
            for launch in buffers.launches():
                gpu.launch(*launch)
        gpu.synchronize()
        (got,), (want,) = buffers.results(), harness.expected(case, operands)
    read, tile = min(max(int(count), 0), len(got)), case.config.get("BM") or case.config["ROWS"] or 1
    computed = min(math.ceil(read / tile) * tile, len(got))
    wrong, _ = harness.faults(case, [got[:read]], [want[:read]]) if read else ([], 0.0)
    stray = int(np.count_nonzero(~np.isnan(got[computed:].astype(np.float32))))
    return [*wrong, *([f"{stray} elements written beyond row {computed}"] if stray else [])]


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*LIMITED, *LIMITED_SPLIT, *LIMITED_SCALED, *LIMITED_F32])
def test_rows_that_nothing_reads(gpu: Gpu, case: harness.Case) -> None:
    wrong = wrong_rows(gpu, case)
    assert not wrong, wrong


@pytest.mark.gpu
@pytest.mark.parametrize("case", TILE_TOO_FEW)
def test_a_tile_too_few(gpu: Gpu, case: harness.Case) -> None:
    assert wrong_rows(gpu, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", harness.swept([*CHOSEN.values()], QUICK), ids=str)
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
@pytest.mark.parametrize("case", harness.swept([BY_ROW, *SPLIT], [BY_ROW, *SPLIT[::6]]), ids=str)
def test_same_bits_every_time(gpu: Gpu, case: harness.Case) -> None:
    """Blocks arrive in another order each time; the sums may not notice."""
    assert len(harness.bits(gpu, case)) == 1
