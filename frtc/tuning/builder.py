"""The process that builds: a module with these tactics becomes the file of a Trial.

    python -m frtc.tuning.builder FOLDER JOB

JOB is a file with a pickled Job. As frtc.tuning.child it says who it is and answers line by line: to a file of tactics
with the name of the file that it wrote in FOLDER, or why there is none.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from frtc.codegen.build import Built, build
from frtc.codegen.nvrtc import CompileFailed
from frtc.errors import FrtcError
from frtc.kernels.catalog import CATALOG, Catalog, Choice, label
from frtc.kernels.spec import Site
from frtc.kernels.tactic import Tactic, Tactics, key_of
from frtc.kernels.targets import Target
from frtc.lowering.text import parse_module
from frtc.tuning.process import own_output
from frtc.tuning.trial import Trial, known_weights, sites_at

Array = np.ndarray[Any, Any]
REASON_MOST = 160  # characters


@dataclass(frozen=True, slots=True)
class Job:
    """What all trials have in common.

    module   after all passes, as text
    given    tactics that decide after those of the trial
    inputs   of an inference, by name
    """

    module: str
    target: Target
    families: tuple[str, ...]
    given: Tactics
    inputs: Mapping[str, Array]


class Remembering(Catalog):
    """Chooses once for each site and tactic: `known` goes from build to build."""

    def __init__(self, tactics: tuple[Tactics, ...], known: dict[tuple[str, str], Choice]) -> None:
        super().__init__(CATALOG.kernels, tactics)
        object.__setattr__(self, "known", known)

    def select(self, site: Site, target: Target, families: Sequence[str] = ("baseline",)) -> Choice:
        known: dict[tuple[str, str], Choice] = self.known  # type: ignore[attr-defined]
        key = key_of(site)
        at = (key, str(self.tactics[0].by_site.get(key)))
        if at not in known:
            known[at] = super().select(site, target, families)
        return known[at]


class Builder:
    """Of one job, with its module."""

    def __init__(self, job: Job) -> None:
        self.job, self.module = job, parse_module(job.module)
        self.known: dict[tuple[str, str], Choice] = {}

    def trial(self, tactics: Sequence[Tactic]) -> Trial:
        job = self.job
        chosen = Tactics.of(job.target.name, "trial", "", tactics)
        built = build(self.module, job.target, job.families, Remembering((chosen, job.given), self.known))
        return trial_of(built, job.inputs)


def trial_of(built: Built, inputs: Mapping[str, Array]) -> Trial:
    """ValueError: there are weights that random bytes are no values of."""
    keys = {name: [key_of(c.site) for c in calls] for name, calls in built.emitted.items()}
    kernels = {
        key_of(c.site): label(c.choice.kernel, c.choice.config) for calls in built.emitted.values() for c in calls
    }
    probes = sites_at(built.program, keys)
    return Trial(built.program, dict(built.cubins), kernels, known_weights(built), inputs, probes)


def main(folder: str, job: str) -> int:
    say = own_output()
    builder: Builder = Builder(pickle.loads(Path(job).read_bytes()))
    say({"ready": True})
    for line, number in zip(sys.stdin, count(), strict=False):
        try:
            trial = builder.trial(pickle.loads(Path(line.strip()).read_bytes()))
        except CompileFailed as fault:
            say({"error": f"it does not compile: {str(fault).splitlines()[0][:REASON_MOST]}"})
            continue
        except (FrtcError, ValueError) as fault:
            say({"error": str(getattr(fault, "what", fault))[:REASON_MOST]})
            continue
        path = Path(folder) / f"{os.getpid()}-{number}"
        path.write_bytes(pickle.dumps(trial))
        say({"made": str(path)})
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
