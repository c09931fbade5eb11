"""`frtc models`: models and their layouts, targets, and what was measured where; plug-ins included."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from typing import TYPE_CHECKING, Any

from frtc.console import Result, size, table
from frtc.kernels.targets import Target, load_targets
from frtc.policy_reader import ORIGINS

if TYPE_CHECKING:
    from frtc.models.policies import PolicyFamily

MEASURED = "measured.json"  # written by tools/measured.py from bench/results
NOT_RUN = "compiles, not run"
PRECISIONS = {
    "fp8": "FP8 x FP8, activation scales of a calibration",
    "fp8-rows": "FP8 x FP8, an activation scale for each row, found as it runs",
    "w8a16": "FP8 weights, 16-bit activations",
}  # bf16 says it itself


def options(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def run(args: argparse.Namespace) -> Result:
    targets = load_targets()
    models, measured = known_models(), json.loads((resources.files("frtc") / MEASURED).read_text())
    text = [
        "models",
        table([("", "", "checkpoints of", "cameras"), *((*_named(m), m["cameras"]) for m in models)]),
        "LoRA is merged when compiling: a peft adapter of torch weights (--adapter), or the factors in a JAX tree",
        "targets",
        table([("target", "GPU", "compiles for", "memory", "evidence"), *map(_target, targets.values())]),
        f"`run on hardware`: its kernels ran on this GPU; `{NOT_RUN}`: cubins are built, nobody has run them",
        "measured, full size, random weights, one CUDA graph, one inference in flight; commands: --json",
        table([("model", "", "shape", "GPU", "nodes", "p50", "worst velocity error"), *map(_measured, measured)]),
        *(f"{name}: {PRECISIONS[name]}" for name in PRECISIONS if any(row["precision"] == name for row in measured)),
        *_unmeasured([m["name"] for m in models], targets, measured),
    ]
    data = {
        "models": models,
        "origins": list(ORIGINS),
        "targets": [{**asdict(t), "has": sorted(t.has)} for t in targets.values()],
        "measured": measured,
    }
    return Result("\n".join(text), data)


def known_models() -> list[dict[str, Any]]:
    """Of each model: name, title, layouts of real files, published cameras. Without torch only what needs none."""
    from frtc.models import MODULES, load_families, load_models, policies

    try:
        models, families = load_models(), load_families()
    except ImportError as fault:
        if fault.name != "torch":
            raise
        rows = {f.name: f for f in vars(policies).values() if isinstance(f, policies.PolicyFamily)}
        return [_model(name, name, None, rows[name]) for name in MODULES]
    layouts = {m.name: m.synthetic.layouts if m.synthetic else () for m in models.values()}
    return [_model(m.name, m.title, layouts[m.name], families[m.name]) for m in models.values()]


def _model(name: str, title: str, layouts: Sequence[str] | None, family: PolicyFamily) -> dict[str, Any]:
    cameras = ", ".join(role for role, _ in family.cameras) or "its checkpoint's own"
    return {"name": name, "title": title, "layouts": None if layouts is None else list(layouts), "cameras": cameras}


def _named(model: dict[str, Any]) -> tuple[str, str, str]:
    layouts = model["layouts"]
    said = "(pip install 'frtc[compile]' to see)" if layouts is None else ", ".join(layouts) or "its own layout"
    return model["name"], model["title"], said


def _target(t: Target) -> tuple[str, ...]:
    return t.name, t.title, t.nvcc, f"{size(t.dram)}/s", t.evidence


def _measured(row: dict[str, Any]) -> tuple[str, ...]:
    kind, p50 = f"{row['precision']} {row['family']}", f"{row['p50_us'] / 1e3:.2f} ms"
    error = f"{row['velocity_error']:.1e}" if "velocity_error" in row else "-"
    return row["model"], kind, shown(row["shape"]), row["gpu"], str(row["nodes"]), p50, error


def shown(shape: str) -> str:
    """ "2 views, prompt 48, chunk 50" of "v2-p48-c50"."""
    found = re.fullmatch(r"v(\d+)-p(\d+)-c(\d+)", shape)
    return f"{found[1]} views, prompt {found[2]}, chunk {found[3]}" if found else shape


def _unmeasured(models: list[str], targets: dict[str, Target], measured: list[dict[str, Any]]) -> list[str]:
    """What the table does not say: models on targets where nobody has run them."""
    done = {(row["model"], row["target"]) for row in measured}
    idle = [name for name in targets if not any(target == name for _, target in done)]
    lines = [f"on {', '.join(idle)}: {NOT_RUN}"] if idle else []
    for target in targets:
        if target not in idle and (rest := [m for m in models if (m, target) not in done]):
            lines.append(f"on {target}, {', '.join(rest)}: {NOT_RUN} at full size")
    return lines
