"""Plug-ins: modules of other packages that extend the tables of models, targets, ops, references, kernels and rules.

A package names its modules under the entry-point group `frtc.plugins`; the part of a name before the dot is the table:

    [project.entry-points."frtc.plugins"]
    "models.toy" = "toy_plugin.model"            # MODEL, FAMILY      docs/adding-a-model.md
    "targets.toygpu" = "toy_plugin.target"       # TARGET             docs/adding-a-target.md
    "ops.toy" = "toy_plugin.ops"                 # rows made by @op   docs/adding-an-op.md
    "references.toy" = "toy_plugin.reference"    # OPS
    "kernels.toy" = "toy_plugin.kernel"          # KERNELS            docs/adding-a-kernel.md
    "rules.toy" = "toy_plugin.rules"             # RULES              docs/adding-a-rule.md

Like errors.py this file imports nothing of ours but the errors, so every room of the house may use it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Sequence
from functools import cache
from types import ModuleType

from frtc.errors import EnvironmentFault

GROUP = "frtc.plugins"
TABLES = ("models", "targets", "ops", "references", "kernels", "rules")


def table(name: str, package: str, builtin: Sequence[str]) -> dict[str, ModuleType]:
    """Modules of a table by short name: ours from `package`, in order, then those of plug-ins, sorted by name."""
    ours = {short: importlib.import_module(f"{package}.{short}") for short in builtin}
    return ours | {short: _load(short, where) for short, where in _plugged(name) if short not in ours}


@cache
def _plugged(name: str) -> tuple[tuple[str, str], ...]:
    """(short name, module) of each plug-in for a table."""
    found = importlib.metadata.entry_points(group=GROUP)
    parts = ((entry.name.partition("."), entry.value) for entry in found)
    return tuple(sorted((short, value) for (kind, _, short), value in parts if kind == name))


def _load(short: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except Exception as fault:  # foreign code may fail in any way
        rows = [("module", where), ("reason", f"{type(fault).__name__}: {fault}")]
        hint = "repair or uninstall the package that brings it"
        raise EnvironmentFault("plugin.load", f"the plug-in {short} cannot be loaded", rows, hint) from fault
