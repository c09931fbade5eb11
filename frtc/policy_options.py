"""What the user may say about a policy. Flags of `frtc compile` bear the names of the fields."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from frtc.errors import UsageError
from frtc.runtime.policy import Layout, Pixel
from frtc.runtime.policy_json import MOST


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """What the user says about the policy; None and () mean: not said."""

    origin: str | None = None
    robot: str | None = None  # openpi's declaration of one: models/robots.py
    views: int | None = None
    camera: tuple[tuple[str, str], ...] = ()  # (ROLE, KEY)
    layout: Layout = "hwc"
    pixel: Pixel = "rgb8"
    asset: str | None = None
    tokenizer: Path | None = None
    actions: str | None = None  # absolute, delta or delta:MASK; MASK as in openpi: 6,-1 is six delta, one absolute
    state_in_prompt: bool | None = None
    state_dim: int | None = None
    action_dim: int | None = None
    constant_statistics: bool = False
    strict: bool = False


def action_mask(option: str, dim: int) -> tuple[bool, ...]:
    """`absolute`, `delta` (all `dim` dimensions) or `delta:6,-1,…` (runs: positive relative, negative absolute)."""
    kind, colon, runs = option.partition(":")
    try:
        counts = [int(run) for run in runs.split(",")] if colon else [dim]
    except ValueError:
        counts = [0]
    known = option == "absolute" or (kind == "delta" and 0 not in counts and sum(map(abs, counts)) <= MOST)
    if not known:
        rows = [("choices", "absolute, delta, delta:MASK with MASK such as 6,-1,6,-1")]
        raise UsageError("policy.actions", f"--actions {option} is not understood", rows)
    return () if kind == "absolute" else tuple(count > 0 for count in counts for _ in range(abs(count)))


def mask_text(mask: tuple[bool, ...]) -> str:
    """The option --actions that means this mask."""
    runs = [len(list(run)) * (1 if relative else -1) for relative, run in groupby(mask)]
    return "delta:" + ",".join(map(str, runs)) if any(mask) else "absolute"
