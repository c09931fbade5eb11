"""What a comparison of a Plan with its checkpoint found: by program and round, by denoise step, by action dimension.

Robot-side code may read it; frtc/verify.py makes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from frtc.errors import CheckFailed
from frtc.runtime.plan import Program
from frtc.selftest import precision_of

Array = np.ndarray[Any, Any]
VELOCITIES = {"f32": 1e-4, "bf16": 2e-2, "w8a16": 6e-2, "fp8": 6e-2}  # bars, by precision; docs/numerics.md
RESULTS = {**VELOCITIES, "w8a16": 1.5e-1, "fp8": 2e-1}  # of other results, and of a whole inference


def bars_of(program: Program) -> tuple[float, float]:
    """(of what a denoise step changes, of any other result), against the model in fp32."""
    precision = precision_of(program)
    return VELOCITIES[precision], RESULTS[precision]


@dataclass(frozen=True, slots=True)
class Difference:
    """A result of a program: `where` is "prefix k.3" or "denoise[4] x_t".

    velocity   it is what the actions are made of: its error is that of what one step changes
    units      of a velocity: |error| that the step adds to each action [horizon, dim], robot units
    """

    stage: str
    round: int
    name: str
    error: float
    bar: float
    velocity: bool = False
    units: Array | None = None

    @property
    def where(self) -> str:
        return f"{self.stage}[{self.round}] {self.name}" if self.round else f"{self.stage} {self.name}"


@dataclass(frozen=True, slots=True)
class Sample:
    """One observation: results by program and round, then the whole inference (see Verified); units [horizon, dim]."""

    differences: tuple[Difference, ...]
    whole: float
    cosine: float
    units: Array


@dataclass(frozen=True, slots=True)
class Dimension:
    """One of the robot's action dimensions, in its units, over samples and rows of the chunk.

    worst, mean    |error| of the actions
    worst_step     the largest |error| that a single denoise step adds
    """

    name: str
    worst: float
    mean: float
    worst_step: float


@dataclass(frozen=True, slots=True)
class Step:
    """One denoise step: worst relative error of its velocity, and the largest |error| that it adds, in robot units."""

    where: str
    error: float
    units: tuple[float, ...]  # by dimension


@dataclass(frozen=True, slots=True)
class Verified:
    """samples   one for each observation
    bar          of velocities
    bar_whole    of a whole inference
    names        of the action dimensions; () where the policy has none
    weights      those of the Plan that are not the checkpoint's

    Over the samples: `differences` are the worst of each result, `whole` is the largest relative error of
    actions - noise, `cosine` the smallest of the actions (it says little where the noise is most of them).
    """

    samples: tuple[Sample, ...]
    bar: float
    bar_whole: float
    names: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()

    @property
    def differences(self) -> tuple[Difference, ...]:
        alike = zip(*(s.differences for s in self.samples), strict=True)
        return tuple(max(same, key=lambda d: d.error) for same in alike)

    @property
    def failed(self) -> tuple[Difference, ...]:
        return tuple(d for d in self.differences if not d.error <= d.bar)

    @property
    def whole(self) -> float:
        return max(s.whole for s in self.samples)

    @property
    def cosine(self) -> float:
        return min(s.cosine for s in self.samples)

    @property
    def steps(self) -> tuple[Step, ...]:
        def step(same: tuple[Difference, ...]) -> Step:
            units = [d.units.max(axis=0) for d in same if d.units is not None]
            largest = np.max(units, axis=0).tolist() if units else []
            return Step(same[0].where, max(d.error for d in same), tuple(largest))

        velocities = ([d for d in s.differences if d.velocity] for s in self.samples)
        return tuple(map(step, zip(*velocities, strict=True)))

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        units = np.concatenate([s.units for s in self.samples])
        steps = [step.units for step in self.steps if step.units] or [(0.0,) * units.shape[1]]
        largest = np.max(steps, axis=0)
        names = self.names or tuple(f"action[{i}]" for i in range(units.shape[1]))
        return tuple(
            Dimension(names[i], float(column.max()), float(column.mean()), float(largest[i]))
            for i, column in enumerate(units.T)
        )

    @property
    def worst_velocity(self) -> float:
        return max((step.error for step in self.steps), default=0.0)

    def failure(self) -> CheckFailed | None:
        rows = [("first", f"{d.where}: relative error {d.error:.2e}, allowed {d.bar:.1e}") for d in self.failed[:1]]
        if not self.failed and not self.weights and self.whole <= self.bar_whole:
            return None
        if self.weights:
            rows.append(("weights", f"{len(self.weights)} are not the checkpoint's, {self.weights[0]} is the first"))
        rows.append(("actions", f"relative error {self.whole:.2e} without the noise, allowed {self.bar_whole:.1e}"))
        what = "the Plan does not compute what the checkpoint says"
        return CheckFailed("verify.checkpoint", what, rows, "--bisect names the first call that departs")

    def data(self) -> dict[str, Any]:
        """For --json."""
        dimensions = self.dimensions
        largest = max(dimensions, key=lambda d: d.worst)
        return {
            "samples": len(self.samples),
            "bar": self.bar,
            "bar_whole": self.bar_whole,
            "whole": self.whole,
            "cosine": self.cosine,
            "worst": [_finite(largest.worst), dimensions.index(largest)],
            "worst_velocity": self.worst_velocity,
            "dimensions": [
                {
                    "name": d.name,
                    "worst": _finite(d.worst),
                    "mean": _finite(d.mean),
                    "worst_step": _finite(d.worst_step),
                }
                for d in dimensions
            ],
            "steps": [
                {"where": s.where, "velocity_error": s.error, "units": list(map(_finite, s.units))} for s in self.steps
            ],
            "differences": [
                {"where": d.where, "stage": d.stage, "round": d.round, "name": d.name, "error": d.error, "bar": d.bar}
                for d in self.differences
            ],
            "failed": [d.where for d in self.failed],
            "weights": list(self.weights),
        }


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if np.isfinite(value) else None
