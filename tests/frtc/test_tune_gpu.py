"""Tuning on a real GPU: other kernels compute the same actions, and a kernel that traps or never ends is survived."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frtc import observation, selftest
from frtc.codegen.nvrtc import Job, compile_one
from frtc.compiler import CompileOptions, compile, families_for
from frtc.kernels.catalog import CATALOG, label
from frtc.kernels.spec import Site
from frtc.kernels.tactic import Tactic, Tactics, key_of
from frtc.kernels.targets import Target
from frtc.models.synthetic import write_checkpoint
from frtc.policy import Policy
from frtc.runtime.plan_file import open_plan
from frtc.tuning import search as searching
from frtc.tuning.chain import Chain, Image, chain_of
from frtc.tuning.options import Tuning
from frtc.tuning.questions import Question, worth_it
from frtc.tuning.search import search
from frtc.tuning.tuned import write_tactics
from frtc.tuning.worker import Worker
from frtc.verified import RESULTS
from tests.frtc.test_tune import linear
from tests.runtime.here import target_here

pytestmark = [pytest.mark.gpu, pytest.mark.full]  # minutes
OPTIONS = CompileOptions(precision="bf16", prompt=72, steps=3, horizon=4)
PRODUCTS = ("linear(", "gated_linear(", "linear_rope_qkv(", "linear_norm(", "linear_moments(")
# Whatever arguments a launch has: a kernel that is given more than it takes does not see them.
BROKEN = """
extern "C" __global__ void trap() { __trap(); }
extern "C" __global__ void forever() { while (true) __nanosleep(1000); }
"""


@pytest.fixture(scope="module")
def target() -> Target:
    return target_here()


# ---- a Plan ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plans:
    """One checkpoint compiled as the cost model says, tuned, and with the candidates that did not win."""

    plain: Path
    tuned: Path
    others: Path
    log: Mapping[str, Any]
    tactics: Path


def config_of(name: str) -> tuple[str, dict[str, Any]]:
    """Inverse of catalog.label."""
    kernel, *pairs = name.split()
    values = dict(pair.split("=") for pair in pairs)
    known = {"True": True, "False": False}
    return kernel, {k: int(v) if v.lstrip("-").isdigit() else known.get(v, v) for k, v in values.items()}


@pytest.fixture(scope="module")
def plans(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Plans:
    folder = tmp_path_factory.mktemp("tune")
    write_checkpoint(folder / "ck", "openpi", "tiny", seed=1)
    paths = {name: folder / f"{name}.plan" for name in ("plain", "tuned", "others")}
    kept, losers = folder / "t.json", folder / "losers.json"

    def compiled(name: str, tuning: Tuning) -> None:
        print(compile(folder / "ck", target.name, paths[name], OPTIONS, tuning=tuning).tuning)

    compiled("plain", Tuning())
    compiled("tuned", Tuning(measure=True, file=kept, seconds=120.0))
    log = open_plan(paths["tuned"]).evidence["tuning"]
    lost = []
    for row in log["log"]:
        ran = [c["kernel"] for c in row["candidates"] if "us" in c and c["kernel"] != row["chosen"]]
        if ran:
            kernel, config = config_of(ran[-1])
            lost.append(Tactic(row["site"], kernel, config, 1.0))
    write_tactics(losers, Tactics.of(target.name, "", "", lost))
    compiled("others", Tuning(file=losers))
    return Plans(**paths, log=log, tactics=kept)


def actions(path: Path) -> tuple[np.ndarray[Any, Any], selftest.Outcome]:
    with Policy.load(path, 0, untested=True) as policy:
        found = policy.infer(observation.seeded(policy.steps), draw=0)
        return np.asarray(found.actions, np.float64), selftest.check(policy)


@pytest.mark.parametrize("name", ["tuned", "others"])
def test_other_kernels_compute_the_same(name: str, plans: Plans) -> None:
    path: Path = getattr(plans, name)
    (expected, _), (found, outcome) = actions(plans.plain), actions(path)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    print(name, f"{error:.1e}")
    assert error <= RESULTS["bf16"] and outcome.failure() is None, str(outcome.failure())


def test_the_losers_are_other_kernels(plans: Plans) -> None:
    """Else the comparison above would compare a program with itself."""
    assert open_plan(plans.others).plan_id not in (open_plan(plans.plain).plan_id, open_plan(plans.tuned).plan_id)


def test_the_log_has_every_product_and_its_candidates(plans: Plans, target: Target) -> None:
    log = plans.log
    print(json.dumps({k: v for k, v in log.items() if k != "log"}))
    for row in log["log"]:
        print(
            row["chosen"],
            "|",
            row["site"],
            "|",
            [(c["kernel"], c.get("us", c.get("failed"))) for c in row["candidates"]],
        )
    assert log["target"] == target.name and log["gpu"] and not log["stopped"] and log["not_reached"] == 0
    products = [row for row in log["log"] if row["site"].startswith(PRODUCTS)]
    assert products and all(len(row["candidates"]) > 1 for row in products)
    times = [us for row in log["log"] for c in row["candidates"] for us in c.get("us", ())]
    assert times and all(0.1 < us < 1e5 for us in times)
    assert not [c for row in log["log"] for c in row["candidates"] if "failed" in c]
    written = json.loads(plans.tactics.read_text())
    assert {line["site"] for line in written["tactics"]} == {row["site"] for row in log["log"]}
    assert written["gpu"] == log["gpu"]


def test_sites_are_decided_in_the_chain(plans: Plans) -> None:
    """Whole programs run on weights that nobody trained, and every candidate computes there what the others do."""
    chain = plans.log["chain"]
    print(json.dumps({k: v for k, v in chain.items() if k != "log"}))
    for row in chain["log"]:
        print(row["program"], row["chosen"], "|", row["site"], "|", [tuple(c.values()) for c in row["candidates"]])
    assert chain["log"] and not chain["stopped"] and not chain["refused"]
    assert not [c for row in chain["log"] for c in row["candidates"] if "failed" in c]
    assert {"vision", "prefix", "denoise"} <= chain["before"].keys() == chain["after"].keys()
    assert chain["after"]["replay"] <= 1.01 * chain["before"]["replay"]


def test_the_same_tactics_make_the_same_plan(plans: Plans, target: Target, tmp_path: Path) -> None:
    folder = plans.plain.parent
    again = tmp_path / "again.plan"
    report = compile(folder / "ck", target.name, again, OPTIONS, tuning=Tuning(file=plans.tactics))
    assert report.plan_id == open_plan(plans.tuned).plan_id


# ---- one site -------------------------------------------------------------------------------------------------------


def question(site: Site, target: Target) -> Question:
    found = list(CATALOG.candidates(site, target, families_for(target, "native")))
    chosen = min(found, key=lambda choice: choice.cost_us)
    return Question(key_of(site), site, frozenset({1}), 1.0, worth_it(found, chosen, 3))


@pytest.mark.parametrize("symbol", ["trap", "forever"])
def test_a_kernel_that_traps_or_never_ends_is_survived(
    symbol: str, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, other = question(linear(), target), question(linear(n=512), target)
    victim = label(asked.candidates[0].kernel, asked.candidates[0].config)
    broken = compile_one(Job(BROKEN, symbol, target))

    def sabotaged(about: Question, *rest: Any) -> Chain:
        chain = chain_of(about, *rest)
        if about is not asked or chain.label != victim:
            return chain
        return replace(chain, kernels=tuple(Image(broken.image, symbol, 0) for _ in chain.kernels))

    monkeypatch.setattr(searching, "chain_of", sabotaged)
    with Worker(answer_s=5.0) as worker:
        found = search([asked, other], target, worker, 120.0, lambda what, share: None)
    first, second = found.log
    print(first, second)
    said = {c["kernel"]: c.get("failed", "") for c in first["candidates"]}
    assert ("no answer within 5 s" if symbol == "forever" else "CUDA_ERROR") in said.pop(victim)
    assert said and not any(said.values()) and first["chosen"] in said
    assert not any("failed" in c for c in second["candidates"]) and not found.stopped


def test_times_are_those_of_cold_weights(target: Target) -> None:
    """A product of 64 MB of weights takes what reading them takes, and no less."""
    site = linear(m=16, n=8192, k=4096)
    with Worker() as worker:
        found = search([question(site, target)], target, worker, 120.0, lambda what, share: None)
    (row,) = found.log
    best = min(min(c["us"]) for c in row["candidates"])
    least_us = 8192 * 4096 * 2 / (1.5 * target.dram) * 1e6  # an H200 has 1.43 times the bandwidth of an H100
    print(row, f"{best:.1f} us, not less than {least_us:.1f}")
    assert least_us < best < 20 * least_us
