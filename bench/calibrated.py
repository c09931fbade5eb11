"""Activation scales of a bench's checkpoint: eight synthetic observations through the calibration, timed.

Everything that `frtc calibrate` does, but for what it reads of recorded data: the device inputs are drawn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.full_model import STATIC, Compiling, Shape, checkpoint, observation, options, scales_path
from frtc.calibrate import counted_of
from frtc.compiler import import_module, open_model, sizes_of
from frtc.lowering.ir import fresh_nodes
from frtc.passes.limit_rows import limit_rows
from frtc.passes.pipeline import Options, run_passes
from frtc.passes.sites import sites_of
from frtc.passes.standard import FRONT
from frtc.runtime.plan import Slot
from frtc.scales import Scales, Site
from frtc.scales_file import write_scales
from frtc.scales_key import key_of
from frtc.torch_run import TorchRun, device_named
from frtc.torch_upload import uploading

SAMPLES, SEED = 8, 100
SECONDS_BAR = 30.0  # on a GPU, for eight samples at full size, weights and hashes included


def compiling(shapes: Sequence[Shape], device: str) -> tuple[Compiling, dict[str, Any]]:
    """All shapes under compilation, those with static scales after a calibration each, while the others are compiled.

    The calibrations by the shape's label. What runs beside them makes them slower: no time to judge.
    """
    static = [shape for shape in shapes if shape.precision == STATIC]
    begun = Compiling(shape for shape in shapes if shape not in static)
    found = {shape.label: calibrated(shape, device) for shape in static}
    begun.start(static)
    return begun, found


@fresh_nodes()
def calibrated(shape: Shape, device: str) -> dict[str, Any]:
    """Writes the scales of a shape; what that took, by part, and the sites that hold their values worst."""
    folder, lap = checkpoint(shape.policy, shape.size), _laps()
    opened = open_model(folder, options(shape))
    with uploading(opened, device_named(device)) as uploads:
        module = import_module(opened)
        policy = opened.policy(sizes_of(module))
        front, _ = run_passes(module, FRONT, Options(check=0))
        lap("trace")
        slots = [Slot(name, type.dtype, type.shape) for name, type in module.inputs.items()]
        lengths = [shape.prompt * (i + 1) // SAMPLES or 1 for i in range(SAMPLES)]  # of a budget all eighths
        observed = [observation(slots, n, opened.config.vocab, SEED + i) for i, n in enumerate(lengths)]
        lap("observations")
        key = key_of(opened, front, policy)
        lap("hashes")
        running = TorchRun(limit_rows(front), opened.read, device, uploads)
        running.constants.evaluate()
        lap("weights")
    counted = counted_of(running, observed, SAMPLES)
    lap("samples")
    about = {"path": "bench.full_model.observation", "kind": "drawn", "frames": SAMPLES, "seed": SEED}
    scales = Scales.made(key, Site.all_of(sites_of(front)), counted, SAMPLES, about, ["drawn at random"])
    write_scales(scales_path(shape), scales)
    seconds = lap("scales")
    del running
    if device == "cuda":
        torch.cuda.empty_cache()
    whole = sum(seconds.values())
    return {
        "samples": SAMPLES,
        "device": device,
        "sites": len(scales.sites),
        "rows": sum(site.rows for site in scales.sites.values()),
        "worst_sqnr_db": dict(sorted(((site, scales.sqnr(site)) for site in scales.sites), key=lambda at: at[1])[:5]),
        "fallen": scales.fallen(),
        "seconds": seconds | {"all": whole},
        "passed": whole <= SECONDS_BAR,
    }


def _laps() -> Callable[[str], dict[str, float]]:
    """Seconds since the last call, under the name of each."""
    found: dict[str, float] = {}
    last = time.perf_counter()

    def lap(name: str) -> dict[str, float]:
        nonlocal last
        now = time.perf_counter()
        found[name], last = now - last, now
        return found

    return lap
