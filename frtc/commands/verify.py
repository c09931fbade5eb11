"""`frtc verify PLAN [CHECKPOINT]`: the self-test that a Plan carries, or the Plan against its checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from frtc import observation, selftest
from frtc.bisect import Departure, Emulated, Opinion, first_departure
from frtc.commands.run import frames_named
from frtc.console import Progress, Result, table
from frtc.errors import CheckFailed, UsageError
from frtc.options import add_adapter_option, count, given, pathname
from frtc.policy import Policy, ordinal_of
from frtc.proven import forget, remember
from frtc.verified import Dimension, Verified

SHOWN = 12  # rows of a table; --json has them all
ALWAYS = ("device", "scales")  # options that every comparison reads, or refuses by itself
OBSERVED = ("image", "state", "prompt", "seed", "data")  # options that say what to run on


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=pathname)
    parser.add_argument("checkpoint", type=pathname, nargs="?", help="compare with this checkpoint, in fp32")
    parser.add_argument(
        "--self-test", action="store_true", help="the vectors in the Plan: the default without CHECKPOINT"
    )
    add_adapter_option(parser)
    parser.add_argument("--device", default="cuda", help="cuda (default), cuda:N, or cpu: the emulator")
    parser.add_argument("--bisect", action="store_true", help="name the first call that departs, instead of the check")
    parser.add_argument("--scales", type=pathname, metavar="FILE", help="with --bisect and CHECKPOINT: activation "
                        "scales of `frtc calibrate`; default: those that the Plan's evidence names")  # fmt: skip
    parser.add_argument("--record", action=argparse.BooleanOptionalAction, default=True,
                        help="keep what passed against CHECKPOINT in the Plan's evidence (default)")  # fmt: skip
    given = parser.add_argument_group(
        "observation", "for CHECKPOINT and --bisect; what is not given is made from the seed"
    )
    given.add_argument("--image", action="append", default=[], metavar="ROLE=FILE")
    given.add_argument("--state", type=pathname, metavar="FILE")
    given.add_argument("--prompt", metavar="TEXT")
    given.add_argument("--seed", type=int, default=0)
    given.add_argument("--data", type=pathname, metavar="DATA",
                       help="instead: recorded ones, a LeRobot dataset or .npz, as of `frtc calibrate`")  # fmt: skip
    given.add_argument("--samples", type=count, default=1, metavar="N",
                       help="against CHECKPOINT: N observations, what is not given from --seed and the seeds after it, "
                       "each with noise of its own (default 1)")  # fmt: skip


def run(args: argparse.Namespace) -> Result:
    ordinal, progress = ordinal_of(args.device), Progress()
    _require_read(args)
    if args.scales and not (args.bisect and args.checkpoint):
        what = "--scales are for --bisect against a checkpoint"
        raise UsageError("verify.scales", what, hint="every other comparison needs none")
    if args.bisect and args.checkpoint is None and ordinal is None:
        what = "--bisect on the CPU compares the emulator with a checkpoint, and none is given"
        raise UsageError("verify.bisect", what, hint="pass the checkpoint, or run on a GPU")
    try:
        with Policy.load(args.plan, args.device, untested=True) as policy:
            if args.bisect:
                return _bisect(args, policy, ordinal, progress)
            if args.checkpoint is None or args.self_test:
                return _self_test(policy, progress)
            return _checkpoint(args, policy, progress)
    finally:
        progress.close()


def _require_read(args: argparse.Namespace) -> None:
    """An option that the comparison does not read would be ignored; of two comparisons one would not be made."""
    other = "--bisect" if args.bisect else "CHECKPOINT" if args.checkpoint else ""
    if args.self_test and other:
        what = f"--self-test compares with the vectors in the Plan, and {other} asks for another comparison"
        raise UsageError("verify.options", what, hint=f"leave out --self-test, or {other}")
    if args.bisect:
        name, reads = "--bisect", ("bisect", *OBSERVED, *(("adapter",) if args.checkpoint else ()))
    elif args.checkpoint:
        name, reads = "the comparison with CHECKPOINT", (*OBSERVED, "adapter", "samples", "record")
    else:
        name, reads = "the self-test", ("self_test",)
    if unread := [flag for option, flag in given(args, options).items() if option not in (*ALWAYS, *reads)]:
        hint = f"leave out {', '.join(unread)}" + ("" if args.checkpoint else ", or compare with a CHECKPOINT")
        raise UsageError("verify.options", f"{name} does not read {', '.join(unread)}", hint=hint)


def _self_test(policy: Policy, progress: Progress) -> Result:
    """The self-test; what passed on a GPU is noted, and a Plan of kernels that nobody had run may act there."""
    outcome = selftest.check(policy, progress)
    exact = sum(v.exact for v in outcome.values)
    worst = max(outcome.values, key=lambda v: v.error)
    lines = [
        f"self-test: {len(outcome.values)} values, {exact} equal to the bit, {len(outcome.failed)} outside their bars"
    ]
    if not worst.exact:
        lines.append(f"largest relative error {worst.error:.2e}: {worst.where}")
    noted, said = _note(policy, outcome)
    return Result("\n".join([*lines, *said]), outcome.data() | noted, outcome.failure())


def _note(policy: Policy, outcome: selftest.Outcome) -> tuple[dict[str, str | None], list[str]]:
    """(for --json, for people): where it was noted that this Plan passed on this GPU. Nothing on the CPU."""
    driver = getattr(policy.executor, "driver", None)
    if driver is None:
        return {}, []
    if outcome.failed:
        forget(policy.plan, driver)
        return {"noted": None}, []
    worst = max(v.error for v in outcome.values)
    path = remember(policy.plan, driver, {"bar": outcome.bar, "worst": worst, "values": len(outcome.values)})
    if path is None:
        return {"noted": None}, ["this could not be noted: name a folder that can be written to in FRTC_CACHE"]
    return {"noted": str(path)}, [f"noted in {path}"]


def _checkpoint(args: argparse.Namespace, policy: Policy, progress: Progress) -> Result:
    from frtc.record import record
    from frtc.verify import reference_of, verify

    reference = reference_of(policy.plan, args.checkpoint, progress, args.adapter)
    found = verify(policy, reference, _observed(args, policy, args.samples), progress)
    text, data = _found(args.checkpoint, found), found.data()
    if args.record:
        why = record(policy, reference.opened, found)
        data["recorded"] = {"done": not why and not found.failure(), "why_not": why or None}
        if why or not found.failure():
            text += f"\nnot recorded in the Plan: {why}" if why else "\nrecorded in the Plan's evidence"
    return Result(text, data, found.failure())


def _observed(args: argparse.Namespace, policy: Policy, count: int = 1) -> list[Mapping[str, Any]]:
    """Observations: spread over recorded ones, or of files and seeds."""
    if args.data is None:
        images = frames_named(args.image)
        seeds = range(args.seed, args.seed + count)
        return [observation.from_files(policy.steps, images, args.state, args.prompt, seed) for seed in seeds]
    if args.image or args.state or args.prompt:
        what = "--data holds whole observations; --image, --state and --prompt would change them"
        raise UsageError("verify.data", what, hint="give one or the other")
    from frtc.dataset import Wanted, open_data

    return list(open_data(args.data, Wanted.of(policy.spec)).samples(count, args.seed))


def _found(checkpoint: Path, found: Verified) -> str:
    ranked = sorted(found.differences, key=lambda d: -d.error)
    samples = f"{len(found.samples)} observation{'s' * (len(found.samples) > 1)}"
    against = f"{len(found.differences)} results on {samples} against {checkpoint} in fp32"
    lines = [
        f"{against}, {len(found.failed)} outside the bar",
        table([(d.where, f"{d.error:.2e}", f"allowed {d.bar:.1e}") for d in ranked[:SHOWN]]),
        f"weights that are not the checkpoint's: {len(found.weights) or 'none'}",
        f"actions without the noise: relative error {found.whole:.2e}, allowed {found.bar_whole:.1e}; "
        f"cosine of the actions {found.cosine:.6f}",
        "error of each action dimension in robot units, over observations and rows of the chunk",
        table([("", "worst", "mean", "worst of one step"), *map(_dimension, found.dimensions)]),
    ]
    if steps := found.steps:
        rows = [(s.where, f"{s.error:.2e}", f"{max(s.units, default=0.0):.4g}") for s in steps]
        lines += ["denoise steps", table([("", "velocity, relative", "largest in robot units"), *rows])]
    return "\n".join(lines)


def _dimension(d: Dimension) -> tuple[str, ...]:
    return d.name, f"{d.worst:.4g}", f"{d.mean:.4g}", f"{d.worst_step:.4g}"


def _bisect(args: argparse.Namespace, policy: Policy, ordinal: int | None, progress: Progress) -> Result:
    prepared = policy.steps.prepare(_observed(args, policy)[0], draw=0)
    inputs = {name: array.copy() for name, array in prepared.inputs.items()}
    opinion: Opinion
    if args.checkpoint is None:
        opinion, second = Emulated(policy.plan, inputs), "the emulator"
    else:
        from frtc.bisect_checkpoint import Interpreted
        from frtc.scales_file import read_scales
        from frtc.verify import reference_of

        scales = read_scales(args.scales) if args.scales else None
        reference = reference_of(policy.plan, args.checkpoint, progress, args.adapter)
        opinion = Interpreted(policy.plan, reference, inputs, progress, scales)
        second = f"the interpreter on {args.checkpoint}"
    found = first_departure(policy.plan, ordinal, inputs, opinion, progress)
    return _bisected(found, second)


def _bisected(found: Departure | None, second: str) -> Result:
    if found is None:
        return Result(f"no call departs from {second}", {"departs": None})
    failure = CheckFailed(
        "verify.departs", f"{found.stage}/{found.index} departs from {second}", [("call", str(found))]
    )
    data: dict[str, Any] = {"departs": asdict(found)}
    return Result(f"first to depart from {second}: {found}", data, failure)
