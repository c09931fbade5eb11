"""The sites that the policies' compiled programs ask for: the table is current; on a GPU results and times of each."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bench.full_model import Shape
from bench.sites import NATIVE_SHAPES, from_json, table, to_json, uses
from frtc.codegen.nvrtc import compile_all
from frtc.compiler import families_for, target_named
from frtc.kernels.catalog import CATALOG
from frtc.kernels.dtypes import DTYPES
from tests.kernels.device import Gpu
from tests.kernels.harness import PERIOD, TARGET, Case, check, drawn, expected, operands_of
from tests.kernels.sites_policies import TABLE, case_of, policy_sites

SITES, NATIVE = policy_sites(), policy_sites(native=True)
CASES = [case_of(site) for site in SITES]
OWN = TARGET.families()  # by itself the compiler takes these
NATIVE_CASES = [case_of(site, OWN) for site in NATIVE if CATALOG.implements(site, TARGET, OWN)]
STALE = "PYTHONPATH=. python3 -m bench.sites --write"


def test_a_site_survives_its_line() -> None:
    for sites in (SITES, NATIVE):
        assert [from_json(json.loads(to_json(site))) for site in sites] == sites
        assert len({to_json(site) for site in sites}) == len(sites)


@pytest.mark.parametrize("policy", ["pi05", "pi0", "smolvla"])
def test_the_table_holds_what_the_compiler_asks_for(policy: str) -> None:
    known = {to_json(site) for site in SITES}
    asked = {to_json(use.site) for use in uses(Shape(policy))}
    assert asked and asked <= known, STALE


@pytest.mark.parametrize("shape", NATIVE_SHAPES[:2], ids=str)
def test_the_table_holds_what_plans_of_own_kernels_ask_for(shape: Shape) -> None:
    hopper = target_named("hopper")
    known = {to_json(site) for site in NATIVE}
    asked = {to_json(use.site) for use in uses(shape, families=families_for(hopper, None))}
    assert len(asked) > 25 and asked <= known, STALE
    assert {site.op for site in NATIVE} >= {"linear", "gated_linear", "linear_rope_qkv", "linear_moments", "attention"}


def test_own_kernels_are_run() -> None:
    """Every product of FP8, and the attentions, on kernels of the target's own family: what a Plan has."""
    if "wgmma" in TARGET.has:
        kernels = {case.kernel.name for case in NATIVE_CASES}
        own = ["gemm", "gated_gemm", "rope_gemm", "moments_gemm", "attention", "attention_split"]
        own += ["few_gated_gemm", "few_rope_gemm", "few_moments_gemm"]
        assert kernels >= {f"sm90_{name}" for name in own}


@pytest.mark.full
def test_the_table_holds_nothing_else() -> None:
    assert table() == TABLE.read_text(), STALE


@pytest.mark.full
def test_more_layers_ask_for_nothing_else() -> None:
    known = {to_json(site) for site in SITES}
    assert all(to_json(use.site) in known for use in uses(Shape("smolvla"), layers=1000))


@pytest.mark.full
def test_chosen_kernels_spill_nothing() -> None:
    jobs = [job for case in (*CASES, *NATIVE_CASES) for job in case.jobs()]
    assert not [job.entry for job, cubin in zip(jobs, compile_all(jobs), strict=True) if cubin.resources.local]


def small(case: Case) -> bool:
    return sum(o.nbytes for o in (*case.site.operands, *case.site.results) if o) < 1 << 20


@pytest.mark.parametrize("case", [*CASES, *NATIVE_CASES], ids=str)
def test_inputs_suit_the_operands(case: Case) -> None:
    """Every site, whatever its size: one value for each operand, of its shape and type; NaN only what is hidden."""
    hides = case.site.op == "attention"
    for operand, values in zip(case.site.operands, drawn(case), strict=True):
        assert (operand is None) == (values is None)
        if operand is not None and values is not None:
            assert values.shape == operand.shape and values.dtype == DTYPES[operand.dtype].numpy
            once = values[tuple(slice(min(n, PERIOD)) for n in values.shape[:-1])]  # drawn rows repeat behind these
            assert hides or values.dtype.kind in "biu" or np.isfinite(once.astype(np.float32)).all()


@pytest.mark.parametrize("case", [case for case in (*CASES, *NATIVE_CASES) if small(case)], ids=str)
def test_inputs_suit_the_reference(case: Case) -> None:
    for value in expected(case, operands_of(case)):
        assert value.dtype.kind != "f" or np.isfinite(value.astype(np.float32)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_site(gpu: Gpu, case: Case) -> None:
    check(gpu, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", NATIVE_CASES, ids=str)
def test_site_of_own_kernels(gpu: Gpu, case: Case) -> None:
    check(gpu, case)
