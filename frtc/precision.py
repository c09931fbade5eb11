"""Which precision a Plan is compiled in: the option, the file that says it by stage and site, the GPU's default.

--precision fp8            all products that can run FP8 x FP8 do
--precision FILE.toml      precision = "fp8"
                           keep = ["denoise.layers.17.*"]      sites that stay in 16 bits, as patterns
                           [stages]
                           vision = "bf16"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import tomllib

from frtc.codegen.weights import Array, Lookup
from frtc.console import table
from frtc.errors import FrtcError, UsageError, nearest
from frtc.kernels.targets import Target
from frtc.lowering.ir import Module
from frtc.passes.precision import KINDS, Precision, Share, shares_of
from frtc.passes.quantize import SCALE, Note
from frtc.passes.sites import UNNORMED, sites_of, unnormed
from frtc.products import meaning
from frtc.runtime.paths import require_file

if TYPE_CHECKING:
    from frtc.compiler import Opened

MMA = "fp8"  # feature of a target that takes FP8 products, whether or not it has instructions for them


@dataclass(frozen=True, slots=True)
class Asked:
    """What the option says; kind None: the GPU's default."""

    kind: str | None = None
    stages: tuple[tuple[str, str], ...] = ()
    keep: tuple[str, ...] = ()


def read_precision(text: str | None) -> Asked:
    """The value of --precision: a kind or a file."""
    if text is None or text in KINDS:
        return Asked(text)
    path = Path(text)
    if path.suffix != ".toml":
        known = [("known", ", ".join((*KINDS, "FILE.toml"))), ("nearest", nearest(text, KINDS) or "none")]
        raise UsageError("option.precision", f"there is no precision {text}", known)
    return _asked(_toml(path), path)


def _toml(path: Path) -> dict[str, Any]:
    try:
        require_file(path)
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as fault:
        raise _wrong(path, f"{path} cannot be read: {fault.strerror or fault}") from None
    except UnicodeDecodeError:
        raise _wrong(path, f"{path} is not UTF-8 text") from None
    except (tomllib.TOMLDecodeError, RecursionError) as fault:
        raise _wrong(path, f"{path} is not TOML: {fault}") from None


def _asked(found: dict[str, Any], path: Path) -> Asked:
    fields = ("precision", "keep", "stages")
    if unknown := [name for name in found if name not in fields]:
        raise _wrong(path, f"{unknown[0]} means nothing here", nearest(unknown[0], fields))
    kind, keep, stages = found.get("precision"), found.get("keep", []), found.get("stages", {})
    if not isinstance(keep, list) or not all(isinstance(one, str) for one in keep):
        raise _wrong(path, "keep is not a list of names")
    if not isinstance(stages, dict):
        raise _wrong(path, "stages is not a table")
    for name, value in [("precision", kind), *stages.items()]:
        if value not in KINDS and not (name == "precision" and value is None):
            raise _wrong(path, f"{name} = {value!r} is no precision", nearest(str(value), KINDS))
    return Asked(kind, tuple(stages.items()), tuple(keep))


def _wrong(path: Path, what: str, near: str | None = None) -> UsageError:
    rows = [("file", str(path)), *([("nearest", near)] if near else []), ("kinds", ", ".join(KINDS))]
    return UsageError("precision.file", what, rows, "docs/numerics.md shows such a file")


def default_kind(target: Target, families: Sequence[str]) -> str:
    """FP8 where the kernels multiply it at a rate of its own, else weights in 8 bits."""
    return "fp8" if target.multiplies_fp8(families) else "w8a16"


def require_possible(asked: Asked, target: Target) -> None:
    """FP8 x FP8 on a GPU without any is refused before anything is read."""
    kinds = {asked.kind, *(kind for _, kind in asked.stages)}
    if unknown := sorted(kind for kind in kinds if kind is not None and kind not in KINDS):
        raise UsageError("option.precision", f"there is no precision {unknown[0]}", [("known", ", ".join(KINDS))])
    if "fp8" in kinds and MMA not in target.has:
        what = f"{target.name} ({target.nvcc}) multiplies no FP8"
        hint = "--precision w8a16 keeps weights in FP8 and multiplies in bf16; --precision bf16 keeps all in 16 bits"
        raise UsageError("option.precision", what, [("asked", "fp8"), ("possible", "bf16, w8a16")], hint)


def require_used(asked: Asked, target: Target, family: str | None) -> None:
    """Activation scales mean nothing to a Plan whose activations have 16 bits. family: as --family says."""
    kind = asked.kind or default_kind(target, target.families(family))
    if "fp8" in (kind, *(stage_kind for _, stage_kind in asked.stages)):
        return
    by = f"{target.name} with --family {family}" if family else target.name
    whose = "" if asked.kind else f", the default of {by},"
    hint = "--precision fp8 uses them" if MMA in target.has else f"leave them out: {target.name} multiplies no FP8"
    raise UsageError("option.scales", f"precision {kind}{whose} has no activation scales", hint=hint)


def require_known(asked: Asked, module: Module) -> None:
    """Every stage and pattern of the file names something."""
    names = Precision("fp8", dict(asked.stages), asked.keep).unknown(module)
    if names:
        near = nearest(names[0], [g.name for g in module.graphs] + [s.name for s in sites_of(module)])
        rows = [("named", names[0]), ("nearest", near or "none"), ("stages", ", ".join(g.name for g in module.graphs))]
        raise UsageError("precision.unknown", f"{names[0]} is neither a stage nor the name of a site", rows)


@dataclass(frozen=True, slots=True)
class PrecisionReport:
    """What became of the products.

    kind, meaning   what was chosen, and what that is on this GPU
    scales          "static", "per row" or "": of activations
    shares          FLOPs of each program by what they multiply
    notes           of every site
    normed          sites in FP8 whose norm stays a step of its own, where those of others do not, and why
    """

    kind: str
    meaning: str
    scales: str
    shares: tuple[Share, ...]
    notes: tuple[Note, ...]
    normed: Mapping[str, str]

    @staticmethod
    def of(precision: Precision, native: bool, module: Module, notes: Sequence[Note]) -> PrecisionReport:
        """native: the kernels multiply FP8 at a rate of its own."""
        used = any(n.kind == "fp8" for n in notes)
        scales = ("static" if precision.static else "per row") if used else ""
        words = meaning(precision.kind, native)
        deferred = any(node.op == "linear_moments" for graph in module.graphs for node in graph.nodes)
        fallen = {n.site: precision.fallen.get(unnormed(n.site), "") for n in notes if n.kind == "fp8" and deferred}
        normed = {site: why for site, why in fallen.items() if why}
        return PrecisionReport(precision.kind, words, scales, tuple(shares_of(module)), tuple(notes), normed)

    @property
    def fp8(self) -> float:
        """Share of the FLOPs of all products that are FP8 x FP8."""
        every = sum(sum(s.flops.values()) for s in self.shares)
        return sum(s.flops.get("fp8", 0.0) for s in self.shares) / max(every, 1.0)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "meaning": self.meaning,
            "scales": self.scales,
            "fp8_share": self.fp8,
            "stages": {s.program: dict(s.flops) for s in self.shares},
            "sites": {n.site: {"kind": n.kind, "reason": n.reason} for n in self.notes},
            "normed": dict(self.normed),
        }

    def __str__(self) -> str:
        scales = f", {self.scales} activation scales" if self.scales else ""
        lines = [f"precision: {self.kind} ({self.meaning}{scales})"]
        if self.kind != "bf16" or any(n.kind != "bf16" for n in self.notes):
            lines.append(table([(s.program, _shares(s)) for s in self.shares]))
            lines.append(f"  {self.fp8:.1%} of all products' FLOPs are FP8 x FP8")
        if kept := [(n.site, n.reason) for n in self.notes if n.reason]:
            lines += ["sites that stay in 16 bits", table(kept)]
        if self.normed:
            lines += ["sites behind a norm of its own", table(self.normed.items())]
        return "\n".join(lines)


def _shares(share: Share) -> str:
    whole = max(sum(share.flops.values()), 1.0)
    return ", ".join(f"{kind} {flops / whole:.1%}" for kind, flops in sorted(share.flops.items()) if flops)


class ActivationScales(Protocol):
    """Static scales of the activations that products read, by site."""

    def of(self, site: str) -> Array:
        """f32 [] or [rounds]: what the site's stored elements are multiplied by."""

    def fallen(self) -> Mapping[str, str]:
        """Sites whose values FP8 cannot hold well, and why."""

    def require(self, opened: Opened, front: Module) -> None:
        """Raise FrtcError unless the scales are of this checkpoint and module."""

    def about(self) -> dict[str, Any]:
        """How they were found, for the Plan's evidence."""


@dataclass(frozen=True, slots=True)
class RecordedScales:
    """Those that a Plan was compiled with, from its evidence."""

    sites: Mapping[str, Any]
    fell: Mapping[str, str]

    @staticmethod
    def of_evidence(evidence: Mapping[str, Any]) -> RecordedScales | None:
        """None where the Plan has no static scales."""
        found = evidence.get("calibration", {})
        return RecordedScales(found["sites"], found.get("fallen", {})) if found.get("scales") == "static" else None

    def of(self, site: str) -> Array:
        return np.asarray(self.sites[site], np.float32)

    def fallen(self) -> Mapping[str, str]:
        return self.fell

    def require(self, opened: Opened, front: Module) -> None:
        """What was recorded is of the Plan that recorded it."""

    def about(self) -> dict[str, Any]:
        return {}


def parameters(read: Lookup, scales: ActivationScales | None) -> Lookup:
    """A lookup of the model's parameters that knows the leaves of activation scales, too."""

    def lookup(key: str) -> Array:
        return scales.of(key[len(SCALE) :]) if scales is not None and key.startswith(SCALE) else read(key)

    return lookup


def require_no_fallen(precision: Precision) -> None:
    """--strict: a site that falls back is an error."""
    rows = [(site, why) for site, why in sorted(precision.fallen.items()) if not site.endswith(UNNORMED)]
    if rows:
        hint = "name them in `keep` of a precision file, or leave --strict out"
        raise FrtcError("precision.fallen", f"--strict, and {len(rows)} sites fall back to 16 bits", rows, hint)
