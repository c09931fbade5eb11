"""fp32 products on tensor cores: what they accept, when they are chosen, cubins; on a GPU results and times."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from frtc.codegen.nvrtc import Job, compile_all, ptx_of
from frtc.kernels import smxx_tf32_gemm
from frtc.kernels.catalog import CATALOG
from frtc.kernels.product import Product, product_of
from frtc.kernels.spec import Operand, Site
from frtc.kernels.targets import Target, load_targets
from tests.kernels import harness
from tests.kernels.device import Gpu
from tests.kernels.sites_gemm import FULL, flops_of, gated, inputs_of, linear, matmul, patch_embedding
from tests.kernels.test_smxx_gemm import of_rows, wrong_rows
from tests.kernels.tier import COMPILED

PLAIN = smxx_tf32_gemm.KERNELS[0]  # the others say the same of other ops
TARGETS = load_targets()
HOPPER = TARGETS["hopper"]
PATCHES = linear(512, 1152, 588, "f32", bias="f32")
# Rows, columns and K inside a tile, at its edge and beyond, with all that an epilogue takes and with little.
AWKWARD = (
    linear(1, 1001, 333, "f32"),
    linear(7, 203, 2050, "f32", **FULL),
    linear(50, 95, 31, "f32", **FULL),
    linear(561, 1100, 588, "f32", bias="f32", residual="f32"),
    linear(130, 200, 1000, "f32", **FULL, out="bf16", gap=4),
    gated(61, 100, 605, "f32", "silu"),
    patch_embedding(2),
)


def product(site: Site) -> Product:
    found = product_of(site)
    assert isinstance(found, Product), found
    return found


def of_types(x: str, w: str) -> Site:
    site = linear(50, 32, 1024, "f32")
    before, weights, *others = site.operands
    assert before is not None and weights is not None
    return replace(site, operands=(replace(before, dtype=x), replace(weights, dtype=w), *others))


@pytest.mark.parametrize(
    ("site", "reason"),
    [
        (linear(5, 16, 64, "f32"), ""),
        (gated(5, 8, 64, "f32"), ""),
        (patch_embedding(2), ""),
        (linear(5, 16, 64), "x is bf16 and w is bf16; needs f32 for both"),
        (of_types("bf16", "f32"), "x is bf16 and w is f32; needs f32 for both"),
        (linear(5, 16, 64, "f32", gap=3), "rows of x are 67 elements apart (batches 0), not a multiple of 16 bytes"),
        (linear(5, 16, 64, "f32", out="f64"), "the epilogue has no f64"),
        (Site("linear", (Operand("f32", (4, 64), (1, 4)), *linear(4, 16, 64, "f32").operands[1:]),
              (Operand.packed("f32", 4, 16),)), "last axis of x has stride 4, needs 1"),
    ],
)  # fmt: skip
def test_refusals(site: Site, reason: str) -> None:
    assert PLAIN.refuse(site, HOPPER) == reason


def test_no_products_of_activations() -> None:
    served = {kernel.op for kernel in smxx_tf32_gemm.KERNELS}
    assert served == {"linear", "gated_linear", "linear_moments"} and matmul((3,), 7, 8, 9, "f32").op not in served


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_configs_fit_the_target(target: Target) -> None:
    for site in (*AWKWARD, PATCHES):
        p, found = product(site), PLAIN.configs(site, target)
        assert found
        for config in found:
            tile = smxx_tf32_gemm.Tile.of(config, p)
            (stage,) = PLAIN.stages(site, config, target)
            assert tile.config() == config
            assert stage.smem <= target.smem_per_block and stage.block == 32 * tile.warps <= 1024
            k_tiles = math.ceil(p.k / 32)
            assert (tile.splits - 1) * math.ceil(k_tiles / tile.splits) < k_tiles, "every split has work"
            assert stage.grid[0] * tile.bm >= p.m and stage.grid[1] * tile.bn >= p.n
            assert stage.grid[2] == max(p.batch, tile.splits)


def test_split_k_has_room_for_its_sums() -> None:
    seen = set()
    for config in PLAIN.configs(PATCHES, HOPPER):
        bm, bn, splits = (config[name] for name in ("BM", "BN", "SPLITS"))
        tiles = math.ceil(512 / bm) * math.ceil(1152 / bn)
        wanted = (tiles * splits * bm * bn * 4, tiles * 4) if splits > 1 else (0, 0)
        assert (PLAIN.scratch(PATCHES, config), PLAIN.counters(PATCHES, config)) == wanted
        seen.add(splits)
    assert {1, 2, 4} <= seen


# ---- when they are chosen -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a100", "orin", "hopper", "thor"])
def test_many_outputs_go_to_tensor_cores(name: str) -> None:
    """Where three products are faster there than one on the ordinary units; on rtx4090 and rtx5090 it is a draw."""
    for site in (PATCHES, patch_embedding(1), linear(3072, 768, 768, "f32"), linear(50, 1024, 2048, "f32")):
        assert CATALOG.select(site, TARGETS[name]).kernel.name == "smxx_tf32_gemm"


def test_few_outputs_and_odd_rows_stay() -> None:
    few = [linear(m, n, k, "f32") for m, n, k in ((1, 1024, 32), (10, 1024, 32), (10, 32, 1024), (50, 32, 1024))]
    for site in (*few, of_types("bf16", "f32")):
        choice = CATALOG.select(site, HOPPER)
        assert (choice.kernel.name, choice.config) == ("smxx_linear_f32", {"ROWS": 0})
    assert CATALOG.select(linear(512, 1152, 589, "f32", gap=3), HOPPER).kernel.name == "smxx_linear_f32"


def test_the_patch_embedding_is_one_wave() -> None:
    choice = CATALOG.select(PATCHES, HOPPER)
    (stage,) = choice.kernel.stages(PATCHES, choice.config, HOPPER)
    assert 0.9 * HOPPER.sms <= math.prod(stage.grid) <= HOPPER.sms


# ---- machine code ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", COMPILED)
def test_cubins_do_not_spill(target: Target) -> None:
    jobs = {
        stage.entry: Job.of(stage, target)
        for m in (70, 20)
        for site in (linear(m, 200, 2048, "f32", **FULL), linear(m, 200, 2048, "f32"))
        for config in PLAIN.configs(site, target)
        for stage in PLAIN.stages(site, config, target)
    }
    assert len(jobs) == 4 * len(smxx_tf32_gemm.TILES)
    used = {entry: cubin.resources for entry, cubin in zip(jobs, compile_all(list(jobs.values())), strict=True)}
    assert not {entry: r for entry, r in used.items() if r.local}


def longest_chain(text: str) -> int:
    """Of the products in PTX that add to one another's results."""
    depth: dict[str, int] = {}
    for line in text.splitlines():
        if move := re.match(r"\s*mov\.f32\s+(%f\d+), (\S+);", line):
            depth[move[1]] = depth.get(move[2], 0)
        elif product := re.match(r"\s*mma\.sync\S+ \{(%f\d+),.*\{(%f\d+),", line):
            depth[product[1]] = depth.get(product[2], 0) + 1
    return max(depth.values())


def test_small_warps_have_a_sum_for_each_product() -> None:
    """Four steps of K in a tile: as many products wait for each other there, and three times as many elsewhere."""
    chains = {}
    for config in PLAIN.configs(PATCHES, HOPPER):
        if config["SPLITS"] == 1:
            tile = smxx_tf32_gemm.Tile.of(config, product(PATCHES))
            (stage,) = PLAIN.stages(PATCHES, config, HOPPER)
            chains[tile] = longest_chain(ptx_of(Job.of(stage, HOPPER)))
    assert len(chains) == len(smxx_tf32_gemm.TILES)
    assert chains == {tile: 12 // tile.sums for tile in chains}
    assert {tile.wm * tile.wn for tile in chains if tile.sums == 3} == {16 * 8, 16 * 16}


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_no_tile_is_bound_by_a_chain_of_products(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def costs() -> list[float]:
        return [PLAIN.cost(PATCHES, c, target) for c in PLAIN.configs(PATCHES, target)]

    chained = costs()
    monkeypatch.setattr(smxx_tf32_gemm, "MMA_CLOCKS", 0)
    assert chained == costs()


def test_a_chain_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small warp with one sum for all products."""
    site = linear(50, 1024, 1024, "f32")
    config = next(c for c in PLAIN.configs(site, HOPPER) if (c["BM"], c["BN"], c["SPLITS"]) == (16, 32, 1))
    apart = PLAIN.cost(site, config, HOPPER)
    monkeypatch.setattr(smxx_tf32_gemm, "FEW_FRAGMENTS", 0)
    assert PLAIN.cost(site, config, HOPPER) > 1.2 * apart


def test_three_products_for_one() -> None:
    """Warps of 16 x 40, four steps of K in a tile, and no rounding that takes four more instructions."""
    config = next(c for c in PLAIN.configs(PATCHES, HOPPER) if (c["BN"], c["SPLITS"]) == (80, 1))
    (stage,) = PLAIN.stages(PATCHES, config, HOPPER)
    text = ptx_of(Job.of(stage, HOPPER))
    products = text.count("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32")
    assert products == text.count("mma.sync") == 3 * 4 * 5
    assert "cvt.rna.tf32" not in text


# ---- on a GPU -------------------------------------------------------------------------------------------------------


def cases_of(site: Site, **about: Any) -> list[harness.Case]:
    """All configs of these kernels."""
    about = {"inputs": inputs_of, "flops": flops_of(site), **about}
    return [case for case in harness.every_config(site, **about) if case.kernel in smxx_tf32_gemm.KERNELS]


EVERY_CONFIG = [case for site in AWKWARD for case in cases_of(site)]
OF_PATCHES = [case for case in cases_of(PATCHES) if case.config["SPLITS"] == 1]
POLICIES = [
    harness.chosen(site, inputs=inputs_of, flops=flops_of(site))
    for m, n, k in (
        (50, 1024, 32), (50, 1024, 1024), (50, 1024, 2048), (10, 1024, 2048), (50, 720, 1440),
        (256, 1152, 588), (768, 1152, 588), (1024, 768, 768), (3072, 768, 768),
    )
    for site in (linear(m, n, k, "f32", bias="f32"),)
]  # fmt: skip
SPLIT = [case for case in EVERY_CONFIG if case.config["SPLITS"] > 2]


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*OF_PATCHES, *POLICIES], ids=str)
def test_real(gpu: Gpu, case: harness.Case) -> None:
    harness.check(gpu, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", harness.swept(EVERY_CONFIG, harness.once(EVERY_CONFIG, splits=1)), ids=str)
def test_every_config(gpu: Gpu, case: harness.Case) -> None:
    wrong, _, _ = harness.run(gpu, case)
    assert not wrong, wrong


@pytest.mark.gpu
@pytest.mark.parametrize("case", [OF_PATCHES[0], SPLIT[0], SPLIT[-1]], ids=str)
def test_sabotaged(gpu: Gpu, case: harness.Case) -> None:
    harness.check_fails(gpu, harness.sabotaged(case, "FRTC_SABOTAGE=last_k_tile"))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [-1, 0, 97, 128, 300])
def test_rows_that_nothing_reads(gpu: Gpu, rows: int) -> None:
    site = linear(300, 136, 1021, "f32", **FULL)
    for splits in (False, True):
        wrong = wrong_rows(gpu, of_rows(site, rows, splits))
        assert not wrong, wrong


@pytest.mark.gpu
def test_a_tile_too_few(gpu: Gpu) -> None:
    case = of_rows(linear(300, 136, 1021, "f32"), 256)
    assert wrong_rows(gpu, harness.sabotaged(case, "FRTC_SABOTAGE=row_tile"))


@pytest.mark.gpu
@pytest.mark.parametrize("case", SPLIT[::7], ids=str)
def test_same_bits_every_time(gpu: Gpu, case: harness.Case) -> None:
    """Blocks arrive in another order each time; the sums may not notice."""
    assert len(harness.bits(gpu, case)) == 1
