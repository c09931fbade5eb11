"""Products of vision and prefix beside the best that cuBLASLt has: the bars of the plain and of the fused epilogue.

    PYTHONPATH=. python3 -m bench.lt_times [--policy pi05] [--precision fp8 bf16] [--seconds 90]
    PYTHONPATH=. python3 -m bench.lt_times --rehearse      no GPU: everything is compiled, nothing is measured

A row a site; microseconds of one launch in a chain on weights that are not in the cache, p50 of replays. Ours is what
the compiler picks. Where that misses a bar, what `compile --tune` would try is measured, too, and the best of them
counts, marked *: the library's is the best of up to 32.

    lt          the fastest algorithm of up to 32 that cuBLASLt's heuristic names with 64 MiB of workspace, result in
                bf16, e4m3 with fast accumulation and a scale for each operand; rows of x and w as ours or without gaps
    plain       our product of the same operands, one scale for all, nothing behind it
    share       lt / plain: the bar is 0.9
    lt + rest   the same call and one kernel that does all else of the site (bench/separate.py), launched behind the
                product's end or early, whichever is faster
    fused       our kernel at the site; rows that a launch may skip are all valid
    gain        (lt + rest) / fused: the bar is more than 1
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from bench import report
from bench.cublaslt import Failed, Library, Problem
from bench.full_model import PRECISIONS, Shape
from bench.product_times import PRODUCTS, WEIGHTS, size_of
from bench.separate import Separate, separate
from bench.sites import distinct, uses
from frtc.codegen.nvrtc import Cubin, Job, compile_all
from frtc.compiler import target_named
from frtc.console import table as columns
from frtc.kernels.catalog import CATALOG, Choice, label
from frtc.kernels.spec import Operand, Site
from frtc.kernels.tactic import key_of
from frtc.kernels.targets import Target
from frtc.tuning.chain import chain_of, jobs_of
from frtc.tuning.questions import Question, worth_trying
from frtc.tuning.worker import Worker

if TYPE_CHECKING:
    from bench.lt_chain import Rival

SHARE_BAR, GAIN_BAR = 0.9, 1.0
STAGES, TYPES, FEWEST_BYTES = ("vision", "prefix"), ("e4m3", "bf16"), 1 << 20


@dataclass(frozen=True, slots=True)
class Task:
    """A site of the policy, its plain product, the launch behind the library's product; and what we run."""

    stage: str
    site: Site
    plain: Site
    rest: Separate
    fused_choice: Choice
    plain_choice: Choice

    def asked(self) -> Iterator[tuple[str, Question]]:
        for name, site, choice in (("plain", self.plain, self.plain_choice), ("fused", self.site, self.fused_choice)):
            yield name, Question(f"{name} {key_of(site)}", site, WEIGHTS, 0.0, (choice,))

    def others(self, name: str, target: Target) -> Question:
        """What else is worth trying, of "plain" or "fused"."""
        question = dict(self.asked())[name]
        found = list(CATALOG.candidates(question.site, target, target.families("native")))
        return replace(question, candidates=worth_trying(found, question.candidates[0], {})[1:])

    def jobs(self, target: Target) -> list[Job]:
        return [self.rest.job, *(job for _, q in self.asked() for job in jobs_of(q, q.candidates[0], target))]

    def names(self) -> tuple[str, str, str]:
        """Of the plain kernel, the one behind the library's product, the fused one."""
        rest = self.rest.stage.entry.removeprefix("frtc::").partition("<")[0]
        plain, fused = (label(choice.kernel, choice.config) for choice in (self.plain_choice, self.fused_choice))
        return plain, f"{rest} ({self.rest.site.op})", fused


@dataclass(frozen=True, slots=True)
class Row:
    """Microseconds; nan where nothing was measured.

    algorithm    its place among the `algorithms` that the heuristic named, what cublasLt.h calls it, ld of x and w
    lt_and_rest  by whether the launch behind the product is an early one
    picked       of "plain" and "fused", what the compiler's pick took where another one was quicker
    """

    stage: str
    op: str
    size: tuple[int, int, int, str]
    kernels: tuple[str, str, str]
    lt: float
    algorithm: Mapping[str, int]
    algorithms: int
    plain: float
    lt_and_rest: Mapping[str, float]
    fused: float
    failed: tuple[str, ...] = ()
    picked: Mapping[str, float] = field(default_factory=dict)

    @property
    def share(self) -> float:
        return self.lt / self.plain

    @property
    def rival(self) -> float:
        """The faster of the two."""
        return min((us for us in self.lt_and_rest.values() if us == us), default=math.nan)

    @property
    def gain(self) -> float:
        return self.rival / self.fused

    @property
    def bars(self) -> dict[str, bool]:
        """A bar is not met where a time is missing."""
        return {"plain": self.share >= SHARE_BAR, "fused": self.gain > GAIN_BAR}

    def to_json(self) -> dict[str, Any]:
        found = {**asdict(self), "share": round(self.share, 4), "gain": round(self.gain, 4), "bars": self.bars}
        found["lt_and_rest"] = {name: _number(us) for name, us in self.lt_and_rest.items()}
        return {name: _number(value) for name, value in found.items()}


def _number(value: Any) -> Any:
    """JSON has no nan."""
    return None if isinstance(value, float) and math.isnan(value) else value


def plain_of(site: Site) -> Site:
    """x and w of the site, summed and stored in bf16; e4m3 with one scale for all."""
    x, w = site.operands[:2]
    assert x is not None and w is not None
    alpha = Operand.packed("f32") if x.dtype == "e4m3" else None
    result = Operand.packed("bf16", *x.shape[:-1], w.shape[0])
    operands = (x, w, None, None, None, None, alpha, None, None)
    return Site("linear", operands, (result,), {"act": "none", "per_row": False, "staged": "bf16"})


def tasks_of(policy: str, precisions: Iterable[str], target: Target) -> list[Task]:
    """Of every distinct product of these stages with a large weight."""
    native, found = target.families("native"), dict[str, Task]()
    for precision in precisions:
        for use in distinct(uses(Shape(policy, precision=precision), families=target.families())):
            if use.stage in STAGES and use.site.op in PRODUCTS and is_large(use.site):
                site, plain = use.site, plain_of(use.site)
                fused_choice, plain_choice = (CATALOG.select(each, target, native) for each in (site, plain))
                task = Task(use.stage, site, plain, separate(site, target), fused_choice, plain_choice)
                found.setdefault(key_of(site), task)
    return list(found.values())


def is_large(site: Site) -> bool:
    w = site.operands[1]
    return w is not None and w.nbytes >= FEWEST_BYTES and size_of(site)[3] in TYPES


def problems_of(site: Site) -> list[Problem]:
    """As the site's rows lie, and without gaps."""
    x, w = site.operands[:2]
    assert x is not None and w is not None
    m, n, k, dtype = size_of(site)
    return list(dict.fromkeys([Problem(m, n, k, dtype, x.strides[-2], w.strides[0]), Problem(m, n, k, dtype, k, k)]))


def measured(task: Task, rival: Rival, worker: Worker, target: Target, cubins: Mapping[Job, Cubin]) -> Row:
    ours, failed, both = dict[str, float](), list[str](), dict[str, float]()
    for name, question in task.asked():
        answer = worker.measure(chain_of(question, question.candidates[0], target, cubins))
        ours[name] = answer.us or math.nan
        failed += [f"{name}: {answer.failed}"] if answer.failed else []
    tried = [rival.best(problem) for problem in problems_of(task.site)]
    failed += [why for found in tried for why in found.failed]
    best = min(tried, key=lambda found: math.inf if math.isnan(found.us) else found.us)
    for name, early in (("after", False), ("early", True)) if best.algorithm else ():
        try:
            both[name] = rival.with_rest(best, task.rest, cubins[task.rest.job], early)
        except Failed as fault:
            failed.append(f"rest, {name}: {fault}")
    about = (best.us, best.about(), best.count)
    size = size_of(task.site)
    return Row(task.stage, task.site.op, size, task.names(), *about, ours["plain"], both, ours["fused"], tuple(failed))


def searched(row: Row, name: str, others: Question, worker: Worker, target: Target) -> Row:
    """With the quickest of `others`, of "plain" or "fused", where one is quicker than the pick."""
    jobs = list(dict.fromkeys(job for choice in others.candidates for job in jobs_of(others, choice, target)))
    cubins, picked = dict(zip(jobs, compile_all(jobs), strict=True)), getattr(row, name)
    times = [(worker.measure(chain_of(others, c, target, cubins)).us, c) for c in others.candidates]
    us, choice = min(((us, c) for us, c in times if us), key=lambda pair: pair[0], default=(math.inf, None))
    if choice is None or us >= picked:
        return row
    plain, rest, fused = row.kernels
    kernel = label(choice.kernel, choice.config)
    kernels = (kernel, rest, fused) if name == "plain" else (plain, rest, kernel)
    return replace(row, kernels=kernels, picked={**row.picked, name: picked}, **{name: us})


HEAD = ("site", "M x N x K", "type", "lt", "algorithm", "plain", "share", "bar", "lt + rest", "fused", "gain", "bar")


def line(row: Row) -> tuple[str, ...]:
    m, n, k, dtype = row.size
    plain, fused = ("ok" if row.bars[name] else "MISSED" for name in ("plain", "fused"))
    early = " early" if row.rival == row.lt_and_rest.get("early") else ""
    which = f"{row.algorithm.get('place', '-')} of {row.algorithms}"
    ours = {name: f"{getattr(row, name):.2f}{'*' if name in row.picked else ''}" for name in ("plain", "fused")}
    figures = (f"{row.lt:.2f}", which, ours["plain"], f"{row.share:.2f}", plain)
    behind = (f"{row.rival:.2f}{early}", ours["fused"], f"{row.gain:.2f}", fused)
    return f"{row.stage} {row.op}", f"{m}x{n}x{k}", dtype, *figures, *behind


def table(rows: Sequence[Row]) -> str:
    plain, fused = (sum(row.bars[name] for row in rows) for name in ("plain", "fused"))
    verdict = (
        f"plain at {SHARE_BAR:.0%} of cuBLASLt or more: {plain} of {len(rows)}; "
        f"fused faster than cuBLASLt and a launch: {fused} of {len(rows)}"
    )
    return f"{columns([HEAD, *map(line, rows)])}\n{verdict}"


def rehearsed(tasks: Sequence[Task]) -> str:
    """What would be measured."""
    sizes = [size_of(task.site) for task in tasks]
    rows = [
        (f"{task.stage} {task.site.op}", f"{m}x{n}x{k}", dtype, *task.names())
        for task, (m, n, k, dtype) in zip(tasks, sizes, strict=True)
    ]
    return columns([("site", "M x N x K", "type", "plain", "behind cuBLASLt", "fused"), *rows])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--policy", default="pi05")
    parser.add_argument("--precision", nargs="+", default=["fp8", "bf16"], choices=PRECISIONS)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args(arguments)
    until, begun, target = time.monotonic() + options.seconds, time.monotonic(), target_named("hopper")
    tasks = tasks_of(options.policy, options.precision, target)
    jobs = list(dict.fromkeys(itertools.chain.from_iterable(task.jobs(target) for task in tasks)))
    cubins = dict(zip(jobs, compile_all(jobs), strict=True))
    print(f"{len(tasks)} sites, {len(jobs)} kernels, {time.monotonic() - begun:.0f} s", flush=True)
    if options.rehearse:
        print(rehearsed(tasks))
        return 0
    rows = measure(tasks, target, cubins, until)
    print(table(rows), *itertools.chain.from_iterable(row.failed for row in rows), sep="\n")
    return 0


def measure(tasks: Sequence[Task], target: Target, cubins: Mapping[Job, Cubin], until: float) -> list[Row]:
    """Rows as far as the time goes; the file holds those that there are at any moment."""
    from bench.lt_chain import Rival
    from tests.kernels.device import Gpu

    rows, library = list[Row](), Library.load()
    rival = Rival(Gpu(), library)
    with Worker() as worker:
        worker.start()
        for task in tasks:
            if time.monotonic() > until:
                print(f"no time for the last {len(tasks) - len(rows)}", flush=True)
                break
            row = measured(task, rival, worker, target, cubins)
            for name in [name for name, kept in row.bars.items() if not kept]:
                row = searched(row, name, task.others(name, target), worker, target)
            rows.append(row)
            print("  ".join(line(rows[-1])), flush=True)
            about = report.about("bench.lt_times", "cuda") | {"cublaslt": library.version()}
            report.write("lt_times", about | {"rows": [row.to_json() for row in rows]})
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
