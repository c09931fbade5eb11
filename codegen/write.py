"""Write a Plan: weights evaluated in pieces by a few threads, straight into the file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from frtc.codegen.plan_writer import PlanWriter
from frtc.codegen.weights import Lookup, pieces, share
from frtc.lowering.ir import Node
from frtc.runtime.plan import Program

WORKERS = min(8, os.cpu_count() or 1)  # each holds some copies of one piece in float64


def write_plan(
    path: Path,
    program: Program,
    expressions: Mapping[str, Node],
    lookup: Lookup,
    blobs: Mapping[str, bytes],
    evidence: Callable[[Path], Mapping[str, Any]],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> str:
    """Write the Plan and return its plan_id. The file appears when it is complete, or not at all.

    expressions   of each weight, over model parameters
    lookup        value of a model parameter, in any float type
    blobs         tensors of bytes: cubins, recipe, tokenizer
    evidence      makes the evidence, given a file that opens as this Plan without any
    progress      called with (weights written, weights in all)
    """
    expressions, values = share(expressions, lookup)
    with PlanWriter(path, program, blobs) as writer, ThreadPoolExecutor(WORKERS) as pool:

        def write(name: str) -> None:
            row = 0
            for piece in pieces(expressions[name], values):
                writer.write_weight(name, piece, row)
                row += len(piece)

        names = [w.name for w in program.weights]
        for done, _ in enumerate(pool.map(write, names), 1):
            progress(done, len(names))
        writer.seal()
        return writer.finish(evidence(writer.tmp))
