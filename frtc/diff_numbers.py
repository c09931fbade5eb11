"""Two Plans on the same inputs: one seeded observation and one noise, on the CPU's emulator or on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from frtc import observation
from frtc.errors import UsageError
from frtc.policy import Inference, Policy, executor_for
from frtc.runtime.plan_file import Plan
from frtc.runtime.policy import Images, Noise, Prompt, Slice, State
from frtc.runtime.policy import Policy as Spec
from frtc.selftest import relative_error

Array = np.ndarray[Any, Any]
TINY = 64 << 20  # bytes of weights up to which the emulator answers in seconds


@dataclass(frozen=True, slots=True)
class Numbers:
    """equal     the actions are the same to the bit
    relative  of actions - noise as the models give them, B against A; None where A gives zeros
    largest   difference of the actions in robot units, and its dimension; by_dim: for each dimension
    """

    seed: int
    device: str
    equal: bool
    relative: float | None
    largest: float
    dimension: int
    by_dim: tuple[float, ...]

    def data(self) -> dict[str, Any]:
        return asdict(self)


def are_tiny(a: Plan, b: Plan) -> bool:
    return max(a.program.weights_nbytes, b.program.weights_nbytes) <= TINY


def require_same_inputs(a: Spec | None, b: Spec | None) -> None:
    """Both take the same raw observation and give actions of one shape; or an error that says where they differ."""
    if a is None or b is None:
        raise UsageError("diff.inputs", "a Plan without a policy takes no observation")
    if rows := list(_differences(a, b)):
        hint = "--no-numbers compares the rest"
        raise UsageError("diff.inputs", "the two Plans cannot run on the same inputs", rows, hint)


def _differences(a: Spec, b: Spec) -> Iterator[tuple[str, str]]:
    for name, ours in _asked(a).items():
        theirs = _asked(b)[name]
        if ours != theirs:
            yield name, f"A {ours}, B {theirs}"


def _asked(spec: Spec) -> dict[str, str]:
    """What a caller must give, and what comes back."""
    images, state, cut = spec.find(Images), spec.find(State), spec.find(Slice)
    noise = spec.find(Noise)
    return {
        "cameras": ", ".join(sorted(c.role for c in images.cameras)) if images else "none",
        "state": f"{state.dim} numbers" if state else "none",
        "prompt": "yes" if spec.find(Prompt) else "none",
        "noise": f"[{noise.horizon}, {noise.width}]" if noise else "none",
        "actions": f"[{cut.horizon}, {cut.dim}]" if cut else "as the model gives them",
    }


def compare_numbers(
    a: Plan, b: Plan, ordinal: int | None, seed: int, progress: Callable[[str, float], None]
) -> Numbers:
    """One inference of each, one after the other, so that one of them at a time is on the device.

    ordinal   the GPU; None: the CPU's emulator
    """
    first, noise, given = _infer(a, ordinal, seed, {}, lambda share: progress("run A", share))
    second, _, _ = _infer(b, ordinal, seed, given, lambda share: progress("run B", share))
    columns = np.abs(second.actions.astype(np.float64) - first.actions).reshape(-1, first.actions.shape[-1]).max(axis=0)
    wide = noise.astype(np.float64)
    relative = relative_error(second.output - wide, first.output - wide)
    return Numbers(
        seed,
        "cpu" if ordinal is None else f"cuda:{ordinal}",
        bool(np.array_equal(first.actions, second.actions)),
        relative if np.isfinite(relative) else None,
        float(columns.max()),
        int(columns.argmax()),
        tuple(float(c) for c in columns),
    )


def _infer(
    plan: Plan, ordinal: int | None, seed: int, given: dict[str, Any], progress: Callable[[float], None]
) -> tuple[Inference, Array, dict[str, Any]]:
    """(answer, noise, what the next Plan is given). Frames are as each Plan declares them: the same pictures."""
    progress(0.0)
    with Policy(plan, executor_for(plan, ordinal), seed) as policy:
        observed = observation.seeded(policy.steps, seed) | given
        answer = policy.infer(observed, draw=None if "noise" in given else 0)
        noise: Array = policy.inputs.get("noise", np.zeros((), np.float32)).copy()
    kept = {name: observed[name] for name in ("state", "prompt") if name in observed}
    return answer, noise, kept | ({"noise": noise} if noise.ndim else {})
