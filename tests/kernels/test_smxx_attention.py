"""smxx_attention: its reference, which sites it takes, what it compiles to, and, on a GPU, what it computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from frtc.codegen.nvrtc import Job, compile_all
from frtc.kernels.catalog import CATALOG
from frtc.kernels.reference import REFERENCES
from frtc.kernels.smxx_attention import (
    candidates,
    configs,
    cost,
    counters,
    refuse,
    scratch,
    show,
    smem_bytes,
    stages,
    strides_of,
    tile_of,
)
from frtc.kernels.spec import Operand, Site
from frtc.kernels.targets import load_targets
from tests.kernels.device import Gpu
from tests.kernels.harness import (
    ROWS,
    Buffers,
    Case,
    check,
    check_fails,
    chosen,
    every_config,
    in_turn,
    measure,
    once,
    operands_of,
    sabotaged,
    write_rows,
)
from tests.kernels.sites_attention import (
    AttentionSite,
    awkward_sites,
    cached_site,
    in_e4m3,
    real_sites,
    self_site,
    with_mask,
)
from tests.kernels.tier import COMPILED

TARGETS = load_targets()
HOPPER = TARGETS["hopper"]
REAL, AWKWARD = real_sites(), awkward_sites()
BY_NAME = {site.name: site for site in (*REAL, *AWKWARD)}
STEP = BY_NAME["step 2 views, prompt 48 of 48, chunk 50"]
# A prompt that leaves a budget unused changes no kernel.
FULL = [site for site in REAL if "prompt 48 of 200" not in site.name]
E4M3 = [in_e4m3(site, per_row) for site in (*FULL, *AWKWARD) for per_row in (False, True)]
E4M3_BY_NAME = {site.name: site for site in E4M3}

# ---- the reference --------------------------------------------------------------------------------------------------


def by_loops(q: Any, k: Any, v: Any, mask: Any, length: Any, scale: float, causal: bool, resume: int) -> Any:
    """The definition, one query at a time, in float64."""
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    sq, sk, group = q.shape[-2], k.shape[-2], q.shape[-3] // k.shape[-3]
    for b, h, i in np.ndindex(*q.shape[:-1]):
        seen = [
            j
            for j in range(sk)
            if (mask is None or np.broadcast_to(mask, (*q.shape[:-1], sk))[b, h, i, j])
            and (length is None or j < length or 0 <= resume <= j)
            and (not causal or j <= i + sk - sq)
        ]
        if seen:
            scores = k[b, h // group, seen] @ q[b, h, i] * scale
            shares = np.exp(scores - scores.max())
            out[b, h, i] = shares @ v[b, h // group, seen] / shares.sum()
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "resume"), [(None, -1), (5, -1), (5, 8), (0, -1), (9, 8)])
@pytest.mark.parametrize("masked", [False, True])
def test_reference_is_the_definition(causal: bool, length: int | None, resume: int, masked: bool) -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal(shape) for shape in ((2, 4, 6, 8), (2, 2, 11, 8), (2, 2, 11, 16)))
    mask = rng.random((2, 1, 6, 11)) < 0.6 if masked else None
    valid = None if length is None else np.array(length, np.int32)
    got = REFERENCES["attention"](q, k, v, mask, valid, scale=0.3, causal=causal, resume=resume)
    assert np.allclose(got, by_loops(q, k, v, mask, length, 0.3, causal, resume), rtol=0, atol=1e-12)


def test_reference_in_blocks_of_rows_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    site = BY_NAME["causal prefill"]
    operands = site.inputs(site.site, np.random.default_rng(2))
    whole = REFERENCES["attention"](*operands, **site.site.attrs)
    monkeypatch.setattr("frtc.kernels.reference.attention.SCORES_AT_ONCE", 150 * 7)
    blocks = REFERENCES["attention"](*operands, **site.site.attrs)
    assert np.linalg.norm(blocks - whole) <= 1e-6 * np.linalg.norm(whole)


def test_reference_rounds_probabilities_where_told() -> None:
    q, k = np.zeros((1, 1, 8), np.float32), np.zeros((1, 3, 8), np.float32)
    v = np.ones((1, 3, 8), np.float32)
    exact, rounded = (REFERENCES["attention"](q, k, v, scale=1.0, probs=probs)[0, 0, 0] for probs in ("f32", "bf16"))
    assert exact == pytest.approx(1.0, abs=1e-6)
    assert rounded == np.float32(3 * 0.333984375)  # 1/3 in bf16


@pytest.mark.parametrize("name", ["one key", "whole tiles hidden", "key mask", "row mask and length"])
def test_inputs_hide_nan_and_the_reference_never_reads_it(name: str) -> None:
    site = BY_NAME[name]
    operands = site.inputs(site.site, np.random.default_rng(3))
    assert np.isnan(np.asarray(operands[2], np.float32)).any()
    assert np.isfinite(REFERENCES["attention"](*operands, **site.site.attrs)).all()


# ---- which sites, which configs -------------------------------------------------------------------------------------


def changed(site: Site, index: int, operand: Operand | None) -> Site:
    operands = (*site.operands[:index], operand, *site.operands[index + 1 :])
    return replace(site, operands=operands)


REFUSED = [
    (changed(STEP.site, 0, Operand.packed("f32", 1, 8, 50, 256)),
     "q, k, v are f32, bf16, bf16: needs one of bf16, f16"),
    (cached_site((8, 1), 10, 50, 12), "head sizes 12 and 12: need multiples of 8 up to 256"),
    (cached_site((8, 1), 10, 50, 264), "head sizes 264 and 264: need multiples of 8 up to 256"),
    (changed(STEP.site, 4, Operand.packed("i64")), "the length is not i32"),
    (changed(STEP.site, 3, Operand.packed("f32", 50, 610)), "the mask is not bool"),
    (replace(STEP.site, attrs={"scale": -1.0}), "scale -1.0 is not positive"),
    (changed(STEP.site, 1, Operand("bf16", (1, 1, 610, 256), (156160, 156160, 1, 610))),
     "the last axis of k is not contiguous"),
    (changed(STEP.site, 2, Operand("bf16", (1, 1, 610, 256), (157380, 157380, 258, 1))),
     "rows of v with strides [157380, 157380, 258, 1] are not 16-byte aligned"),
    (changed(STEP.site, 1, Operand("bf16", (1, 1, 610, 256), (0, 0, 1 << 30, 1))),
     "rows of k are 1073741824 elements apart: the kernel counts them in 32-bit bytes"),
    (changed(STEP.site, 5, Operand.packed("f32")), "a result in bf16 with 1 kinds of scale"),
    (replace(STEP.site, results=(replace(STEP.site.results[0], dtype="e4m3"),)),
     "a result in e4m3 with 0 kinds of scale"),
    (in_e4m3(AttentionSite("", self_site(1, 33, 1, 256)), True).site,
     "tokens of 8448 elements: a warp's registers hold 8192"),
    (self_site(70000, 1, 1, 16), "70000 batches times key heads: the grid allows 65535"),
]  # fmt: skip


@pytest.mark.parametrize(("site", "reason"), REFUSED, ids=[reason[:40] for _, reason in REFUSED])
def test_refuses(site: Site, reason: str) -> None:
    assert refuse(site, HOPPER) == reason


def test_batch_axes_collapse_or_are_refused() -> None:
    packed = Operand.packed("bf16", 2, 3, 4, 5, 8)
    assert strides_of(packed, packed.shape, 3) == (160, 40, 8)
    broadcast = Operand.packed("bool", 1, 5, 7)
    assert strides_of(broadcast, (2, 3, 4, 5, 7), 4) == (0, 0, 7, 1)
    gaps = Operand("bf16", (2, 3, 4, 5, 8), (1000, 160, 40, 8, 1))
    with pytest.raises(ValueError, match="are not one axis"):
        strides_of(gaps, gaps.shape, 3)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_configs_fit_and_exclusions_have_reasons(target: Any) -> None:
    for site in (*REAL, *AWKWARD, *E4M3[::7]):
        assert refuse(site.site, target) == ""
        taken = configs(site.site, target)
        assert taken == [config for config, reason in candidates(site.site, target) if not reason]
        assert len(taken) < len(candidates(site.site, target))
        for config in taken:
            (stage,) = stages(site.site, config, target)
            assert stage.smem <= target.smem_per_block
            assert stage.block <= 256
            assert cost(site.site, config, target) > 0


def test_largest_tiles_of_a_99_kib_target_fit_exactly() -> None:
    config = {"WM": 4, "WN": 1, "BN": 64, "STAGES": 1, "SPLITS": 1}
    assert smem_bytes(tile_of(config), 256, 256) == TARGETS["rtx4090"].smem_per_block
    reasons = [reason for _, reason in candidates(STEP.site, TARGETS["rtx4090"])]
    assert "needs 168960 bytes of shared memory, a block has 101376" in reasons


def test_few_queries_split_the_keys_and_many_do_not() -> None:
    step = CATALOG.select(STEP.site, HOPPER)
    vision = CATALOG.select(BY_NAME["vision 3 views"].site, HOPPER)
    assert step.config["SPLITS"] > 1 and vision.config["SPLITS"] == 1
    assert show(step.config).endswith(f"{step.config['SPLITS']} split")
    assert "us estimated" in str(step)


def test_a_panel_ends_with_a_whole_token() -> None:
    """Tiles of 16 rows: 3 of them hold 16 tokens of 3 heads, one holds 2 tokens of 8 heads."""
    config = {"WM": 1, "WN": 4, "BN": 64, "STAGES": 1, "SPLITS": 1}
    for name, panel, blocks in (("groups of 3", 3, 4), ("50 queries", 1, 25), ("groups of 40", 5, 8)):
        site = E4M3_BY_NAME[f"{name}, e4m3 per row"].site
        (stage,) = stages(site, config, HOPPER)
        assert (stage.params[-1].kind, stage.params[-1].value) == ("i32", panel)
        assert counters(site, config) == 4 * blocks


def test_scratch_holds_partial_sums_and_then_results_of_tokens() -> None:
    site = E4M3_BY_NAME["groups of 3, e4m3 per row"].site
    config = {"WM": 1, "WN": 4, "BN": 64, "STAGES": 1, "SPLITS": 3}
    partial = 3 * 5 * 150 * (64 + 2) * 4  # splits, key heads, rows, sums and statistics
    assert scratch(site, config) == partial + 50 * 15 * 64 * 2
    (stage,) = stages(site, config, HOPPER)
    pointers = [(p.kind, p.value) for p in stage.params if p.kind in ("scratch", "counters")]
    assert pointers == [("scratch", 0), ("scratch", 3 * 5 * 150 * 64 * 4), ("counters", 0), ("scratch", partial),
                        ("counters", 4 * 10 * 5)]  # fmt: skip


def test_scales_are_given_or_found() -> None:
    fixed, found = (in_e4m3(STEP, per_row).site for per_row in (False, True))
    config = configs(fixed, HOPPER)[0]
    (given,), (own,) = stages(fixed, config, HOPPER), stages(found, config, HOPPER)
    assert [(p.kind, p.value) for p in given.params[-7:-5]] == [("operand", 5), ("i64", 0)]
    assert [(p.kind, p.value) for p in own.params[-7:-5]] == [("i64", 0), ("result", 1)]
    assert given.entry.endswith(" 0>") and own.entry.endswith(" 2048>")


# ---- what it compiles to --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", COMPILED)
def test_chosen_kernels_of_real_sites_spill_nothing(target: Any) -> None:
    sites = [*REAL, *(in_e4m3(site, per_row) for site in FULL for per_row in (False, True))]
    assert_no_spills([(site, CATALOG.select(site.site, target).config) for site in sites], target)


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_all_kernels_of_all_sites_spill_nothing(target: Any) -> None:
    assert_no_spills([(s, config) for s in (*REAL, *AWKWARD, *E4M3) for config in configs(s.site, target)], target)


def assert_no_spills(picks: list[tuple[AttentionSite, Any]], target: Any) -> None:
    jobs = {Job.of(stage, target) for site, config in picks for stage in stages(site.site, config, target)}
    ordered = sorted(jobs, key=lambda job: job.entry)
    for job, cubin in zip(ordered, compile_all(ordered), strict=True):
        assert cubin.sm == target.sm
        assert (cubin.resources.local, cubin.resources.smem) == (0, 0), job.entry


# ---- on a GPU -------------------------------------------------------------------------------------------------------


CHOSEN = {site.name: chosen(site.site, **site.judged) for site in (*REAL, *AWKWARD, *E4M3)}
QUICK = {site.name for site in (*in_turn(REAL), *AWKWARD, *in_turn(in_turn(E4M3)))}
SWEPT = [STEP, BY_NAME["vision 1 views"], BY_NAME["row mask and length"], BY_NAME["causal and length"]]
SWEEP = [(site.name, case) for site in SWEPT for case in every_config(site.site, **site.judged)]
SWEEP_E4M3 = [
    (name, case)
    for name in ("groups of 3, e4m3 per row", f"{STEP.name}, e4m3 per row", f"{STEP.name}, e4m3 times inv")
    for case in every_config(E4M3_BY_NAME[name].site, **E4M3_BY_NAME[name].judged)[::5]
]
SWEPT_QUICKLY = [*once([case for _, case in SWEEP]), *(case for _, case in SWEEP_E4M3[::8])]

FINITE = replace(BY_NAME["50 queries"], hidden=3.0)  # so that not only NaN gives the leak away
SABOTAGED = [
    *(sabotaged(CHOSEN[name], "FRTC_SABOTAGE=1") for name in ("50 queries", "causal prefill", "one key")),
    sabotaged(chosen(FINITE.site, **FINITE.judged), "FRTC_SABOTAGE=1"),
    *(sabotaged(CHOSEN[name], "FRTC_SABOTAGE=2") for name in ("vision 2 views", STEP.name, "full mask")),
    sabotaged(CHOSEN[f"{STEP.name}, e4m3 times inv"], "FRTC_SABOTAGE=2"),
    *(
        sabotaged(CHOSEN[f"{name}, e4m3 per row"], f"FRTC_SABOTAGE={fault}")
        for name in ("vision 2 views", STEP.name, "groups of 3")
        for fault in (2, 3, 4)
    ),
]


def named(pairs: list[tuple[str, Case]], quick: list[Case]) -> list[Any]:
    """Parameters; those whose case is not among `quick` for full runs alone."""
    kept = {id(case) for case in quick}
    return [
        pytest.param(name, case, id=f"{name}: {show(case.config)}", marks=() if id(case) in kept else pytest.mark.full)
        for name, case in pairs
    ]


@pytest.fixture(scope="module")
def timings(request: pytest.FixtureRequest, gpu: Gpu) -> Iterator[list[dict[str, Any]]]:
    """Rows (site, config, predicted us, measured us): printed at the end, and written as JSON."""
    rows: list[dict[str, Any]] = []
    yield rows
    reporter: Any = request.config.pluginmanager.getplugin("terminalreporter")
    capture: Any = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        reporter.write_line("\nattention: us predicted, us measured, site: config")
        for row in rows:
            reporter.write_line(f"{row['predicted']:7.1f} {row['measured']:7.1f}  {row['site']}: {row['config']}")
    write_rows("attention.json", rows, request.config, str(gpu))


def note(timings: list[dict[str, Any]], name: str, case: Case) -> None:
    predicted = round(cost(case.site, case.config, HOPPER), 2)
    timings.append({"site": name, "config": show(case.config), "predicted": predicted, "measured": ROWS[-1].us})


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "case"), named([*CHOSEN.items()], [CHOSEN[name] for name in QUICK]))
def test_sites(gpu: Gpu, timings: list[dict[str, Any]], name: str, case: Case) -> None:
    check(gpu, case)
    note(timings, name, case)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "case"), named([*SWEEP, *SWEEP_E4M3], SWEPT_QUICKLY))
def test_every_config(gpu: Gpu, timings: list[dict[str, Any]], name: str, case: Case) -> None:
    check(gpu, case)
    note(timings, name, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SABOTAGED, ids=str)
def test_sabotage_is_seen(gpu: Gpu, case: Case) -> None:
    check_fails(gpu, case)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        CHOSEN[name]
        for name in (STEP.name, "561 queries", "1 query", "vision 2 views, e4m3 per row", "groups of 3, e4m3 per row")
    ],
    ids=str,
)
def test_repeats_give_the_same_bits(gpu: Gpu, case: Case) -> None:
    with Buffers(gpu, case, operands_of(case)) as buffers:
        bits = []
        for _ in range(20):
            for launch in buffers.launches():
                gpu.launch(*launch)
            gpu.synchronize()
            bits.append(b"".join(result.tobytes() for result in buffers.results()))
    assert len(set(bits)) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [10, 50])
def test_hidden_keys_cost_little(gpu: Gpu, chunk: int) -> None:
    """A budget of 200 with 48 valid tokens against a budget of 48: at most 0.3 ms in a loop's 180 attentions."""
    small, large = (
        measure(gpu, case, operands_of(case), 0.0).us
        for case in (CHOSEN[f"step 2 views, prompt 48 of {budget}, chunk {chunk}"] for budget in (48, 200))
    )
    assert 180 * (large - small) <= 300, f"{large} us with a budget of 200, {small} us with 48"


def test_masks_are_views_of_scores() -> None:
    site = with_mask(self_site(2, 4, 100, 64), 1, 1, 100)
    (stage,) = stages(site, configs(site, HOPPER)[0], HOPPER)
    strides = [param.value for param in stage.params if param.kind == "i64"]
    assert strides[-13:-9] == [0, 0, 0, 1]  # mask: batch, head, row, key; then the result's, and six zeros of codes
