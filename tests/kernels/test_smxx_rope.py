"""Rotary embedding kernels: what they refuse, their groups, and on a GPU their results and times at every site."""

from __future__ import annotations

import pytest

from frtc.kernels.catalog import CATALOG
from frtc.kernels.spec import Operand, Site
from tests.kernels.device import Gpu
from tests.kernels.harness import TARGET, Case, check, check_fails, chosen, sabotaged
from tests.kernels.sites_rows import awkward_sites, inputs, real_sites, rope, rope_qkv

SITES = [site for site in (*real_sites(), *awkward_sites()) if site.op in ("rope", "rope_qkv")]
SABOTAGED = [
    sabotaged(chosen(site, inputs=inputs), "FRTC_SABOTAGE_NEXT_ANGLE") for site in (rope(3, 5, 64), rope_qkv(10, 570))
]


def only(site: Site) -> str:
    choice = CATALOG.select(site, TARGET)
    (stage,) = choice.kernel.stages(site, choice.config, TARGET)
    return stage.entry


def test_groups_divide_half_a_row() -> None:
    assert only(rope(3, 5, 256)) == "frtc::rope<false, 256, 4, 128, __nv_bfloat16, float, __nv_bfloat16>"
    assert only(rope(3, 5, 10)) == "frtc::rope<false, 10, 1, 128, __nv_bfloat16, float, __nv_bfloat16>"
    assert (
        only(rope_qkv(7, 9, 6, 2, 72, angles="bf16"))
        == "frtc::rope_qkv<false, 72, 4, 128, __nv_bfloat16, __nv_bfloat16>"
    )


def test_queries_keys_and_values_are_one_launch() -> None:
    choice = CATALOG.select(rope_qkv(50, 610), TARGET)
    (stage,) = choice.kernel.stages(rope_qkv(50, 610), choice.config, TARGET)
    assert stage.grid == (50 * 32 // 128 + 1, 10, 1)
    numbers = [p.value for p in stage.params[6:]]
    assert numbers == [50, 8, 1, 2560, 128, 128, 50 * 256, 256, 610 * 256, 256, 610 * 256, 256]


@pytest.mark.parametrize(
    ("site", "reason"),
    [
        (rope(3, 5, 9), "rows of 9 elements do not match 4 angles"),
        (rope(3, 5, 64, angles="i32"), "an element type is none of bf16, f16, f32"),
        (Site("rope", (Operand("f32", (5, 8), (1, 5)), *(Operand.packed("f32", 5, 4),) * 2),
              (Operand.packed("f32", 5, 8),), {}), "an operand's last axis is strided"),
    ],
)  # fmt: skip
def test_refusals(site: Site, reason: str) -> None:
    (kernel,) = CATALOG.kernels_for(site.op)
    assert kernel.refuse(site, TARGET) == reason


@pytest.mark.gpu
@pytest.mark.parametrize("case", [chosen(site, inputs=inputs) for site in SITES], ids=str)
def test_rope(gpu: Gpu, case: Case) -> None:
    check(gpu, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SABOTAGED, ids=str)
def test_rope_sabotaged(gpu: Gpu, case: Case) -> None:
    check_fails(gpu, case)
