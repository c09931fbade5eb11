"""Percentiles are samples, and tables have one row a part."""

from __future__ import annotations

from frtc.runtime.timing import Spread, Timing


def test_spread() -> None:
    spread = Spread.of([float(i) for i in range(1000, 0, -1)])
    assert spread.row() == {"min": 1.0, "p50": 500.0, "p90": 900.0, "p99": 990.0, "p99.9": 999.0, "max": 1000.0}
    assert Spread.of([3.0]).row() == dict.fromkeys(spread.row(), 3.0)


def test_table() -> None:
    timing = Timing.of([{"total": 1500.0, "input": 10.0}, {"total": 2500.0, "input": 20.0}])
    head, total, part = timing.table().splitlines()
    assert head.split() == ["ms", "min", "p50", "p90", "p99", "p99.9", "max"]
    assert total.split() == ["total", "1.500", "1.500", "2.500", "2.500", "2.500", "2.500"]
    assert part.split()[:2] == ["input", "0.010"]
