"""`frtc update PLAN CHECKPOINT`: a new fine-tune in an existing Plan, in seconds."""

from __future__ import annotations

import argparse

from frtc.compiler import require_python
from frtc.console import Progress, Result
from frtc.errors import UsageError
from frtc.options import add_adapter_option, pathname
from frtc.scales_file import read_scales
from frtc.update import Chosen, update


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=pathname)
    parser.add_argument(
        "checkpoint", type=pathname, help="of the same model and configuration: folder or safetensors file"
    )
    where = parser.add_argument_group("result", "one of these: what is proved of a Plan is lost with its weights")
    where.add_argument(
        "-o", "--output", type=pathname, metavar="PLAN", help="a new file; the old Plan keeps its self-test"
    )
    where.add_argument("--in-place", action="store_true", help="replace PLAN, when the new one is complete")
    said = parser.add_argument_group("checkpoint", "all other options are those that the Plan was compiled with")
    add_adapter_option(said)
    said.add_argument("--tokenizer", type=pathname, metavar="FILE", help="another tokenizer.json than the Plan's")
    where.add_argument("--self-test", action="store_true", help="make the vectors of a self-test, too, as compile does")
    said.add_argument("--asset", metavar="NAME", help="which of several statistics")
    said.add_argument("--scales", type=pathname, metavar="FILE", help="activation scales of the checkpoint, of `frtc "
                      "calibrate`: a Plan with static ones needs them")  # fmt: skip


def run(args: argparse.Namespace) -> Result:
    require_python()
    if (args.output is not None) == args.in_place:
        what = "say where the result goes: -o PLAN or --in-place, one of them"
        hint = "--in-place replaces the Plan and, with the old weights, its self-test"
        raise UsageError("update.output", what, hint=hint)
    if args.output is not None and args.output.exists() and args.plan.exists() and args.output.samefile(args.plan):
        raise UsageError("update.output", f"-o {args.output} is the Plan itself", hint="--in-place replaces it")
    progress = Progress()
    try:
        scales = read_scales(args.scales) if args.scales else None
        chosen = Chosen(args.adapter, args.tokenizer, args.asset, args.self_test, scales)
        found = update(args.plan, args.checkpoint, args.output or args.plan, chosen, progress)
    finally:
        progress.close()
    return Result(str(found), found.to_json())
