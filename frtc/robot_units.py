"""From the units that statistics are of back to a robot's own: the inverse of a policy's vector steps on the state."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from frtc.runtime.policy import Linkage, Rescale, Scale, VectorSteps

Array = NDArray[Any]


def to_robot_units(steps: VectorSteps, x: Array) -> Array:
    """f64 [..., dim] that `steps` turn into x; where they cannot reach it, into what is next to it."""
    x = x.astype(np.float64)
    for step in reversed(steps):
        if isinstance(step, Scale):
            factor = np.asarray(step.factor)
            x[..., : len(factor)] /= np.where(factor == 0, 1.0, factor)
        else:
            part = x[..., list(step.dims)]
            x[..., list(step.dims)] = _stroke(step, part) if isinstance(step, Linkage) else _before(step, part)
    return x


def _stroke(step: Linkage, turn: Array) -> Array:
    """The slider's place by the law of cosines, the rod pointing away from the crank's axis."""
    angle = np.clip(turn * (step.full - step.zero) + step.zero, -np.pi / 2, np.pi / 2)
    across = step.arm**2 - (step.crank * np.cos(angle)) ** 2
    place: Array = step.crank * np.sin(angle) + np.sqrt(np.maximum(across, 0.0))
    return (place - step.low) / (step.high - step.low)


def _before(step: Rescale, share: Array) -> Array:
    return share * (step.high - step.low) + step.low - step.shift
