"""`frtc diff A B`: two checkpoints, two Plans, or a Plan and a checkpoint: what differs, section by section."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from frtc.console import Progress, Result, size, table
from frtc.diff import Change, Diff, Options, diff
from frtc.diff_numbers import Numbers
from frtc.diff_plans import Changed, Launches, StageDiff
from frtc.diff_weights import Moved, Weights
from frtc.errors import CheckFailed
from frtc.options import pathname
from frtc.policy import ordinal_of
from frtc.policy_options import PolicyOptions

SHOWN = 12  # rows of a section; --all shows every one, --json has them all


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=pathname, metavar="A", help="checkpoint or Plan")
    parser.add_argument("b", type=pathname, metavar="B", help="checkpoint or Plan")
    parser.add_argument("--all", action="store_true", help="every difference, not the first of each section")
    parser.add_argument("--exit-code", action="store_true", help="exit 3 if they differ; else 0 whenever it ran")
    parser.add_argument("--weights", action=argparse.BooleanOptionalAction, default=True, help="read all weights")
    parser.add_argument("--numbers", action=argparse.BooleanOptionalAction,
                        help="run two Plans on the same inputs; default: if they are small")  # fmt: skip
    parser.add_argument("--device", default="cpu", help="of --numbers: cpu (default, the emulator), cuda, cuda:N")
    parser.add_argument("--seed", type=int, default=0, help="of the observation and the noise")
    said = parser.add_argument_group("checkpoints", "what their files do not say")
    said.add_argument("--adapter", type=pathname, metavar="DIR", help="LoRA adapter that is merged into B")
    said.add_argument("--tokenizer", type=pathname, metavar="FILE", help="tokenizer.json, of both")
    said.add_argument("--asset", metavar="NAME", help="which of several statistics, of both")


def run(args: argparse.Namespace) -> Result:
    policy = PolicyOptions(tokenizer=args.tokenizer, asset=args.asset)
    chosen = Options(policy, args.adapter, args.numbers, ordinal_of(args.device), args.seed, args.weights)
    progress = Progress()
    try:
        found = diff(args.a, args.b, chosen, progress)
    finally:
        progress.close()
    failure = None
    if args.exit_code and found.differing:
        failure = CheckFailed("diff.differs", "A and B differ", [("in", ", ".join(found.differing))])
    return Result(text_of(found, None if args.all else SHOWN), found.data(), failure)


def text_of(found: Diff, most: int | None) -> str:
    """most: rows of a section; None: all."""
    sides = table([("A", str(found.a.path), found.a.about), ("B", str(found.b.path), found.b.about)], indent="")
    if found.same and found.a.plan:
        return f"{sides}\none program, plan {found.a.plan.plan_id}: everything that decides actions is equal"
    parts = [sides, *found.notes, _changes("config", *found.config, most)]
    if found.policy:
        parts.append(_changes("policy", *found.policy, most))
    if found.weights:
        parts.append(_weights(found.weights, most))
    if found.launches:
        parts.append(_launches(found.launches, most))
    if found.memory:
        parts.append(_memory(found.memory))
    if found.numbers:
        parts.append(_numbers(found.numbers, most))
    return "\n".join(parts)


def _changes(title: str, compared: int, changes: Sequence[Change], most: int | None) -> str:
    head = f"{title}: {compared} values, {len(changes)} differ" if changes else f"{title}: {compared} values, equal"
    return _section(head, [(c.name, _value(c.a), _value(c.b)) for c in changes], most)


def _section(
    head: str, rows: Sequence[Sequence[str]], most: int | None, columns: Sequence[str] = ("", "A", "B")
) -> str:
    if not rows:
        return head
    shown = rows if most is None else rows[:most]
    lines = [head, table([columns, *shown])]
    return "\n".join([*lines, f"  and {len(rows) - len(shown)} more: --all"] if len(shown) < len(rows) else lines)


def _value(value: Any) -> str:
    if value is None:
        return "-"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _weights(w: Weights, most: int | None) -> str:
    head = f"weights: {w.both} in both, {w.equal} equal to the bit" + (f", {len(w.moved)} differ" if w.moved else "")
    parts = [_section(head, [_moved(m) for m in w.moved], most, ("", "type", "relative", "largest"))]
    for side, only in (("A", w.only_a), ("B", w.only_b)):
        if only:
            parts.append(_section(f"only in {side}: {len(only)}", only, most, ("", "type")))
    return "\n".join(parts)


def _moved(m: Moved) -> tuple[str, ...]:
    type = m.a if m.a == m.b else f"{m.a} -> {m.b}"
    return m.name, type, *("-" if v is None else f"{v:.3g}" for v in (m.relative, m.largest))


def _launches(found: Launches, most: int | None) -> str:
    if not found.differ:
        return f"launches: {found.whole.a} in one inference, {found.kernels.a} kernels, equal"
    head = f"launches: {_count(found.whole)} in one inference, {_count(found.kernels)} kernels"
    beside = [f"  stages that overlap: {_count(found.overlap)}"] if found.overlap.a != found.overlap.b else []
    return "\n".join([head, *beside, *(_stage(s, most) for s in found.stages if s.differs)])


def _stage(stage: StageDiff, most: int | None) -> str:
    parts = [f"  {stage.name}: {_count(stage.launches)}"]
    for title, counts in (("op", stage.ops), ("kernel", stage.kernels)):
        rows = [(f"{title} {c.name}", str(c.a), str(c.b)) for c in counts]
        parts.append(_indented(rows, most))
    parts.append(_indented([(f"{r.calls} x {r.op}", r.a, r.b, r.first) for r in stage.retiled], most))
    return "\n".join(part for part in parts if part)


def _indented(rows: Sequence[Sequence[str]], most: int | None) -> str:
    shown = rows if most is None else rows[:most]
    more = f"\n      and {len(rows) - len(shown)} more: --all" if len(shown) < len(rows) else ""
    return table(shown, indent="      ") + more


def _count(c: Changed, shown: Callable[[int], str] = str) -> str:
    return shown(c.a) if c.a == c.b else f"{shown(c.a)} -> {shown(c.b)}"


def _memory(parts: Sequence[Changed]) -> str:
    return _section("memory on the device", [(c.name, size(c.a), size(c.b)) for c in parts], None)


def _numbers(n: Numbers, most: int | None) -> str:
    where = f"numbers on the same inputs (seed {n.seed}, {n.device})"
    if n.equal:
        return f"{where}: actions equal to the bit"
    relative = "-" if n.relative is None else f"{n.relative:.2e}"
    head = (
        f"{where}: relative error of actions - noise {relative}, "
        f"largest difference {n.largest:.4g} in robot units, dimension {n.dimension}"
    )
    ranked = sorted(enumerate(n.by_dim), key=lambda pair: -pair[1])
    return _section(head, [(f"dimension {i}", f"{d:.4g}") for i, d in ranked if d], most, ("", "largest"))
