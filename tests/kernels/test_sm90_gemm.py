"""Products on wgmma: what they accept, tensor maps, cubins; on a GPU every config at sizes that no tile divides."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from frtc.codegen.nvrtc import Job, compile_all
from frtc.kernels import sm90_finish_gemm, sm90_gemm, sm90_rope_gemm
from frtc.kernels.product import Product, product_of
from frtc.kernels.smxx_finish_gemm import as_product
from frtc.kernels.spec import Config, Kernel, Site
from frtc.kernels.targets import Target, load_targets
from tests.kernels import harness, sites_finish, sites_rope_gemm
from tests.kernels.device import Gpu
from tests.kernels.sites_gemm import FULL, gated, inputs_of, limited, linear, scaled
from tests.kernels.sites_policies import policy_sites

TARGETS = load_targets()
HOPPER = TARGETS["hopper"]
KERNELS = {k.op: k for k in sm90_gemm.KERNELS}
ROPE, FINISH = sm90_rope_gemm.KERNELS[0], {k.op: k for k in sm90_finish_gemm.KERNELS}


def product(site: Site) -> Product:
    found = product_of(site)
    assert isinstance(found, Product), found
    return found


def kernel_of(site: Site) -> Kernel:
    return FINISH[site.op] if site.op in ("linear_norm",) or site.attrs.get("per_row") else KERNELS[site.op]


@pytest.mark.parametrize(
    ("site", "reason"),
    [
        (scaled(linear(50, 64, 128)), ""),
        (linear(50, 64, 128, "f16"), ""),
        (linear(50, 64, 128, "f32"), "x is f32 and w is f32; needs bf16, f16 or e4m3 for both"),
        (scaled(linear(50, 64, 128), "bf16"), "x is bf16 and w is e4m3; needs bf16, f16 or e4m3 for both"),
        (linear(5, 16, 64, gap=4), "rows of x are 68 elements apart, not a multiple of 16 bytes behind each other"),
    ],
)  # fmt: skip
def test_refusals(site: Site, reason: str) -> None:
    assert KERNELS[site.op].refuse(site, HOPPER) == reason


@pytest.mark.parametrize("target", [t for t in TARGETS.values() if t is not HOPPER], ids=lambda t: t.name)
def test_only_hopper_has_wgmma(target: Target) -> None:
    assert KERNELS["linear"].refuse(linear(50, 64, 128), target) == "needs wgmma"


def served() -> list[tuple[Kernel, Site]]:
    """The policies' products that wgmma takes, with the kernel that does."""
    pairs = []
    for site in policy_sites():
        for kernel in (*sm90_gemm.KERNELS, ROPE, *sm90_finish_gemm.KERNELS):
            if kernel.op == site.op and not kernel.refuse(site, HOPPER):
                pairs.append((kernel, site))
    return pairs


def best(kernel: Kernel, site: Site, count: int = 1) -> list[Config]:
    found = sorted(kernel.configs(site, HOPPER), key=lambda config: kernel.cost(site, config, HOPPER))
    return list(found[:count])


def test_configs_fit_and_cover() -> None:
    assert len(served()) >= 60
    for kernel, site in served():
        for config in kernel.configs(site, HOPPER):
            assert config["STAGES"] >= 2
            for stage in kernel.stages(site, config, HOPPER):
                assert stage.smem <= HOPPER.smem_per_block and stage.block <= 1024 and stage.waits
                for made in stage.tensormaps:
                    assert all(1 <= box <= 256 for box in made.box)
                    assert not any(step % 16 for step in made.strides)


def test_permuted_rows_cover_w() -> None:
    """The five axes of the map name each row of w once, in the places that the accumulators have."""
    (stage,) = KERNELS["linear"].stages(linear(50, 64, 128), best(KERNELS["linear"], linear(50, 64, 128))[0], HOPPER)
    rows = harness.rows_in_order(stage.tensormaps[1], 2)
    assert sorted(rows) == list(range(64))
    assert rows[:8] == [0, 1, 8, 9, 16, 17, 24, 25]


SPILL_SITES = [
    scaled(linear(560, 2048, 2048, **FULL), out="e4m3", x_scale=True),
    scaled(gated(560, 4096, 1024), out="e4m3", x_scale=True),
    linear(512, 1000, 1152, **FULL),
]


def test_cubins_do_not_spill() -> None:
    jobs = {}
    for site in SPILL_SITES:
        for shape in best(KERNELS[site.op], site, 3):
            (stage,) = KERNELS[site.op].stages(site, shape, HOPPER)
            jobs[stage.entry] = Job.of(stage, HOPPER)
    used = {entry: cubin.resources for entry, cubin in zip(jobs, compile_all(list(jobs.values())), strict=True)}
    assert not {entry: r for entry, r in used.items() if r.local}


@pytest.mark.full
def test_no_cubin_spills() -> None:
    """But for tiles of three warpgroups, which have 128 registers until the producer has given up its share."""
    jobs = {}
    for site in SPILL_SITES:
        for config in KERNELS[site.op].configs(site, HOPPER):
            (stage,) = KERNELS[site.op].stages(site, config, HOPPER)
            jobs[stage.entry] = Job.of(stage, HOPPER)
    used = {entry: cubin.resources for entry, cubin in zip(jobs, compile_all(list(jobs.values())), strict=True)}
    assert not {entry: r for entry, r in used.items() if r.local > (64 if "Parts::rows, 3," in entry else 0)}


# ---- on a GPU -------------------------------------------------------------------------------------------------------


# Tensor cores add products of e4m3 in fewer bits than fp32 has (cuBLAS shows the same, test_smxx_gemm_e4m3.py): what is
# small because large terms cancel is off by a share of the large ones.
NEAR = 1e-2


def cases(kernel: Kernel, site: Site, configs: list[Config], inputs: object) -> list[harness.Case]:
    near = NEAR if product_dtype(site) == "e4m3" else 0.0
    return [harness.Case(site, kernel, config, inputs=inputs, near=near) for config in configs]  # type: ignore[arg-type]


def product_dtype(site: Site) -> str:
    x = site.operands[0]
    assert x is not None
    return x.dtype


AWKWARD = [
    scaled(linear(561, 2040, 1040, **FULL), x_scale=True),
    scaled(linear(130, 200, 1008, **FULL), out="e4m3"),
    scaled(linear(50, 1024, 2048, **FULL)),
    scaled(linear(7, 320, 4096, **FULL)),
    scaled(linear(1, 64, 272)),
    linear(561, 1000, 1152, **FULL),
    linear(50, 136, 1024, **FULL),
    linear(10, 96, 4096, residual="bf16"),
    linear(13, 64, 520, "f16"),
]
GATED = [
    scaled(gated(561, 3008, 1040), out="e4m3", x_scale=True),
    gated(700, 3000, 600),
    scaled(gated(50, 4096, 1024), out="e4m3"),
    gated(10, 200, 1024),
]
EVERY = [c for s in (*AWKWARD, *GATED) for c in cases(KERNELS[s.op], s, KERNELS[s.op].configs(s, HOPPER), inputs_of)]
ROPED = [
    c
    for s in (*sites_rope_gemm.real_sites(), *sites_rope_gemm.fp8_sites(), *sites_rope_gemm.awkward_sites())
    if not ROPE.refuse(s, HOPPER)
    for c in cases(ROPE, s, best(ROPE, s, 3), sites_rope_gemm.inputs)
]
FINISHED = [
    c
    for s in (*sites_finish.expert_sites(), *sites_finish.fp8_sites(), *sites_finish.scaled_sites(),
              *sites_finish.awkward_sites())
    if s.op in FINISH and not FINISH[s.op].refuse(s, HOPPER)
    for c in cases(FINISH[s.op], s, best(FINISH[s.op], s, 4), sites_finish.inputs)
]  # fmt: skip


def each_tile_once(cases: list[harness.Case]) -> list[harness.Case]:
    """Each tile, alone and sharing K, of each op and type, at sites that take turns."""
    found: dict[object, list[harness.Case]] = {}
    for case in cases:
        tile = tuple(case.config[name] for name in ("BLOCKS", "WN", "PARTS", "WARPGROUPS"))
        found.setdefault((tile, case.config["SPLIT"] > 1, case.kernel.op, product_dtype(case.site)), []).append(case)
    return [same[i % len(same)] for i, same in enumerate(found.values())]


QUICK = each_tile_once(EVERY)


@pytest.mark.gpu
@pytest.mark.parametrize("case", harness.swept(EVERY, QUICK))
def test_gemm(gpu: Gpu, case: harness.Case) -> None:
    harness.check(gpu, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", harness.swept(ROPED, ROPED[::3]), ids=str)
def test_rope_gemm(gpu: Gpu, case: harness.Case) -> None:
    harness.check(gpu, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", harness.swept(FINISHED, FINISHED[::4]), ids=str)
def test_finish_gemm(gpu: Gpu, case: harness.Case) -> None:
    harness.check(gpu, case)


def with_parts(site: Site, **wanted: object) -> harness.Case:
    kernel = KERNELS[site.op]
    found = [c for c in kernel.configs(site, HOPPER) if all(c[name] == value for name, value in wanted.items())]
    return harness.Case(site, kernel, found[0], inputs=inputs_of, near=NEAR)


SHARED_K, TURNS = with_parts(AWKWARD[2], SPLIT=4), with_parts(GATED[0], PARTS="turns")
SABOTAGED = [
    *(harness.sabotaged(case, "FRTC_SABOTAGE=last_k_tile") for case in (SHARED_K, TURNS, EVERY[0])),
    harness.sabotaged(EVERY[0], "FRTC_SABOTAGE=neighbour_gate"),
    harness.sabotaged(EVERY[0], "FRTC_SABOTAGE=neighbour_scale"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", SABOTAGED, ids=str)
def test_gemm_sabotaged(gpu: Gpu, case: harness.Case) -> None:
    harness.check_fails(gpu, case)


def meeting() -> list[tuple[Site, Config]]:
    """Candidates whose blocks wait for each other and are more than SMs hold one each of."""
    found = []
    for n, k, kind in (
        (1024, 2048, "ada"),
        (1024, 4096, "ada"),
        (1012, 4096, "ada"),
        (1044, 4096, "ada"),
        (996, 2048, "layer"),
    ):
        plain = sites_finish.linear_norm(
            50, n, k, kind, bias="bf16", residual="bf16", gate="bf16" if kind == "ada" else ""
        )
        fast = sites_finish.in_fp8(plain, x_scale=True)
        for site in (plain, fast, sites_finish.per_row(fast)):
            for config in FINISH["linear_norm"].configs(site, HOPPER):
                tile = sm90_gemm.Tile.of(config, product_of(as_product(site)))
                blocks = math.prod(tile.tiles(product_of(as_product(site)))) * tile.split
                if config["FINISH"] == "spread" and blocks > sm90_gemm.CLUSTERED[tile.split]:
                    found.append((site, config))
    return found


def test_blocks_that_meet_fit_on_the_sms() -> None:
    """Two of 160 threads on an SM: three warps on each of its four parts, of 16,384 registers in units of 256 a warp.

    Rows that end inside a group of columns may spill a little instead.
    """
    cases, jobs, ragged = meeting(), {}, set()
    for site, config in cases:
        (stage,) = FINISH["linear_norm"].stages(site, config, HOPPER)
        assert config["WN"] == 32 and stage.block == 160 and 2 * (stage.smem + 1280) <= HOPPER.smem_per_sm
        jobs[stage.entry] = Job.of(stage, HOPPER)
        if site.results[0].shape[-1] % 8:
            ragged.add(stage.entry)
    assert len(jobs) > 8
    for entry, cubin in zip(jobs, compile_all(list(jobs.values())), strict=True):
        assert cubin.resources.registers <= 168 and (entry in ragged or not cubin.resources.local)


@pytest.mark.parametrize(
    ("tall", "wide", "blocks"),
    [
        (13, 128, 130),  # 816 rows: gate and up
        (13, 132, 132),  # in 130 blocks some would have 14 tiles
        (12, 128, 132),  # the same rows anyway
        (9, 128, 132),  # six blocks are too many to spare
        (7, 2, 14),  # one tile each
    ],
)
def test_blocks_that_keep_their_rows(tall: int, wide: int, blocks: int) -> None:
    assert sm90_gemm.Tile._even(min(132, tall * wide), tall, wide) == blocks


@pytest.mark.parametrize(
    ("rows", "live", "wide", "blocks", "wn", "found"),
    [
        (816, 816, 128, 1, 256, 0),  # 13 tiles high, in 130 blocks
        (816, 816, 132, 1, 256, 13),  # in 132: in 130 some would have 14 tiles
        (816, 653, 128, 1, 256, 11),  # in 130 for all rows, of which fewer are there
        (560, 560, 128, 1, 256, 9),
        (560, 560, 256, 3, 128, 0),  # three high
        (816, 816, 256, 2, 128, 2 * 14),  # seven high
    ],
)
def test_rows_that_a_block_keeps_cost_less(rows: int, live: int, wide: int, blocks: int, wn: int, found: int) -> None:
    """found: how often a block finds factors of 64 rows, beside the first time."""
    tile = sm90_gemm.Tile(blocks, wn, "turns", 2, 5, 1)
    p = product(linear(rows, wide * wn, 2048))
    plain, normed = (sm90_gemm._cost_us(one, live, tile, HOPPER) for one in (p, replace(p, norm="rms")))
    assert normed - plain == pytest.approx(found * sm90_gemm.ROW_FACTORS_US) and sm90_gemm.ROW_FACTORS_US > 0


@pytest.mark.parametrize(
    ("site", "tile"),
    [
        # bench/results/product_times.json
        (scaled(limited(gated(560, 16384, 2048)), out="e4m3"), (3, 128, "turns", 2)),
        # bench/results/chain_search_views1.json; there is no norm here, which makes less of a difference
        (scaled(limited(gated(304, 16384, 2048)), out="e4m3"), (1, 256, "turns", 2)),
        # bench/results/chain_search_views3.json
        (scaled(limited(linear(816, 2048, 16384))), (1, 128, "rows", 2)),
    ],
    ids=["gated 560", "gated 304", "linear 816"],
)
def test_what_was_quickest_is_taken(site: Site, tile: tuple[int, int, str, int]) -> None:
    config = best(KERNELS[site.op], site)[0]
    assert (config["BLOCKS"], config["WN"], config["PARTS"], config["WARPGROUPS"], config["SPLIT"]) == (*tile, 1)
