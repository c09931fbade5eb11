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
from frtc.runtime.masked import require_unmasked
from frtc.runtime.policy import Linkage, Norm, Rescale, Scale, State, VectorSteps

Array = NDArray[Any]
FLOAT32_MOST = float(np.finfo(np.float32).max)
LARGE = 1e15  # of a number in robot units


class Normaliser:
    """A Norm with its constants ready. Both directions compute in `dtype` and return it.

        normalise   (x - offset) / divisor - shift
        unnormalise (y + shift) * factor + offset

    have the bits of the formulas above: a factor of two is exact wherever it stands.

    ordinary    numbers whose sizes add up to so much at most stay in float32; negative: not known
    """

    def __init__(self, norm: Norm) -> None:
        self.rule = norm.rule
        self.dtype = np.dtype(np.float32 if norm.rule.startswith("lerobot") else np.float64)
        a, b = (np.asarray(v, self.dtype) for v in (norm.mean_or_low, norm.std_or_high))
        eps = self.dtype.type(norm.eps)
        self.offset, self.divisor, self.shift = a, np.ones_like(a), self.dtype.type(0)
        self.factor = self.divisor  # of "identity" none of them counts
        if norm.rule.endswith("mean_std"):
            self.divisor = b + eps
            self.factor = b if norm.rule == "lerobot_mean_std" else self.divisor
        elif norm.rule != "identity":
            span = b - a
            self.divisor = (span + eps if norm.rule == "openpi_range" else np.where(span == 0, eps, span)) / 2
            self.factor, self.shift = self.divisor, self.dtype.type(1)
        most, least = float(np.abs(self.offset).max(initial=0)), float(np.abs(self.divisor).min(initial=1))
        self.ordinary = LARGE if LARGE + most < FLOAT32_MOST / 2 * least else -1.0

    def normalise(self, x: Array) -> Array:
        """x [dim] in robot units -> [dim], a new array."""
        x = x.astype(self.dtype)
        if self.rule != "identity":
            x -= self.offset
            x /= self.divisor
            if self.shift:
                x -= self.shift
        return x

    def unnormalise(self, y: Array) -> Array:
        """y [..., dim] -> robot units, a new array."""
        y = y.astype(self.dtype)
        if self.rule != "identity":
            if self.shift:
                y += self.shift
            y *= self.factor
            y += self.offset
        return y


class StateStep:
    """The state as it was observed -> in the units that it is normalised in, and normalised.

    read   whether somebody reads the normalised one: else it may be None
    last   as it was observed
    """

    def __init__(self, step: State, before: VectorSteps, read: bool = True) -> None:
        self.step, self.before, self.read = step, before, read
        norm = Normaliser(step.norm)
        self.normalise = norm.normalise
        self.ordinary = -1.0 if before else norm.ordinary
        self.last: Array = np.zeros(step.dim)

    def run(self, value: object) -> tuple[Array, Array | None]:
        """Both [dim], new."""
        self.last = state = read_state(self.step, value)
        if sum(map(abs, state.tolist())) <= self.ordinary:  # NaN is not; a list, as NumPy is slow while caches are cold
            return state, self.normalise(state) if self.read else None
        _require_finite(state)
        with np.errstate(over="ignore", invalid="ignore"):  # said by the check below
            state = apply(self.before, state)
            normalised = self.normalise(state)
        _require_reachable(normalised)
        return state, normalised


def read_state(step: State, value: object) -> Array:
    """The state as a float array [dim] in robot units, a copy; its values are not looked at."""
    if type(value) is np.ndarray and value.dtype.kind == "f" and value.shape == (step.dim,):
        return value.copy()
    require_unmasked("the state", value)
    declared = ("declared", f"{step.dim} numbers in robot units")
    try:
        state = np.asarray(value)
    except Exception as fault:  # of uneven lists; of other libraries' arrays on a GPU or of another type, in any way
        what = f"the state, a {type(value).__name__}, becomes no NumPy array"
        raise FrtcError("input.state_dtype", what, [declared, ("reason", str(fault))]) from None
    if state.dtype.kind != "f":
        raise FrtcError("input.state_dtype", f"the state is {state.dtype}, not floating point", [declared])
    if state.shape != (step.dim,):
        raise FrtcError(
            "input.state_shape",
            f"the state has the shape {list(state.shape)}, not [{step.dim}]",
            hint="one number per dimension of the statistics, not padded; --state-dim sets it",
        )
    return np.array(state)


def _require_finite(state: Array) -> None:
    finite = np.isfinite(state)
    if not finite.all():
        raise FrtcError("input.state_value", f"state numbers {np.flatnonzero(~finite).tolist()} are not finite")


def _require_reachable(normalised: Array) -> None:
    """A finite state may still leave float32 on its way to the model."""
    near = np.abs(normalised) <= FLOAT32_MOST
    if not near.all():
        what = f"state numbers {np.flatnonzero(~near).tolist()} are too large once normalised"
        raise FrtcError("input.state_value", what, hint="are they in the robot's units?")


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
