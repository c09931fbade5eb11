"""The report of a compilation: what was read, what was assumed, what came out, how long each part took."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frtc.console import size, table
from frtc.runtime.plan import BuiltFor, Program, unrolled
from frtc.runtime.policy import Assumption, Policy

if TYPE_CHECKING:
    from frtc.models.evidence import Fact
    from frtc.precision import PrecisionReport
    from frtc.tuning.options import TuningReport

MEANING = {
    "run on hardware": "kernels of this target have run on this GPU",
    "compiles, not run": "cubins are built, nobody has run them: self-test the Plan on the robot before it acts",
}


@dataclass(frozen=True, slots=True)
class CompileReport:
    """What `frtc.compile` made.

    facts         (name, value, source) of everything that the checkpoint's files or the options decided
    launches      per program, once through it; graph_nodes: of a whole inference
    estimate_us   per program and run, by the cost model; a guess that ranks kernels, not a measurement
    fired         how often each rewrite rule fired
    precision     what became of the products
    tuning        which kernels are measured choices
    notes         what was asked for and is not there
    """

    path: Path
    plan_id: str
    model: str
    target: BuiltFor
    facts: tuple[tuple[str, Any, str], ...]
    assumed: tuple[Assumption, ...]
    file_nbytes: int
    weights_nbytes: int
    arena_nbytes: int
    state_nbytes: int
    kernels: int
    launches: Mapping[str, int]
    graph_nodes: int
    estimate_us: Mapping[str, float]
    fired: Mapping[str, int]
    seconds: Mapping[str, float]
    precision: PrecisionReport
    tuning: TuningReport
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(
        path: Path,
        plan_id: str,
        model: str,
        facts: Sequence[Fact],
        policy: Policy,
        program: Program,
        costs: Mapping[str, float],
        fired: Counter[str],
        seconds: Mapping[str, float],
        precision: PrecisionReport,
        tuning: TuningReport,
        notes: tuple[str, ...] = (),
    ) -> CompileReport:
        launches = launches_of(program)
        return CompileReport(
            path=path,
            plan_id=plan_id,
            model=model,
            target=program.target,
            facts=tuple((f.name, f.value, f.source) for f in facts),
            assumed=policy.assumed,
            file_nbytes=path.stat().st_size,
            weights_nbytes=program.weights_nbytes,
            arena_nbytes=program.arena_nbytes,
            state_nbytes=program.state_nbytes,
            kernels=len(program.kernels),
            launches=launches,
            graph_nodes=sum(launches[name] for name, _ in unrolled(program.schedule)),
            estimate_us=dict(costs),
            fired=dict(sorted(fired.items())),
            seconds=dict(seconds),
            precision=precision,
            tuning=tuning,
            notes=notes,
        )

    def to_json(self) -> dict[str, Any]:
        own = {"precision": self.precision.to_json(), "tuning": self.tuning.to_json()}
        return {**asdict(self), "path": str(self.path), **own}

    def __str__(self) -> str:
        t = self.target
        parts = [
            f"{self.path}: {self.model} for {t.name} ({t.nvcc}), {size(self.file_nbytes)}",
            table(
                [
                    ("plan", self.plan_id),
                    ("target", f"{t.evidence}: {MEANING.get(t.evidence, 'see `frtc models`')}"),
                    *(("note", note) for note in self.notes),
                ]
            ),
            facts_text(self.facts, self.assumed),
            str(self.precision),
            "memory on the device",
            table(memory_rows(self.weights_nbytes, self.arena_nbytes, self.state_nbytes)),
            f"launches: {self.graph_nodes} in one inference, {self.kernels} different kernels",
            table([(name, str(count)) for name, count in self.launches.items()]),
            str(self.tuning),
            "time",
            table([(name, f"{seconds:.1f} s") for name, seconds in self.seconds.items()]),
        ]
        return "\n".join(parts)


def launches_of(program: Program) -> dict[str, int]:
    """Launches of each program, once through it."""
    return {s.name: sum(len(c.launches) for c in s.calls) for s in program.stages}


def memory_rows(weights: int, arena: int, state: int) -> list[tuple[str, str]]:
    parts = {"weights": weights, "scratch": arena, "states": state}
    return [(name, size(nbytes)) for name, nbytes in (*parts.items(), ("together", sum(parts.values())))]


def facts_text(facts: Sequence[tuple[str, Any, str]], assumed: Sequence[Assumption]) -> str:
    """Facts with their sources, then what nobody confirmed."""
    held = {a.field for a in assumed}
    lines = ["read", table([(n, _shown(v), source) for n, v, source in facts if n not in held])]
    if assumed:
        rows = [(a.field, a.value, f"{a.why}; confirm with {a.option}") for a in assumed]
        lines += ["ASSUMED, and said at every opening until confirmed", table(rows)]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of everything inside records, mappings and sequences of them; lists of plain values stay."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value if isinstance(value, (int, float, str, bool, list, tuple, type(None))) else str(value)
