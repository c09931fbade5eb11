"""What every file of results says about itself, and where it goes: $OUT, or bench/results."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import torch


def about(module: str, device: str) -> dict[str, Any]:
    """Device, versions, commit (FRTC_COMMIT) and the command that was run."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "this CPU, a rehearsal",
        "torch": torch.__version__,
        "commit": os.environ.get("FRTC_COMMIT", ""),
        "command": shlex.join(["python3", "-m", module, *sys.argv[1:]]),
    }


def write(name: str, result: dict[str, Any]) -> Path:
    """Replaces the file as a whole: a run that is stopped leaves what it has measured so far."""
    folder = Path(os.environ.get("OUT") or "bench/results")
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{name}.partial"
    partial.write_text(json.dumps(result, indent=1) + "\n")
    return partial.replace(folder / f"{name}.json")
