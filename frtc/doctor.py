"""What this machine can do: facts, each with a verdict and what to do. Nothing here raises an error."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from dataclasses import dataclass

from frtc.errors import FrtcError
from frtc.kernels.targets import load_targets
from frtc.runtime.driver import Driver, driver_branch

RUN = ("numpy", "ml_dtypes", "cuda-bindings", "tokenizers")
COMPILE = ("torch", "jinja2", "safetensors", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime")
CLOCKS = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.max.sm,clocks.mem", "--format=csv,noheader"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: `ok` None where it is a fact without a verdict."""

    name: str
    found: str
    ok: bool | None = None
    hint: str = ""


def examine() -> list[Finding]:
    return [_python(), *_packages("run", RUN), *_packages("compile", COMPILE), *_nvrtc(), *_gpu()]


def can(findings: list[Finding], what: str) -> bool:
    """Whether this machine can "run" on a GPU, or "compile"."""
    asked = [f for f in findings if f.name.startswith(what) or (what == "run" and f.name.startswith("GPU"))]
    return all(f.ok is not False for f in asked)


def _python() -> Finding:
    new_enough = sys.version_info >= (3, 11)
    hint = "" if new_enough else "running works; compiling needs Python 3.11"
    return Finding("compile: Python", f"{platform.python_version()}, {platform.machine()}", new_enough, hint)


def _packages(what: str, names: tuple[str, ...]) -> list[Finding]:
    """Presence and version; the robot needs the first list only."""
    extra = "frtc[compile]" if what == "compile" else "frtc"
    found = []
    for name in names:
        try:
            found.append(Finding(f"{what}: {name}", importlib.metadata.version(name), True))
        except importlib.metadata.PackageNotFoundError:
            found.append(Finding(f"{what}: {name}", "not installed", False, f"pip install '{extra}'"))
    return found


def _nvrtc() -> list[Finding]:
    """The compiler of kernels against the driver: cubins load on a driver of their own CUDA version or newer."""
    try:
        from frtc.codegen.nvrtc import compiler_version

        version = compiler_version()
    except (ImportError, FrtcError) as fault:
        return [Finding("compile: NVRTC", str(fault).splitlines()[0], False, "pip install 'frtc[compile]'")]
    wants, branch = max(t.min_driver for t in load_targets().values()), driver_branch()
    if not branch:
        return [Finding("compile: NVRTC", version.split()[0], True)]
    fits = branch >= wants
    return [
        Finding("GPU: driver for our cubins", f"{branch}, they need {wants}", fits, "" if fits else "update the driver")
    ]


def _gpu() -> list[Finding]:
    try:
        driver = Driver()
    except FrtcError as fault:
        return [Finding("GPU", fault.what, False, fault.hint)]
    device = driver.device
    driver.release()
    targets = [t.name for t in load_targets().values() if t.sm == device.sm]
    kind = "shared with the CPU" if device.integrated else "its own"
    about = (
        f"{device.name}, sm_{device.sm}, driver {device.branch or 'unknown'}, CUDA {device.cuda // 1000}, memory {kind}"
    )
    known = Finding("GPU", about, bool(targets), "" if targets else "frtc has no target for this GPU")
    return [known, Finding("target", ", ".join(targets) or "none"), *_clocks()]


def _clocks() -> list[Finding]:
    """Clocks now and at most, where the system tells; low ones explain slow first calls (`frtc run --idle`)."""
    try:
        answer = subprocess.run(CLOCKS, capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return [Finding("clocks", "not readable here")]
    return [Finding("clocks", f"SM now, SM at most, memory: {answer.strip().splitlines()[0]}")]
