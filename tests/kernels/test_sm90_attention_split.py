"""sm90_attention_split: which sites it takes and how it cuts them, what it compiles to, on a GPU what it computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from frtc.codegen.nvrtc import compile_all
from frtc.kernels.cubin import operations_of, waits
from frtc.kernels.dtypes import round_to
from frtc.kernels.sm90_attention_split import KERNELS, candidates, configs, cost, keys_of, refuse, stages
from frtc.kernels.smxx_attention import Shape
from frtc.kernels.spec import Config, Param, Site, Stage
from frtc.kernels.targets import Target, load_targets
from tests.kernels.device import Gpu
from tests.kernels.harness import (
    BARS,
    Buffers,
    Case,
    check,
    check_fails,
    expected,
    faults,
    in_turn,
    operands_of,
    sabotaged,
    span_bytes,
    swept,
)
from tests.kernels.sites_attention import (
    AttentionSite,
    awkward_sites,
    cached_site,
    heads_apart,
    in_e4m3,
    real_sites,
    self_site,
    with_mask,
)

TARGETS = load_targets()
HOPPER = TARGETS["hopper"]
(KERNEL,) = KERNELS
SHARED, REGISTERS, WARPGROUP = 0x9F0, 0xDF0, 0x9C5  # operations of sm_90: wgmma by where A is; its fences and waits
CACHED = cached_site((8, 1), 50, 610, 256, resume=560)
EDGES = [
    *(AttentionSite(f"length {n}", CACHED, n) for n in (0, 1, 47, 80, 81, 553, 560)),
    *(AttentionSite(f"{n} keys of 700", cached_site((8, 1), 19, 700, 256), n) for n in (0, 1, 47, 96, 699, 700)),
    AttentionSite("a block sees nothing", cached_site((8, 1), 10, 800, 256, resume=790), 3),
    AttentionSite("a block without keys", cached_site((8, 1), 50, 355, 256, resume=304), 300),
    AttentionSite("one query, one group", cached_site((8, 1), 1, 561, 256, resume=560), 555),
    AttentionSite("many queries", cached_site((8, 1), 129, 700, 256, resume=600), 555),
    AttentionSite("15 heads of 64", cached_site((15, 5), 50, 177, 64), 170),
    AttentionSite("15 heads of 64 resume", cached_site((15, 5), 50, 227, 64, resume=177), 140),
    AttentionSite("16 heads of 128", cached_site((16, 8), 31, 1000, 128), 987),
    AttentionSite("16 heads a key head", cached_site((16, 1), 9, 500, 128), 400),
    AttentionSite("heads of 192", cached_site((4, 2), 33, 600, 192, batch=2), 590),
    AttentionSite("values 64 wide, keys 128", cached_site((4, 2), 33, 300, 128, values=64), 277),
    AttentionSite("own keys", self_site(2, 3, 70, 64)),
    AttentionSite("causal step", cached_site((8, 1), 10, 570, 256, resume=560, causal=True), 500),
    AttentionSite("causal step, 15 heads of 64", cached_site((15, 5), 50, 227, 64, resume=177, causal=True), 140),
    AttentionSite("causal, 15 heads of 64", cached_site((15, 5), 177, 177, 64, causal=True), 170),
    AttentionSite("causal, one query", cached_site((8, 1), 1, 305, 256, batch=8, resume=304, causal=True), 290),
    AttentionSite("own keys, heads apart", heads_apart(self_site(2, 3, 200, 128))),
]
REAL = [about for about in real_sites() if about.name.startswith("step")]
AWKWARD = [*(about for about in awkward_sites() if refuse(about.site, HOPPER) == ""), *EDGES]
E4M3 = [in_e4m3(about, False) for about in (*REAL, *AWKWARD) if "prompt 48 of 200" not in about.name]
ALL = {about.name: about for about in (*REAL, *AWKWARD, *E4M3)}
STEP, SHORT = ALL["step 2 views, prompt 48 of 48, chunk 50"], ALL["step 2 views, prompt 48 of 48, chunk 10"]


# Probabilities, a block's sums and the result are rounded to bf16, 2^-9 at most each. A row's norm is that of its loud
# channel, so they need not cancel: at this site the kernel's arithmetic alone has more than the bar of bf16.
LOUD, LOUD_BAR = "values 64 wide, keys 128", 3 * 2.0**-9


def cases_of(about: AttentionSite) -> list[Case]:
    judged = ({"bar": LOUD_BAR} if about.name == LOUD else {}) | about.judged
    return [Case(about.site, KERNEL, config, **judged) for config in configs(about.site, HOPPER)]


def best(about: AttentionSite) -> Case:
    return min(cases_of(about), key=lambda case: cost(case.site, case.config, HOPPER))


# ---- which sites, which configs -------------------------------------------------------------------------------------

REFUSED = [
    (with_mask(CACHED, 50, 610), "a mask"),
    (in_e4m3(STEP, True).site, "a scale for each token"),
    (cached_site((8, 1), 50, 610, 256, dtype="f16"), "operands are f16: blocks exchange sums in bf16"),
    (self_site(1, 16, 256, 72), "head sizes 72 and 72: need multiples of 64"),
]


@pytest.mark.parametrize(("site", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_refuses(site: Site, reason: str) -> None:
    assert refuse(site, HOPPER) == reason


def test_refuses_more_keys_than_a_cluster_holds() -> None:
    site = cached_site((8, 1), 50, 2100, 256)
    assert refuse(site, HOPPER).startswith("32 rows, 8 blocks: 263 keys of a block: a product has up to 256; 32")


@pytest.mark.parametrize("target", [t for name, t in TARGETS.items() if name != "hopper"], ids=lambda t: t.name)
def test_other_targets_have_no_wgmma(target: Any) -> None:
    assert refuse(CACHED, target) == f"{target.nvcc} has no wgmma or no tensor maps"


def test_every_step_is_taken() -> None:
    assert all(refuse(about.site, HOPPER) == "" for about in (*REAL, *EDGES))


def test_configs_fit_and_hold_all_keys() -> None:
    for about in ALL.values():
        taken, shape = configs(about.site, HOPPER), Shape.of(about.site)
        assert taken == [config for config, reason in candidates(about.site, HOPPER) if not reason]
        for config in taken:
            (stage,) = stages(about.site, config, HOPPER)
            rows, split = config["ROWS"], config["SPLIT"]
            assert stage.smem <= HOPPER.smem_per_block and stage.waits
            assert not config["ALONE"] or 2 * (stage.smem + 1024) > HOPPER.smem_per_sm
            assert keys_of(shape, split) * split >= shape.sk and stage.grid[0] % split == 0
            assert rows // split * shape.dv // 8 % 32 == 0 and cost(about.site, config, HOPPER) > 0


def test_rows_and_keys_of_a_step() -> None:
    (stage,) = stages(STEP.site, {"ROWS": 32, "SPLIT": 8, "ALONE": False}, HOPPER)
    assert stage.grid == (104, 1, 1) and stage.entry.endswith("<__nv_bfloat16, 256, 256, 80, 32, 8, 8, false>")
    q, k, v = stage.tensormaps
    assert q.box == (64, 8, 4, 1) and k.box == v.box == (64, 1, 80, 1)
    assert stage.smem == 2 * 32 * 256 + 2 * 80 * 512 + 32 * 520 + 56
    (stage,) = stages(ALL["15 heads of 64"].site, {"ROWS": 32, "SPLIT": 4, "ALONE": False}, HOPPER)
    assert stage.grid == (8, 15, 1) and stage.tensormaps[0].box == (64, 1, 32, 1)


def test_maps_stay_inside_their_operands() -> None:
    for about in ALL.values():
        for config in configs(about.site, HOPPER):
            for index, tensor in enumerate(stages(about.site, config, HOPPER)[0].tensormaps):
                operand = about.site.operands[index]
                assert operand and (tensor.of.kind, tensor.of.value) == ("operand", index)
                steps = zip(tensor.extents[1:], tensor.strides, strict=True)
                assert tensor.extents[0] * 2 + sum((n - 1) * step for n, step in steps) <= span_bytes(operand)
                assert tensor.box[0] == 64 and max(tensor.box) <= 256


# ---- what it rounds -------------------------------------------------------------------------------------------------


def model(case: Case) -> tuple[list[str], float]:
    """What the harness says of the kernel's arithmetic: each block's keys by themselves, as it rounds them."""
    operands = operands_of(case)
    q, k, v, _, length = (None if o is None else np.asarray(o, np.float64) for o in operands[:5])
    assert q is not None and k is not None and v is not None and length is not None
    group, step = q.shape[-3] // k.shape[-3], keys_of(Shape.of(case.site), case.config["SPLIT"])
    k, v = (np.repeat(x[..., : int(length), :], group, -3) for x in (k, v))
    scores = q @ k.swapaxes(-1, -2) * case.site.attrs["scale"]
    top, sums, total = scores.max(-1, keepdims=True), np.zeros(q.shape[:-1] + v.shape[-1:]), 0.0
    for first in range(0, int(length), step):
        block = scores[..., first : first + step]
        own = block.max(-1, keepdims=True)
        weights, share = np.exp(block - own), np.exp(own - top)
        sums += share * bf16(bf16(weights) @ v[..., first : first + step, :])
        total = total + share * weights.sum(-1, keepdims=True)
    return faults(case, [bf16(sums / total)], expected(case, operands))


def bf16(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return round_to(x.astype(np.float32), "bf16").astype(np.float64)


def test_what_rounding_takes() -> None:
    wrong, errors = zip(*(model(case) for case in cases_of(ALL[LOUD])), strict=True)
    assert not any(wrong) and BARS["bf16"] < max(errors) < LOUD_BAR


# ---- what it compiles to --------------------------------------------------------------------------------------------


def assert_sound(cases: list[Case]) -> None:
    """Nothing spilled, all waits as written: the compiler puts one behind every product that it serialises."""
    jobs = {job: case for case in cases for job in case.jobs()}
    for (job, case), cubin in zip(jobs.items(), compile_all(list(jobs)), strict=True):
        shape, done = Shape.of(case.site), operations_of(cubin.image, cubin.symbol)
        parts = shape.dv // 64
        steps = keys_of(shape, case.config["SPLIT"]) // 16 * parts
        assert (cubin.resources.local, cubin.resources.smem) == (0, 0), job.entry
        assert waits(cubin.image, cubin.symbol), job.entry
        assert (done.count(SHARED), done.count(REGISTERS)) == (shape.d // 16, steps), job.entry
        written = shape.d // 64 + 2 + parts  # a fence for each panel of k and one for v; waits
        assert written <= done.count(WARPGROUP) <= written + 1, job.entry  # or one more fence, of the compiler


def test_real_kernels_spill_nothing_and_serialise_nothing() -> None:
    assert_sound([best(STEP), best(SHORT), best(in_e4m3(STEP, False))])


@pytest.mark.full
def test_all_kernels_spill_nothing_and_serialise_nothing() -> None:
    assert_sound([case for about in ALL.values() for case in cases_of(about)])


# ---- on a GPU -------------------------------------------------------------------------------------------------------

CHOSEN = {name: best(about) for name, about in ALL.items()}
QUICK = [CHOSEN[about.name] for about in (*in_turn(REAL), *AWKWARD, *in_turn(in_turn(E4M3)))]
SWEEP = [
    case
    for name in (STEP.name, SHORT.name, "step 2 views, prompt 48 of 200, chunk 50", "15 heads of 64", "16 heads of 128")
    for case in cases_of(ALL[name])
    if case.config != CHOSEN[name].config
]
FINITE = replace(ALL["length 47"], hidden=3.0)  # so that not only NaN gives the leak away
SABOTAGED = [
    *(sabotaged(CHOSEN[name], "FRTC_SABOTAGE=1") for name in ("length 553", "length 47", "length 0")),
    sabotaged(best(FINITE), "FRTC_SABOTAGE=1"),
    *(sabotaged(CHOSEN[name], "FRTC_SABOTAGE=2") for name in (STEP.name, SHORT.name, f"{STEP.name}, e4m3 times inv")),
    *(sabotaged(CHOSEN[name], "FRTC_SABOTAGE=5") for name in (STEP.name, "sharp", "15 heads of 64")),
    *(sabotaged(CHOSEN[name], "FRTC_SABOTAGE=6") for name in ("length 47", "a block sees nothing")),
    *(sabotaged(CHOSEN[name], "FRTC_SABOTAGE=7") for name in ("causal step", "causal, 15 heads of 64")),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", swept(list(CHOSEN.values()), QUICK), ids=str)
def test_sites(gpu: Gpu, case: Case) -> None:
    check(gpu, case)


def asked_before(case: Case) -> Case:
    """As the builder leaves it where half of the keys were there before: what a block may ask for before it waits."""

    def stages(site: Site, config: Config, target: Target) -> tuple[Stage, ...]:
        (stage,) = KERNEL.stages(site, config, target)
        at, k, _ = stage.settled
        keys = site.operands[k]
        assert keys is not None and stage.params[at] == Param("i32", 0)
        return (
            replace(stage, params=(*stage.params[:at], Param("i32", keys.shape[-2] // 2), *stage.params[at + 1 :])),
        )

    return replace(case, kernel=replace(KERNEL, stages=stages))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [STEP.name, SHORT.name, "length 47", "a block sees nothing"])
def test_keys_that_were_there_before(gpu: Gpu, name: str) -> None:
    check(gpu, asked_before(CHOSEN[name]))


@pytest.mark.gpu
@pytest.mark.parametrize("case", swept(SWEEP, SWEEP[::2]), ids=str)
def test_every_config(gpu: Gpu, case: Case) -> None:
    check(gpu, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SABOTAGED, ids=str)
def test_sabotage_is_seen(gpu: Gpu, case: Case) -> None:
    check_fails(gpu, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [CHOSEN[name] for name in (STEP.name, SHORT.name, "16 heads of 128")], ids=str)
def test_repeats_give_the_same_bits(gpu: Gpu, case: Case) -> None:
    with Buffers(gpu, case, operands_of(case)) as buffers:
        bits = []
        for _ in range(20):
            for launch in buffers.launches():
                gpu.launch(*launch)
            gpu.synchronize()
            bits.append(b"".join(result.tobytes() for result in buffers.results()))
    assert len(set(bits)) == 1
