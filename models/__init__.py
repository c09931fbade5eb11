"""Robot policies as plain PyTorch modules with strict weight maps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from frtc import plugins
from frtc.errors import FrtcError

if TYPE_CHECKING:
    from frtc.models.checkpoint import Checkpoint
    from frtc.models.policies import PolicyFamily
    from frtc.models.stages import Model

MODULES = ["pi05", "pi0", "smolvla"]


def load_models() -> dict[str, Model]:
    """All models by name: ours in the order of MODULES, then those of plug-ins."""
    modules = plugins.table("models", "frtc.models", MODULES).values()
    return {module.MODEL.name: module.MODEL for module in modules}


def load_families() -> dict[str, PolicyFamily]:
    """What each model's family publishes about its policy, by the model's name."""
    modules = plugins.table("models", "frtc.models", MODULES).values()
    return {module.MODEL.name: module.FAMILY for module in modules}


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
