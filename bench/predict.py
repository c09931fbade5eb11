"""`frtc estimate` of a policy at full size, without a checkpoint: what the docs say of GPUs that nobody has run it on.

    PYTHONPATH=. python3 -m bench.predict [--policy pi0] [--arch thor,rtx5090] [--horizon 10] [--family native]

FP8 with static scales where the target has FP8 products at all, else weights in 8 bits.
"""

from __future__ import annotations

import argparse
import sys

from bench.full_model import STATIC, Shape
from bench.gpu_scale import Case, traced
from frtc.codegen.fusible import implements
from frtc.compiler import FAMILY_NAMES, families_for, target_named
from frtc.estimate import FITTED_PATH, Estimate, Fitted, calls_of_module, rounds_of_module
from frtc.lowering.ir import Module, fresh_nodes
from frtc.models import load_models
from frtc.passes.pipeline import Options, run_passes
from frtc.passes.precision import Precision
from frtc.passes.standard import pipeline
from frtc.precision import MMA


def predicted(module: Module, arch: str, family: str | None, kind: str) -> Estimate:
    target = target_named(arch)
    families = families_for(target, family)
    precision = Precision(kind if kind != STATIC or MMA in target.has else "w8a16", static=kind == STATIC)
    module = run_passes(module, pipeline(implements(target, families), precision), Options(check=0))[0]
    calls = calls_of_module(module, target, families)
    return Estimate.of(calls, target, precision.kind, rounds_of_module(module.schedule), Fitted.read(FITTED_PATH))


@fresh_nodes()
def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--policy", default="pi05", choices=list(load_models()))
    parser.add_argument("--size", default="full", choices=("full", "tiny"))
    parser.add_argument("--arch", default="thor,rtx5090,hopper", help="targets, comma separated")
    parser.add_argument("--family", choices=FAMILY_NAMES)
    parser.add_argument("--precision", default=STATIC, choices=("bf16", STATIC, "w8a16"))
    for name, default in (("views", 2), ("prompt", 48), ("horizon", 10), ("steps", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    case = Case(Shape(args.policy, args.views, args.prompt, args.horizon, args.size), args.steps)
    module, _ = traced(case)
    for arch in args.arch.split(","):
        print(predicted(module, arch, args.family, args.precision), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
