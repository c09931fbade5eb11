"""Measured choices of kernels of a policy at full size, for kernels/tactics/hopper.json; no Plan is written.

    PYTHONPATH=. python3 -m bench.tactics [--policy pi05] [--precision bf16 fp8] [--horizon 50] [--seconds 40]

For each precision what `frtc compile --tune --tactics $OUT/hopper.json` does before a Plan's weights, so both end up in
one file. Seconds on an H200 with 16 cores, by those of bench/gpu_bench.py: checkpoint 22, calibration 23, then for each
precision 30 and what `--seconds` allows.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from bench.calibrated import calibrated
from bench.full_model import ARCH, PRECISIONS, STATIC, Shape, checkpoint, options, scales_of, scales_path
from frtc.compiler import families_for, open_model, optimise, silent, target_named
from frtc.lowering.ir import fresh_nodes
from frtc.passes.pipeline import Options
from frtc.tuning.options import Tuning, TuningReport
from frtc.tuning.tuned import prepare, tuned_build


@fresh_nodes()
def tuned(shape: Shape, file: Path, seconds: float) -> TuningReport:
    """Measures the sites of a shape and adds them to the file. Static scales have to be there."""
    target, chosen = target_named(ARCH), options(shape)
    prepared = prepare(Tuning(True, file, seconds), target)
    opened = open_model(checkpoint(shape.policy, shape.size), chosen)
    made = optimise(opened, target, chosen, Options.from_environment(), scales=scales_of(shape))
    _, report = tuned_build(prepared, made.module, families_for(target, chosen.family), silent)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--policy", default="pi05")
    parser.add_argument("--precision", nargs="+", default=["bf16", STATIC], choices=PRECISIONS)
    parser.add_argument("--horizon", type=int, default=50)
    parser.add_argument(
        "--seconds", type=float, default=40.0, help="for each precision: begin no measurement after so long"
    )
    arguments = parser.parse_args()
    folder = Path(os.environ.get("OUT") or "bench/results")
    folder.mkdir(parents=True, exist_ok=True)
    for precision in arguments.precision:
        shape = Shape(arguments.policy, precision=precision, horizon=arguments.horizon)
        if precision == STATIC and not scales_path(shape).exists():
            calibrated(shape, "cuda")
        print(f"{shape.label}\n{tuned(shape, folder / f'{ARCH}.json', arguments.seconds)}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
