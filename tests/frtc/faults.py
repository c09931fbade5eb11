"""Planting faults: a Plan with some weights, or its program, changed, in a file that opens like any other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from frtc.codegen.plan_writer import PlanWriter
from frtc.kernels.dtypes import DTYPES
from frtc.runtime.plan import Program
from frtc.runtime.plan_file import Plan, open_plan

Array = np.ndarray[Any, Any]
Change = Callable[[Array], Array]


def weight(plan: Plan, name: str) -> Array:
    """A copy of a weight, without the padding of its rows."""
    entry = next(w for w in plan.program.weights if w.name == name)
    flat = np.frombuffer(plan.weights[entry.offset : entry.offset + entry.nbytes], DTYPES[entry.dtype].numpy)
    last = entry.shape[-1:] and slice(entry.shape[-1])
    return flat.reshape(entry.stored_shape)[..., last].copy() if entry.shape else flat.reshape(()).copy()


def planted(plan: Plan, out: Path, weights: Mapping[str, Array] | None = None, program: Program | None = None) -> Plan:
    """The Plan with other weights or another program, written to `out`; its evidence is kept."""
    program, files = program or plan.program, {name: bytes(data) for name, data in plan.files().items()}
    with PlanWriter(out, program, files) as writer:
        for entry in program.weights:
            found = (weights or {}).get(entry.name)
            value = weight(plan, entry.name) if found is None else found
            writer.write_weight(entry.name, value if entry.shape else value.reshape(1), 0)
        writer.finish(plan.evidence)
    return open_plan(out)
