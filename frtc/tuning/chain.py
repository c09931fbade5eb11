"""A candidate as the measuring process gets it: one launch after the other on weights that are not in the cache.

The weights of a policy are larger than the L2: when a layer runs, its weights come from memory, its activations mostly
do not. So the operands that are weights are there many times, more than the L2 holds, and the launches take turns;
activations, results, scratch are there once. Counters are every launch's own, as in a Plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from frtc.codegen.build import call_of
from frtc.codegen.emit import Emitted
from frtc.codegen.memory import aligned
from frtc.codegen.nvrtc import Cubin, Job
from frtc.codegen.places import Buffer, Place
from frtc.kernels.catalog import Choice, label
from frtc.kernels.dtypes import DTYPES
from frtc.kernels.spec import Operand
from frtc.kernels.targets import Target
from frtc.lowering.strided import Strided
from frtc.runtime.plan import ARENA, STATE, WEIGHTS, Call
from frtc.tuning.inputs import Fill, elements, limits
from frtc.tuning.questions import Question

COLD = 200 << 20  # bytes of weights that the launches walk through, and at least twice the L2
MOST = 1 << 30  # bytes of all copies: a larger operand is there once
COPIES_MOST, LAUNCHES_LEAST = 128, 16


@dataclass(frozen=True, slots=True)
class Image:
    cubin: bytes
    symbol: str
    smem: int


@dataclass(frozen=True, slots=True)
class Chain:
    """`calls` in order, each after the one before. spaces: bytes of each."""

    label: str
    calls: tuple[Call, ...]
    kernels: tuple[Image, ...]
    spaces: Mapping[str, int]
    fills: tuple[Fill, ...]


def jobs_of(question: Question, choice: Choice, target: Target) -> dict[Job, int]:
    """What must be compiled for a candidate, with the most shared memory that a launch of it asks for."""
    most: dict[Job, int] = {}
    for stage in choice.kernel.stages(question.site, choice.config, target):
        job = Job.of(stage, target)
        most[job] = max(most.get(job, 0), stage.smem)
    return most


def chain_of(question: Question, choice: Choice, target: Target, cubins: Mapping[Job, Cubin]) -> Chain:
    jobs = jobs_of(question, choice, target)
    index = {job: i for i, job in enumerate(jobs)}
    images = tuple(Image(cubins[job].image, cubins[job].symbol, smem) for job, smem in jobs.items())
    layout = _Layout(question, target)
    calls: list[Call] = []
    scratch = choice.kernel.scratch(question.site, choice.config)
    counters = choice.kernel.counters(question.site, choice.config)
    for i in range(layout.launches):
        operands, results = layout.places(i % layout.copies)
        work = Buffer(ARENA, scratch, offset=layout.arena) if scratch else None
        own = Buffer(STATE, counters, offset=i * aligned(counters)) if counters else None
        emitted = Emitted(f"launch {i}", question.site, choice, operands, results, None, work, own)
        calls.append(replace(call_of(emitted, target, index), after=(i - 1,) if i else ()))
    spaces = {
        WEIGHTS: layout.weights * layout.copies,
        ARENA: layout.arena + scratch,
        STATE: aligned(counters) * layout.launches,
    }
    return Chain(label(choice.kernel, choice.config), tuple(calls), images, spaces, layout.fills())


class _Layout:
    """Where operands and results lie: offsets of the weights within one copy of them, of all else in the arena."""

    def __init__(self, question: Question, target: Target) -> None:
        self.question, self.site = question, question.site
        self.weights = self.arena = 0
        self.operands: list[tuple[str, int] | None] = []
        for i, operand in enumerate(self.site.operands):
            space = WEIGHTS if i in question.weights else ARENA
            self.operands.append(None if operand is None else (space, self._take(space, operand)))
        self.results = [(ARENA, self._take(ARENA, result)) for result in self.site.results]
        wanted = max(COLD, 2 * target.l2)
        room = MOST // self.weights if self.weights else 1
        self.copies = max(1, min(-(-wanted // self.weights), COPIES_MOST, room)) if self.weights else 1
        self.launches = max(self.copies, LAUNCHES_LEAST)

    def _take(self, space: str, operand: Operand) -> int:
        at, nbytes = getattr(self, space), aligned(elements(operand) * DTYPES[operand.dtype].itemsize)
        setattr(self, space, at + nbytes)
        return int(at)

    def places(self, copy: int) -> tuple[tuple[Place | None, ...], tuple[Place, ...]]:
        pairs = zip(self.site.operands, self.operands, strict=True)
        operands = tuple(None if o is None or at is None else self._place(o, *at, copy) for o, at in pairs)
        found = zip(self.site.results, self.results, strict=True)
        return operands, tuple(self._place(result, *at, copy) for result, at in found)

    def _place(self, operand: Operand, space: str, offset: int, copy: int) -> Place:
        at = offset + copy * self.weights if space == WEIGHTS else offset
        buffer = Buffer(space, elements(operand) * DTYPES[operand.dtype].itemsize, offset=at)
        return Place(buffer, operand.dtype, Strided(operand.shape, operand.strides))

    def fills(self) -> tuple[Fill, ...]:
        found = []
        for i, (operand, at) in enumerate(zip(self.site.operands, self.operands, strict=True)):
            if operand is not None and at is not None:
                copies, pitch = (self.copies, self.weights) if at[0] == WEIGHTS else (1, 0)
                low, below = limits(self.site, i)
                found.append(Fill(*at, operand.dtype, elements(operand), low, below, copies, pitch))
        return tuple(found)
