"""Reductions, running sums, softmax: how axes are split, what is refused, and on a GPU results and times."""

from __future__ import annotations

import pytest

from frtc.kernels.catalog import CATALOG
from frtc.kernels.spec import Operand, Site
from tests.kernels.device import Gpu
from tests.kernels.harness import TARGET, Case, check, check_fails, chosen, every_config, sabotaged
from tests.kernels.sites_rows import awkward_sites, cumsum, inputs, reduce, softmax

SITES = [site for site in awkward_sites() if site.op.startswith("reduce_") or site.op in ("cumsum", "softmax")]
SABOTAGED = [
    sabotaged(chosen(site), "FRTC_SABOTAGE_LAST_ELEMENT")
    for site in (reduce("reduce_sum", (3, 70), (-1,)), cumsum((3, 73), "f32", "f32"), softmax(5, 72, "f32"))
]


def numbers(site: Site) -> list[float]:
    choice = CATALOG.select(site, TARGET)
    (stage,) = choice.kernel.stages(site, choice.config, TARGET)
    return [p.value for p in stage.params if p.kind == "i32"]


def test_axes_become_rows_and_elements() -> None:
    assert numbers(reduce("reduce_sum", (3, 50, 70), (-2, -1))) == [3, 3500, 3500, 1, 1]
    assert numbers(reduce("reduce_max", (60, 70), (-2,))) == [70, 60, 1, 70, 1]
    assert numbers(reduce("reduce_max", (60, 70), (-1,), keepdims=True)) == [60, 70, 70, 1, 1]
    assert numbers(cumsum((73, 4), "i32", "i32", -2)) == [4, 73, 1, 4, 1, 4]


@pytest.mark.parametrize(
    ("site", "reason"),
    [
        (reduce("reduce_sum", (3, 4, 5), (-3, -1)), "leading or reduced axes do not step as one"),
        (reduce("reduce_sum", (3, 4), (-1,), y="i32"), "f32 added up into i32"),
        (Site("softmax", (Operand.packed("f32", 3, 4),), (Operand.packed("f32", 3, 4),), {"axis": -2}),
         "not along a dense last axis"),
        (softmax(2, 40000), "rows of 40000 elements do not fit the registers of a block"),
    ],
)  # fmt: skip
def test_refusals(site: Site, reason: str) -> None:
    (kernel,) = CATALOG.kernels_for(site.op)
    assert kernel.refuse(site, TARGET) == reason


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for site in SITES for case in every_config(site, inputs=inputs)], ids=str)
def test_reduce(gpu: Gpu, case: Case) -> None:
    check(gpu, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SABOTAGED, ids=str)
def test_reduce_sabotaged(gpu: Gpu, case: Case) -> None:
    check_fails(gpu, case)
