"""A build with tactics: read from a file, measured now, or none; then what was used, and the log for the evidence."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from frtc.codegen.build import Built, build
from frtc.codegen.emit import Emitted
from frtc.doctor import CLOCKS
from frtc.errors import EnvironmentFault, FrtcError, UsageError
from frtc.kernels.catalog import CATALOG, Catalog, label
from frtc.kernels.tactic import Tactic, Tactics, key_of, read_tactics
from frtc.kernels.targets import Target
from frtc.lowering.ir import Module
from frtc.lowering.text import show_module
from frtc.tuning.builder import Job
from frtc.tuning.builders import Builders
from frtc.tuning.inputs import all_valid
from frtc.tuning.options import Tuning, TuningReport
from frtc.tuning.questions import Alone, places_of, questions_of
from frtc.tuning.search import Found, Progress, search
from frtc.tuning.whole import SHARE, US_LEAST, NoBase, Whole
from frtc.tuning.worker import Worker, require_gpu

Array = np.ndarray[Any, Any]
MEASURED = "measured now"
ALONE = 0.4  # of the seconds: at most, for sites by themselves; the rest is for the whole chain


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
    prepared: Prepared,
    module: Module,
    families: tuple[str, ...],
    progress: Progress,
    inputs: Mapping[str, Array] | None = None,
) -> tuple[Built, TuningReport]:
    """The module built with the kernels that the tactics name, measured before where that was asked for.

    inputs   of an inference, to measure in the whole chain; None: sites are measured by themselves, no more
    """
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
        share = 1.0 if inputs is None else ALONE
        found = search(questions, target, worker, share * tuning.seconds, progress)
        tactics, log = found.tactics, dict[str, Any]()
        if inputs is not None:
            job = Job(show_module(module), target, families, prepared.given, all_valid(inputs))
            with Builders(job) as builders:
                whole = Whole(builders, worker, started + tuning.seconds)
                tactics, log = in_chain(whole, first, job, found, catalog, progress)
        device = dict(worker.device)
    measured = Tactics.of(target.name, MEASURED, str(device["name"]), tactics)
    log = _log(found, target, device, tuning.seconds, time.monotonic() - started) | log
    if tuning.file is not None:
        kept = [t for site, t in prepared.given.by_site.items() if site not in measured.by_site]
        write_tactics(tuning.file, Tactics.of(target.name, MEASURED, measured.gpu, (*kept, *tactics)))
    second = built(replace(CATALOG, tactics=(measured, prepared.given)))
    return second, TuningReport.of(second, log, str(tuning.file or ""))


def in_chain(
    whole: Whole, first: Built, job: Job, found: Found, catalog: Catalog, progress: Progress
) -> tuple[tuple[Tactic, ...], dict[str, Any]]:
    """What is chosen after the search in the whole chain, from what was found alone; and its log."""
    began, alone, rows, stopped = time.monotonic(), found.alone(), list[dict[str, Any]](), ""
    places = [p for p in places_of(first, job.target, job.families, catalog, alone) if p.most >= SHARE]
    quickest = {tactic.site: tactic for tactic in found.tactics}
    own = {key_of(c.site): own_tactic(c, alone) for calls in first.emitted.values() for c in calls}
    untuned = {site: own[site] for site in quickest}
    starts = [untuned, *([quickest] if [*map(str, quickest.values())] != [*map(str, untuned.values())] else [])]
    try:
        whole.begin(starts, [place.key for place in places])
        for decided in whole.run(places, whole.programs(), progress):
            rows.append(decided.row())
    except NoBase as fault:
        stopped, whole.left = str(fault), [(next(iter(p.calls)), p.key) for p in places]
    except FrtcError as error:  # the measuring process no longer starts
        stopped = " ".join([error.what, *(text for _, text in error.rows)])
    times = {name: whole.row(us) for name, us in (("before", whole.before), ("after", whole.now))}
    left = [{"program": program, "site": site} for program, site in whole.left]
    about = {"seconds": round(time.monotonic() - began, 1), "stopped": stopped, "refused": whole.refused}
    return (tuple(whole.tactics()) if whole.before else found.tactics), {
        "chain": {**about, **times, "log": rows, "not_reached": left}
    }


def own_tactic(call: Emitted, alone: Alone) -> Tactic:
    """What a call has without measurements, with microseconds: measured alone, or estimated."""
    choice, key = call.choice, key_of(call.site)
    us = alone.get(key, {}).get(label(choice.kernel, choice.config)) or choice.cost_us
    return Tactic(key, choice.kernel.name, choice.config, max(us, US_LEAST))


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
