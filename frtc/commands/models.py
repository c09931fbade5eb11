"""`frtc models`: the tables of models, checkpoint layouts and targets, plug-ins included."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from frtc.console import Result, size, table
from frtc.kernels.targets import load_targets
from frtc.models import load_families, load_models
from frtc.policy_reader import ORIGINS


def options(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def run(args: argparse.Namespace) -> Result:
    models, families, targets = load_models(), load_families(), load_targets()
    cameras = {name: ", ".join(role for role, _ in family.cameras) for name, family in families.items()}
    rows = [("target", "GPU", "compiles for", "memory", "evidence")]
    rows += [(t.name, t.title, t.nvcc, f"{size(t.dram)}/s", t.evidence) for t in targets.values()]
    text = [
        "models",
        table([(m.name, m.title, f"published cameras: {cameras[m.name]}") for m in models.values()]),
        f"checkpoint layouts: {', '.join(ORIGINS)}; safetensors, one file or shards",
        "targets",
        table(rows),
        "`run on hardware`: its kernels ran on this GPU; `compiles, not run`: cubins are built, nobody has run them",
    ]
    data = {
        "models": [{"name": m.name, "title": m.title, "cameras": cameras[m.name]} for m in models.values()],
        "layouts": list(ORIGINS),
        "targets": [{**asdict(t), "has": sorted(t.has)} for t in targets.values()],
    }
    return Result("\n".join(text), data)
