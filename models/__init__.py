"""Robot policies as plain PyTorch modules with strict weight maps."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from frtc.errors import FrtcError

if TYPE_CHECKING:
    from frtc.models.checkpoint import Checkpoint
    from frtc.models.stages import Model

MODULES = ["pi05"]


def load_models() -> dict[str, Model]:
    """All built-in models by name, in the order of MODULES."""
    return {name: importlib.import_module(f"frtc.models.{name}").MODEL for name in MODULES}


def detect(checkpoint: Checkpoint) -> Model:
    """The model whose tensor names the checkpoint holds."""
    models = load_models()
    for model in models.values():
        if model.claims(checkpoint.tensors):
            return model
    rows = [
        ("known", ", ".join(f"{m.name} ({m.title})" for m in models.values())),
        ("found", ", ".join(sorted(checkpoint.tensors)[:4]) or "no tensors"),
        ("checkpoint", str(checkpoint)),
    ]
    raise FrtcError("checkpoint.kind", "the tensor names belong to no model that frtc knows", rows)
