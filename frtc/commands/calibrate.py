"""`frtc calibrate CHECKPOINT --data DATA -o F.scales`: activation scales from recorded observations."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from frtc.calibrate import Calibration, calibration
from frtc.compiler import CompileOptions, require_python
from frtc.console import Progress, Result, table
from frtc.data_options import add_data_options, require_data, wishes
from frtc.errors import UsageError
from frtc.options import add_policy_options, choices, pathname, policy_options
from frtc.passes.sites import UNNORMED
from frtc.policy_options import PolicyOptions
from frtc.recalibrate import replace_scales
from frtc.scales import Scales
from frtc.scales_file import read_scales, require_place, write_scales
from frtc.update import Chosen


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=pathname, help="folder or safetensors file")
    parser.add_argument("-o", "--output", type=pathname, metavar="FILE", help="default: CHECKPOINT.scales, here")
    parser.add_argument("--into", type=pathname, metavar="PLAN", help="replace the scales in a Plan of the checkpoint; "
                        "its options count")  # fmt: skip
    parser.add_argument("--scales", type=pathname, metavar="FILE", help="with --into: these, and no data")
    parser.add_argument("--self-test", action="store_true", help="with --into: make the vectors of a self-test, too")
    add_data_options(parser)
    add_policy_options(parser)


def run(args: argparse.Namespace) -> Result:
    require_python()
    if (args.data is None) == (args.scales is None) or (args.scales is not None and args.into is None):
        hint = "--data DATA; or, with --into PLAN, --scales FILE"
        raise UsageError("calibrate.source", "say where the scales come from", hint=hint)
    require_data(args)
    progress = Progress()
    try:
        return _into(args, progress) if args.into else _file(args, progress)
    finally:
        progress.close()


def _file(args: argparse.Namespace, progress: Progress) -> Result:
    if args.self_test:
        raise UsageError(
            "calibrate.options", "a file of scales holds no self-test", hint="--self-test goes with --into"
        )
    out = args.output or Path(f"{args.checkpoint.resolve().name}.scales")
    require_place(out)
    chosen = CompileOptions(policy_options(args), **choices(args))
    found = calibration(args.checkpoint, args.data, chosen, wishes(args), progress)
    write_scales(out, found.scales)
    return Result(_text(out, found), _data(out, found))


def _into(args: argparse.Namespace, progress: Progress) -> Result:
    """The Plan's own options count; what else was said is refused, not ignored."""
    said, sizes = policy_options(args), choices(args)
    if replace(said, tokenizer=None, asset=None) != PolicyOptions() or any(
        value for name, value in sizes.items() if name != "adapter"
    ):
        hint = "only --adapter, --tokenizer and --asset name files of the checkpoint"
        raise UsageError("calibrate.options", "with --into the options are those of the Plan", hint=hint)
    if args.output is not None:
        raise UsageError("calibrate.options", "--into writes the Plan, and no file of scales", hint="leave -o out")
    scales = read_scales(args.scales) if args.scales else None
    chosen = Chosen(args.adapter, said.tokenizer, said.asset, args.self_test)
    found = replace_scales(args.into, args.checkpoint, args.data, scales, chosen, wishes(args), progress)
    return Result(str(found), found.to_json())


def _data(out: Path, found: Calibration) -> dict[str, Any]:
    scales = found.scales
    sites = {
        name: {
            "program": site.program,
            "rounds": site.rounds,
            "scale": scales.of(name).tolist(),
            "absmax": [h.absmax for h in scales.histograms[name]],
            "sqnr_db": _finite(scales.sqnr(name)),
        }
        for name, site in scales.sites.items()
        if site.product
    }
    about = {"path": str(out), "device": found.device, "seconds": dict(found.seconds)}
    return about | scales.about() | {"sites": sites, "fallen": scales.fallen()}


def _finite(value: float) -> float | None:
    """JSON has no infinities."""
    return value if np.isfinite(value) else None


def _text(out: Path, found: Calibration) -> str:
    scales, data = found.scales, found.scales.data
    how = f"{scales.method}, headroom {scales.headroom:g}" if scales.method == "absmax" else scales.method
    took = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in found.seconds.items())
    lines = [
        f"{out}: scales of {sum(site.product for site in scales.sites.values())} sites, {how}",
        f"  {scales.samples} of {data['frames']} observations of {data['path']} ({data['kind']}), on {found.device}",
        f"  key {scales.key.digest}",
        table([("program", "sites", "rounds", "least SQNR", "of"), *_programs(scales)]),
    ]
    fallen = scales.fallen()
    if kept := [(site, why) for site, why in fallen.items() if not site.endswith(UNNORMED)]:
        lines += ["sites that stay in 16 bits", table(kept)]
    if kept := [(site.removesuffix(UNNORMED), why) for site, why in fallen.items() if site.endswith(UNNORMED)]:
        lines += ["sites behind a norm of its own", table(kept)]
    if scales.synthetic:
        lines += ["not a robot's observations, accepted by --allow-synthetic", table([(w,) for w in scales.synthetic])]
    return "\n".join([*lines, f"took {sum(found.seconds.values()):.1f} s: {took}"])


def _programs(scales: Scales) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for program in dict.fromkeys(site.program for site in scales.sites.values()):
        sites = {name: site for name, site in scales.sites.items() if site.program == program and site.product}
        worst = min(sites, key=scales.sqnr)
        rounds = next(iter(sites.values())).rounds
        rows.append((program, str(len(sites)), str(rounds or 1), f"{scales.sqnr(worst):.1f} dB", worst))
    return rows
