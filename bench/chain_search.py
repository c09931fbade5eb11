"""Tactics from the whole chain: kernels and tiles that make a program quickest, each measured in its place.

    PYTHONPATH=. python3 -m bench.chain_search [--policy pi0] [--only "c50 fp8"] [--programs denoise] [--seconds 300]
        [--sites "e4m3[4304,1152]" ...]

The search is that of `frtc compile --tune` (frtc/tuning/whole.py), of policies at full size without a checkpoint, case
after case: what one case has found, the next ones know. Candidates are those that the cost model finds near its best;
none is measured by itself before. Sites that the target's table knows, and those of a small share, are left as they
are, unless `--sites` names them.

Written after each site: chain_search.json, the times of its candidates, first those of what was chosen before, and
hopper.json, tactics for `frtc compile --tactics` and for frtc/kernels/tactics, with those that the target's table has
already. Microseconds of a tactic are its site's share of its program's, by the estimates. `--device cpu` is a rehearsal
at size tiny.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bench import report
from bench.full_model import ARCH, STATIC, Shape, observation
from bench.gpu_scale import Case, named, traced
from bench.sites import precision_of
from frtc.codegen.build import build
from frtc.codegen.fusible import implements
from frtc.compiler import families_for, silent, target_named
from frtc.errors import UsageError
from frtc.kernels.catalog import CATALOG
from frtc.kernels.tactic import Tactic, Tactics, table_of
from frtc.lowering.ir import fresh_nodes
from frtc.lowering.text import show_module
from frtc.models import load_models
from frtc.passes.pipeline import Options, run_passes
from frtc.passes.standard import pipeline
from frtc.tuning.builder import Job
from frtc.tuning.builders import Builders
from frtc.tuning.child import EMULATED
from frtc.tuning.questions import MOST, Place, places_of
from frtc.tuning.whole import SHARE, Decided, NoBase, Whole
from frtc.tuning.worker import COMMAND, Worker

OPS = ("linear", "gated_linear", "linear_rope_qkv", "linear_moments", "linear_norm", "attention")
VALID = 48  # tokens of a prompt

Prepared = tuple[Job, list[Place]]


@fresh_nodes()
def prepared(case: Case) -> Prepared:
    """Traced, all passes run; its sites, with candidates by the cost model."""
    torch.set_num_threads(1)
    target = target_named(ARCH)
    families = families_for(target, None)
    module, vocab = traced(case)
    passes = pipeline(implements(target, families), precision_of(case.shape))
    module = run_passes(module, passes, Options(check=0))[0]
    built = build(module, target, families)
    places = [p for p in places_of(built, target, families, CATALOG, {}, MOST) if p.key.partition("(")[0] in OPS]
    inputs = observation(built.program.inputs, min(VALID, case.shape.prompt), vocab)
    return Job(show_module(module), target, families, Tactics(ARCH, ""), inputs), places


@dataclass(slots=True)
class Search:
    """Of one case.

    texts      where there are any: only sites whose key holds one of them, and all of those
    searched   keys, by this search or by another one of the same run: once is enough
    keys       of all sites of its programs
    chosen     what was found, and what was known before
    """

    case: Case
    device: str
    until: float
    again: bool
    texts: tuple[str, ...] = ()
    searched: set[str] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)
    chosen: dict[str, Tactic] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def run(self, ready: Prepared, programs: Sequence[str]) -> Iterator[None]:
        """One pass over all sites of the programs."""
        job, places = ready
        known = {program for place in places for program in place.calls}
        if unknown := ", ".join(program for program in programs if program not in known):
            raise UsageError("option.programs", f"there is no program {unknown}", [("known", ", ".join(sorted(known)))])
        here = [place for place in places if place.calls.keys() & set(programs)]
        self.keys |= {place.key for place in here}
        wanted = self.wanted(here)
        command = COMMAND if self.device == "cuda" else (*COMMAND, EMULATED)
        with Builders(job) as builders, Worker(command) as worker:
            whole = Whole(builders, worker, self.until)
            try:
                whole.begin([self.chosen], [place.key for place in wanted])
            except NoBase as fault:
                print(f"{self.case.label}: {fault}", flush=True)
                return
            print(
                f"{self.case.label}: " + "  ".join(f"{n} {t:.1f}" for n, t in whole.before.items() if t > 20),
                flush=True,
            )
            self.rows.append({"site": "", "tactic": "", "times_us": whole.before})
            for decided in whole.run(wanted, programs, silent):
                self.searched.add(decided.place.key)
                self._keep(decided)
                self.chosen = {tactic.site: tactic for tactic in whole.tactics()}
                yield
            for program, key in whole.left:
                print(f"  {program} no time for {key[:110]}", flush=True)

    def wanted(self, places: Sequence[Place]) -> list[Place]:
        """None twice, whatever programs and cases it is in."""
        table = {} if self.again else table_of(ARCH).by_site
        if self.texts:
            found = [place for place in places if any(text in place.key for text in self.texts)]
        else:
            found = [place for place in places if place.most >= SHARE and place.key not in table]
        return [place for place in found if place.key not in self.searched]

    def _keep(self, decided: Decided) -> None:
        """Every time as a row, and the best of them on the terminal."""
        about = {"program": decided.program, "site": decided.place.key}
        # What was chosen before comes first, timed anew: the others are compared with it.
        self.rows += [about | {"tactic": name, "times_us": times} for name, times in decided.times.items()]
        self.rows += [about | {"tactic": name, "failed": why} for name, why in decided.failed.items()]
        launches, before = sum(decided.place.calls.values()), decided.us(decided.before)
        print(f"  {decided.program} {decided.place.key[:110]}", flush=True)
        for name in sorted(decided.times, key=decided.us)[:4]:
            mark, us = "*" if name == decided.chosen else " ", decided.us(name)
            print(f"    {mark} {us:9.1f} ({(us - before) / launches:+.2f} a launch) {name}", flush=True)
        for name, why in decided.failed.items():
            print(f"      {name}: {why}", flush=True)


def cases(policy: str, device: str) -> list[Case]:
    base = Shape(policy, precision=STATIC) if device == "cuda" else Shape(policy, 1, 12, 10, "tiny", precision=STATIC)
    short = Shape(policy, horizon=10, precision=STATIC)
    views = [replace(shape, views=views) for shape in (short, Shape(policy)) for views in (1, 3)]
    more = [Case(shape) for shape in (short, Shape(policy), *views)]
    return [Case(base), *(more if device == "cuda" else [])]


def main() -> int:
    arguments, wanted = parsed()
    started, device, searched = time.monotonic(), arguments.device, set[str]()
    texts = tuple(arguments.sites)
    searches = [Search(case, device, started + arguments.seconds, arguments.again, texts, searched) for case in wanted]
    chosen = {} if arguments.again else dict(table_of(ARCH).by_site)
    with ProcessPoolExecutor(len(wanted), mp_context=multiprocessing.get_context("spawn")) as pool:
        ready = [pool.submit(prepared, case) for case in wanted]
        try:
            search_all(searches, ready, chosen, arguments.programs.split(","), started)
        except UsageError as fault:
            print(fault, file=sys.stderr)
            return fault.exit_code
    print(f"{len(searched)} sites searched in {time.monotonic() - started:.1f} s, {len(chosen)} known")
    return 0


def parsed() -> tuple[argparse.Namespace, list[Case]]:
    """The options, and the cases that they name."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--policy", default="pi05", choices=list(load_models()))
    parser.add_argument("--only", default="", help="cases whose label holds this")
    parser.add_argument("--programs", default="denoise,vision,prefix")
    parser.add_argument("--seconds", type=float, default=240, help="no new measurement is begun after these")
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
    return arguments, named(parser, cases(arguments.policy, arguments.device), arguments.only)


def search_all(
    searches: Sequence[Search],
    ready: Sequence[Future[Prepared]],
    chosen: dict[str, Tactic],
    programs: Sequence[str],
    started: float = 0.0,
) -> None:
    """One case after the other; `chosen` grows, and is written after each site."""
    for search, case in zip(searches, ready, strict=True):
        search.chosen.update(chosen)
        for _ in search.run(case.result(), programs):
            chosen |= search.chosen
            write(searches, chosen, search.device, time.monotonic() - started)
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
