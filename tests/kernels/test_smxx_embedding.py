"""Rows by device integers: what is refused, and on a GPU results and times."""

from __future__ import annotations

import pytest

from frtc.kernels.catalog import CATALOG
from frtc.kernels.spec import Operand, Site
from tests.kernels.device import Gpu
from tests.kernels.harness import TARGET, Case, check, check_fails, chosen, sabotaged
from tests.kernels.sites_rows import awkward_sites, embedding, index, inputs, real_sites, write

SITES = [site for site in (*real_sites(), *awkward_sites()) if site.op in ("embedding", "index", "write")]


def case_of(site: Site) -> Case:
    """The result of `write` is the next version of the state in the state's buffer."""
    return chosen(site, inputs=inputs, in_place=((0, 0),) if site.op == "write" else ())


def numbers(site: Site) -> list[float]:
    choice = CATALOG.select(site, TARGET)
    (stage,) = choice.kernel.stages(site, choice.config, TARGET)
    return [p.value for p in stage.params if p.kind in ("i32", "f32")]


def test_steps() -> None:
    assert numbers(embedding(50, 13, 33, scale=2.5)) == [33, 33, 1, 33, 2.5]
    assert numbers(index((10, 3, 1024))) == [3072, 3072, 0, 0, 1.0]
    assert numbers(write((2, 600, 256), (2, 50, 256), -2)) == [50 * 256, 50 * 256, 600 * 256, 256]


@pytest.mark.parametrize(
    ("site", "reason"),
    [
        (embedding(50, 13, 33, ids="f32"), "ids of type f32"),
        (embedding(50, 13, 33, "i32", scale=2.0), "rows of i32 scaled or stored as i32"),
        (Site("index", (Operand("f32", (4, 8, 8), (64, 1, 8)), Operand.packed("i32")), (Operand.packed("f32", 8, 8),)),
         "entries are strided"),
        (write((2, 3, 600, 8), (2, 3, 50, 8), -2, "f32"), ""),
        (Site("write", (Operand("f32", (600, 8), (9, 1)), Operand.packed("f32", 50, 8), Operand.packed("i32")),
              (Operand("f32", (600, 8), (9, 1)),), {"axis": -2}), "value or state are strided behind the written axis"),
    ],
)  # fmt: skip
def test_refusals(site: Site, reason: str) -> None:
    (kernel,) = CATALOG.kernels_for(site.op)
    assert kernel.refuse(site, TARGET) == reason


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case_of(site) for site in SITES], ids=str)
def test_rows(gpu: Gpu, case: Case) -> None:
    check(gpu, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [sabotaged(case_of(embedding(50, 13, 33)), "FRTC_SABOTAGE_NEIGHBOUR_ROW")], ids=str)
def test_rows_sabotaged(gpu: Gpu, case: Case) -> None:
    check_fails(gpu, case)
