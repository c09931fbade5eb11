"""Ask for every candidate, twice: the fastest wins if it is faster by more than a candidate differs from itself.

A candidate whose results are not about those of the first one that runs is out, however fast it is: a launch that does
nothing would win. Correctness is not judged here: kernels' tests, `frtc verify` and the self-test do that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

from frtc.codegen.nvrtc import CompileFailed, Cubin, Job, compile_all
from frtc.errors import FrtcError
from frtc.kernels.catalog import Choice, label
from frtc.kernels.tactic import Tactic
from frtc.kernels.targets import Target
from frtc.tuning.chain import chain_of, jobs_of
from frtc.tuning.questions import Question
from frtc.tuning.worker import Answer, Results, Worker

ROUNDS = 2
FAR = 0.05  # relative error between candidates that is no rounding any more, e4m3 results included
LEAST_GAIN = 0.01  # share of the time: below it another kernel is not worth having
TOGETHER = 4  # questions whose kernels are compiled at once, while others are measured

Cubins = Mapping[Job, "Cubin | str"]  # compiled, or why not
Progress = Callable[[str, float], None]


@dataclass(slots=True)
class Timed:
    """A candidate and what was measured of it, microseconds, or why nothing was."""

    choice: Choice
    us: list[float]
    failed: str = ""

    @property
    def mean(self) -> float:
        return sum(self.us) / len(self.us)

    @property
    def noise(self) -> float:
        return max(self.us) - min(self.us)

    def row(self) -> dict[str, Any]:
        name = label(self.choice.kernel, self.choice.config)
        about = {"kernel": name, "estimated_us": round(self.choice.cost_us, 2)}
        return {**about, **({"failed": self.failed} if self.failed else {"us": [round(us, 3) for us in self.us]})}


@dataclass(frozen=True, slots=True)
class Found:
    """tactics      one for every site that was decided, also where what was chosen without measuring stays
    log          of these sites: the candidates, their times, which was chosen
    not_reached  sites for which there was no time
    stopped      why measuring ended early, or ""
    """

    tactics: tuple[Tactic, ...]
    log: tuple[dict[str, Any], ...]
    not_reached: int
    stopped: str

    def alone(self) -> dict[str, dict[str, float | None]]:
        """Site -> candidate -> microseconds, None where it failed."""
        times = {}
        for row in self.log:
            pairs = ((c["kernel"], None if "failed" in c else sum(c["us"]) / len(c["us"])) for c in row["candidates"])
            times[row["site"]] = dict(pairs)
        return times


def search(questions: Sequence[Question], target: Target, worker: Worker, seconds: float, progress: Progress) -> Found:
    """Most expensive sites first, until all are decided or the time is over."""
    until = time.monotonic() + seconds
    tactics, log, stopped = list[Tactic](), list[dict[str, Any]](), ""
    try:
        for i, (question, cubins) in enumerate(_compiled(questions, target)):
            progress(f"tune, site {i + 1} of {len(questions)}", max(i / len(questions), 1 - _left(until) / seconds))
            timed = _measure(question, target, worker, cubins, until)
            if timed is None:
                break
            best = decide(timed)
            row = {"site": question.key, "candidates": [each.row() for each in timed]}
            if best is None:
                log.append(row | {"chosen": None})
                continue
            kernel, config = timed[best].choice.kernel.name, dict(timed[best].choice.config)
            log.append(row | {"chosen": label(timed[best].choice.kernel, config)})
            tactics.append(Tactic(question.key, kernel, config, timed[best].mean))
    except FrtcError as error:  # the measuring process no longer starts
        stopped = " ".join([error.what, *(text for _, text in error.rows)])
    return Found(tuple(tactics), tuple(log), len(questions) - len(log), stopped)


def decide(timed: Sequence[Timed]) -> int | None:
    """The fastest; the first, unless another is faster by more than both differ from themselves. None: all failed."""
    there = [i for i, each in enumerate(timed) if not each.failed]
    if not there:
        return None
    best = min(there, key=lambda i: timed[i].mean)
    if there[0] == 0:
        first, other = timed[0], timed[best]
        gain = first.mean - other.mean
        if gain <= max(first.noise, other.noise, LEAST_GAIN * first.mean):
            return 0
    return best


def _measure(question: Question, target: Target, worker: Worker, cubins: Cubins, until: float) -> list[Timed] | None:
    """All candidates, one after the other, and all again, so that a GPU that changes its clocks shows as noise. None
    if the time is over before."""
    timed = [Timed(choice, []) for choice in question.candidates]
    first: Answer | None = None
    for _ in range(ROUNDS):
        for each in timed:
            if _left(until) <= 0:
                return None
            if not each.failed:
                answer = _ask(question, each.choice, target, worker, cubins)
                first = first or (None if answer.failed else answer)
                each.us, each.failed = (
                    [*each.us, answer.us],
                    answer.failed or (differs(answer.results, first.results) if first else ""),
                )
    return timed


def differs(results: Results, others: Results, far: float = FAR) -> str:
    """Why these are not the results of the same op, or ""."""
    if [len(some) for some in results] != [len(some) for some in others]:
        return "its results have another size than those of the others"
    pairs = [pair for a, b in zip(results, others, strict=True) for pair in zip(a, b, strict=True)]
    apart = [(a - b, b) for a, b in pairs if not (a == b or (math.isnan(a) and math.isnan(b)))]
    if not apart:
        return ""
    error = math.hypot(*(gap for gap, _ in apart)) / max(math.hypot(*(b for _, b in pairs if math.isfinite(b))), 1e-300)
    return "" if error <= far else f"its results are not those of the others: relative error {error:.1e}"


def _ask(question: Question, choice: Choice, target: Target, worker: Worker, cubins: Cubins) -> Answer:
    made: dict[Job, Cubin] = {}
    for job in jobs_of(question, choice, target):
        cubin = cubins[job]
        if isinstance(cubin, str):
            return Answer(failed=cubin)
        made[job] = cubin
    return worker.measure(chain_of(question, choice, target, made))


def _compiled(questions: Sequence[Question], target: Target) -> Iterator[tuple[Question, Cubins]]:
    """Each question with the kernels of its candidates; the next few are compiled while these are measured."""
    waiting = iter(questions)
    groups = iter(lambda: list(islice(waiting, TOGETHER)), [])
    with ThreadPoolExecutor(1) as pool:
        group = next(groups, [])
        pending = pool.submit(_compile, group, target)
        while group:
            cubins, following = pending.result(), next(groups, [])
            pending = pool.submit(_compile, following, target)
            for question in group:
                yield question, cubins
            group = following


def _compile(questions: Sequence[Question], target: Target) -> Cubins:
    """All kernels of the questions; where one does not compile, the others do."""
    jobs = list(dict.fromkeys(j for q in questions for choice in q.candidates for j in jobs_of(q, choice, target)))
    try:
        return dict(zip(jobs, compile_all(jobs), strict=True))
    except CompileFailed:
        return {job: _alone(job) for job in jobs}


def _alone(job: Job) -> Cubin | str:
    try:
        return compile_all([job])[0]
    except CompileFailed as fault:
        return f"it does not compile: {str(fault).splitlines()[0][:160]}"


def _left(until: float) -> float:
    return until - time.monotonic()
