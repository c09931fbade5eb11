"""`frtc compile CHECKPOINT --arch GPU -o PLAN`."""

from __future__ import annotations

import argparse
from pathlib import Path

from frtc.calibrate import calibration
from frtc.compiler import (
    FAMILY_NAMES,
    CompileOptions,
    compile,
    open_model,
    optimise,
    require_python,
    resolved,
    target_named,
)
from frtc.console import Progress, Result
from frtc.data_options import add_data_options, require_data, wishes
from frtc.debug_options import add_debug_options, settings_of
from frtc.errors import UsageError
from frtc.options import add_policy_options, choices, pathname, policy_options
from frtc.precision import read_precision
from frtc.scales import Scales
from frtc.scales_file import read_scales
from frtc.tuning.options import SECONDS, Tuning

LONGEST_S = 86400.0  # of tuning


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=pathname, help="folder or safetensors file")
    parser.add_argument("--arch", required=True, metavar="GPU", help="target; `frtc models` lists them")
    parser.add_argument("-o", "--output", type=pathname, metavar="PLAN", help="default: CHECKPOINT-GPU.plan, here")
    parser.add_argument("--precision", metavar="KIND", help="bf16, fp8, w8a16, or FILE.toml that says it by stage and "
                        "site; default: fp8 where the GPU has instructions for it, else w8a16")  # fmt: skip
    parser.add_argument("--scales", type=pathname, metavar="FILE", help="activation scales of `frtc calibrate`, for "
                        "fp8; without them FP8 finds one for each row as it runs")  # fmt: skip
    parser.add_argument("--family", choices=FAMILY_NAMES, help="native: the GPU's own instructions, where kernels "
                        "for them exist (hopper's default)")  # fmt: skip
    parser.add_argument("--tune", action="store_true", help="measure kernels for every site, alone and in the whole "
                        "program, on the GPU that is here, which must be the target's; take the fastest")  # fmt: skip
    parser.add_argument("--tune-seconds", type=float, metavar="S",
                        help=f"with --tune: begin no measurement after so long; default {SECONDS:g}")  # fmt: skip
    parser.add_argument("--tactics", type=pathname, metavar="FILE", help="measured choices of kernels: with --tune "
                        "written there, without it used, and no GPU is needed")  # fmt: skip
    parser.add_argument("--no-self-test", action="store_true", help="leave the self-test's vectors out")
    add_data_options(parser)
    add_policy_options(parser)
    add_debug_options(parser)


def run(args: argparse.Namespace) -> Result:
    require_python()
    tuning = _tuning(args)
    asked = read_precision(args.precision)
    chosen = CompileOptions(
        policy_options(args), asked.kind, asked.stages, asked.keep, args.family, **choices(args),
        self_test=not args.no_self_test,
    )  # fmt: skip
    settings, target, progress = settings_of(args), target_named(args.arch), Progress()
    try:
        if settings.stop:  # the runner of passes prints the IR
            optimise(open_model(args.checkpoint, chosen), target, chosen, settings, progress)
            return Result(f"stopped after pass {settings.stop}: no Plan was written", {"stopped": settings.stop})
        out = args.output or Path(f"{args.checkpoint.resolve().name}-{target.name}.plan")
        scales = _scales(args, chosen, progress)
        report = compile(args.checkpoint, target.name, out, chosen, settings, progress, scales, tuning)
    finally:
        progress.close()
    return Result(str(report), report.to_json())


def _tuning(args: argparse.Namespace) -> Tuning:
    seconds = SECONDS if args.tune_seconds is None else args.tune_seconds
    if not 0 < seconds <= LONGEST_S:
        hint = "to measure nothing, leave --tune out"
        what = f"--tune-seconds {seconds:g}: more than 0, at most {LONGEST_S:g} seconds"
        raise UsageError("option.value", what, hint=hint)
    if args.tune_seconds is not None and not args.tune:
        what = "--tune-seconds limits measurements, and without --tune there are none"
        raise UsageError("usage.option", what, hint="add --tune, or leave --tune-seconds out")
    return Tuning(args.tune, args.tactics, seconds)


def _scales(args: argparse.Namespace, chosen: CompileOptions, progress: Progress) -> Scales | None:
    """From the file, or found on the way; what would not use them is refused before the model runs."""
    require_data(args)
    if args.scales is not None and args.data is not None:
        raise UsageError("calibrate.source", "--scales and --data: one of them", hint="--scales FILE, or --data DATA")
    if args.scales is not None:
        return read_scales(args.scales)
    if args.data is None:
        return None
    resolved(chosen, target_named(args.arch), scales=True)
    return calibration(args.checkpoint, args.data, chosen, wishes(args), progress).scales
