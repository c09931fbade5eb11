"""What every file of results says about itself, and where it goes: $OUT, or bench/results."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

QUERY = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "watts": "power.draw",
    "celsius": "temperature.gpu",
    "driver": "driver_version",
}


def about(module: str, device: str) -> dict[str, Any]:
    """Device, its clocks, versions, commit (FRTC_COMMIT) and the command that was run."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "this CPU, a rehearsal",
        "gpu": gpu() if device == "cuda" else {},
        "torch": torch.__version__,
        "commit": os.environ.get("FRTC_COMMIT", ""),
        "command": shlex.join(["python3", "-m", module, *sys.argv[1:]]),
    }


def gpu() -> dict[str, Any]:
    """Clocks, power, temperature and driver as nvidia-smi says at this moment; {} where it says nothing."""
    try:
        command = ["nvidia-smi", f"--query-gpu={','.join(QUERY.values())}", "--format=csv,noheader,nounits", "--id=0"]
        line = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return {name: _number(word.strip()) for name, word in zip(QUERY, line.split(","), strict=False)}


def _number(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:  # "580.95.05", "[N/A]"
        return word


def write(name: str, result: dict[str, Any]) -> Path:
    """Replaces the file as a whole: a run that is stopped leaves what it has measured so far."""
    folder = Path(os.environ.get("OUT") or "bench/results")
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{name}.partial"
    partial.write_text(json.dumps(result, indent=1) + "\n")
    return partial.replace(folder / f"{name}.json")
