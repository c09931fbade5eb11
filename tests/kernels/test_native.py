"""The families that no GPU here can run: they compile for their GPU, hold the instructions they are for, and are chosen
only when asked for. Nothing here says that their results are right: a Plan's self-test on the robot does."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from frtc.cli import main
from frtc.codegen import nvrtc
from frtc.codegen.nvrtc import Job, compile_one, ptx_of
from frtc.errors import EnvironmentFault
from frtc.kernels.catalog import CATALOG, Choice, NoKernel
from frtc.kernels.cubin import parameters_of
from frtc.kernels.product import NULL
from frtc.kernels.spec import Operand, Param, Site, Stage
from frtc.kernels.targets import Target, load_targets
from frtc.runtime.plan_file import open_plan
from tests.conftest import Demo
from tests.kernels import sites_gemm
from tests.kernels.sites_gemm import gated, linear, matmul

TARGETS = load_targets()
THOR, RTX5090 = TARGETS["thor"], TARGETS["rtx5090"]
NATIVE = ("baseline", "sm_110a")
SIZES = {"operand": 8, "result": 8, "scratch": 8, "counters": 8, "i64": 8, "i32": 4, "f32": 4}  # bytes of a parameter


def scaled(m: int, n: int, k: int, dtype: str = "e4m3", bias: str = "", residual: str = "") -> Site:
    """linear of two MX operands: their scales, one for 32 elements of K, behind the op's operands."""
    site = linear(m, n, k, dtype, bias=bias, residual=residual, out="bf16", act="gelu_tanh")
    scales = (Operand.packed("u8", m, k // 32), Operand.packed("u8", n, k // 32))
    return replace(site, operands=(*site.operands, None, None, None, None, *scales))


def native(name: str, site: Site, target: Target) -> list[Choice]:
    """Every config of one kernel for the site."""
    found = CATALOG.candidates(site, target, ("baseline", target.nvcc))
    return [choice for choice in found if choice.kernel.name == name]


def stage_of(choice: Choice, site: Site, target: Target) -> Stage:
    (stage,) = choice.kernel.stages(site, choice.config, target)
    return stage


THOR_SITE = linear(560, 2560, 2048, bias="bf16", residual="bf16", gate="f32", act="silu")
MX_SITE = scaled(560, 2560, 2048, residual="bf16")


def instances() -> list[tuple[str, Site, Target]]:
    return [
        ("sm110_gemm", THOR_SITE, THOR),
        ("sm110_gated_gemm", gated(50, 4096, 1024), THOR),
        ("sm120_mxfp8_gemm", MX_SITE, RTX5090),
    ]


@cache
def ptx(name: str, number: int) -> str:
    site, target = {n: (s, t) for n, s, t in instances()}[name]
    return ptx_of(Job.of(stage_of(native(name, site, target)[number], site, target), target))


@pytest.mark.parametrize(("name", "site", "target"), instances(), ids=[name for name, _, _ in instances()])
def test_it_compiles_for_its_gpu(name: str, site: Site, target: Target) -> None:
    stage = stage_of(native(name, site, target)[0], site, target)
    job = Job.of(stage, target)
    assert job.needs_cutlass
    cubin = compile_one(job)
    assert cubin.sm == target.sm and cubin.resources.local == 0
    assert cubin.resources.smem + stage.smem <= target.smem_per_block
    assert cubin.resources.registers * stage.block <= 65536
    assert parameters_of(cubin.image, cubin.symbol) == tuple(SIZES[p.kind] for p in stage.params)
    for folder in (b"site-packages", b"cutlass_library", str(nvrtc.__file__).encode()):
        assert folder not in cubin.image, "a path reached the cubin"


@pytest.mark.full
@pytest.mark.parametrize(("name", "site", "target"), instances(), ids=[name for name, _, _ in instances()])
def test_every_config_compiles(name: str, site: Site, target: Target) -> None:
    for choice in native(name, site, target):
        assert compile_one(Job.of(stage_of(choice, site, target), target)).resources.local == 0


def test_tcgen05_does_the_products() -> None:
    """BN = 256: four products of 128 x 256 x 16 for a tile, their operands described as PTX ISA says."""
    text = ptx("sm110_gemm", 0)
    assert len(re.findall(r"tcgen05\.mma\.cta_group::1\.kind::f16 ", text)) == 4
    once = ("alloc", "relinquish_alloc_permit", "commit", "ld.sync.aligned.32x32b.x8", "wait::ld", "dealloc")
    for instruction in once:
        assert len(re.findall(rf"tcgen05\.{re.escape(instruction)}", text)) == 1, instruction
    assert "fence.proxy.async" in text and "mma.sync" not in text
    # Instruction descriptor: fp32 result (bit 4), bf16 operands (7, 10), N / 8 (17), M / 16 (24).
    assert str(1 << 4 | 1 << 7 | 1 << 10 | 256 // 8 << 17 | 128 // 16 << 24) in text
    # Upper half of a tile's descriptor: 1024 bytes / 16 from atom to atom, version 1 (bit 46), 128-byte swizzle (61).
    assert str((1024 // 16) << 32 | 1 << 46 | 2 << 61 | 1 << 16) in text or str(64 | 1 << 14 | 2 << 29) in text


def test_block_scaled_mma_does_the_products() -> None:
    """Warps of 64 x 64, 4 steps of K in a tile: 4 * 8 * 4 products."""
    text = ptx("sm120_mxfp8_gemm", 0)
    instruction = "mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.e4m3.e4m3.f32.ue8m0"
    assert text.count(instruction) == text.count("mma.sync") == 4 * 8 * 4


def test_nothing_native_unless_asked() -> None:
    for target in TARGETS.values():
        for case in sites_gemm.real_sites():
            assert CATALOG.select(case.site, target).kernel.family == "baseline"


def test_thor_runs_its_large_products_natively() -> None:
    """Every product of 16-bit operands can run on tcgen05. The estimate decides: where both wait for DRAM it is a draw,
    and the kernel that has run on hardware is taken."""
    taken = {}
    for case in sites_gemm.real_sites():
        choice = CATALOG.select(case.site, THOR, NATIVE)
        if all(o.dtype == "bf16" for o in case.site.operands[:2] if o):
            offered = [k for k in CATALOG.kernels_for(case.site.op) if k.family == "sm_110a"]
            assert [k.refuse(case.site, THOR) for k in offered] == [""], case.name
            taken[case.name] = choice.kernel.name
        else:
            assert choice.kernel.name in ("smxx_linear_f32", "smxx_tf32_gemm"), case.name
    assert taken["prefix gate|up, 560 tokens"] == "sm110_gated_gemm"
    assert taken["prefix down, 560 tokens"] == taken["prefix q|k|v, 560 tokens"] == "sm110_gemm"
    assert taken["expert q|k|v, chunk 10"] == "smxx_gemm"


@pytest.mark.parametrize("case", sites_gemm.awkward_sites(), ids=lambda case: case.name)
def test_what_thor_refuses_has_its_reason(case: sites_gemm.Case) -> None:
    """Tails, gaps, batches and every epilogue are served; [K, N] operands, odd rows and fp32 are not."""
    kernel = next(k for k in CATALOG.kernels_for(case.site.op) if k.family == "sm_110a")
    reason = kernel.refuse(case.site, THOR)
    if case.name.startswith("fp32"):
        assert reason == "x is f32 and w is f32; needs bf16 or f16 for both"
    elif case.name in ("batch", "batch, odd"):
        assert reason == "the second operand is [K, N]; needs rows of K"
    elif case.name == "bf16, rows not aligned":
        assert "not a multiple of 16 bytes" in reason
    else:
        assert reason == "", reason
    assert kernel.refuse(case.site, TARGETS["hopper"]) == "needs tcgen05"


def test_rows_are_served_to_their_end() -> None:
    site = linear(130, 203, 1021)
    for choice in native("sm110_gemm", site, THOR):
        stage = stage_of(choice, site, THOR)
        assert stage.grid == (2, -(-203 // choice.config["BN"]), 1) and stage.block == 128
        assert stage.params[3:6] == (Param("i32", 130), Param("i32", 203), Param("i32", 1021))
    batched = matmul((3,), 70, 90, 200, transposed=True)
    assert {stage_of(c, batched, THOR).grid[2] for c in native("sm110_batched_gemm", batched, THOR)} == {3}


def test_block_scales_are_asked_for() -> None:
    (kernel,) = (k for k in CATALOG.kernels if k.name == "sm120_mxfp8_gemm")
    assert kernel.refuse(MX_SITE, RTX5090) == ""
    assert kernel.refuse(MX_SITE, THOR) == "needs block-scaled mma"
    for case in sites_gemm.real_sites():
        if case.site.op == "linear":
            assert "needs e4m3 with a scale for every 32 elements" in kernel.refuse(case.site, RTX5090)
            assert CATALOG.select(case.site, RTX5090, ("baseline", "sm_120a")).kernel.family == "baseline"
    for wrong, reason in (
        (replace(MX_SITE, operands=MX_SITE.operands[:6]), "needs e4m3 with a scale"),
        (replace(MX_SITE, operands=(*MX_SITE.operands[:9], None, MX_SITE.operands[10])), "the scale of x is absent"),
        (replace(MX_SITE, operands=(*MX_SITE.operands[:10], Operand.packed("f32", 2560, 64))), "the scale of w is f32"),
        (scaled(50, 128, 2040), "K = 2040; needs one, and whole blocks of 32"),
    ):
        assert reason in kernel.refuse(wrong, RTX5090)
    with pytest.raises(NoKernel, match="needs e4m3 with a scale"):
        CATALOG.select(replace(MX_SITE, operands=MX_SITE.operands[:6]), RTX5090, ("sm_120a",))


def test_scales_are_parameters() -> None:
    (first, *_) = native("sm120_mxfp8_gemm", MX_SITE, RTX5090)
    params = stage_of(first, MX_SITE, RTX5090).params
    assert params[2] == NULL
    assert params[10:14] == (Param("operand", 9), Param("operand", 10), Param("i32", 64), Param("i32", 64))


def test_rows_that_nothing_reads_are_left_out() -> None:
    count = Operand("i32", (), ())
    few = replace(THOR_SITE, operands=(*THOR_SITE.operands, count))
    (first, *_) = native("sm110_gemm", few, THOR)
    assert stage_of(first, few, THOR).params[2] == Param("operand", 5)
    few = replace(MX_SITE, operands=(*MX_SITE.operands[:5], count, *MX_SITE.operands[6:]))
    (first, *_) = native("sm120_mxfp8_gemm", few, RTX5090)
    assert stage_of(first, few, RTX5090).params[2] == Param("operand", 5)


@pytest.mark.parametrize("arch", ["thor", pytest.param("rtx5090", marks=pytest.mark.full)])
def test_the_command_line_offers_them(
    arch: str, demo: Demo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tiny model's products are too small for the native ones to win, so the Plan says what it holds: baseline."""
    plan = tmp_path / "native.plan"
    command = ["compile", str(demo.checkpoint), "--arch", arch, "--family", "native", "--no-self-test", "-o", str(plan)]
    assert main(command) == 0
    assert "compiles, not run" in (said := capsys.readouterr().out)
    assert "self-test the Plan on the robot before it acts" in said
    assert open_plan(plan).program.target.family == "baseline"


def test_versions_of_the_headers_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Job.of(stage_of(native("sm110_gemm", THOR_SITE, THOR)[0], THOR_SITE, THOR), THOR)
    baseline = CATALOG.select(THOR_SITE, THOR)
    plain = Job.of(stage_of(baseline, THOR_SITE, THOR), THOR)
    before = ours.key(), plain.key()
    real = nvrtc._distribution
    monkeypatch.setattr(nvrtc, "_distribution", lambda name: "9.9" if name in nvrtc.CUTLASS else real(name))
    nvrtc.compiler_version.cache_clear()
    after = ours.key(), plain.key()
    nvrtc.compiler_version.cache_clear()
    assert before[0] != after[0] and before[1] == after[1]


def test_absent_headers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda import pathfinder

    real = pathfinder.find_nvidia_header_directory
    found = {"cutlass": None}
    monkeypatch.setattr(pathfinder, "find_nvidia_header_directory", lambda name: found.get(name, name) and real(name))
    nvrtc._cutlass_headers.cache_clear()
    with pytest.raises(EnvironmentFault, match="the headers of CUTLASS are not installed") as caught:
        ptx_of(Job.of(stage_of(native("sm110_gemm", THOR_SITE, THOR)[0], THOR_SITE, THOR), THOR))
    assert caught.value.code == "compiler.headers" and "nvidia-cutlass" in caught.value.hint
