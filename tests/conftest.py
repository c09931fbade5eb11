"""What several rooms of the tests share: the demo is run once, and its checkpoint and Plans serve everyone."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Demo:
    """What examples/demo.py left: `folder` with its files, and what it printed."""

    folder: Path
    text: str

    @property
    def checkpoint(self) -> Path:
        return self.folder / "pi05"

    @property
    def plan(self) -> Path:
        return self.folder / "pi05-thor.plan"


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("demo") / "out"
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), "-o", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=checkout(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return Demo(folder, done.stdout)


def checkout() -> dict[str, str]:
    """An environment in which a new interpreter finds this checkout, installed or not."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
