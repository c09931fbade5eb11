"""Reading values where a Plan keeps them, on the device or in the emulator: what self-test and bisection look at."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from frtc.runtime.executor import Executor
from frtc.runtime.plan import ARENA, SLOT, STATE, WEIGHTS, Program, Ref, Repeat, Run, Stage
from frtc.runtime.plan_file import Plan
from frtc.runtime.races import extent

Array = np.ndarray[Any, Any]


def read(executor: Executor, ref: Ref, round: int = 0) -> Array:
    """A copy of the value that `ref` describes, as the last run left it. ValueError where it is not in memory."""
    _require_inside(executor.program, ref, round)
    return executor.peek(ref, round)


def _require_inside(program: Program, ref: Ref, round: int) -> None:
    """`ref` may come from evidence, which nobody validated."""
    sizes = {ARENA: program.arena_nbytes, STATE: program.state_nbytes, WEIGHTS: program.weights_nbytes}
    sizes |= {SLOT + slot.name: slot.nbytes for slot in (*program.inputs, *program.outputs)}
    space, start, end = extent(ref, round + 1)
    if start < 0 or end > sizes[space] or min((*ref.shape, *ref.strides, ref.step), default=0) < 0:
        raise ValueError(f"bytes {start} to {end} of {space}")


def by_call(plan: Plan) -> Plan:
    """The same Plan with every call as a stage of its own ("denoise/7"), so that each can run and be looked at alone.

    Offsets stay: the memory plan gives every call its operands as long as the calls run in order.
    """
    program = plan.program
    stages = tuple(
        Stage(f"{stage.name}/{i}", (replace(call, after=()),))
        for stage in program.stages
        for i, call in enumerate(stage.calls)
    )
    return replace(plan, program=replace(program, stages=stages, schedule=_spread(program, program.schedule)))


def _spread(program: Program, steps: tuple[Run | Repeat, ...]) -> tuple[Run | Repeat, ...]:
    spread: list[Run | Repeat] = []
    for step in steps:
        if isinstance(step, Repeat):
            spread.append(Repeat(step.count, _spread(program, step.body)))
        else:
            spread += [Run(f"{step.stage}/{i}") for i in range(len(program.stage(step.stage).calls))]
    return tuple(spread)
