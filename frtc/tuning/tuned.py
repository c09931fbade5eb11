"""A build with tactics: read from a file, measured now, or none; then what was used, and the log for the evidence."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from frtc.codegen.build import Built, build
from frtc.doctor import CLOCKS
from frtc.errors import EnvironmentFault, UsageError
from frtc.kernels.catalog import CATALOG, Catalog
from frtc.kernels.tactic import Tactics, read_tactics
from frtc.kernels.targets import Target
from frtc.lowering.ir import Module
from frtc.tuning.options import Tuning, TuningReport
from frtc.tuning.questions import questions_of
from frtc.tuning.search import Found, Progress, search
from frtc.tuning.worker import Worker, require_gpu

MEASURED = "measured now"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A tuned build that has what it needs: the file is readable, or can be written; the GPU is there."""

    tuning: Tuning
    target: Target
    given: Tactics


def prepare(tuning: Tuning, target: Target) -> Prepared:
    """Fails before minutes of work where they would be in vain."""
    given, file = Tactics(target.name, ""), tuning.file
    if file is not None:
        if tuning.measure and not file.parent.is_dir():
            hint = "create it, or choose another with --tactics"
            raise UsageError("output.folder", f"there is no folder {file.parent}", hint=hint)
        if file.exists() or not tuning.measure:  # what is there is added to, or it is somebody else's file
            given = read_tactics(file, target.name)
    if tuning.measure:
        require_gpu(target)
    return Prepared(tuning, target, given)


def tuned_build(
    prepared: Prepared, module: Module, families: tuple[str, ...], progress: Progress
) -> tuple[Built, TuningReport]:
    """The module built with the kernels that the tactics name, measured before where that was asked for."""
    target, tuning = prepared.target, prepared.tuning

    def built(catalog: Catalog) -> Built:
        return build(module, target, families, catalog, lambda share: progress("compile kernels", share))

    catalog = replace(CATALOG, tactics=(prepared.given,))
    first = built(catalog)
    if not tuning.measure:
        return first, TuningReport.of(first)
    started, questions = time.monotonic(), questions_of(first, target, families, catalog)
    with Worker() as worker:
        worker.start()
        found = search(questions, target, worker, tuning.seconds, progress)
        device = dict(worker.device)
    measured = Tactics.of(target.name, MEASURED, str(device["name"]), found.tactics)
    log = _log(found, target, device, tuning.seconds, time.monotonic() - started)
    if tuning.file is not None:
        kept = [t for site, t in prepared.given.by_site.items() if site not in measured.by_site]
        write_tactics(tuning.file, Tactics.of(target.name, MEASURED, measured.gpu, (*kept, *found.tactics)))
    second = built(replace(CATALOG, tactics=(measured, prepared.given)))
    return second, TuningReport.of(second, log, str(tuning.file or ""))


def write_tactics(path: Path, tactics: Tactics) -> None:
    """The file is there when it is complete; until then what was there stays."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with temporary.open("w") as file:
            file.write(tactics.text())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as fault:
        temporary.unlink(missing_ok=True)
        what = f"{path} cannot be written: {fault.strerror or fault}"
        raise EnvironmentFault("tactics.write", what, hint="choose another place with --tactics") from None


def _log(found: Found, target: Target, device: dict[str, Any], limit: float, seconds: float) -> dict[str, Any]:
    about = {"target": target.name, "gpu": device["name"], "driver": device.get("branch"), "cuda": device.get("cuda")}
    took = {"clocks": _clocks(), "seconds": round(seconds, 1), "limit_s": limit}
    return {**about, **took, "not_reached": found.not_reached, "stopped": found.stopped, "log": list(found.log)}


def _clocks() -> str:
    """SM now, SM at most, memory; just after the measurements."""
    try:
        return subprocess.run(CLOCKS, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "not readable"
