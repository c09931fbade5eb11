"""Histograms of magnitudes: bins, sums, and the scales and errors that follow from them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from frtc.histogram import FINITE, LARGEST, OCTAVE, Histogram, bin_of, members, stored, upper_edge
from frtc.site_counts import SiteCounts

Array = np.ndarray[Any, Any]
BF16 = ml_dtypes.bfloat16


def normal(count: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(count).astype(BF16).astype(np.float32)


def counted(x: Array, dtype: torch.dtype) -> Histogram:
    counts = SiteCounts(2, torch.device("cpu"))
    for half in np.array_split(x, 2):
        counts.add(1, torch.from_numpy(half).to(dtype))
    first, second = counts.histograms()
    assert (first.count, first.absmax) == (0, 0.0)
    return second


def test_sixteen_bins_an_octave_of_eight_numbers_each() -> None:
    assert bin_of(np.array([1.0, 2.0, 4.0])).tolist() == [127 * OCTAVE, 128 * OCTAVE, 129 * OCTAVE]
    numbers = members(np.arange(127 * OCTAVE, 128 * OCTAVE))
    assert numbers.shape == (16, 8) and numbers[0, 0] == 1 and numbers[-1, -1] < 2 == upper_edge(128 * OCTAVE - 1)
    assert (bin_of(numbers) == np.arange(127 * OCTAVE, 128 * OCTAVE)[:, None]).all()
    assert bin_of(np.array([-1.5])) == bin_of(np.array([1.5]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_torch_and_numpy_count_alike(dtype: torch.dtype) -> None:
    x = np.concatenate([normal(5000) * 1e-3, [0, -0.0, 3.0]]).astype(np.float32)
    x = torch.from_numpy(x).to(dtype).float().numpy()
    found, expected = counted(x, dtype), Histogram.of(x)
    assert (found.counts == expected.counts).all() and found.counts.shape == (FINITE,)
    assert (found.absmax, found.zeros, found.nonfinite) == (3.0, expected.zeros, 0) and found.zeros >= 2


def test_what_is_not_finite_is_counted_apart() -> None:
    found = counted(np.array([1, np.nan, -np.inf, 2], np.float32), torch.bfloat16)
    assert (found.count, found.nonfinite) == (2, 2)
    expected = Histogram.of(np.array([1, np.nan, -np.inf, 2]))
    assert (found.counts == expected.counts).all() and expected.absmax == 2


def test_two_halves_make_the_whole() -> None:
    samples = [normal(4000, seed) * (1 + seed) for seed in range(8)]
    parts = [Histogram.of(x) for x in samples]
    halves = sum(parts[1:4], parts[0]) + sum(parts[5:], parts[4])
    whole = Histogram.of(np.concatenate(samples))
    assert (halves.counts == whole.counts).all()
    assert (halves.absmax, halves.zeros, halves.count) == (whole.absmax, whole.zeros, 32000)
    for percent in (50, 99, 99.9, 100):
        assert halves.percentile(percent) == whole.percentile(percent)


@pytest.mark.parametrize("percent", [10, 50, 99, 99.9])
def test_percentiles_are_those_of_the_values_within_a_bin(percent: float) -> None:
    x = normal(20000)
    exact = np.percentile(np.abs(x), percent)
    assert exact <= Histogram.of(x).percentile(percent) <= exact * (1 + 1.01 / OCTAVE)


def test_percentiles_of_little() -> None:
    assert Histogram.of(np.zeros(0)).percentile(99) == 0
    assert Histogram.of(np.array([3.0])).percentile(99.9) == 3.0
    assert Histogram.of(normal(100)).percentile(100) == np.abs(normal(100)).max()


def test_scales_of_each_method() -> None:
    x = normal(20000)
    found, largest = Histogram.of(x), float(np.abs(x).max())
    assert found.scale("absmax") == largest / LARGEST
    assert found.scale("absmax", 1.25) == 1.25 * largest / LARGEST
    assert found.scale("percentile", percent=99) == found.percentile(99) / LARGEST < found.scale("absmax")
    assert Histogram.of(np.zeros(4)).scale("absmax") > 0


def error(x: Array, scale: float) -> float:
    return float(((stored(x, scale) - x) ** 2).sum())


def test_the_best_scale_has_the_least_error_of_the_values_themselves() -> None:
    """At most 5 % above the best of a fine search."""
    x = (normal(50_000) * 1e-3).astype(BF16).astype(np.float32)
    found = Histogram.of(x).best_scale()
    scales = np.geomspace(found / 64, found * 64, 200)
    assert error(x, found) <= 1.05 * min(error(x, s) for s in scales)


def test_sqnr_is_that_of_the_values() -> None:
    x = normal(50_000)
    scale = float(np.abs(x).max()) / LARGEST
    exact = 10 * np.log10((x.astype(np.float64) ** 2).sum() / error(x, scale))
    assert -0.5 < Histogram.of(x).sqnr(scale) - exact < 0.2, "the least of four parts"
    assert 30 < exact < 33, "what e4m3 is worth"


def test_headroom_of_a_quarter_costs_nothing() -> None:
    found = Histogram.of(normal(50_000))
    assert abs(found.sqnr(found.scale("absmax", 1.25)) - found.sqnr(found.scale("absmax"))) < 0.5


def test_an_outlier_shows_in_the_bulk() -> None:
    """All values: fine, for the giants are stored well. 99.9 % of them: lost."""
    x = normal(100_000)
    x[:50] = 3e6
    found = Histogram.of(x)
    scale = found.scale("absmax")
    assert 10 * np.log10((x.astype(np.float64) ** 2).sum() / error(x, scale)) > 40
    assert found.sqnr(scale) < 10


@pytest.mark.parametrize("share", [1, 4, 30])
def test_channels_of_giants_show_too(share: int) -> None:
    """Of 300 channels, so many hold values a million times as large."""
    x = normal(300 * 1000).reshape(1000, 300)
    x[:, :share] *= 1e6
    found = Histogram.of(x)
    assert found.sqnr(found.scale("absmax")) < 10
    wide = normal(300 * 1000).reshape(1000, 300)
    wide[:, :share] *= 300
    found = Histogram.of(wide)
    assert found.sqnr(found.scale("absmax", 1.25)) > 25, "a few hundred is what a float is for"


def test_zeros_do_not_hide_the_bulk_and_prove_nothing_alone() -> None:
    x = np.concatenate([np.zeros(10_000_000, np.float32), normal(5000)])
    found = Histogram.of(x)
    assert found.sqnr(found.scale("absmax")) > 28
    assert Histogram.of(np.zeros(9)).sqnr(1.0) == -np.inf
    assert Histogram.of(np.full(9, 2.0)).sqnr(2 / 448) > 40
