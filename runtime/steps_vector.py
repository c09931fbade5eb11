"""Vector steps: normalisation in the origin's own formula and precision, and actions back in robot units.

  rule              precision  normalise                    un-normalise
  openpi_mean_std   float64    (x - mean) / (std + eps)     y * (std + eps) + mean
  openpi_range      float64    (x - low) / d * 2 - 1        (y + 1) / 2 * d + low        d = high - low + eps
  lerobot_mean_std  float32    (x - mean) / (std + eps)     y * std + mean
  lerobot_range     float32    2 * (x - low) / d - 1        (y + 1) * d / 2 + low        d = high - low, or eps if 0

openpi: eps 1e-6, statistics are the doubles of norm_stats.json. lerobot: eps 1e-8 from the pipeline JSON, all in
float32; ranges are QUANTILES (q01, q99), QUANTILE10 (q10, q90) and MIN_MAX alike. Nothing is clipped.

Steps between the robot's own units and those of the training data (Scale, Linkage, Rescale) compute in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from frtc.errors import FrtcError
from frtc.runtime.policy import Linkage, Norm, Rescale, Scale, State, VectorSteps

Array = NDArray[Any]


class Normaliser:
    """A Norm with its constants ready. Both directions compute in `dtype` and return it."""

    def __init__(self, norm: Norm) -> None:
        self.rule = norm.rule
        self.dtype = np.dtype(np.float32 if norm.rule.startswith("lerobot") else np.float64)
        a, b = (np.asarray(v, self.dtype) for v in (norm.mean_or_low, norm.std_or_high))
        eps = self.dtype.type(norm.eps)
        if norm.rule.endswith("mean_std"):
            self.offset, self.divisor = a, b + eps
            self.factor = b if norm.rule == "lerobot_mean_std" else self.divisor
        elif norm.rule != "identity":
            span = b - a
            self.offset = a
            self.divisor = span + eps if norm.rule == "openpi_range" else np.where(span == 0, eps, span)

    def normalise(self, x: Array) -> Array:
        """x [dim] in robot units -> [dim]."""
        x = x.astype(self.dtype)
        if self.rule == "identity":
            return x
        if self.rule.endswith("mean_std"):
            return (x - self.offset) / self.divisor
        return 2 * (x - self.offset) / self.divisor - 1  # times 2 is exact: openpi's order gives the same bits

    def unnormalise(self, y: Array) -> Array:
        """y [..., dim] -> robot units."""
        y = y.astype(self.dtype)
        if self.rule == "identity":
            return y
        if self.rule.endswith("mean_std"):
            return y * self.factor + self.offset
        return (y + 1) * self.divisor / 2 + self.offset


def read_state(step: State, value: object) -> Array:
    """The state as a float array [dim] in robot units, checked."""
    try:
        state = np.array(value)  # a copy: it is needed again when the actions come out
    except ValueError:
        state = np.array(None)
    if state.dtype.kind != "f":
        raise FrtcError(
            "input.state_dtype",
            f"the state is {state.dtype}, not floating point",
            [("declared", f"{step.dim} numbers in robot units")],
        )
    if state.shape != (step.dim,):
        raise FrtcError(
            "input.state_shape",
            f"the state has the shape {list(state.shape)}, not [{step.dim}]",
            hint="one number per dimension of the statistics, not padded; --state-dim sets it",
        )
    if not np.isfinite(state).all():
        raise FrtcError(
            "input.state_value", f"state numbers {np.flatnonzero(~np.isfinite(state)).tolist()} are not finite"
        )
    return state


def apply(steps: VectorSteps, x: Array) -> Array:
    """x [..., dim] through the steps, as a new float64 array; x itself where there are none."""
    if not steps:
        return x
    x = x.astype(np.float64)
    for step in steps:
        if isinstance(step, Scale):
            x[..., : len(step.factor)] *= np.asarray(step.factor)
        else:
            part = x[..., list(step.dims)]
            x[..., list(step.dims)] = linkage(step, part) if isinstance(step, Linkage) else rescale(step, part)
    return x


def linkage(step: Linkage, stroke: Array) -> Array:
    """Law of cosines: where the slider is says how far the crank turned; unreachable positions are clipped."""
    place = stroke * (step.high - step.low) + step.low
    with np.errstate(divide="ignore", invalid="ignore"):  # a slider on the axis: clipped, too
        sine = (step.crank**2 + place**2 - step.arm**2) / (2 * step.crank * place)
    angle: Array = np.arcsin(np.clip(sine, -1.0, 1.0))
    return (angle - step.zero) / (step.full - step.zero)


def rescale(step: Rescale, x: Array) -> Array:
    return ((x + step.shift) - step.low) / (step.high - step.low)


def absolute(actions: Array, state: Array, mask: tuple[bool, ...]) -> None:
    """actions [H, dim] += state on the masked dimensions, in the actions' precision, in place."""
    n = len(mask)
    actions[:, :n] += state[:n].astype(actions.dtype) * np.asarray(mask, actions.dtype)
