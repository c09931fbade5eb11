"""Fit the cost models to measured stages of three configurations, and see what the others say.

    PYTHONPATH=. python3 -m bench.fit bench/results/gpu_scale.json [--fit LABEL ...] [--write]

A stage takes the sum over labels of (factor x microseconds by the cost model), and a gap for each launch. Factors start
from 1 and the gap from 0, and move as far as the relative errors of the stages ask for it: least squares with a weak
prior. It fails (exit 3) when the estimate of a whole inference that was not fitted is further off than BAR, when fewer
than eight configurations were measured, or when there are more numbers to fit than stages. `--write` puts what passes
into frtc/fitted.json, which `frtc estimate` reads; what these measurements do not have keeps its factors.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from frtc.estimate import FITTED_PATH, Fitted

# The middle in FP8, whose sites have tactics, and the corners with the smallest and the largest stages in bf16.
FIT = ("v2-p48-c50-s10 fp8", "v1-p48-c10-s10 bf16", "v3-p200-c50-s10 bf16")
BAR, CONFIGURATIONS, FIT_MOST = 0.15, 8, 3
PRIOR = 0.1  # a factor moves by 0.1 where that makes one stage's error smaller by 0.01
LEAST = 0.2  # of a factor
STAGE = 0.01  # share of the inference from which on a stage is fitted
SHARE = 0.02  # of the time by the cost model of what is fitted, from which on a label has a factor of its own
GAP = "gap"
# One H200: bandwidth of reading 8 GB, best of cuBLASLt's products; the datasheet has 4.8e12, 989 and 1979.
CEILINGS = {"hopper": {"dram": 4.64e12, "tflops": {"bf16": 791.0, "f16": 791.0, "e4m3": 1350.0}}}


@dataclass(frozen=True, slots=True)
class Sample:
    """A measured stage: what the cost model says of it by label, its launches, and what it took."""

    costs: Mapping[str, tuple[float, int]]
    measured_us: float


def samples(rows: Sequence[Mapping[str, Any]]) -> list[Sample]:
    """The stages that matter."""
    stages = [(stage, row["device_us"]["p50"]) for row in rows for stage in row["stages"].values()]
    kept = [stage for stage, whole in stages if stage["p50_us"] >= STAGE * whole]
    return [Sample({n: (us, k) for n, (us, k) in s["costs"].items()}, s["p50_us"]) for s in kept]


def names_of(found: Sequence[Sample]) -> list[str]:
    """Labels that are fitted, and the gap."""
    whole = sum(us for s in found for us, _ in s.costs.values())
    labels = sorted({label for s in found for label in s.costs})
    return [n for n in labels if sum(s.costs.get(n, (0.0, 0))[0] for s in found) >= SHARE * whole] + [GAP]


def solve(found: Sequence[Sample], before: Fitted) -> dict[str, float]:
    """Factor of each name; microseconds for the gap."""
    names = names_of(found)
    fixed = np.zeros(len(found))
    table = np.zeros((len(found), len(names)))
    for i, sample in enumerate(found):
        for label, (us, launches) in sample.costs.items():
            table[i, -1] += launches / sample.measured_us
            if label in names:
                table[i, names.index(label)] += us / sample.measured_us
            else:
                fixed[i] += before.factors.get(label, 1.0) * us / sample.measured_us
    start = np.array([0.0 if name == GAP else 1.0 for name in names])
    free = np.ones(len(names), bool)
    answer = start.copy()
    while True:
        rest = 1.0 - fixed - table[:, ~free] @ answer[~free]
        lines = np.vstack([table[:, free], PRIOR * np.eye(int(free.sum()))])
        answer[free] = np.linalg.lstsq(lines, np.concatenate([rest, PRIOR * start[free]]), rcond=None)[0]
        low = free & (answer < LEAST) & (start > 0)
        if not low.any():
            return dict(zip(names, answer.tolist(), strict=True))
        answer[low], free = LEAST, free & ~low


def fitted(found: Sequence[Sample], before: Fitted) -> Fitted:
    """`before` with what the samples say."""
    solved = solve(found, before)
    gap = solved.pop(GAP)
    families = {label.split()[0] for s in found for label in s.costs}
    return replace(
        before, gaps_us={**before.gaps_us, **dict.fromkeys(sorted(families), gap)}, factors={**before.factors, **solved}
    )


def estimated_us(stage: Mapping[str, Any], fit: Fitted) -> float:
    return sum(fit.expected_us(label, us, launches) for label, (us, launches) in stage["costs"].items())


def errors_of(row: Mapping[str, Any], fit: Fitted) -> dict[str, float]:
    """Relative error of the whole inference ("") and of each stage that matters."""
    whole = row["device_us"]["p50"]
    found = {"": sum(estimated_us(stage, fit) for stage in row["stages"].values()) / whole - 1}
    for name, stage in row["stages"].items():
        if stage["p50_us"] >= STAGE * whole:
            found[name] = estimated_us(stage, fit) / stage["p50_us"] - 1
    return found


def judged(result: Mapping[str, Any], labels: Sequence[str], before: Fitted, source: str) -> tuple[Fitted, list[str]]:
    """The fit to the rows with these labels, and what is wrong with it."""
    rows = {row["label"]: row for row in result["rows"]}
    if missing := [label for label in labels if label not in rows]:
        return before, [f"{', '.join(missing)} was not measured; there are {', '.join(rows)}"]
    found = samples([rows[label] for label in labels])
    fit = fitted(found, before)
    held_out = {label: errors_of(row, fit)[""] for label, row in rows.items() if label not in labels}
    about = {"gpu": result["device"], "target": result["target"], "source": source}
    fit = replace(fit, **about, fit=tuple(labels), held_out=held_out, ceilings=CEILINGS)
    wrong = [f"{label}: {error:+.1%}" for label, error in held_out.items() if abs(error) > BAR]
    if len(labels) > FIT_MOST or len(rows) < CONFIGURATIONS:
        wrong.append(
            f"{len(labels)} of {len(rows)} configurations fitted; at most {FIT_MOST} of {CONFIGURATIONS} or more"
        )
    if (numbers := len(names_of(found))) > len(found):
        wrong.append(f"{numbers} numbers fitted to {len(found)} stages")
    return fit, wrong


def show(result: Mapping[str, Any], fit: Fitted) -> None:
    for label, factor in fit.factors.items():
        print(f"{label:40s} x {factor:.3f}")
    for family, gap in fit.gaps_us.items():
        print(f"{'launch of ' + family:40s} + {gap:.3f} us")
    print(f"{'':28s} {'measured ms':>11} {'error':>7}   of stages")
    for row in result["rows"]:
        errors = errors_of(row, fit)
        stages = "  ".join(f"{name} {error:+.1%}" for name, error in errors.items() if name)
        kind = "fitted" if row["label"] in fit.fit else ""
        print(f"{row['label']:28s} {row['device_us']['p50'] / 1e3:11.3f} {errors['']:+7.1%}   {stages}  {kind}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", type=Path, help="what bench.gpu_scale wrote")
    parser.add_argument("--fit", nargs="+", default=FIT, metavar="LABEL", help="configurations to fit, at most three")
    parser.add_argument("--write", action="store_true", help=f"{FITTED_PATH.name}, where nothing is wrong")
    parser.add_argument("--into", type=Path, default=FITTED_PATH, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    result = json.loads(args.results.read_text())
    commit = f" at {result['commit']}" if result.get("commit") else ""
    fit, wrong = judged(result, args.fit, Fitted.read(args.into), f"{args.results.name}{commit}")
    if fit.fit == tuple(args.fit):
        show(result, fit)
    for line in wrong:
        print(f"FAILED {line}")
    if args.write and not wrong:
        args.into.write_text(json.dumps(asdict(fit), indent=1) + "\n")
    return 3 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
