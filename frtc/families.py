"""Kernel families that were asked for and are not there."""

from __future__ import annotations

from frtc.kernels.catalog import CATALOG
from frtc.kernels.targets import Target


def family_notes(target: Target, family: str | None) -> tuple[str, ...]:
    """For the report of a compilation with `--family native` on a target for which nobody wrote kernels."""
    if family != "native" or any(kernel.family == target.nvcc for kernel in CATALOG.kernels):
        return ()
    return (f"--family native: {target.name} has no kernels of its own; those of the baseline serve every site",)
