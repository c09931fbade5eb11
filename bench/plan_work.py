"""What a Plan's stages and classes of kernels have to do at least, beside what they take: shares of the roofline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from frtc.kernels.targets import load_targets
from frtc.profile import report_of
from frtc.runtime.plan import Program
from frtc.runtime.profile import Profile, rounds_in
from frtc.runtime.timing import Spread
from frtc.work import kind_of, work_of

Row = dict[str, Any]


def stages_of(program: Program, parts: Mapping[str, Spread]) -> dict[str, Row]:
    """Work of each stage, all its rounds together, and its part of an inference in microseconds."""
    return {stage: row | _took(row, parts[stage]) for stage, row in _work(program, by_stage=True).items()}


def classes_of(program: Program, profile: Profile | None = None) -> dict[str, Row]:
    """Work of each class of kernels in an inference; with a profile also what its launches took in the graph."""
    if profile is not None:
        return {kind: asdict(sums) for kind, sums in report_of(program, profile).kinds.items()}
    return _work(program, by_stage=False)


def _work(program: Program, by_stage: bool) -> dict[str, Row]:
    target, found = load_targets()[program.target.name], dict[str, Row]()
    for name, rounds in rounds_in(program).items():
        for call in program.stage(name).calls:
            work, key = work_of(call), name if by_stage else kind_of(call.op)
            row = found.setdefault(key, {"launches": 0, "nbytes": 0, "flops": 0.0, "roof_us": 0.0})
            row["launches"] += len(call.launches) * rounds
            row["nbytes"] += work.nbytes * rounds
            row["flops"] += work.flops * rounds
            row["roof_us"] += work.roof_us(target) * rounds
    return found


def _took(row: Row, part: Spread) -> Row:
    at = part.row()
    return at | {"share": row["roof_us"] / at["p50"] if at["p50"] else None}
