"""Are a run's outputs finite? If not: which stage left the first value that is not, found in memory that outlives it.

The look at the outputs costs microseconds, at every run; the search runs only where it fails. It cannot see scratch
memory, which later calls have overwritten.
"""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np

from frtc.errors import CheckFailed
from frtc.kernels.dtypes import is_float
from frtc.kernels.reference import REFERENCES
from frtc.runtime.plan import ARENA, SLOT, STATE, Call, Ref, Stage, unrolled

if TYPE_CHECKING:
    from frtc.runtime.executor import Executor

Array = np.ndarray[Any, Any]
Place = tuple[str, str, int]  # space, slot, offset


def refusal(executor: Executor) -> CheckFailed | None:
    """Why no output of the last run may be used; None if all are finite."""
    for name, array in executor.outputs_here().items():
        if is_float(executor.outputs[name].dtype) and not np.isfinite(array).all():
            return _refusal(executor, name, array)
    return None


def _refusal(executor: Executor, name: str, array: Array) -> CheckFailed:
    bad = np.argwhere(~np.isfinite(array))
    first = [int(i) for i in bad[0]]
    rows = [("output", f"{name}{first} is {array[tuple(first)]}; {len(bad)} of {array.size} numbers are not finite")]
    found = _first_bad(executor)
    if found:
        stage, call = found
        once = sum(name == stage for name, _ in unrolled(executor.program.schedule)) == 1
        # In a loop the next rounds carried it to every call: the stage is certain, the call is not.
        rows.append(("first", f"stage {stage}" + (f", {call.op} ({call.name})" if once else "")))
    what = f"{name} of this run is not finite: nothing is sent to the robot"
    return CheckFailed("run.nonfinite", what, rows, "`frtc verify --bisect` names the first call that departs")


def _first_bad(executor: Executor) -> tuple[str, Call] | None:
    """The first stage whose result in lasting memory, as the last to write it left it, is not finite."""
    written: dict[Place, tuple[str, int, Call, Ref, int | None]] = {}  # in the order of the last writes
    for name, round in unrolled(executor.program.schedule):
        stage = executor.program.stage(name)
        for call in stage.calls:
            for ref in call.results:
                if ref.space in (STATE, SLOT) and is_float(ref.dtype):
                    place = (ref.space, ref.slot, ref.offset + round * ref.step)
                    written.pop(place, None)
                    written[place] = (name, round, call, ref, _rows_of(stage, ref, executor))
    for name, round, call, ref, rows in written.values():
        value = executor.peek(ref, round)
        if not np.isfinite(value[..., :rows, :] if value.ndim > 1 else value).all():
            return name, call
    return None


def _rows_of(stage: Stage, ref: Ref, executor: Executor) -> int | None:
    """How many rows of a result are specified, as the calls of its stage say; None: all."""
    for call in stage.calls:
        at = list(signature(REFERENCES[call.op]).parameters)
        counts = call.operands[at.index("rows")] if "rows" in at[: len(call.operands)] else None
        if counts is not None and call.results[0].shape[-2:-1] == ref.shape[-2:-1]:
            return 1 if counts.space == ARENA else int(executor.peek(counts))  # scratch has been overwritten
    return None
