"""sm90_attention: which sites it takes, its tensor maps, what it compiles to, and, on a GPU, what it computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from frtc.codegen.nvrtc import compile_all
from frtc.kernels.cubin import operations_of, waits
from frtc.kernels.dtypes import DTYPES
from frtc.kernels.sm90_attention import KERNELS, ROWS, candidates, configs, cost, refuse, stages
from frtc.kernels.spec import Operand, Site
from frtc.kernels.targets import load_targets
from tests.kernels.device import Gpu
from tests.kernels.harness import Buffers, Case, check, check_fails, in_turn, operands_of, sabotaged, span_bytes, swept
from tests.kernels.sites_attention import (
    AttentionSite,
    awkward_sites,
    cached_site,
    heads_apart,
    in_e4m3,
    real_sites,
    rows_of,
    self_site,
    with_mask,
)

TARGETS = load_targets()
HOPPER = TARGETS["hopper"]
(KERNEL,) = KERNELS
SHARED, REGISTERS, WARPGROUP = 0x9F0, 0xDF0, 0x9C5  # operations of sm_90: wgmma by where A is; its fences and waits
REAL = [site for site in real_sites() if refuse(site.site, HOPPER) == ""]
EDGES = [
    *(AttentionSite(f"length {n}", cached_site((8, 1), 19, 700, 256, resume=690), n) for n in (0, 1, 47, 96, 690)),
    AttentionSite("a hole within a tile", cached_site((8, 1), 10, 120, 256, resume=70), 3),
    AttentionSite("no keys resumed", cached_site((8, 1), 10, 500, 256, resume=500), 499),
    AttentionSite("heads apart, many", heads_apart(self_site(2, 16, 250, 72))),
    AttentionSite("heads of one row", replace(self_site(1, 2, 1, 64), attrs={"scale": 0.125}), 1),
    AttentionSite("f16, wide", cached_site((8, 1), 61, 333, 256, dtype="f16"), 300),
]
AWKWARD = [*(site for site in awkward_sites() if refuse(site.site, HOPPER) == ""), *EDGES]
E4M3 = [in_e4m3(site, False) for site in (*REAL, *AWKWARD) if "prompt 48 of 200" not in site.name]
ALL = {site.name: site for site in (*REAL, *AWKWARD, *E4M3)}
PREFIX, VISION = ALL["prefix 2 views, prompt 48 of 48"], ALL["vision 2 views"]
BUDGET = ALL["prefix 2 views, prompt 48 of 200"]  # whose last keys are hidden
STEP = ALL["step 2 views, prompt 48 of 48, chunk 50"]


def cases_of(about: AttentionSite) -> list[Case]:
    return [Case(about.site, KERNEL, config, **about.judged) for config in configs(about.site, HOPPER)]


def best(about: AttentionSite) -> Case:
    return min(cases_of(about), key=lambda case: cost(case.site, case.config, HOPPER))


# ---- which sites, which configs -------------------------------------------------------------------------------------


def changed(site: Site, index: int, operand: Operand | None) -> Site:
    return replace(site, operands=(*site.operands[:index], operand, *site.operands[index + 1 :]))


REFUSED = [
    (with_mask(VISION.site, 2, 1, 1, 256), "a mask"),
    (replace(PREFIX.site, attrs={**PREFIX.site.attrs, "causal": True}), "causality"),
    (in_e4m3(VISION, True).site, "a scale for each token"),
    (replace(VISION.site, results=(replace(VISION.site.results[0], dtype="f32"),)),
     "result is f32: needs bf16, f16 or e4m3"),
    (changed(STEP.site, 0, Operand.packed("f32", 1, 8, 50, 256)),
     "q, k, v are f32, bf16, bf16: needs one of bf16, f16"),
    (cached_site((8, 1), 10, 50, 264), "head sizes 264 and 264: need multiples of 8 up to 256"),
    (changed(VISION.site, 1, Operand("bf16", (2, 16, 256, 72), (18432, 0, 72, 1))),
     "k repeats along an axis: strides [18432, 0, 72, 1]"),
    (self_site(1, 70000, 1, 16), "70000 batches times key heads: the grid allows 65535"),
]  # fmt: skip


@pytest.mark.parametrize(("site", "reason"), REFUSED, ids=[reason[:40] for _, reason in REFUSED])
def test_refuses(site: Site, reason: str) -> None:
    assert refuse(site, HOPPER) == reason


@pytest.mark.parametrize("target", [t for name, t in TARGETS.items() if name != "hopper"], ids=lambda t: t.name)
def test_other_targets_have_no_wgmma(target: Any) -> None:
    assert refuse(VISION.site, target) == f"{target.nvcc} has no wgmma or no tensor maps"


def test_real_sites_are_taken() -> None:
    assert [site.name for site in real_sites()] == [site.name for site in REAL]


def test_configs_fit_and_exclusions_have_reasons() -> None:
    for about in ALL.values():
        taken = configs(about.site, HOPPER)
        assert taken == [config for config, reason in candidates(about.site, HOPPER) if not reason]
        for config in taken:
            (stage,) = stages(about.site, config, HOPPER)
            assert stage.smem <= HOPPER.smem_per_block and stage.waits
            assert cost(about.site, config, HOPPER) > 0
    reasons = [reason for _, reason in candidates(PREFIX.site, HOPPER)]
    assert reasons == ["", "", "", "needs 294952 bytes of shared memory, a block has 232448"]


def test_the_largest_tile_leaves_room_for_the_barriers() -> None:
    (stage,) = stages(PREFIX.site, {"BN": 96}, HOPPER)
    assert stage.smem == 229376 + 40 <= HOPPER.smem_per_block


def test_heads_of_a_key_head_share_a_tile() -> None:
    (prefix,) = stages(PREFIX.site, {"BN": 96}, HOPPER)
    assert prefix.grid == (70, 1, 1) and prefix.entry.endswith(" 256, 256, 96, 8>")
    (vision,) = stages(VISION.site, {"BN": 128}, HOPPER)
    assert vision.grid == (4, 16, 2) and vision.entry.endswith(" 72, 72, 128, 1>")
    (thirds,) = stages(ALL["groups of 3"].site, {"BN": 64}, HOPPER)
    assert thirds.grid == (1, 15, 1) and thirds.entry.endswith(" 64, 64, 64, 1>")


# ---- tensor maps ----------------------------------------------------------------------------------------------------


def test_maps_of_heads_side_by_side() -> None:
    q, k, v = stages(VISION.site, {"BN": 128}, HOPPER)[0].tensormaps
    assert (q.extents, q.strides, q.box) == ((72, 16, 256, 2), (144, 6912, 1769472), (64, 1, 64, 1))
    assert (k.extents, k.strides, k.box) == ((72, 16, 256, 2), (144, 6912, 1769472), (64, 1, 128, 1))
    assert (k.box, k.strides) == (v.box, v.strides) and {q.swizzle, k.swizzle, v.swizzle} == {128}


def test_maps_of_a_cache() -> None:
    q, k, _ = stages(STEP.site, {"BN": 96}, HOPPER)[0].tensormaps
    assert (q.extents, q.strides, q.box) == ((256, 8, 50, 1), (512, 5120, 256000), (64, 8, 8, 1))
    assert (k.extents, k.strides, k.box) == ((256, 1, 610, 1), (512, 512, 312320), (64, 1, 96, 1))


def test_maps_stay_inside_their_operands() -> None:
    for about in ALL.values():
        for config in configs(about.site, HOPPER):
            for index, tensor in enumerate(stages(about.site, config, HOPPER)[0].tensormaps):
                operand = about.site.operands[index]
                assert operand and (tensor.of.kind, tensor.of.value) == ("operand", index)
                size = DTYPES[tensor.dtype].itemsize
                steps = zip(tensor.extents[1:], tensor.strides, strict=True)
                assert tensor.extents[0] * size + sum((n - 1) * step for n, step in steps) <= span_bytes(operand)
                assert all(step % 16 == 0 and step > 0 for step in tensor.strides)
                assert tensor.box[0] * size == 128 and max(tensor.box) <= 256
                assert index or tensor.box[1] * tensor.box[2] == ROWS


def test_an_axis_of_one_has_a_stride() -> None:
    q, _, _ = stages(ALL["heads of one row"].site, {"BN": 64}, HOPPER)[0].tensormaps
    assert q.strides == (128, 256, 256)
    one = rows_of("bf16", 1, 1, 1, 64, 0)
    (stage,) = stages(Site("attention", (one, one, one, None, None), (one,), {"scale": 1.0}), {"BN": 64}, HOPPER)
    assert stage.tensormaps[0].strides == (128, 128, 128)


# ---- what it compiles to --------------------------------------------------------------------------------------------


def assert_sound(cases: list[Case]) -> None:
    """Nothing spilled, all waits as written: the compiler puts one behind every product that it serialises."""
    jobs = sorted({job for case in cases for job in case.jobs()}, key=lambda job: job.entry)
    for job, cubin in zip(jobs, compile_all(jobs), strict=True):
        done = operations_of(cubin.image, cubin.symbol)
        assert (cubin.resources.local, cubin.resources.smem) == (0, 0), job.entry
        assert waits(cubin.image, cubin.symbol), job.entry
        assert SHARED in done and REGISTERS in done and done.count(WARPGROUP) == 4, job.entry


def test_real_kernels_spill_nothing_and_serialise_nothing() -> None:
    assert_sound([best(about) for about in (VISION, PREFIX, in_e4m3(VISION, False), in_e4m3(PREFIX, False))])


@pytest.mark.full
def test_all_kernels_spill_nothing_and_serialise_nothing() -> None:
    assert_sound([case for about in ALL.values() for case in cases_of(about)])


# ---- on a GPU -------------------------------------------------------------------------------------------------------

CHOSEN = {name: best(about) for name, about in ALL.items()}
QUICK = [CHOSEN[about.name] for about in (*in_turn(REAL), *AWKWARD, *in_turn(in_turn(E4M3)))]
SWEEP = [
    case
    for name in (PREFIX.name, VISION.name, "vision 3 views", "whole tiles hidden", "groups of 2", "7 queries")
    for case in cases_of(ALL[name])
    if case.config != CHOSEN[name].config
]
FINITE = replace(ALL["length 47"], hidden=3.0)  # so that not only NaN gives the leak away
SABOTAGED = [
    *(sabotaged(CHOSEN[name], "FRTC_SABOTAGE=1") for name in (BUDGET.name, "length 47", "length 0")),
    sabotaged(best(FINITE), "FRTC_SABOTAGE=1"),
    *(sabotaged(CHOSEN[name], "FRTC_SABOTAGE=2") for name in (VISION.name, STEP.name)),
    sabotaged(CHOSEN[f"{PREFIX.name}, e4m3 times inv"], "FRTC_SABOTAGE=2"),
    *(sabotaged(CHOSEN[name], "FRTC_SABOTAGE=5") for name in (VISION.name, PREFIX.name, "sharp")),
    *(sabotaged(CHOSEN[name], "FRTC_SABOTAGE=6") for name in ("length 47", "a hole within a tile")),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("case", swept(list(CHOSEN.values()), QUICK), ids=str)
def test_sites(gpu: Gpu, case: Case) -> None:
    check(gpu, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", swept(SWEEP, SWEEP[::2]), ids=str)
def test_every_config(gpu: Gpu, case: Case) -> None:
    check(gpu, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SABOTAGED, ids=str)
def test_sabotage_is_seen(gpu: Gpu, case: Case) -> None:
    check_fails(gpu, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [CHOSEN[name] for name in (PREFIX.name, VISION.name, "groups of 3")], ids=str)
def test_repeats_give_the_same_bits(gpu: Gpu, case: Case) -> None:
    with Buffers(gpu, case, operands_of(case)) as buffers:
        bits = []
        for _ in range(20):
            for launch in buffers.launches():
                gpu.launch(*launch)
            gpu.synchronize()
            bits.append(b"".join(result.tobytes() for result in buffers.results()))
    assert len(set(bits)) == 1
