"""The tensor-core GEMM on e4m3: x and w, or w alone; what it accepts, its cubins; on a GPU results, also torch's."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from frtc.codegen.nvrtc import Job, compile_all, ptx_of
from frtc.kernels import smxx_gemm
from frtc.kernels.dtypes import round_to
from frtc.kernels.product import Product, product_of
from frtc.kernels.spec import Operand, Param, Site
from frtc.kernels.targets import Target, load_targets
from tests.kernels import harness
from tests.kernels.device import Gpu
from tests.kernels.sites_gemm import (
    FULL,
    awkward_scaled_sites,
    flops_of,
    gated,
    inputs_of,
    linear,
    matmul,
    scaled,
    scaled_sites,
)
from tests.kernels.sites_policies import policy_sites
from tests.kernels.tier import IN_TIER

PLAIN = smxx_gemm.KERNELS[0]  # the others say the same of other ops
TARGETS = load_targets()
HOPPER, A100 = TARGETS["hopper"], TARGETS["a100"]
KINDS = ("e4m3", "bf16")  # types of x


def product(site: Site) -> Product:
    found = product_of(site)
    assert isinstance(found, Product), found
    return found


def of(x: Operand, w: Operand) -> Site:
    return Site("linear", (x, w), (Operand.packed("bf16", x.shape[0], w.shape[0]),))


# ---- what it accepts ------------------------------------------------------------------------------------------------


def test_places_of_scales() -> None:
    p = product(scaled(linear(5, 16, 64, **FULL), out="e4m3", x_scale=True))
    assert [m and (m.index, m.ld) for m in (p.alpha, p.x_scale, p.inv)] == [(6, 1), (7, 1), (8, 0)]
    p = product(scaled(gated(5, 8, 64), out="e4m3", x_scale=True, one=True))
    assert [m and (m.index, m.ld) for m in (p.alpha, p.x_scale, p.inv)] == [(4, 0), (5, 1), (6, 0)]
    assert [a.param for a in p.arguments()][3:6] == [Param("operand", place) for place in (4, 5, 6)]


def test_scales_of_rows_have_a_stride_and_batches() -> None:
    site = scaled(linear(6, 16, 64), x_scale=True)
    apart = replace(site, operands=(*site.operands[:7], Operand("f32", (6, 1), (3, 1)), None))
    scale = product(apart).x_scale
    assert scale and scale.ld == 3
    batched = next(case.site for case in awkward_scaled_sites() if case.name == "e4m3 batches")
    scale = product(batched).x_scale
    assert product(batched).batch == 2 and scale and (scale.ld, scale.batch) == (1, 256)


@pytest.mark.parametrize(
    ("site", "reason"),
    [
        (scaled(linear(5, 16, 64)), ""),
        (scaled(linear(5, 16, 40), "f16"), ""),
        (replace(scaled(linear(5, 16, 64)), attrs={"per_row": True}),
         "per-row results need a kernel that finishes whole rows"),
        (replace(scaled(linear(5, 16, 64)), results=(Operand.packed("e4m3", 5, 16),)),
         "the epilogue has no e4m3 without inv"),
        (replace(scaled(linear(5, 16, 64), out="e4m3"), results=(Operand.packed("bf16", 5, 16),)),
         "inv scales an e4m3 result, not bf16"),
        (matmul((2,), 16, 32, 64, "e4m3"), "the second operand is [K, N]; e4m3 needs rows of K"),
        (of(Operand.packed("e4m3", 5, 40), Operand.packed("e4m3", 16, 40)),
         "rows of x are 40 elements apart (batches 0), not a multiple of 16 bytes"),
        (of(Operand.packed("e4m3", 5, 64), Operand.packed("bf16", 16, 64)),
         "x is e4m3 and w is bf16; needs bf16 or f16 for both, e4m3 for both, or for w"),
    ],
)  # fmt: skip
def test_refusals(site: Site, reason: str) -> None:
    assert PLAIN.refuse(site, HOPPER) == reason


def test_wrong_types_of_scales() -> None:
    site = scaled(linear(5, 16, 64), x_scale=True)
    wrong = replace(site, operands=(*site.operands[:7], Operand.packed("bf16", 5, 1), None))
    assert PLAIN.refuse(wrong, HOPPER) == "x_scale is bf16; needs f32"


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_who_has_products_of_e4m3(target: Target) -> None:
    both, weights = (PLAIN.refuse(scaled(linear(50, 1024, 1024), x), target) for x in KINDS)
    assert weights == ""
    assert both == ("" if target.sm >= 89 else "no FP8 tensor instructions; use w8a16")


def policy_shapes() -> list[Site]:
    """The policies' products of bf16 or e4m3, each (rows, columns, K) once, whatever they are fused with."""
    found: dict[tuple[int, int, int], Site] = {}
    for site in policy_sites():
        if site.op not in ("linear", "gated_linear", "linear_norm", "linear_rope_qkv"):
            continue
        x, w = site.operands[:2]
        if x and w and {x.dtype, w.dtype} <= {"bf16", "e4m3"}:
            m, (n, k) = math.prod(x.shape[:-1]), w.shape
            found.setdefault((m, n, k), gated(m, n // 2, k) if site.op == "gated_linear" else linear(m, n, k))
    return list(found.values())


def test_every_product_of_the_policies_is_served() -> None:
    assert len(policy_shapes()) >= 30
    for site in policy_shapes():
        for x in KINDS:
            assert PLAIN.refuse(scaled(site, x), HOPPER) == "", site


# ---- cubins ---------------------------------------------------------------------------------------------------------


def jobs_of_every_tile(target: Target, x: str, registers: int) -> dict[str, Job]:
    """Tiles that need at least so many registers, with the epilogue that needs most, with and without split K."""
    found: dict[str, Job] = {}
    for m in (512, 40, 13):
        site = scaled(linear(m, 1024, 4096, **FULL), x, "e4m3", x_scale=True)
        for config in PLAIN.configs(site, target):
            if smxx_gemm.Tile.of(config, product(site)).registers >= registers:
                (stage,) = PLAIN.stages(site, config, target)
                found[stage.entry] = Job.of(stage, target)
    return found


def in_tier(name: str, x: str) -> bool:
    """Products of e4m3 by default are this kernel's where mma.sync has them: hopper's are wgmma's."""
    return name in IN_TIER and (x != "e4m3" or "fp8_mma" in TARGETS[name].has)


@pytest.mark.parametrize(
    ("target", "registers", "x"),
    [(name, 200, x) for name in TARGETS for x in KINDS if in_tier(name, x)]
    + [pytest.param(name, 0, x, marks=pytest.mark.full) for name in TARGETS for x in KINDS],
)
def test_cubins_do_not_spill(target: str, registers: int, x: str) -> None:
    if x == "e4m3" and "fp8" not in TARGETS[target].has:
        return  # refused, see above
    found = jobs_of_every_tile(TARGETS[target], x, registers)
    assert len(found) >= 3
    used = {entry: cubin.resources for entry, cubin in zip(found, compile_all(list(found.values())), strict=True)}
    assert not {entry: r for entry, r in used.items() if r.local}


def test_native_products_where_there_are_any() -> None:
    """mma.sync e4m3 on sm_89 and sm_120a; elsewhere fp16, twice as many."""
    site = scaled(linear(512, 1024, 1024))
    config = next(c for c in PLAIN.configs(site, HOPPER) if c["BM"] == c["BN"] == 64)
    counts = {}
    for name in ("rtx4090", "rtx5090", "hopper", "thor"):
        (stage,) = PLAIN.stages(site, config, TARGETS[name])
        text = ptx_of(Job.of(stage, TARGETS[name]))
        counts[name] = text.count("m16n8k32.row.col.f32.e4m3"), text.count("m16n8k16.row.col.f32.f16")
        assert ("fp8_mma" in TARGETS[name].has) == (counts[name][0] > 0)
    products = 2 * 4 * 4  # warps of 32 x 32, 4 steps of K
    assert counts["rtx4090"] == counts["rtx5090"] == (products, 0)
    assert counts["hopper"] == counts["thor"] == (0, 2 * products)


# ---- inputs ---------------------------------------------------------------------------------------------------------


def test_e4m3_results_saturate_in_part() -> None:
    """Else the cases below would not tell a saturating conversion from another."""
    for case in awkward_scaled_sites():
        (y,) = case.site.results
        if y.dtype == "e4m3":
            whole = harness.chosen(case.site, inputs=inputs_of)
            if whole.site.operands[0] and whole.site.operands[0].nbytes < 1 << 16:
                (want,) = harness.expected(whole, harness.operands_of(whole))
                share = np.mean(np.abs(want.astype(np.float32)) == 448)
                assert 0.001 < share < 0.7, (case.name, share)


# ---- on a GPU -------------------------------------------------------------------------------------------------------


CHOSEN = {
    case.name: harness.chosen(case.site, inputs=inputs_of, flops=flops_of(case.site))
    for case in (*scaled_sites(), *awkward_scaled_sites())
}
# Every shape of the policies is below; here are those of Pi0.5 whose results are e4m3.
QUICK = [case for name, case in CHOSEN.items() if re.fullmatch("fp8 to fp8.*(2 views|560 tokens|chunk 50)", name)]
QUICK += [
    CHOSEN[case.name] for case in awkward_scaled_sites() if not case.name.startswith(("f16 full", "f16 one", "f16 few"))
]
POLICIES = [
    harness.chosen(scaled(site, x), inputs=inputs_of, flops=flops_of(site)) for site in policy_shapes() for x in KINDS
]
EVERY_CONFIG = [
    case
    for x in KINDS
    for site in (
        scaled(linear(130, 200, 1000, **FULL), x, "e4m3", x_scale=True), scaled(linear(50, 136, 1021, **FULL), x),
        scaled(linear(10, 136, 2040, **FULL), x, x_scale=True), scaled(gated(61, 100, 600), x),
    )
    for case in harness.every_config(site, inputs=inputs_of, flops=flops_of(site))
]  # fmt: skip
EACH_ONCE = [
    case
    for x in KINDS
    for case in harness.once([c for c in EVERY_CONFIG if c.site.operands[0].dtype == x], splits=2)  # type: ignore[union-attr]
]
SPLIT = [case for case in EVERY_CONFIG if case.config.get("SPLITS", 1) > 2]
BY_ROW = [
    harness.chosen(scaled(linear(50, 1024, 4096, **FULL), x, out, x_scale=True), inputs=inputs_of)
    for x in KINDS
    for out in ("", "e4m3")
]
GATED = [harness.chosen(scaled(gated(50, 4096, 1024), x, "e4m3", x_scale=True), inputs=inputs_of) for x in KINDS]
SABOTAGED = [
    harness.sabotaged(case, f"FRTC_SABOTAGE={defect}")
    for case in (*BY_ROW, *GATED)
    for defect in ("last_k_tile", "neighbour_scale")
] + [harness.sabotaged(case, "FRTC_SABOTAGE=last_k_tile") for case in (SPLIT[0], SPLIT[-1])]


@pytest.mark.gpu
@pytest.mark.parametrize("case", harness.swept([*CHOSEN.values()], QUICK), ids=str)
def test_chosen(gpu: Gpu, case: harness.Case) -> None:
    harness.check(gpu, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", harness.swept(POLICIES, POLICIES[::3]), ids=str)
def test_policies(gpu: Gpu, case: harness.Case) -> None:
    harness.check(gpu, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", harness.swept(EVERY_CONFIG, EACH_ONCE[::2]), ids=str)
def test_every_config(gpu: Gpu, case: harness.Case) -> None:
    wrong, _, _ = harness.run(gpu, case)
    assert not wrong, wrong


@pytest.mark.gpu
@pytest.mark.parametrize("case", SABOTAGED, ids=str)
def test_sabotaged(gpu: Gpu, case: harness.Case) -> None:
    harness.check_fails(gpu, case)


def every_number(x: str) -> harness.Case:
    """One column for every e4m3 number: row k of x is 1 at k, so that y[k, n] is w[n, k]."""

    def inputs(site: Site, generator: np.random.Generator) -> list[Any]:
        w = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
        w = np.where((w & 0x7F) == 0x7F, 0, w).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
        one = round_to(np.eye(256, dtype=np.float32), x)
        return [one, w, None, None, None, None, np.ones(256, np.float32), None, None]

    return harness.chosen(scaled(linear(256, 256, 256, out="f32"), x), inputs=inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [every_number(x) for x in ("e4m3", "bf16", "f16")], ids=str)
def test_every_number_is_widened_exactly(gpu: Gpu, case: harness.Case) -> None:
    operands = harness.operands_of(case)
    with harness.Buffers(gpu, case, operands) as buffers:
        for launch in buffers.launches():
            gpu.launch(*launch)
        gpu.synchronize()
        (got,) = buffers.results()
        assert operands[1] is not None
        np.testing.assert_array_equal(got, operands[1].astype(np.float32).T)


def by_torch(torch: Any, x: harness.Array, w: harness.Array, alpha: float) -> harness.Array:
    """torch._scaled_mm of the same bytes, summed in fp32, in bf16."""
    a, b = (torch.from_numpy(np.array(v.view(np.uint8))).cuda().view(torch.float8_e4m3fn) for v in (x, w))
    one, scale = (torch.tensor(v, device="cuda", dtype=torch.float32) for v in (1.0, alpha))
    y = torch._scaled_mm(a, b.t(), scale_a=one, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=False)
    return np.asarray(y.float().cpu().numpy())


@pytest.mark.gpu
def test_as_torch_does(gpu: Gpu) -> None:
    """Beside torch._scaled_mm at every shape of the policies: ours within its bar of the reference, and of torch."""
    torch = pytest.importorskip("torch")
    if not (torch.cuda.is_available() and hasattr(torch, "_scaled_mm")):
        pytest.skip("no torch with FP8 on this GPU")
    shapes = {(p.batch * p.m, p.n, p.k): None for p in map(product, policy_shapes())}
    shapes = {shape: None for shape in shapes if shape[1] % 16 == 0 == shape[2] % 16}  # as torch needs them
    cases = {shape: harness.chosen(scaled(linear(*shape), one=True), inputs=inputs_of) for shape in shapes}
    compile_all([job for case in cases.values() for job in case.jobs()])
    wrong = []
    for shape, case in cases.items():
        operands = harness.operands_of(case)
        x, w, alpha = (operands[place] for place in (0, 1, 6))
        assert x is not None and w is not None and alpha is not None
        theirs = by_torch(torch, x, w, float(alpha))
        with harness.Buffers(gpu, case, operands) as buffers:
            for launch in buffers.launches():
                gpu.launch(*launch)
            gpu.synchronize()
            ours, want = buffers.results(), harness.expected(case, operands)
        bad, _ = harness.faults(case, ours, want)
        apart, _ = harness.difference(ours[0], theirs)
        bar = 1e-2 if shape[2] > 4096 else harness.BARS["bf16"]  # torch's own sums, on wgmma, are worth no more there
        print(f"{shape}: to torch {apart:.1e}, torch to the reference {harness.difference(theirs, want[0])[0]:.1e}")
        wrong += [f"{shape}: {bad} {apart:.2e}"] if bad or apart > bar else []
    assert len(shapes) >= 20 and not wrong, wrong
