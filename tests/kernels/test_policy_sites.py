"""The sites that the policies' compiled programs ask for: the table is current; on a GPU results and times of each."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bench.full_model import Shape
from bench.sites import from_json, table, to_json, uses
from frtc.codegen.nvrtc import compile_all
from tests.kernels.device import Gpu
from tests.kernels.harness import Case, check, expected, operands_of
from tests.kernels.sites_policies import TABLE, case_of, policy_sites

SITES = policy_sites()
CASES = [case_of(site) for site in SITES]
STALE = "PYTHONPATH=. python3 -m bench.sites --write"


def test_a_site_survives_its_line() -> None:
    assert [from_json(json.loads(to_json(site))) for site in SITES] == SITES
    assert len({to_json(site) for site in SITES}) == len(SITES)


@pytest.mark.parametrize("policy", ["pi05", "pi0", "smolvla"])
def test_the_table_holds_what_the_compiler_asks_for(policy: str) -> None:
    known = {to_json(site) for site in SITES}
    asked = {to_json(use.site) for use in uses(Shape(policy))}
    assert asked and asked <= known, STALE


@pytest.mark.full
def test_the_table_holds_nothing_else() -> None:
    assert table() == TABLE.read_text(), STALE


@pytest.mark.full
def test_more_layers_ask_for_nothing_else() -> None:
    known = {to_json(site) for site in SITES}
    assert all(to_json(use.site) in known for use in uses(Shape("smolvla"), layers=1000))


@pytest.mark.full
def test_chosen_kernels_spill_nothing() -> None:
    jobs = [job for case in CASES for job in case.jobs()]
    assert not [job.entry for job, cubin in zip(jobs, compile_all(jobs), strict=True) if cubin.resources.local]


def small(case: Case) -> bool:
    return sum(o.nbytes for o in (*case.site.operands, *case.site.results) if o) < 1 << 20


@pytest.mark.parametrize("case", [case for case in CASES if small(case)], ids=str)
def test_inputs_suit_the_reference(case: Case) -> None:
    for value in expected(case, operands_of(case)):
        assert value.dtype.kind != "f" or np.isfinite(value.astype(np.float32)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_site(gpu: Gpu, case: Case) -> None:
    check(gpu, case)
