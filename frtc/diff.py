"""`frtc diff`: what two checkpoints, two Plans, or a Plan and a checkpoint differ in, section by section.

    found = diff(Path("a.plan"), Path("b.plan"))
    found.differs, found.data()

A section is None where it does not apply: launches, memory and numbers are Plans' only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from frtc.diff_numbers import Numbers, are_tiny, compare_numbers, require_same_inputs
from frtc.diff_plans import Changed, Launches, compare_launches, compare_memory
from frtc.diff_sides import Side, flat_policy, open_side
from frtc.diff_weights import Weights, compare_weights
from frtc.errors import FrtcError, UsageError
from frtc.policy_options import PolicyOptions
from frtc.runtime.plan_file import Plan

Progress = Callable[[str, float], None]
ABSENT = None  # value of a name that a side does not have


@dataclass(frozen=True, slots=True)
class Change:
    """A value that differs; None: the side has no such name."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class Options:
    """policy    of checkpoints, the same for both
    adapter   of B, a checkpoint
    numbers   run both Plans; None: if they are small
    ordinal   the GPU they run on; None: the CPU's emulator
    weights   read and compare them
    """

    policy: PolicyOptions = field(default_factory=PolicyOptions)
    adapter: Path | None = None
    numbers: bool | None = None
    ordinal: int | None = None
    seed: int = 0
    weights: bool = True


@dataclass(frozen=True, slots=True)
class Diff:
    """same    both are one program (equal plan_id): nothing was compared
    config, policy   how many names were compared, and those that differ; policy None where a side has none
    """

    a: Side
    b: Side
    same: bool = False
    config: tuple[int, tuple[Change, ...]] = (0, ())
    policy: tuple[int, tuple[Change, ...]] | None = None
    weights: Weights | None = None
    launches: Launches | None = None
    memory: tuple[Changed, ...] | None = None
    numbers: Numbers | None = None
    notes: tuple[str, ...] = ()

    @property
    def differing(self) -> tuple[str, ...]:
        """The sections in which the sides differ."""
        found = {
            "config": bool(self.config[1]),
            "policy": bool(self.policy and self.policy[1]),
            "weights": bool(self.weights and self.weights.differ),
            "launches": bool(self.launches and self.launches.differ),
            "memory": any(c.a != c.b for c in self.memory or ()),
            "numbers": bool(self.numbers and not self.numbers.equal),
            "program": bool(self.a.plan and self.b.plan and self.a.plan.plan_id != self.b.plan.plan_id),
        }
        return tuple(name for name, differs in found.items() if differs)

    def data(self) -> dict[str, Any]:
        sections = {"config": self.config, "policy": self.policy}
        return {
            "a": _about(self.a),
            "b": _about(self.b),
            "same": self.same,
            "differing": list(self.differing),
            **{name: found and _changes(*found) for name, found in sections.items()},
            "weights": self.weights and self.weights.data(),
            "launches": self.launches and self.launches.data(),
            "memory": self.memory and [asdict(c) for c in self.memory],
            "numbers": self.numbers and self.numbers.data(),
            "notes": list(self.notes),
        }


def _about(side: Side) -> dict[str, Any]:
    known = {"path": str(side.path), "kind": side.kind, "model": side.model}
    return known | ({"plan_id": side.plan.plan_id} if side.plan else {})


def _changes(compared: int, changes: tuple[Change, ...]) -> dict[str, Any]:
    return {"compared": compared, "changes": [asdict(c) for c in changes]}


def diff(a: Path, b: Path, options: Options | None = None, progress: Progress = lambda what, share: None) -> Diff:
    """Compare. Two Plans of one plan_id are equal without reading more than their headers."""
    options = options or Options()
    ours, theirs = open_side(a, options.policy), open_side(b, options.policy, options.adapter)
    plans = (ours.plan, theirs.plan)
    if plans[0] and plans[1] and plans[0].plan_id == plans[1].plan_id:
        return Diff(ours, theirs, same=True)
    for plan, name in zip(plans, "AB", strict=True):
        if plan:
            progress(f"check {name}", 0.0)
            plan.verify()
    notes = [*ours.notes, *theirs.notes]
    both = (plans[0], plans[1]) if plans[0] and plans[1] else None
    if both and (files := _other_files(*both)):
        notes.append(f"other files of the program differ: {', '.join(files)}")
    numbers = _numbers(ours, theirs, both, options, progress, notes)
    return Diff(
        a=ours,
        b=theirs,
        config=_config(ours, theirs),
        policy=_policy(ours, theirs),
        weights=_weights(ours, theirs, progress, notes) if options.weights else None,
        launches=compare_launches(*both) if both else None,
        memory=compare_memory(both[0].program, both[1].program) if both else None,
        numbers=numbers,
        notes=tuple(notes),
    )


def _other_files(a: Plan, b: Plan) -> list[str]:
    """Those that differ, or that one Plan has, beside kernels that launches name: the tokenizer, camera frames."""
    kernels = {entry.cubin for plan in (a, b) for entry in plan.program.kernels}
    ours, theirs = a.files(), b.files()
    return sorted(name for name in {*ours, *theirs} - kernels if ours.get(name) != theirs.get(name))


def _config(a: Side, b: Side) -> tuple[int, tuple[Change, ...]]:
    """Of two sides of one kind every name; of a Plan and a checkpoint those that both have."""
    if a.kind == b.kind:
        return _compare(a.config, b.config)
    shared = [name for name in a.config if name in b.config]
    return _compare({n: a.config[n] for n in shared}, {n: b.config[n] for n in shared})


def _policy(a: Side, b: Side) -> tuple[int, tuple[Change, ...]] | None:
    if a.policy is None or b.policy is None:
        return None
    return _compare(dict(flat_policy(a.policy)), dict(flat_policy(b.policy)))


def _compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[int, tuple[Change, ...]]:
    names = dict.fromkeys((*a, *b))
    pairs = [Change(name, _plain(a.get(name, ABSENT)), _plain(b.get(name, ABSENT))) for name in names]
    return len(names), tuple(c for c in pairs if c.a != c.b)


def _plain(value: Any) -> Any:
    """Tuples as the lists that JSON made of them."""
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def _weights(a: Side, b: Side, progress: Progress, notes: list[str]) -> Weights | None:
    """By name; of a Plan and a checkpoint, the Plan's against those that its recipe makes of the checkpoint."""
    if a.kind == b.kind:
        return compare_weights(a.weights, b.weights, progress)
    from frtc.diff_recipe import compare_with_recipe

    made, from_these = (a, b) if a.plan else (b, a)
    assert made.plan is not None
    try:
        return compare_with_recipe(made.plan, made.weights, from_these.weights, progress)
    except FrtcError as fault:
        if fault.code != "diff.parameters":
            raise
        rows = "; ".join(f"{name} {text}" for name, text in fault.rows)
        notes.append(f"weights are not compared: {fault.what} ({rows})")
        return None


def _numbers(
    a: Side, b: Side, plans: tuple[Plan, Plan] | None, options: Options, progress: Progress, notes: list[str]
) -> Numbers | None:
    """Run both, where that was asked for or costs little. Asked for and impossible is an error, else a note."""
    if plans is None:
        if options.numbers:
            raise UsageError("diff.inputs", "--numbers runs two Plans", [("A", a.kind), ("B", b.kind)])
        return None
    if options.numbers is False or (options.numbers is None and not are_tiny(*plans)):
        return None
    try:
        require_same_inputs(a.policy, b.policy)
    except UsageError as fault:
        if options.numbers:
            raise
        notes.append(f"numbers are not compared: {fault.what} ({'; '.join(f'{k}: {v}' for k, v in fault.rows)})")
        return None
    return compare_numbers(*plans, options.ordinal, options.seed, progress)
