"""Normalisation statistics of a checkpoint, read and judged. They decide motion: nothing here has a default.

openpi    assets/<id>/norm_stats.json   {"norm_stats": {"state": {"mean": [...], ...}, "actions": {...}}}
lerobot   the safetensors file that a pipeline step names in `state_file`: "<feature>.<statistic>" f32
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frtc.errors import FrtcError, UsageError, nearest
from frtc.models.checkpoint import open_file, read_json
from frtc.runtime.policy import Norm

LEROBOT_MODES = {  # normalisation mode -> (rule, statistics)
    "IDENTITY": ("identity", ()),
    "MEAN_STD": ("lerobot_mean_std", ("mean", "std")),
    "QUANTILES": ("lerobot_range", ("q01", "q99")),
    "QUANTILE10": ("lerobot_range", ("q10", "q90")),
    "MIN_MAX": ("lerobot_range", ("min", "max")),
}
OPENPI_RULES = {"openpi_mean_std": ("mean", "std"), "openpi_range": ("q01", "q99")}
OPENPI_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Statistics:
    """Vectors [dim] of one feature by statistic's name; `where` names file and field."""

    feature: str
    where: str
    values: Mapping[str, NDArray[np.float64]]

    @property
    def dim(self) -> int:
        return max((len(v) for v in self.values.values()), default=0)

    @property
    def real(self) -> int:
        """Dimensions before a tail in which every statistic is exactly zero: what padding leaves in a file."""
        used = [np.flatnonzero(v) for v in self.values.values()]
        return max((int(u[-1]) + 1 for u in used if len(u)), default=0)

    def cut(self, dim: int) -> Statistics:
        return Statistics(self.feature, self.where, {name: v[:dim] for name, v in self.values.items()})

    def norm(self, rule: str, names: Sequence[str], eps: float, keep_constant: bool) -> Norm:
        """The Norm of this feature. keep_constant: a dimension that never moved keeps the origin's formula."""
        if rule == "identity":
            return Norm("identity")
        missing = [name for name in names if name not in self.values or not len(self.values[name])]
        if missing:
            raise FrtcError(
                "statistics.missing",
                f"{self.feature} has no {' and no '.join(missing)}",
                [("looked in", self.where), ("found", ", ".join(self.values) or "nothing")],
            )
        low, high = (self.values[name] for name in names)
        bad = [f"{self.feature}[{i}]" for i in np.flatnonzero(~(np.isfinite(low) & np.isfinite(high)))]
        if bad:
            raise FrtcError("statistics.value", f"{', '.join(bad)}: not a finite number", [("file", self.where)])
        spread = high if rule.endswith("mean_std") else high - low
        if (spread < 0).any():
            what = f"{names[1]} of {self.feature} is {'negative' if rule.endswith('mean_std') else 'below ' + names[0]}"
            raise FrtcError("statistics.value", f"{what} in dimension {int(spread.argmin())}", [("file", self.where)])
        if not keep_constant and (spread == 0).any():
            raise self._constant(np.flatnonzero(spread == 0).tolist(), names)
        return Norm(rule, tuple(low.tolist()), tuple(high.tolist()), eps)  # type: ignore[arg-type]

    def _constant(self, dims: list[int], names: Sequence[str]) -> FrtcError:
        said = f"{names[1]} is 0" if names[1] == "std" else f"{names[0]} equals {names[1]}"
        hint = (
            "check the data they were made from; --constant-statistics keeps the origin's formula, "
            "which divides by its epsilon; --state-dim and --action-dim cut padding off"
        )
        what = f"{self.feature} never moved in {len(dims)} of {self.dim} dimensions: {dims}"
        return FrtcError("statistics.constant", what, [("because", said), ("file", self.where)], hint)


def openpi_asset(folder: Path, wanted: str | None) -> str:
    """The id of the statistics to use: the only one, or the one that the option names."""
    found = sorted(p.parent.relative_to(folder / "assets").as_posix() for p in folder.glob("assets/**/norm_stats.json"))
    if not found:
        rows = [("looked for", str(folder / "assets" / "<asset>" / "norm_stats.json"))]
        hint = "copy the assets folder of the training run next to the weights"
        raise FrtcError("statistics.missing", "the checkpoint has no normalisation statistics", rows, hint)
    if wanted is None and len(found) == 1:
        return found[0]
    if wanted not in found:
        what = f"there is no asset {wanted}" if wanted else f"the checkpoint holds {len(found)} statistics assets"
        rows = [("choices", ", ".join(found)), ("nearest", nearest(wanted or "", found))]
        raise UsageError("policy.asset", what, [r for r in rows if r[1]], "choose the robot's with --asset")
    return wanted


def openpi_statistics(folder: Path, asset: str) -> dict[str, Statistics]:
    """Statistics of `state` and `actions` in one asset."""
    where = f"assets/{asset}/norm_stats.json"
    top = read_json(folder / where).get("norm_stats")
    made = {}
    for feature in ("state", "actions"):
        entry = top.get(feature) if isinstance(top, dict) else None
        if not isinstance(entry, dict):
            found = ", ".join(top) if isinstance(top, dict) else "no norm_stats"
            raise FrtcError(
                "statistics.missing",
                f"{where} has no statistics of {feature}",
                [("looked in", f"{where}: norm_stats.{feature}"), ("found", found)],
            )
        place = f"{where}: norm_stats.{feature}"
        made[feature] = _equal_lengths(
            Statistics(feature, place, {k: _vector(v, f"{place}.{k}") for k, v in entry.items() if v is not None})
        )
    return made


def _vector(value: Any, where: str) -> NDArray[np.float64]:
    if not isinstance(value, list) or not all(type(v) in (int, float) and not abs(v) > 1e300 for v in value):
        raise FrtcError("statistics.value", f"{where} is not a list of numbers")
    return np.array(value, np.float64)


def _equal_lengths(stats: Statistics) -> Statistics:
    lengths = {name: len(v) for name, v in stats.values.items() if len(v)}
    if len(set(lengths.values())) > 1:
        raise FrtcError(
            "statistics.value",
            f"statistics of {stats.feature} have different lengths",
            [("found", ", ".join(f"{k}: {n}" for k, n in lengths.items())), ("file", stats.where)],
        )
    return stats


def lerobot_statistics(path: Path, feature: str, dim: int) -> Statistics:
    """All statistics of one feature that a pipeline's state file holds, [dim] each."""
    file = open_file(path)
    names = [name for name in file.tensors if name.rpartition(".")[0] == feature]
    if not names:
        held = sorted({name.rpartition(".")[0] for name in file.tensors})
        raise FrtcError(
            "statistics.missing",
            f"{path.name} has no statistics of {feature}",
            [("looked in", str(path)), ("found", ", ".join(held) or "an empty file")],
        )
    values = {name.rpartition(".")[2]: file.read(name).astype(np.float64) for name in names}
    odd = [f"{name} {list(v.shape)}" for name, v in values.items() if v.shape != (dim,) and name != "count"]
    if odd:
        raise FrtcError(
            "statistics.value",
            f"{feature} has {dim} dimensions, its statistics do not",
            [("found", ", ".join(odd)), ("file", str(path))],
        )
    values.pop("count", None)
    return Statistics(feature, f"{path.name}: {feature}", values)
