"""`frtc estimate PLAN|CHECKPOINT [--arch A[,B...]]`: roofline and expected time of each stage on a GPU. Needs none.

Of a checkpoint it makes what `frtc compile` makes with the same options, up to the choice of kernels. Of a Plan it
takes the calls: with their own kernels for the target of the Plan, with others for other targets, where there are any.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from frtc.codegen.fusible import implements
from frtc.compiler import FAMILY_NAMES, CompileOptions, families_for, import_module, open_model, target_named
from frtc.console import Progress, Result
from frtc.diff_sides import is_plan
from frtc.errors import FrtcError, UsageError
from frtc.estimate import (
    FITTED_PATH,
    Estimate,
    Fitted,
    calls_of_module,
    calls_of_plan,
    refusal,
    rounds_of_module,
    rounds_of_plan,
)
from frtc.kernels.targets import Target, load_targets
from frtc.lowering.ir import Module, fresh_nodes
from frtc.options import add_policy_options, choices, given, pathname, policy_options
from frtc.passes.pipeline import Options, run_passes
from frtc.passes.precision import Precision
from frtc.passes.standard import pipeline
from frtc.precision import Asked, default_kind, read_precision, require_known, require_possible, require_used
from frtc.runtime.plan_file import open_plan
from frtc.selftest import precision_of

Pricing = Callable[[Target], Estimate]
BECAUSE = "because"


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=pathname, metavar="PLAN|CHECKPOINT")
    parser.add_argument("--arch", metavar="GPU[,GPU...]", help="targets; default: all")
    parser.add_argument("--precision", metavar="KIND", help="bf16, fp8, w8a16 or FILE.toml; default: the GPU's")
    parser.add_argument("--static-scales", action="store_true",
                        help="as after a calibration; else FP8 finds a scale for each row as it runs")  # fmt: skip
    parser.add_argument("--family", choices=FAMILY_NAMES)
    add_policy_options(parser)


@fresh_nodes()
def run(args: argparse.Namespace) -> Result:
    named = None if args.arch is None else [target_named(name.strip()) for name in args.arch.split(",")]
    targets = list(dict.fromkeys(named or load_targets().values()))
    fit, progress = Fitted.read(FITTED_PATH), Progress()
    price = _of_plan(args, fit) if is_plan(args.source) else _of_checkpoint(args, targets, fit, progress)
    found, refused = list[Estimate](), dict[str, FrtcError]()
    for target in targets:
        try:
            found.append(price(target))
        except FrtcError as error:
            refused[target.name] = error
    progress.close()
    failure = next(iter(refused.values()), None) if named or not found else None
    if failure and not found:
        raise failure
    lines = [*map(str, found), *(_refused_text(*item) for item in refused.items())]
    why = [{"target": name, "why": _why(error), "hint": error.hint} for name, error in refused.items()]
    return Result("\n".join(lines), {"estimates": [e.to_json() for e in found], "refused": why}, failure)


def _why(error: FrtcError) -> str:
    because = [text for label, text in error.rows if label == BECAUSE]
    return ": ".join([refusal(error), *because])


def _refused_text(name: str, error: FrtcError) -> str:
    return f"{name}: no estimate. {_why(error)}" + (f"\n  hint  {error.hint}" if error.hint else "")


def _of_plan(args: argparse.Namespace, fit: Fitted) -> Pricing:
    _require_no_choices(args)
    program = open_plan(args.source, verify=False).program
    own = program.target

    def price(target: Target) -> Estimate:
        families = tuple(own.family.split("+")) if target.name == own.name else families_for(target, None)
        try:
            calls = calls_of_plan(program, target, families)
        except FrtcError as error:
            what = f"the calls of this Plan, made for {own.name}, do not run on {target.name}"
            hint = f"frtc estimate CHECKPOINT --arch {target.name}"
            raise UsageError("estimate.checkpoint", what, [(BECAUSE, refusal(error))], hint) from None
        return Estimate.of(calls, target, precision_of(program), rounds_of_plan(program), fit)

    return price


def _require_no_choices(args: argparse.Namespace) -> None:
    """A Plan has its sizes, precision and kernels: an option that says others would be ignored."""
    if flags := [flag for name, flag in given(args, options).items() if name != "arch"]:
        raise UsageError("estimate.option", f"{flags[0]} says nothing of a Plan", hint="give the checkpoint instead")


def _of_checkpoint(args: argparse.Namespace, targets: Sequence[Target], fit: Fitted, progress: Progress) -> Pricing:
    """Traced once, for all targets; not at all where none of them can be what the options say."""
    asked = read_precision(args.precision)

    def require(target: Target) -> None:
        require_possible(asked, target)
        if args.static_scales:
            require_used(asked, target, args.family)

    _require_one(targets, require)
    opened = open_model(args.source, CompileOptions(policy_options(args), **choices(args)))
    traced = import_module(opened, progress=progress)

    def price(target: Target) -> Estimate:
        require(target)
        families = families_for(target, args.family)
        kind = asked.kind or default_kind(target, families)
        precision = Precision(kind, dict(asked.stages), asked.keep, args.static_scales)
        module = optimised(traced, target, families, precision, asked)
        calls = calls_of_module(module, target, families)
        return Estimate.of(calls, target, precision.kind, rounds_of_module(module.schedule), fit)

    return price


def _require_one(targets: Sequence[Target], require: Callable[[Target], None]) -> None:
    """Raises what the first target says where all of them say something."""
    refused = []
    for target in targets:
        try:
            return require(target)
        except FrtcError as error:
            refused.append(error)
    raise refused[0]


def optimised(traced: Module, target: Target, families: tuple[str, ...], precision: Precision, asked: Asked) -> Module:
    def named(front: Module) -> Module:
        require_known(asked, front)
        return front

    passes = pipeline(implements(target, families), precision, front=named)
    return run_passes(traced, passes, Options(check=0))[0]
