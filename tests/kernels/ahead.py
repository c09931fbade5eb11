"""What coming cases need, made by other cores while the GPU and this process are busy: cubins, operands, references.

    ahead = Ahead(cases)            # of the session, in order; before the process has a CUDA context: it forks
    ahead.reach(n)                  # the n-th begins: what those before it needed is given up
    ahead.operands(case), ahead.expected(case, operands), ahead.await_cubins(jobs)

Arrays come back in memory that all processes share, a ring through which cases go in order. What was not begun, did not
fit or failed is None: who asks makes it himself, and meets the same error.
"""

from __future__ import annotations

import math
import mmap
import multiprocessing
import os
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from frtc.codegen.nvrtc import Job, compile_all
from frtc.kernels.dtypes import DTYPES
from frtc.kernels.spec import Operand
from tests.kernels.harness import Array, Case, drawn, referenced

WINDOW = 96  # cases that are begun before their turn
SPACE = 3 << 30  # bytes of the ring; no page of it is there before it is written
ALIGN = 64
PATIENCE_S = 60.0  # a process that takes longer hangs: it is not waited for
Kept = tuple[int, tuple[int, ...], Any]  # offset in the ring, shape, dtype

# Of the processes that were forked: what they work on.
_cases: Sequence[Case] = ()
_jobs: Sequence[Job] = ()
_ring: Any = None


def nbytes_of(case: Case) -> int:
    """What operands and results take at most, each axis that a view repeats once."""
    return sum(_once(operand) for operand in (*case.site.operands, *case.site.results) if operand)


def _once(operand: Operand) -> int:
    extents = [n for n, step in zip(operand.shape, operand.strides, strict=True) if step]
    return -(-math.prod(extents) * DTYPES[operand.dtype].itemsize // ALIGN) * ALIGN


@dataclass(slots=True)
class Values:
    """Of one case, in bytes `start` to `end` of the ring."""

    start: int
    end: int
    made: Future[tuple[list[Kept | None], list[Kept]]]


class Ahead:
    """workers: processes; by default a core stays for this one."""

    def __init__(self, cases: Sequence[Case], workers: int = 0, space: int = SPACE) -> None:
        global _cases, _jobs, _ring
        self.cases, self.space = cases, space
        jobs = [case.jobs() for case in cases]
        places = {job: i for i, job in enumerate(dict.fromkeys(job for of_case in jobs for job in of_case))}
        self.needs = [[places[job] for job in of_case] for of_case in jobs]
        self.ring = mmap.mmap(-1, space)
        _cases, _jobs, _ring = cases, list(places), self.ring
        self.places, self.index = places, defaultdict[int, list[int]](list)
        for i, case in enumerate(cases):
            self.index[id(case)].append(i)
        self.compiled: dict[int, Future[None]] = {}
        self.values: dict[int, Values] = {}
        self.given: dict[int, tuple[list[Array | None], list[Array]]] = {}
        self.begun = self.done = self.head = 0
        context = multiprocessing.get_context("fork")
        self.pool = ProcessPoolExecutor(workers or max(1, (os.cpu_count() or 2) - 1), mp_context=context)
        self.reach(0)

    def reach(self, position: int) -> None:
        """Cases before `position` are over; those behind it are begun, as far as there is room."""
        self.done = max(self.done, position)
        self.begun = max(self.begun, self.done)
        for index in [i for i in self.values if i < self.done]:
            self.given.pop(index, None)
            made = self.values[index].made
            if made.cancel() or made.done():
                del self.values[index]
        while self.begun < min(self.done + WINDOW, len(self.cases)) and self._begin(self.begun):
            self.begun += 1

    def _begin(self, index: int) -> bool:
        size = nbytes_of(self.cases[index])
        start = self._room(size)
        if start is None and size <= self.space // 4:
            return False  # later, when others have left
        try:
            for job in self.needs[index]:
                if job not in self.compiled:
                    self.compiled[job] = self.pool.submit(_compile, job)
            if start is not None:
                self.head = start + size
                self.values[index] = Values(start, self.head, self.pool.submit(_make, index, start, self.head))
        except BrokenProcessPool:  # a process was killed, for its memory perhaps: all is made when it is asked for
            return False
        return True

    def _room(self, size: int) -> int | None:
        """Where so many bytes are free, behind the last ones or at the start."""
        for start in (self.head, 0):
            end = start + size
            taken = any(start < other.end and other.start < end for other in self.values.values())
            if end <= self.space and not taken:
                return start
        return None

    def _found(self, case: Case) -> tuple[list[Array | None], list[Array]] | None:
        index = self._place(case)
        if index not in self.values:
            return None
        if index not in self.given:
            try:
                operands, results = self.values[index].made.result(PATIENCE_S)
            except Exception:  # whatever it is, who asked meets it himself
                return None
            given = [None if kept is None else _view(self.ring, kept) for kept in operands]
            views = zip(case.site.operands, given, strict=True)
            whole = [None if o is None or a is None else np.broadcast_to(a, o.shape) for o, a in views]
            self.given[index] = whole, [_view(self.ring, kept) for kept in results]
        return self.given[index]

    def _place(self, case: Case) -> int:
        """The next one in order; -1 where it is none of the session's."""
        return next((i for i in self.index.get(id(case), ()) if i >= self.done), -1)

    def operands(self, case: Case) -> list[Array | None] | None:
        found = self._found(case)
        return None if found is None else found[0]

    def expected(self, case: Case, operands: Sequence[Array | None]) -> list[Array] | None:
        """What the reference says of these very operands."""
        found = self.given.get(self._place(case))
        return found[1] if found is not None and found[0] is operands else None

    def await_cubins(self, jobs: Sequence[Job]) -> None:
        """Those that are under way are in the cache, or have failed and will again."""
        for job in jobs:
            running = self.compiled.get(self.places.get(job, -1))
            if running is not None:
                with suppress(TimeoutError, CancelledError):
                    running.exception(PATIENCE_S)

    def close(self) -> None:
        self.given.clear()
        workers = list((self.pool._processes or {}).values())
        self.pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:  # one that hangs would be waited for at the end of this process, too
            worker.terminate()


# ---- in the other processes -----------------------------------------------------------------------------------------


def _compile(job: int) -> None:
    compile_all([_jobs[job]], workers=1)


def _make(index: int, start: int, end: int) -> tuple[list[Kept | None], list[Kept]]:
    case = _cases[index]
    operands = drawn(case)
    keeper = _Keeper(start, end)
    kept = [
        None if o is None or a is None else keeper.keep(_values_once(o, a))
        for o, a in zip(case.site.operands, operands, strict=True)
    ]
    return kept, [keeper.keep(result) for result in referenced(case, operands)]


def _values_once(operand: Operand, values: Array) -> Array:
    """One along each axis that the view repeats."""
    found: Array = values[tuple(slice(0, 1) if step == 0 else slice(None) for step in operand.strides)]
    return found


class _Keeper:
    """Copies arrays into the ring, one behind the other."""

    def __init__(self, start: int, end: int) -> None:
        self.at, self.end = start, end

    def keep(self, values: Array) -> Kept:
        kept = (self.at, values.shape, values.dtype)
        self.at += -(-values.nbytes // ALIGN) * ALIGN
        assert self.at <= self.end, "values of another size than their operand"
        _view(_ring, kept)[...] = values
        return kept


def _view(ring: Any, kept: Kept) -> Array:
    offset, shape, dtype = kept
    found: Array = np.ndarray(shape, dtype, ring, offset)
    return found
