"""Tactics from the whole chain: kernels and tiles that make a program quickest, each measured in its place.

    PYTHONPATH=. python3 -m bench.chain_search [--policy pi0] [--only "c50 fp8"] [--programs denoise] [--seconds 300]

A launch shares the device with its neighbours: their weights are on their way while it works, and their blocks wait for
room beside its own. No chain of one site shows that. So each site of a program, those with the most time first, takes
each of the candidates that the cost model finds near its best; the program is compiled with it, as a whole, and timed;
what is quickest stays. Programs have random weights, as in bench/gpu_scale.py.

Written after each site: chain_search.json, every time that was measured, and hopper.json, tactics for `frtc compile
--tactics` and for frtc/kernels/tactics, with those that the target's table has already. Microseconds of a tactic are
its site's share of its program's, by the estimates. `--device cpu` is a rehearsal at size tiny.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from bench import report
from bench.full_model import ARCH, STATIC, Shape, observation
from bench.gpu_scale import Case as ScaleCase
from bench.gpu_scale import Compiled, exact_weights, fill_weights, plan_in_memory, traced
from bench.sites import precision_of
from frtc.codegen.build import build
from frtc.codegen.fusible import implements
from frtc.compiler import families_for, target_named
from frtc.estimate import rounds_of_module
from frtc.kernels.catalog import CATALOG, Catalog, Choice
from frtc.kernels.spec import Site
from frtc.kernels.tactic import Tactic, Tactics, key_of, table_of
from frtc.kernels.targets import Target
from frtc.lowering.ir import Module
from frtc.models import load_models
from frtc.passes.pipeline import Options, run_passes
from frtc.passes.standard import pipeline
from frtc.runtime.emulator import Emulator
from frtc.runtime.session import Session

OPS = ("linear", "gated_linear", "linear_rope_qkv", "linear_moments", "linear_norm", "attention")
NEAR, MOST = 1.6, 7  # candidates: of an estimate up to so many times the least, the best so many of them
SHARE = 0.03  # sites of a smaller share of the program's launches are left to the cost model
GAIN = 0.998  # what is kept must be quicker than this share of the time before
SAMPLES, WARM_UP = 40, 5
PROCESSES = 4  # that compile for a case


@dataclass(frozen=True, slots=True)
class Made:
    """A case, compiled with some tactics.

    sites      program -> (text, launches, candidates as tactics with estimates, the chosen one first)
    rounds     program -> how often it runs in an inference
    estimates  program -> microseconds of all its calls in all rounds
    """

    compiled: Compiled
    sites: Mapping[str, tuple[tuple[str, int, tuple[Tactic, ...]], ...]]
    rounds: Mapping[str, int]
    estimates: Mapping[str, float]


class Remembering(Catalog):
    """Chooses once for each site; `chosen` decides before all else."""

    def __init__(self, chosen: Sequence[Tactic]) -> None:
        super().__init__(CATALOG.kernels, (Tactics.of(ARCH, "search", "", chosen),))

    def select(self, site: Site, target: Target, families: Sequence[str] = ("baseline",)) -> Choice:
        key, known = key_of(site), _known(families)
        tactic = self.tactics[0].by_site.get(key)
        at = (key, str(tactic))
        if at not in known:
            known[at] = super().select(site, target, families)
        return known[at]


@cache
def _known(families: tuple[str, ...]) -> dict[tuple[str, str], Choice]:
    return {}


@cache
def _module(case: ScaleCase) -> tuple[Module, int]:
    """After all passes; kept in the process."""
    torch.set_num_threads(1)
    target = target_named(ARCH)
    module, vocab = traced(case)
    passes = pipeline(implements(target, families_for(target, None)), precision_of(case.shape))
    return run_passes(module, passes, Options(check=0))[0], vocab


def made(case: ScaleCase, chosen: tuple[Tactic, ...]) -> Made:
    """Compiled with these tactics, by the process that keeps the module."""
    target = target_named(ARCH)
    families = families_for(target, None)
    module, vocab = _module(case)
    catalog = Remembering(chosen)
    built = build(module, target, families, catalog)
    sites = {}
    for name, calls in built.emitted.items():
        found = Counter(key_of(c.site) for c in calls if c.site.op in OPS)
        by_key = {key_of(c.site): c for c in calls}
        sites[name] = tuple((key, n, _candidates(by_key[key], catalog, target, families)) for key, n in found.items())
    known = rounds_of_module(module.schedule)
    rounds = {name: known.get(name, 1) for name in built.emitted}
    estimates = {name: rounds[name] * sum(c.choice.cost_us for c in calls) for name, calls in built.emitted.items()}
    compiled = Compiled(built.program, dict(built.cubins), tuple(exact_weights(built)), {}, vocab, (0.0, 0.0))
    return Made(compiled, sites, rounds, estimates)


def _candidates(call: Any, catalog: Catalog, target: Target, families: tuple[str, ...]) -> tuple[Tactic, ...]:
    key, best = key_of(call.site), call.choice
    found = sorted(catalog.candidates(call.site, target, families), key=lambda c: c.cost_us)
    near = [c for c in found if c.cost_us <= NEAR * found[0].cost_us][:MOST]
    own = [c for c in found if (c.kernel.name, c.config) == (best.kernel.name, best.config)]
    return tuple(Tactic(key, c.kernel.name, c.config, c.cost_us) for c in [*own, *(c for c in near if c not in own)])


# ---- times ----------------------------------------------------------------------------------------------------------


def times_of(case: ScaleCase, one: Made, device: str) -> dict[str, float]:
    """p50 in microseconds of each program and of the whole replay."""
    made, stream = one.compiled, torch.cuda.Stream() if device == "cuda" else None
    plan = plan_in_memory(made, device == "cpu")
    with closing(Session(plan, stream=stream) if stream else Emulator(plan)) as executor:
        if isinstance(executor, Session):
            fill_weights(executor, made.exact)
        for name, value in observation(made.program.inputs, min(48, case.shape.prompt), made.vocab).items():
            executor.set(name, value)
        executor.run()
        samples, warm_up = (SAMPLES, WARM_UP) if device == "cuda" else (1, 0)
        parts = executor.time(samples, warm_up=warm_up).parts
    return {name: spread.percentiles["p50"] for name, spread in parts.items()}


@dataclass(slots=True)
class Search:
    """Of one case."""

    case: ScaleCase
    device: str
    pool: ProcessPoolExecutor
    until: float
    again: bool
    chosen: dict[str, Tactic] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def start(self, tactics: Mapping[str, Tactic]) -> Future[Made]:
        return self.pool.submit(made, self.case, tuple(tactics.values()))

    def run(self, programs: Sequence[str]) -> Iterator[None]:
        """One pass over all sites of the programs."""
        base = self.start(self.chosen).result()
        before = times_of(self.case, base, self.device)
        print(f"{self.case.label}: " + "  ".join(f"{n} {t:.1f}" for n, t in before.items() if t > 20), flush=True)
        self.rows.append({"site": "", "tactic": "", "times_us": before})
        for program in programs:
            best = before[program]
            for key, launches, candidates in sorted(base.sites[program], key=lambda s: -s[1] * s[2][0].us):
                few = launches < SHARE * sum(n for _, n, _ in base.sites[program])
                known = key in self.chosen or (key in table_of(ARCH).by_site and not self.again)
                if few or known or time.perf_counter() > self.until:
                    continue  # known: chosen for another program or case, or in the table
                best = self._site(program, key, launches * base.rounds[program], candidates, best)
                share = self.chosen[key].us / base.estimates[program]
                self.chosen[key] = replace(self.chosen[key], us=best * share)
                yield

    def _site(self, program: str, key: str, launches: int, candidates: Sequence[Tactic], best: float) -> float:
        own, *others = candidates
        futures = [(one, self.start(self.chosen | {key: one})) for one in others]
        found = {str(own): best}
        self.chosen[key] = own
        for one, future in futures:
            try:
                times = times_of(self.case, future.result(), self.device)
            except Exception as fault:  # a candidate that does not compile or run is no candidate
                print(f"  {one}: {type(fault).__name__}: {str(fault)[:200]}", flush=True)
                continue
            found[str(one)] = times[program]
            self.rows.append({"program": program, "site": key, "tactic": str(one), "times_us": times})
            if times[program] < best * GAIN:
                best, self.chosen[key] = times[program], one
        per_launch = {name: (t - found[str(own)]) / launches for name, t in found.items()}
        print(f"  {program} {key[:110]}", flush=True)
        for name, t in sorted(found.items(), key=lambda item: item[1])[:4]:
            mark = "*" if name == str(self.chosen[key]) else " "
            print(f"    {mark} {t:9.1f} ({per_launch[name]:+.2f} a launch) {name}", flush=True)
        return best


def cases(policy: str, device: str) -> list[ScaleCase]:
    base = Shape(policy, precision=STATIC) if device == "cuda" else Shape(policy, 1, 12, 10, "tiny", precision=STATIC)
    short = Shape(policy, horizon=10, precision=STATIC)
    return [ScaleCase(base), *([ScaleCase(short), ScaleCase(Shape(policy))] if device == "cuda" else [])]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--policy", default="pi05", choices=list(load_models()))
    parser.add_argument("--only", default="", help="cases whose label holds this")
    parser.add_argument("--programs", default="denoise,vision,prefix")
    parser.add_argument("--seconds", type=float, default=240, help="no new site is begun after these")
    parser.add_argument("--again", action="store_true", help="sites, too, that the target's table knows already")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    arguments = parser.parse_args()
    started, device = time.perf_counter(), arguments.device
    wanted = [case for case in cases(arguments.policy, device) if arguments.only in case.label]
    context, workers = multiprocessing.get_context("spawn"), min(PROCESSES, os.cpu_count() or 1)
    until = started + arguments.seconds
    pools = [ProcessPoolExecutor(workers, mp_context=context) for _ in wanted]
    searches = [Search(case, device, pool, until, arguments.again) for case, pool in zip(wanted, pools, strict=True)]
    for search in searches:  # all of them trace meanwhile
        for _ in range(workers):
            search.start({})
    all_chosen = {} if arguments.again else dict(table_of(ARCH).by_site)
    for search in searches:
        search.chosen.update(all_chosen)
        for _ in search.run(arguments.programs.split(",")):
            all_chosen |= search.chosen
            write(searches, all_chosen, device, time.perf_counter() - started)
    for pool in pools:
        pool.shutdown(wait=False, cancel_futures=True)
    print(f"{len(all_chosen)} sites in {time.perf_counter() - started:.1f} s")
    return 0


def write(searches: Sequence[Search], chosen: Mapping[str, Tactic], device: str, seconds: float) -> None:
    about = report.about("bench.chain_search", device) | {"seconds": seconds}
    rows = {search.case.label: search.rows for search in searches}
    gpu = torch.cuda.get_device_name() if device == "cuda" else ""
    path = report.write("chain_search", about | {"rows": rows})
    (path.parent / f"{ARCH}.json").write_text(Tactics.of(ARCH, "", gpu, chosen.values()).text())


if __name__ == "__main__":
    sys.exit(main())
