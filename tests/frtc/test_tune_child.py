"""What the measuring process asks of the driver, on a driver that only records."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from frtc.codegen.dependences import span
from frtc.codegen.nvrtc import Cubin
from frtc.kernels.catalog import CATALOG, Choice
from frtc.kernels.spec import Site
from frtc.kernels.tactic import key_of
from frtc.runtime import tensor_map
from frtc.runtime.driver import Driver
from frtc.runtime.plan import ARENA, STATE, WEIGHTS
from frtc.tuning import chain as chaining
from frtc.tuning.chain import Chain, chain_of, jobs_of
from frtc.tuning.child import REPLAYS, SAMPLES, WARM_UP, Bench
from frtc.tuning.inputs import values
from frtc.tuning.questions import BEST, Question, worth_it
from tests.frtc.test_tune import HOPPER, linear, question
from tests.kernels.sites_policies import policy_sites
from tests.runtime.null_driver import CopyingApi

NBYTES = {"i32": 4, "f32": 4, "tensormap": 128}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 MB of weights are cold enough for a driver that does nothing."""
    monkeypatch.setattr(chaining, "COLD", 2 << 20)
    monkeypatch.setattr(chaining, "MOST", 2 << 20)


def made(asked: Question, choice: Choice) -> Chain:
    jobs = jobs_of(asked, choice, HOPPER)
    return chain_of(asked, choice, HOPPER, {job: Cubin(b"\x7fELF", f"k{i}") for i, job in enumerate(jobs)})


def api_for(*chains: Chain) -> CopyingApi:
    sizes: dict[str, tuple[int, ...]] = {}
    for chain in chains:
        for call in chain.calls:
            for launch in call.launches:
                sizes[chain.kernels[launch.kernel].symbol] = tuple(NBYTES.get(kind, 8) for kind, _ in launch.params)
    return CopyingApi(sizes)


def split(asked: Question, parts: bool) -> Choice:
    """A candidate that adds up parts of a sum, or none."""
    found = [c for c in asked.candidates if bool(c.kernel.counters(asked.site, c.config)) == parts]
    return found[0]


def test_launches_take_turns_on_copies_of_the_weights() -> None:
    asked = question(linear(m=8, n=64, k=1024))
    chain = made(asked, asked.candidates[0])
    api = api_for(chain)
    bench = Bench(Driver(api=api))
    us, ((*some,),) = bench.measure(chain)
    assert us == pytest.approx(1.0 / len(chain.calls))  # the null driver's clock: 1 us
    assert len(some) == SAMPLES and all(map(math.isnan, some))  # nobody wrote there
    blocks = dict(bench.blocks)
    (weights, nbytes), copy = blocks[WEIGHTS], 64 * 1024 * 2
    assert nbytes == 16 * copy and len(chain.calls) == 16
    nodes = list(api.kernels.values())
    assert [node.arguments[1] for node in nodes] == [weights + i * copy for i in range(16)]
    assert len({node.arguments[0] for node in nodes}) == 1
    assert api.calls["cuGraphLaunch"] == WARM_UP + REPLAYS == api.calls["cuStreamSynchronize"]
    fill = next(f for f in chain.fills if f.space == WEIGHTS)
    expected = values(fill).tobytes()
    for i in range(16):
        assert bytes(api.device(weights + i * copy, copy)) == expected


def test_a_second_candidate_finds_the_operands_there() -> None:
    asked = question(linear(m=4, n=256, k=4096), best=99)
    chains = [made(asked, split(asked, parts)) for parts in (True, True, False)]
    api: Any = api_for(chains[0])
    bench = Bench(Driver(api=api))
    bench.measure(chains[0])
    copies, loads = api.calls["cuMemcpyHtoD"], api.calls["cuModuleLoadData"]
    at, nbytes = bench.blocks[STATE]
    api.device(at, nbytes)[:] = b"\x01" * nbytes  # counters that a wrong kernel left
    bench.measure(chains[1])
    assert api.calls["cuMemcpyHtoD"] == copies == len(chains[0].fills)
    assert not np.frombuffer(bytes(api.device(at, nbytes)), np.uint8).any()
    assert api.calls["cuModuleLoadData"] == 2 * loads == api.calls["cuModuleUnload"]
    assert api.calls["cuGraphExecDestroy"] == 2
    other = question(linear(m=4, n=512, k=4096))
    api.sizes |= api_for(made(other, other.candidates[0])).sizes
    bench.measure(made(other, other.candidates[0]))
    assert api.calls["cuMemcpyHtoD"] > copies and bench.blocks[ARENA][1] > 0
    assert api.calls["cuMemAlloc"] - api.calls["cuMemFree"] == 3


@pytest.mark.parametrize("site", {site.op: site for site in policy_sites()}.values(), ids=lambda site: site.op)
def test_chains_of_every_op_stay_in_their_memory(site: Site) -> None:
    """A site of each op that policies have, with all candidates that would be measured, tensor maps too."""
    found = list(CATALOG.candidates(site, HOPPER, ("baseline", HOPPER.nvcc)))
    chosen = min(found, key=lambda choice: choice.cost_us)
    asked = Question(key_of(site), site, frozenset({1}), 1.0, worth_it(found, chosen, BEST))
    for choice in asked.candidates:
        chain = made(asked, choice)
        for call in (chain.calls[0], chain.calls[-1]):
            refs = [ref for ref in (*call.operands, *call.results) if ref is not None]
            assert all(span(ref).end <= chain.spaces[ref.space] for ref in refs)
            assert sum(call.scratch) <= chain.spaces[ARENA] and sum(call.counters) <= chain.spaces[STATE]
            maps = [map for launch in call.launches for map in launch.tensormaps]
            assert not [why for map in maps if (why := tensor_map.refuse(map, call))]
