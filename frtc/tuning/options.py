"""What is asked of a tuned build, and what it tells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frtc.codegen.build import Built
from frtc.console import table
from frtc.kernels.tactic import key_of

SECONDS = 300.0  # of --tune-seconds
SHOWN = 3  # tactics that do not fit
SHOWN_SHARE = 0.01  # of the time of all programs: of less nothing is said


@dataclass(frozen=True, slots=True)
class Tuning:
    """measure   candidates on the GPU that is here, which must be the target's
    file      tactics to use; with `measure` what was measured is written there
    seconds   after which no further measurement begins
    """

    measure: bool = False
    file: Path | None = None
    seconds: float = SECONDS


@dataclass(frozen=True, slots=True)
class TuningReport:
    """sites     different ones that were compiled
    measured  how many of these have their kernel from tactics, by their origin
    ignored   (tactic, reason) of tactics that no longer fit
    log       what was measured, for the Plan's evidence; None: nothing
    written   file that the tactics went to
    """

    sites: int = 0
    measured: Mapping[str, int] = field(default_factory=dict)
    ignored: tuple[tuple[str, str], ...] = ()
    log: Mapping[str, Any] | None = None
    written: str = ""

    @staticmethod
    def of(built: Built, log: Mapping[str, Any] | None = None, written: str = "") -> TuningReport:
        choices = {key_of(c.site): c.choice for calls in built.emitted.values() for c in calls}
        origins = Counter(c.pick.origin for c in choices.values() if c.pick.tactic)
        ignored = dict.fromkeys(pair for choice in choices.values() for pair in choice.pick.ignored)
        return TuningReport(len(choices), dict(sorted(origins.items())), tuple(ignored), log, written)

    def evidence(self) -> dict[str, Any]:
        return {"tuning": dict(self.log)} if self.log is not None else {}

    def to_json(self) -> dict[str, Any]:
        log = {k: v for k, v in (self.log or {}).items() if k not in ("log", "chain")}
        if self.log and (chain := self.log.get("chain")):
            decided = {row["site"]: row["chosen"] for row in chain["log"]}
            log["chain"] = {k: v for k, v in chain.items() if k != "log"} | {"decided": decided}
        about = {"sites": self.sites, "measured": dict(self.measured), "ignored": [list(i) for i in self.ignored]}
        return {**about, "tuned": log, "written": self.written}

    def __str__(self) -> str:
        count = sum(self.measured.values())
        origins = ", ".join(f"{n} {origin}" for origin, n in self.measured.items())
        lines = [
            f"kernels: {count} of {self.sites} sites by measured tactics{f' ({origins})' if origins else ''}, "
            f"{self.sites - count} by the cost model"
        ]
        rows = [*self._log_rows(), *(("ignored", f"{tactic}: {why}") for tactic, why in self.ignored[:SHOWN])]
        if len(self.ignored) > SHOWN:
            rows.append(("", f"and {len(self.ignored) - SHOWN} more that do not fit"))
        return "\n".join([*lines, *([table(rows)] if rows else [])])

    def _log_rows(self) -> Iterable[tuple[str, str]]:
        if self.log is None:
            return
        sites = self.log["log"]
        failed = sum("failed" in c for site in sites for c in site["candidates"])
        text = f"{len(sites)} sites on {self.log['gpu']} in {self.log['seconds']:.0f} s"
        yield "tuned", text + (f"; {failed} candidates failed" if failed else "")
        if self.log["not_reached"]:
            yield "", f"{self.log['not_reached']} sites not reached in time (--tune-seconds)"
        if self.log["stopped"]:
            yield "stopped", self.log["stopped"]
        yield from _chain_rows(self.log.get("chain", {}))
        if self.written:
            home = f"kernels/tactics/{self.log['target']}.json"
            yield "tactics", f"{self.written}; for everybody: copy it to {home} (docs/tuning.md)"


def _chain_rows(chain: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """What the search in the whole chain did, program by program."""
    if not chain:
        return
    rows, before, after = chain["log"], chain["before"], chain["after"]
    failed = sum("failed" in c for row in rows for c in row["candidates"])
    changed = sum(row["chosen"] != row["before"] for row in rows)
    text = f"{len(rows)} sites in {chain['seconds']:.0f} s, {changed} with another kernel than before"
    yield "in the chain", text + (f"; {failed} candidates failed" if failed else "")
    for name in sorted(after, key=lambda name: -after[name]):
        if after[name] >= SHOWN_SHARE * after["replay"]:
            yield "", f"{name} {before[name] / 1e3:.3f} ms before, {after[name] / 1e3:.3f} after"
    if left := Counter(row["program"] for row in chain["not_reached"]):
        of = ", ".join(f"{n} of {program}" for program, n in left.items())
        yield "", f"{sum(left.values())} sites not reached in time (--tune-seconds): {of}"
    if chain["refused"]:
        yield "", f"what was quickest alone is not taken together: {chain['refused']}"
    if chain["stopped"]:
        yield "stopped", chain["stopped"]
