"""The kernel of camera frames, compiled for the CPU: its own source, thread by thread."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from frtc.kernels.smxx_frames import CAMERA

HERE = Path(__file__).parent
OPTIONS = (
    "-std=c++20",
    "-O2",
    "-ffp-contract=off",
    "-fwrapv",
    "-shared",
    "-fPIC",
    "-Wall",
    "-Werror",
    "-Wno-unknown-pragmas",
)


@cache
def library(*defines: str) -> Any:
    """Compiled with these macros; tests skip where there is no g++."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "frames.so"
        macros = [f"-D{macro}" for macro in defines]
        include = f"-I{HERE.parents[1] / 'kernels'}"
        subprocess.run([compiler, *OPTIONS, *macros, include, HERE / "frames_cpu.cpp", "-o", made], check=True)
        found = ctypes.CDLL(str(made))
    assert found.frames_sizes(0) == CAMERA.itemsize
    return found


def launch(table: int, images: int, found: int, grid: tuple[int, int, int], *defines: str) -> None:
    """table, images, found: addresses on the host, also those in the table."""
    pointers = (ctypes.c_void_p(table), ctypes.c_void_p(images), ctypes.c_void_p(found))
    library(*defines).frames_on_cpu(*pointers, *grid)
