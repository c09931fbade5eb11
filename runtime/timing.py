"""Latency: what was measured and how it is spread. All times in microseconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}


@dataclass(frozen=True, slots=True)
class Spread:
    """Of `count` samples. A percentile is a sample: the smallest that no smaller share of them exceeds."""

    count: int
    min: float
    percentiles: Mapping[str, float]
    max: float

    @staticmethod
    def of(samples_us: Sequence[float]) -> Spread:
        ordered = sorted(samples_us)
        at = {name: ordered[math.ceil(share * len(ordered)) - 1] for name, share in SHARES.items()}
        return Spread(len(ordered), ordered[0], at, ordered[-1])

    def row(self) -> dict[str, float]:
        """For tables and JSON, in order."""
        return {"min": self.min, **self.percentiles, "max": self.max}


@dataclass(frozen=True, slots=True)
class Timing:
    """Parts of an inference by name, in order:

    total    from inputs on the host to outputs on the host
    replay   the stages alone, as one launch
    input    copying the inputs to the device
    ...      each stage of the schedule, its repetitions added up
    output   copying the outputs to the host
    """

    parts: Mapping[str, Spread]

    @staticmethod
    def of(samples: Sequence[Mapping[str, float]]) -> Timing:
        return Timing({name: Spread.of([sample[name] for sample in samples]) for name in samples[0]})

    def table(self) -> str:
        """One row a part, in milliseconds."""
        width = max(map(len, self.parts))
        lines = [f"{'ms':<{width}} " + " ".join(f"{name:>9}" for name in ("min", *SHARES, "max"))]
        for name, spread in self.parts.items():
            lines.append(f"{name:<{width}} " + " ".join(f"{us / 1e3:9.3f}" for us in spread.row().values()))
        return "\n".join(lines)


def took_us(action: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    action()
    return (time.perf_counter_ns() - start) / 1e3
