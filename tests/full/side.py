"""One side of the comparison, in a process of its own: the named results of a Plan's self-test inference, as .npz.

python -m tests.full.side emulator PLAN OUT             the Plan's calls over its arena and weights
python -m tests.full.side interpreter PLAN OUT CKPT     the module after all passes, weights from the checkpoint
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from frtc import observation
from frtc.policy import Policy
from frtc.probe import read
from frtc.runtime.emulator import Emulator
from frtc.runtime.plan import unrolled
from frtc.runtime.plan_file import Plan, open_plan
from frtc.selftest import ref_of

Array = np.ndarray[Any, Any]


def emulator(plan: Plan) -> Iterator[tuple[str, Array]]:
    with Policy(plan, Emulator(plan, poison=True)) as policy:
        for name, array in inputs(policy).items():
            policy.executor.set(name, array)
        for stage, round in unrolled(plan.program.schedule):
            policy.executor.run_stage(stage, round)
            for name, data in plan.evidence["self_test"]["values"].get(stage, {}).items():
                yield f"{stage}[{round}] {name}", read(policy.executor, ref_of(data), round)


def interpreter(plan: Plan, checkpoint: Path) -> Iterator[tuple[str, Array]]:
    from frtc.compiler import families_for, open_model, optimise, options_of, target_named
    from frtc.lowering.interpret import run
    from frtc.lowering.ir import Let
    from frtc.passes.pipeline import Options
    from frtc.results import counters

    options, target = options_of(plan.evidence["options"]), target_named(plan.program.target.name)
    families_for(target, options.family)
    opened = open_model(checkpoint, options)
    module = optimise(opened, target, options, Options.from_environment()).module
    weight = weights(dict(module.weights.outputs), opened.read)
    with Policy(plan, Emulator(plan)) as policy:
        env: dict[str, Any] = {name: array.copy() for name, array in inputs(policy).items()}
    sources = {step.name: step.source for step in module.schedule if isinstance(step, Let)}
    indices = dict(counters(module.schedule))
    for stage, round in unrolled(plan.program.schedule):
        if stage.startswith("let."):
            name = stage.removeprefix("let.")
            found = {name: env[sources[name]]}
        else:
            found = run(module.graph(stage), env | {indices.get(stage, ""): np.array(round, np.int32)}, weight)
        env |= found
        for name, value in found.items():
            yield f"{stage}[{round}] {name}", value


def inputs(policy: Policy) -> dict[str, Array]:
    return dict(policy.steps.prepare(observation.seeded(policy.steps), draw=0).inputs)


def weights(expressions: dict[str, Any], tensors: Callable[[str], Array]) -> Callable[[str], Array]:
    """Each weight evaluated from the checkpoint once, and kept."""
    from frtc.codegen.weights import pieces

    kept: dict[str, Array] = {}

    def weight(name: str) -> Array:
        if name not in kept:
            kept[name] = np.concatenate(list(pieces(expressions[name], tensors))).reshape(expressions[name].shape)
        return kept[name]

    return weight


def main(side: str, plan: str, out: str, *checkpoint: str) -> None:
    opened = open_plan(plan, verify=False)
    values = emulator(opened) if side == "emulator" else interpreter(opened, Path(*checkpoint))
    np.savez(out, **{where: np.array(array, np.float32) for where, array in values})


if __name__ == "__main__":
    main(*sys.argv[1:])
