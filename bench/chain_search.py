"""Tactics from the whole chain: kernels and tiles that make a program quickest, each measured in its place.

    PYTHONPATH=. python3 -m bench.chain_search [--policy pi0] [--only "c50 fp8"] [--programs denoise] [--seconds 300]
        [--sites "e4m3[4304,1152]" ...]

A launch shares the device with its neighbours: their weights are on their way while it works, and their blocks wait for
room beside its own. No chain of one site shows that. So each site of a program, those with the most time first, takes
each of the candidates that the cost model finds near its best; the program is compiled with it, as a whole, and timed;
what is quickest stays. Sites that the target's table knows, and those of a small share, are left as they are, unless
`--sites` names them. Programs have random weights, as in bench/gpu_scale.py.

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
from bench.gpu_scale import Compiled, exact_weights, fill_weights, named, plan_in_memory, traced
from bench.sites import precision_of
from frtc.codegen.build import build
from frtc.codegen.fusible import implements
from frtc.compiler import families_for, target_named
from frtc.errors import UsageError
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


SiteOf = tuple[str, int, tuple[Tactic, ...]]  # key, launches, candidates


@dataclass(frozen=True, slots=True)
class Made:
    """A case, compiled with some tactics.

    sites      program -> (key, launches, candidates as tactics with estimates, the chosen one first)
    rounds     program -> how often it runs in an inference
    estimates  program -> microseconds of all its calls in all rounds
    """

    compiled: Compiled
    sites: Mapping[str, tuple[SiteOf, ...]]
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
    """Of one case.

    texts      where there are any: only sites whose key holds one of them, and all of those
    searched   keys, by this search or by another one of the same run: once is enough
    keys       of all sites of its programs
    chosen     what was found, and what was known before
    """

    case: ScaleCase
    device: str
    pool: ProcessPoolExecutor
    until: float
    again: bool
    texts: tuple[str, ...] = ()
    searched: set[str] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)
    chosen: dict[str, Tactic] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def start(self, tactics: Mapping[str, Tactic]) -> Future[Made]:
        return self.pool.submit(made, self.case, tuple(tactics.values()))

    def run(self, programs: Sequence[str]) -> Iterator[None]:
        """One pass over all sites of the programs."""
        base = self.start(self.chosen).result()
        if unknown := ", ".join(program for program in programs if program not in base.sites):
            raise UsageError("option.programs", f"there is no program {unknown}", [("known", ", ".join(base.sites))])
        self.keys |= {key for program in programs for key, *_ in base.sites[program]}
        before = times_of(self.case, base, self.device)
        print(f"{self.case.label}: " + "  ".join(f"{n} {t:.1f}" for n, t in before.items() if t > 20), flush=True)
        self.rows.append({"site": "", "tactic": "", "times_us": before})
        for program in programs:
            best = before[program]
            for key, launches, candidates in self.wanted(base.sites[program]):
                if time.perf_counter() > self.until:
                    print(f"  {program} no time for {key[:110]}", flush=True)
                    continue
                self.searched.add(key)
                best = self._site(program, key, launches * base.rounds[program], candidates, best)
                share = self.chosen[key].us / base.estimates[program]
                self.chosen[key] = replace(self.chosen[key], us=best * share)
                yield

    def wanted(self, sites: Sequence[SiteOf]) -> list[SiteOf]:
        """Those with the most time first; none twice, whatever programs and cases it is in."""
        total, table = sum(n for _, n, _ in sites), {} if self.again else table_of(ARCH).by_site
        if self.texts:
            found = [site for site in sites if any(text in site[0] for text in self.texts)]
        else:
            found = [site for site in sites if site[1] >= SHARE * total and site[0] not in table]
        return sorted((s for s in found if s[0] not in self.searched), key=lambda s: -s[1] * s[2][0].us)

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
    parser.add_argument(
        "--sites",
        metavar="TEXT",
        action="append",
        default=[],
        help="only sites whose key holds this, and all of those; may be repeated",
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    arguments = parser.parse_args()
    started, device = time.perf_counter(), arguments.device
    wanted = named(parser, cases(arguments.policy, device), arguments.only)
    context, workers = multiprocessing.get_context("spawn"), min(PROCESSES, os.cpu_count() or 1)
    pools = [ProcessPoolExecutor(workers, mp_context=context) for _ in wanted]
    searched: set[str] = set()
    searches = [
        Search(case, device, pool, started + arguments.seconds, arguments.again, tuple(arguments.sites), searched)
        for case, pool in zip(wanted, pools, strict=True)
    ]
    for search in searches:  # all of them trace meanwhile
        for _ in range(workers):
            search.start({})
    chosen = {} if arguments.again else dict(table_of(ARCH).by_site)
    try:
        search_all(searches, chosen, arguments.programs.split(","), started)
    except UsageError as fault:
        print(fault, file=sys.stderr)
        return fault.exit_code
    finally:
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
    print(f"{len(searched)} sites searched in {time.perf_counter() - started:.1f} s, {len(chosen)} known")
    return 0


def search_all(
    searches: Sequence[Search], chosen: dict[str, Tactic], programs: Sequence[str], started: float = 0.0
) -> None:
    """One case after the other; `chosen` grows, and is written after each site."""
    for search in searches:
        search.chosen.update(chosen)
        for _ in search.run(programs):
            chosen |= search.chosen
            write(searches, chosen, search.device, time.perf_counter() - started)
    keys = {key for search in searches for key in search.keys}
    for text in searches[0].texts:
        if not any(text in key for key in keys):
            rows = [("their sites", key[:110]) for key in sorted(keys)]
            raise UsageError("option.sites", f"no site of {', '.join(programs)} holds {text!r}", rows)


def write(searches: Sequence[Search], chosen: Mapping[str, Tactic], device: str, seconds: float) -> None:
    about = report.about("bench.chain_search", device) | {"seconds": seconds}
    rows = {search.case.label: search.rows for search in searches}
    gpu = torch.cuda.get_device_name() if device == "cuda" else ""
    path = report.write("chain_search", about | {"rows": rows})
    (path.parent / f"{ARCH}.json").write_text(Tactics.of(ARCH, "", gpu, chosen.values()).text())


if __name__ == "__main__":
    sys.exit(main())
