"""How large the values at a site are: counts of |x| in 16 bins an octave, from which every kind of scale follows.

A bin holds the magnitudes with one exponent and one value of the upper four bits of the mantissa: of a bf16, eight
numbers. Counts of several samples add up, so that scales do not depend on how the samples were split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

OCTAVE = 16  # bins
WITHIN = 8  # bf16 numbers in a bin
FINITE = 0x7F80 >> 3  # bins of finite magnitudes; the bits of a bf16 without sign, shifted by three
BINS = 1 << 12  # with those of infinity and NaN
LARGEST = 448.0  # of e4m3
SMALLEST = 1e-30  # the maximum of a site of zeros, so that its scale is a number
BULKS = (99.9, 99.0, 90.0)  # percent of the values that are not zero, from the smallest on
STEP, BELOW, ABOVE = 8, 10, 1  # candidates of the best scale: steps an octave, octaves around that of the maximum


def bin_of(values: Array) -> Array:
    """i32 [...]: the bin of each magnitude, f32."""
    return ((values.astype(np.float32).view(np.uint32) & np.uint32(0x7FFFFFFF)) >> np.uint32(19)).astype(np.int32)


def members(bins: Array) -> Array:
    """f64 [len(bins), 8]: the bf16 numbers of each bin."""
    bits = (bins[:, None] * WITHIN + np.arange(WITHIN)).astype(np.uint16)
    numbers: Array = bits.view(ml_dtypes.bfloat16).astype(np.float64)
    return numbers


def upper_edge(bin: int) -> float:
    """What the magnitudes in a bin stay below."""
    edge: float = np.array([(bin + 1) << 19], np.uint32).view(np.float32)[0].item()
    return edge


@dataclass(frozen=True, slots=True)
class Histogram:
    """counts: i64 [FINITE], zeros among the first bin's; absmax: exact, of the finite values."""

    counts: Array
    absmax: float
    zeros: int = 0
    nonfinite: int = 0

    @staticmethod
    def of(values: Array) -> Histogram:
        """Of an array of floats."""
        flat = values.astype(np.float32).ravel()
        counts = np.bincount(bin_of(flat), minlength=BINS)
        finite = np.isfinite(flat)
        absmax = float(np.abs(flat[finite]).max(initial=0.0))
        return Histogram(counts[:FINITE], absmax, int((flat == 0).sum()), int((~finite).sum()))

    @property
    def count(self) -> int:
        """Finite values."""
        return int(self.counts.sum())

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram(
            self.counts + other.counts,
            max(self.absmax, other.absmax),
            self.zeros + other.zeros,
            self.nonfinite + other.nonfinite,
        )

    def percentile(self, percent: float) -> float:
        """The least edge of a bin that `percent` of all values do not exceed; never more than the maximum."""
        below = np.cumsum(self.counts)
        if not self.count:
            return 0.0
        bin = int(np.searchsorted(below, percent / 100 * below[-1], side="left"))
        return min(upper_edge(bin), self.absmax)

    def scale(self, method: str, headroom: float = 1.0, percent: float = 99.99) -> float:
        """Of e4m3: the amplitude that the method finds, times the headroom, is stored as 448."""
        if method == "mse":
            return self.best_scale()
        amplitude = self.absmax if method == "absmax" else self.percentile(percent)
        return max(amplitude, SMALLEST) * headroom / LARGEST

    def best_scale(self) -> float:
        """The scale with the least squared error, by the histogram."""
        start = max(self.absmax, SMALLEST) / LARGEST
        scales = [start * 2.0 ** (k / STEP) for k in range(-BELOW * STEP, ABOVE * STEP + 1)]
        values, weights = self._values()
        best: float = min(scales, key=lambda scale: _noise(values, weights, scale))
        return best

    def sqnr(self, scale: float) -> float:
        """dB of signal over what storing as e4m3 adds: of all values, or of a bulk of them, whichever is least.

        Giants alone look well stored while the rest of the values is lost: a few elements, or a channel of hundred. A
        site that never held anything but zeros proves nothing: minus infinity.
        """
        if self.absmax == 0:
            return -np.inf
        values, weights = self._values()
        below, error = np.cumsum(weights), (stored(values, scale) - values) ** 2
        parts = [below <= percent / 100 * below[-1] for percent in BULKS]
        whole = np.ones(values.shape, np.bool_)
        return min(_decibels(values[p], error[p], weights[p]) for p in (whole, *parts) if p.any())

    def _values(self) -> tuple[Array, Array]:
        """Representative magnitudes f64 [n], rising, none beyond the maximum, and how many values each stands for.

        Without zeros, which any scale stores exactly.
        """
        counts = self.counts.copy()
        counts[0] -= self.zeros
        occupied = np.flatnonzero(counts)
        values = np.minimum(members(occupied), self.absmax)
        weights = np.broadcast_to(counts[occupied, None] / WITHIN, values.shape)
        return values.ravel(), weights.ravel()


def stored(values: Array, scale: float) -> Array:
    """What e4m3 holds of the values at a scale, as the kernels store it: times the reciprocal, rounded, saturated."""
    inv = np.float32(1) / np.float32(scale)
    near = np.clip(values.astype(np.float32) * inv, -LARGEST, LARGEST).astype(ml_dtypes.float8_e4m3fn)
    found: Array = near.astype(np.float64) * scale
    return found


def _noise(values: Array, weights: Array, scale: float) -> float:
    return float(weights @ (stored(values, scale) - values) ** 2)


def _decibels(values: Array, error: Array, weights: Array) -> float:
    signal, noise = float(weights @ values**2), float(weights @ error)
    return 10 * float(np.log10(signal / noise)) if noise else np.inf
