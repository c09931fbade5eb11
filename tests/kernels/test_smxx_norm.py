"""The norm kernel: what it refuses, how rows meet threads, and on a GPU its results and times at every site."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from frtc.codegen.nvrtc import Job, compile_all
from frtc.kernels import smxx_norm
from frtc.kernels.catalog import CATALOG
from frtc.kernels.spec import Operand, Site
from frtc.kernels.targets import Target, load_targets
from tests.kernels.device import Gpu
from tests.kernels.harness import (
    TARGET,
    Case,
    check,
    check_fails,
    chosen,
    distinct,
    every_config,
    in_turn,
    sabotaged,
    swept,
)
from tests.kernels.sites_rows import (
    EPS,
    awkward_sites,
    in_e4m3,
    inputs,
    layer_norm,
    loud_ends,
    packed,
    real_sites,
    residual_norm,
    rms_norm,
)

OPS = {kernel.op for kernel in smxx_norm.KERNELS}
# A kernel is of its width, config and types: without full runs each is tried at one number of rows.
REAL = [case for site in real_sites() if site.op in OPS for case in every_config(site, inputs=inputs)]
AWKWARD = [chosen(site, inputs=inputs) for site in awkward_sites() if site.op in OPS]
E4M3, AWKWARD_E4M3 = (
    [chosen(in_e4m3(s, per_row), inputs=inputs) for s in sites if s.op in OPS for per_row in (False, True)]
    for sites in (real_sites(), awkward_sites())
)
IN_PLACE = [
    replace(chosen(residual_norm(50, 1024, "ada", gate="f32")), in_place=((0, 0),)),
    replace(chosen(residual_norm(50, 1001, "rms")), in_place=((0, 1),)),
    replace(chosen(rms_norm(50, 2048)), in_place=((0, 0),)),
    replace(chosen(in_e4m3(residual_norm(50, 1024, "ada", gate="f32"), per_row=True)), in_place=((0, 0),)),
]
QUICK = [*distinct(REAL), *AWKWARD, *distinct(in_turn(E4M3)), *in_turn(AWKWARD_E4M3), *IN_PLACE]
SABOTAGED = [
    sabotaged(chosen(site), "FRTC_SABOTAGE_LAST_GROUP")
    for site in (
        rms_norm(9, 72),
        layer_norm(50, 1152, "f32"),
        residual_norm(9, 72, "ada", gate="f32"),
        in_e4m3(rms_norm(9, 72, w=""), per_row=True),
    )
] + [
    sabotaged(chosen(in_e4m3(site, per_row=True), inputs=loud_ends), macro)
    for site in (rms_norm(9, 72, w=""), layer_norm(50, 1152, affine=""))
    for macro in ("FRTC_SABOTAGE_LAST_MAXIMUM", "FRTC_SABOTAGE_NEIGHBOUR_SCALE")
]


def test_one_group_a_thread_comes_first() -> None:
    lanes = [config["LANES"] for config in smxx_norm.configs(rms_norm(968, 2048), TARGET)]
    assert lanes == [256, 128, 96, 64]


def test_short_rows_share_a_block() -> None:
    assert smxx_norm.configs(rms_norm(9, 72), TARGET) == [{"LANES": 16, "ROWS": 8}]
    (stage,) = smxx_norm.stages(rms_norm(9, 72), {"LANES": 16, "ROWS": 8}, TARGET)
    assert (stage.grid, stage.block) == ((2, 1, 1), 128)


def test_operands_by_role() -> None:
    (stage,) = smxx_norm.stages(residual_norm(50, 1024, "ada", gate="f32"), {"LANES": 128, "ROWS": 1}, TARGET)
    kinds = "frtc::Norm::ada, 1024, 128, 1, 8, __nv_bfloat16, __nv_bfloat16, float, float, float, __nv_bfloat16, float"
    assert stage.entry == f"frtc::norm<{kinds}, false>"
    assert [(p.kind, p.value) for p in stage.params[:10]] == [
        *(("operand", i) for i in range(5)), ("result", 0), ("result", 1), ("i64", 0), ("i64", 0), ("i32", 50),
    ]  # fmt: skip
    assert [p.value for p in stage.params[10:]] == [1024, 1024, 0, 0, 0, 1024, 1024, 0, EPS, 1.0]


@pytest.mark.parametrize(("per_row", "pointers"), [(False, [("operand", 2), ("i64", 0)]),
                                                   (True, [("i64", 0), ("result", 1)])])  # fmt: skip
def test_e4m3_has_one_kind_of_scale(per_row: bool, pointers: list[tuple[str, int]]) -> None:
    (stage,) = smxx_norm.stages(in_e4m3(rms_norm(50, 1024), per_row), {"LANES": 128, "ROWS": 1}, TARGET)
    assert stage.entry.endswith(f"__nv_fp8_e4m3, float, {str(per_row).lower()}>")
    assert [(p.kind, p.value) for p in stage.params[7:9]] == pointers
    assert stage.params[-3].value == int(per_row)  # from one row's scale to the next


def test_loud_ends_are_the_largest_of_their_rows() -> None:
    x, *_ = loud_ends(rms_norm(9, 72, w=""), np.random.default_rng(0))
    assert x is not None and (np.argmax(np.abs(x.astype(np.float32)), axis=-1) == 71).all()


@pytest.mark.parametrize(
    ("site", "reason"),
    [
        (rms_norm(5, 64, "i32"), "element type i32 is none of bf16, f16, f32"),
        (rms_norm(5, 64, w="e4m3"), "element type e4m3 is none of bf16, f16, f32"),
        (Site("rms_norm", (Operand("f32", (4, 8), (1, 4)), None), (Operand.packed("f32", 4, 8),), {"eps": EPS}),
         "an operand's last axis is strided or broadcast"),
        (Site("rms_norm", (Operand("f32", (4, 3, 8), (100, 8, 1)), None), (Operand.packed("f32", 4, 3, 8),),
              {"eps": EPS}), "leading axes do not step as one through all operands"),
        (rms_norm(5, 64, y="e4m3"), "a result in e4m3 with 0 kinds of scale"),
        (rms_norm(5, 64, y="e5m2"), "element type e5m2 is none of bf16, f16, f32, e4m3"),
        (replace(rms_norm(5, 64), attrs={"eps": EPS, "per_row": True}, results=(packed("bf16", 5, 64),
              packed("f32", 5, 1))), "a result in bf16 with 1 kinds of scale"),
        (rms_norm(2, 40000), "rows of 40000 elements do not fit the registers of 1024 threads"),
    ],
)  # fmt: skip
def test_refusals(site: Site, reason: str) -> None:
    assert smxx_norm.refuse(site, TARGET) == reason
    assert not CATALOG.implements(site, TARGET)


@pytest.mark.gpu
@pytest.mark.parametrize("case", swept([*REAL, *AWKWARD, *E4M3, *AWKWARD_E4M3, *IN_PLACE], QUICK), ids=str)
def test_norm(gpu: Gpu, case: Case) -> None:
    check(gpu, case)


@pytest.mark.parametrize("target", load_targets().values(), ids=load_targets())
def test_e4m3_spills_nothing(target: Target) -> None:
    jobs = {}
    for site in (in_e4m3(site, per_row) for site in real_sites() if site.op in OPS for per_row in (False, True)):
        choice = CATALOG.select(site, target)
        jobs.update({Job.of(stage, target): site for stage in choice.kernel.stages(site, choice.config, target)})
    assert [job.entry for job, cubin in zip(jobs, compile_all([*jobs]), strict=True) if cubin.resources.local] == []


@pytest.mark.gpu
@pytest.mark.parametrize("case", SABOTAGED, ids=str)
def test_norm_sabotaged(gpu: Gpu, case: Case) -> None:
    check_fails(gpu, case)
