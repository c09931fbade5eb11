"""Calibration: recorded observations through the reference model, and how large the values at each GEMM site are.

    scales = calibrate(checkpoint, data)            # frtc.scales.Scales; frtc.scales_file.write_scales keeps them

The model is the checkpoint's in bf16 after the passes that no GPU has been chosen for, run in torch as typed, on a GPU
if there is one. Rows that nothing reads (the padding behind a prompt) are not counted.

Imports torch: only the compile side loads this file.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frtc.compiler import (
    CompileOptions,
    Opened,
    Progress,
    import_module,
    open_model,
    require_python,
    silent,
    sizes_of,
)
from frtc.dataset import Wanted, open_data
from frtc.dataset_trust import require_trust
from frtc.errors import FrtcError, UsageError
from frtc.histogram import LARGEST, Histogram
from frtc.lowering.ir import Node, fresh_nodes
from frtc.lowering.ops import OPS
from frtc.norm_noise import before_norm, noise_of
from frtc.passes.limit_rows import limit_rows
from frtc.passes.norm_readers import unnormed_of
from frtc.passes.pipeline import Options, run_passes
from frtc.passes.sites import UNNORMED, GemmSite, sites_of, weights_of
from frtc.passes.standard import FRONT
from frtc.runtime.policy_steps import PolicySteps
from frtc.scales import HEADROOM, METHODS, UNNORMED_HEADROOM, Counted, Scales, Site
from frtc.scales_key import key_of
from frtc.site_counts import SiteCounts
from frtc.torch_run import TorchRun, device_named
from frtc.torch_upload import uploading

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user may say of a calibration.

    samples    observations, spread over the data
    seed       of their choice and of the noise
    method     "absmax", "percentile" or "mse"; headroom: factor of absmax
    cameras    (role, key in the data) where the names do not decide
    synthetic  accept observations that are constant or random
    device     "auto", "cpu" or "cuda"
    """

    samples: int = 8
    seed: int = 0
    method: str = "absmax"
    headroom: float = HEADROOM
    cameras: tuple[tuple[str, str], ...] = ()
    synthetic: bool = False
    device: str = "auto"


@dataclass(frozen=True, slots=True)
class Calibration:
    """device: what it ran on; seconds: of its parts, in order."""

    scales: Scales
    device: str
    seconds: Mapping[str, float] = field(default_factory=dict)


def calibrate(
    checkpoint: str | Path,
    data: str | Path,
    options: CompileOptions | None = None,
    wishes: Wishes | None = None,
    progress: Progress = silent,
) -> Scales:
    """The activation scales of a checkpoint. options: those of a later compilation; which GPU does not matter."""
    return calibration(checkpoint, data, options, wishes, progress).scales


@fresh_nodes()
def calibration(
    checkpoint: str | Path,
    data: str | Path,
    options: CompileOptions | None = None,
    wishes: Wishes | None = None,
    progress: Progress = silent,
) -> Calibration:
    """As `calibrate`, with what it ran on and how long its parts took."""
    require_python()
    return calibration_of(open_model(Path(checkpoint), options or CompileOptions()), Path(data), wishes, progress)


def calibration_of(
    opened: Opened, data: Path, wishes: Wishes | None = None, progress: Progress = silent
) -> Calibration:
    """Of an opened checkpoint."""
    wishes, seconds = wishes or Wishes(), _Seconds()
    _require(wishes)
    with uploading(opened, device_named(wishes.device)) as uploads:
        module = import_module(opened, progress=progress)
        policy = opened.policy(sizes_of(module))
        wanted = Wanted.of(policy)
        found = open_data(data, wanted, wishes.cameras)
        seconds.lap("trace")
        progress("read observations", 0.0)
        observations = list(found.samples(wishes.samples, wishes.seed))
        why = tuple(map(str, require_trust(observations, wanted, wishes.synthetic)))
        seconds.lap("data")
        front, _ = run_passes(module, FRONT, Options(check=0))
        key = key_of(opened, front, policy)
        seconds.lap("key")
        running = TorchRun(limit_rows(front), opened.read, wishes.device, uploads)
        running.constants.evaluate(progress)
        seconds.lap("weights")
    steps = PolicySteps(policy, opened.files.tokenizer, wishes.seed)
    inputs = (steps.prepare(observation, draw=i).inputs for i, observation in enumerate(observations))
    counted = counted_of(running, inputs, len(observations), progress)
    seconds.lap("samples")
    _require_finite(counted.histograms)
    about = {"path": data.name, "kind": found.kind, "frames": found.frames, "seed": wishes.seed}
    sites = Site.all_of(sites_of(front))
    chosen = (len(observations), about, why, wishes.method, wishes.headroom)
    scales = Scales.made(key, sites, counted, *chosen)
    seconds.lap("scales")
    return Calibration(scales, str(running.device), seconds.found)


def _require(wishes: Wishes) -> None:
    if wishes.method not in METHODS:
        rows = [("known", ", ".join(METHODS))]
        raise UsageError("option.method", f"there is no method {wishes.method}", rows)


def counted_of(
    running: TorchRun, inputs: Iterable[Mapping[str, Any]], samples: int, progress: Progress = silent
) -> Counted:
    """Of each site, one sample of device inputs after the other."""
    taps = _Taps(running, samples, progress)
    for number, given in enumerate(inputs):
        taps.sample = number
        known = {name: value for name, value in given.items() if name in running.module.inputs}
        running(known, taps.watch, taps)
    rows = taps.counts.histograms()
    histograms = {name: tuple(rows[at : at + count]) for name, (at, count) in taps.places.items()}
    return Counted(histograms, taps.noises())


def _require_finite(counted: Mapping[str, tuple[Histogram, ...]]) -> None:
    bad = {name: sum(h.nonfinite for h in rows) for name, rows in counted.items() if any(h.nonfinite for h in rows)}
    if bad:
        rows = [(name, f"{count} values are NaN or infinite") for name, count in list(bad.items())[:5]]
        hint = "`frtc run` on the same observations shows whether the checkpoint's actions are finite"
        raise FrtcError("calibrate.nonfinite", f"{len(bad)} sites do not see finite values", rows, hint)


class _Taps:
    """What a run is asked for, and where it is counted.

    watch    nodes: what sites read, what that is the norm of, how many of its rows are real, and the sites, when all
             of it is known
    places   name of values (Site) -> (their first row, how many); sites that read one value share rows
    noise    f64 [rows, 2], of products behind a norm: frtc/norm_noise.py
    """

    def __init__(self, running: TorchRun, samples: int, progress: Progress) -> None:
        self.samples, self.sample, self.done, self.progress = samples, 0, 0, progress
        self.places: dict[str, tuple[int, int]] = {}
        self.at: dict[Node, tuple[int, GemmSite]] = {}  # the first site that reads a value
        rows, known = 0, dict[tuple[str, Node, Node | None], int]()
        for site in sites_of(running.module):
            what, count = (site.program, site.x, rows_of(site.node)), site.rounds or 1
            endings = ("", UNNORMED) if unnormed_of(site.x) else ("",)
            if what not in known:
                known[what], self.at[site.node] = rows, (rows, site)
                rows += count * len(endings)
            for i, ending in enumerate(endings):
                self.places[site.name + ending] = (known[what] + i * count, count)
        self.total = samples * sum(site.rounds or 1 for _, site in self.at.values())
        self.counts, self.constants = SiteCounts(rows, running.device), running.constants
        self.noise = torch.zeros(rows, 2, dtype=torch.float64, device=running.device)
        self.readers = Counter(n for _, site in self.at.values() for n in _operands(site))
        self.watch = frozenset((*self.at, *self.readers))
        self.held: dict[Node, tuple[Any, int]] = {}  # value, sites that have not seen it

    def __call__(self, program: str, round: int, node: Node, value: Any) -> None:
        if node in self.at:
            first, site = self.at[node]
            row, count = first + (round if site.rounds else 0), site.rounds or 1
            taken = {n: self._take(n) for n in _operands(site)}
            rows, before, seen = rows_of(node), unnormed_of(site.x), [taken[site.x]]
            if before is not None:
                seen += [taken[before.s], before_norm(before, taken)]
            if rows is not None:
                seen = [x[..., : max(0, int(taken[rows])), :] for x in seen]
            self.counts.add(row, seen[0])
            if before is not None:
                self.counts.add(row + count, seen[2])
                behind, here = self.counts.absmax[row], self.counts.absmax[row + count]
                scales = torch.stack([behind * HEADROOM, here * UNNORMED_HEADROOM]) / LARGEST
                weights = [self.constants[w] for w in weights_of(node)]
                self.noise[row] += noise_of(site.x, seen, taken, weights, scales)
            self.done += 1
            self.progress(f"sample {self.sample + 1} of {self.samples}", self.done / self.total)
        if node in self.readers:
            self.held[node] = value, self.readers[node]

    def noises(self) -> dict[str, Array]:
        """Of each site behind a norm, f64 [rounds, 2]."""
        found = self.noise.cpu().numpy()
        names = [name for name in self.places if name + UNNORMED in self.places]
        return {name: found[at : at + count] for name in names for at, count in (self.places[name],)}

    def _take(self, node: Node) -> Tensor:
        value, left = self.held.pop(node)
        if left > 1:
            self.held[node] = value, left - 1
        found: Tensor = value
        return found


def _operands(site: GemmSite) -> list[Node]:
    """Nodes whose values are looked at when the site runs."""
    before = unnormed_of(site.x)
    vectors = site.x.args[1:2] if before else ()
    found = [site.x, rows_of(site.node), before.s if before else None, *vectors]
    return [n for n in found if n is not None]


def rows_of(node: Node) -> Node | None:
    """The operand that says how many rows of a product anything reads."""
    index = OPS[node.op].operands.index("rows")
    return node.args[index] if index < len(node.args) else None


class _Seconds:
    """Since the last lap, by name."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.found[name], self.last = now - self.last, now
