"""`frtc run PLAN`: one observation through the policy, again and again, with the time of every part."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from frtc import observation
from frtc.console import Progress, Result, size
from frtc.device import about
from frtc.errors import CheckFailed, EnvironmentFault, FrtcError, UsageError
from frtc.options import count, number, pathname
from frtc.policy import Inference, Policy
from frtc.runtime.own_file import partial
from frtc.runtime.paths import require_file
from frtc.runtime.timing import Spread, Timing
from frtc.trust import trust_of

if TYPE_CHECKING:
    from frtc.profile import Report

HOST = ("total", "prepare", "run", "finish")
TIMED_WHERE = "time launches on the Plan's GPU; `frtc run PLAN --device cpu` without --profile and --report needs none"
MOST_US = 1e12  # of a baseline's p50
SLACK = 1.05  # a baseline holds if no p50 of today is more than 5 % above it


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=pathname)
    parser.add_argument("--device", default="cuda", help="cuda (default), cuda:N, or cpu: the emulator, slow and exact")
    parser.add_argument("--untested", action="store_true", help="run kernels that nobody has run on this GPU although "
                        "their self-test has not passed here")  # fmt: skip
    parser.add_argument("--check-finite", action=argparse.BooleanOptionalAction, default=True,
                        help="exit 3 and name the stage where an output is NaN or infinite (default)")  # fmt: skip
    given = parser.add_argument_group("observation", "what is not given is made from the seed")
    given.add_argument("--image", action="append", default=[], metavar="ROLE=FILE", help="a camera frame")
    given.add_argument("--state", type=pathname, metavar="FILE", help=".npy, robot units")
    given.add_argument("--prompt", metavar="TEXT")
    given.add_argument("--seed", type=int, default=0, help="of noise and of what is not given")
    timing = parser.add_argument_group("timing", "host to host: raw observation to robot actions, one in flight")
    timing.add_argument("--runs", type=count, metavar="N", help="default: 100 on a GPU, 1 on the CPU")
    timing.add_argument("--rate", type=number(0.001, 1_000_000), metavar="HZ",
                        help="start inferences at this rate, not back to back")  # fmt: skip
    timing.add_argument("--idle", type=number(0, 86_400), metavar="S",
                        help="also time the first inference after S idle seconds")  # fmt: skip
    timing.add_argument("--budget", type=number(0, 1_000_000_000), metavar="MS",
                        help="fail (exit 3) if p99 host to host is longer")  # fmt: skip
    timing.add_argument("--baseline", type=pathname, metavar="FILE",
                        help="JSON of an earlier `run --json`: exit 3 if the p50 of total is 5 %% slower")  # fmt: skip
    timing.add_argument("--profile", action="store_true",
                        help="also time every launch of the Plan, and set it beside the target's roofline")  # fmt: skip
    timing.add_argument(
        "--report", type=pathname, metavar="FILE", help="write the profile as one HTML page; has --profile"
    )
    parser.add_argument(
        "--actions", type=pathname, metavar="FILE", help="write the actions as .npy, under exactly this name"
    )


def run(args: argparse.Namespace) -> Result:
    baseline = _baseline(args.baseline) if args.baseline else None
    profiled, frames = _checked(args), frames_named(args.image)
    progress = Progress()
    with _loaded(args, profiled) as policy:
        seen = observation.from_files(policy.steps, frames, args.state, args.prompt, args.seed)
        policy.warm()
        first = policy.infer(seen, draw=0)
        runs = args.runs or (1 if args.device == "cpu" else 100)
        samples = [dict(s.latency_us) for s in _repeat(policy, seen, runs, args.rate, progress)]
        host = Timing.of(samples)
        parts = policy.executor.time(runs, warm_up=0 if args.device == "cpu" else 3)
        after_idle = _after_idle(policy, seen, args.idle)
        facts = about(policy)
        facts["assumed"] = [asdict(a) for a in policy.spec.assumed]
        facts["trust"] = trust_of(policy.plan)
        report = _profile(policy, progress) if profiled else None
    progress.close()
    if args.actions:
        _write(args.actions, lambda file: np.save(file, first.actions))
    if report and args.report:
        _write_page(args.report, policy, report, facts)
    failure = _judge(host.parts["total"], args.budget, baseline)
    data = _data(first, host, parts, facts) | ({"after_idle_us": after_idle} if after_idle else {})
    text = _text(args.plan, facts, first, host, parts, after_idle)
    if report:
        text, data = f"{text}\n{report}", data | {"profile": report.to_json()}
    return Result(text, data, failure)


def _checked(args: argparse.Namespace) -> bool:
    """Whether launches are to be timed. What cannot work is found out before anything runs."""
    profiled = args.profile or args.report is not None
    if profiled and args.device == "cpu":
        what = "--profile and --report time a GPU's launches, and the emulator has none"
        raise EnvironmentFault("env.no_gpu", what, hint=TIMED_WHERE)
    _require_places(args)
    return profiled


def _loaded(args: argparse.Namespace, profiled: bool) -> Policy:
    try:
        return Policy.load(args.plan, args.device, args.seed, untested=args.untested, check_finite=args.check_finite)
    except EnvironmentFault as fault:
        if profiled and fault.code == "env.no_gpu":  # the emulator, which its hint offers, has no launches to time
            raise EnvironmentFault(fault.code, fault.what, fault.rows, TIMED_WHERE) from None
        raise


def _profile(policy: Policy, progress: Progress) -> Report:
    """On the observation of the runs before. Loaded here: most runs have no use for it."""
    from frtc.profile import report_of
    from frtc.runtime.profile import profile
    from frtc.runtime.session import Session

    assert isinstance(policy.executor, Session)
    found = profile(policy.executor, lambda share: progress("profile", share))
    return report_of(policy.plan.program, found)


def _write_page(path: Path, policy: Policy, report: Report, facts: Mapping[str, Any]) -> None:
    from frtc.profile_page import html_of

    text = html_of(policy.plan.program, report, facts)
    _write(path, lambda file: file.write(text.encode()))


def _require_places(args: argparse.Namespace) -> None:
    """What is to be written can be, and replaces neither what is read nor each other."""
    read = [("the Plan", args.plan), ("--state", args.state), ("--baseline", args.baseline)]
    taken = [(name, path) for name, path in read if path] + [("--image", pair(text)[1]) for text in args.image]
    for option, path, example in (("--actions", args.actions, "actions.npy"), ("--report", args.report, "report.html")):
        if path:
            _require_place(path, option, example)
            for name, other in taken:
                if _same(path, other):
                    hint = f"another file: {option} {example}"
                    raise UsageError("output.exists", f"{option} {path} would replace {name}", hint=hint)
            taken.append((option, path))


def _same(one: Path, other: Path) -> bool:
    """The same file, by whichever name, or the same place of one that is not there yet."""
    with suppress(OSError):
        return os.path.samefile(one, other)
    return os.path.realpath(one) == os.path.realpath(other)


def _require_place(path: Path, option: str, example: str) -> None:
    if not os.path.isdir(path.parent):
        hint = f"create it, or choose another with {option}"
        raise UsageError("output.folder", f"there is no folder {path.parent}", hint=hint)
    if os.path.isdir(path):
        raise UsageError("output.folder", f"{path} is a folder", hint=f"name a file: {option} {path / example}")
    if os.path.exists(path) and not os.path.isfile(path):  # a device would be replaced by the rename
        raise UsageError("output.folder", f"{path} is neither new nor a regular file", hint="name a file")
    trial = partial(path)
    try:
        open(trial, "xb").close()
        trial.unlink()
        with suppress(FileNotFoundError):
            os.lstat(path)  # of a name that is too long
    except OSError as fault:
        raise _unwritten(path, fault) from None


def _unwritten(path: Path, fault: OSError) -> FrtcError:
    return FrtcError("output.write", f"cannot write {path}: {fault.strerror}", hint="write elsewhere")


def _write(path: Path, save: Callable[[BinaryIO], object]) -> None:
    """By atomic rename: an older file stays until all of the new one is there."""
    temporary = partial(path)
    try:
        with open(temporary, "xb") as file:
            save(file)
        os.replace(temporary, path)
    except OSError as fault:
        raise _unwritten(path, fault) from None
    finally:
        with suppress(OSError):  # it is there only if something failed, or the user stopped it
            temporary.unlink()


def _repeat(
    policy: Policy, seen: Mapping[str, Any], runs: int, rate: float | None, progress: Progress
) -> list[Inference]:
    answers, start = [], time.perf_counter()
    for i in range(runs):
        if rate:
            time.sleep(max(0.0, start + i / rate - time.perf_counter()))
        answers.append(policy.infer(seen, draw=0))
        progress("run", (i + 1) / runs)
    return answers


def _after_idle(policy: Policy, seen: Mapping[str, Any], idle_s: float | None) -> float | None:
    """Microseconds of the first inference after a pause: clocks fall, caches cool."""
    if idle_s is None:
        return None
    time.sleep(idle_s)
    return policy.infer(seen, draw=0).latency_us["total"]


def _judge(total: Spread, budget_ms: float | None, baseline: float | None) -> CheckFailed | None:
    p50, p99 = total.percentiles["p50"], total.percentiles["p99"]
    if budget_ms is not None and p99 > budget_ms * 1e3:
        what = f"p99 is {p99 / 1e3:.3f} ms, the budget {budget_ms:.3f} ms"
        return CheckFailed("run.budget", what, [("samples", str(total.count))])
    if baseline is not None and p50 > SLACK * baseline:
        what = f"p50 is {p50 / 1e3:.3f} ms, the baseline {baseline / 1e3:.3f} ms"
        return CheckFailed("run.baseline", what, [("allowed", f"{SLACK:.0%} of the baseline")])
    return None


def _baseline(path: Path) -> float:
    """p50 of an earlier run, microseconds."""
    try:
        require_file(path)
        p50 = json.loads(path.read_text())["host_us"]["total"]["p50"]
        if type(p50) not in (int, float) or not 0 < p50 <= MOST_US:
            raise ValueError(f"its p50 is {p50!r}")
        return float(p50)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as fault:
        hint = "a baseline is what `frtc run --json` printed"
        why = fault.strerror if isinstance(fault, OSError) and fault.strerror else repr(fault)
        raise FrtcError("run.baseline_file", f"{path} is no baseline: {why}", hint=hint) from None


def frames_named(texts: Sequence[str]) -> dict[str, Path]:
    """Files of --image by role."""
    pairs = list(map(pair, texts))
    if twice := [role for role, count in Counter(role for role, _ in pairs).items() if count > 1]:
        raise UsageError("option.image", f"--image names {twice[0]} twice", hint="leave one of them out")
    return dict(pairs)


def pair(text: str) -> tuple[str, Path]:
    role, equals, path = text.partition("=")
    if not (role and equals and path):
        raise UsageError("option.image", f"--image {text} is not ROLE=FILE", [("for example", "base=frame.png")])
    return role, Path(path)


def _data(first: Inference, host: Timing, parts: Timing, facts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "device": dict(facts),
        "actions": first.actions.tolist(),
        "runs": host.parts["total"].count,
        "host_us": {name: spread.row() for name, spread in host.parts.items()},
        "stages_us": {name: spread.row() for name, spread in parts.parts.items()},
    }


def _text(
    plan: Path,
    facts: Mapping[str, Any],
    first: Inference,
    host: Timing,
    parts: Timing,
    after_idle: float | None,
) -> str:
    shown = np.array2string(first.actions[0], precision=4, max_line_width=100, floatmode="fixed")
    memory = facts["memory"]
    lines = [
        f"{plan} on {facts['name']}: {size(memory['planned'])} of memory planned",
        f"actions {list(first.actions.shape)}, the first: {shown}",
        f"host to host, {host.parts['total'].count} runs: observation to actions, and its parts",
        host.table(),
        "on the device: inputs in host memory to outputs in host memory, and its parts",
        parts.table(),
    ]
    if after_idle is not None:
        lines.append(f"first after idling: {after_idle / 1e3:.3f} ms")
    return "\n".join(lines)
