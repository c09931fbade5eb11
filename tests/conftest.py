"""What several rooms of the tests share: the demo is run once, and its checkpoint and Plans serve everyone."""

from __future__ import annotations

import fcntl
import os
import shutil
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
    """Made once for all processes of a run; each has a copy of its own, which its tests may change."""
    made, copy = _demo_of_all(tmp_path_factory), tmp_path_factory.mktemp("demo") / "out"
    shutil.copytree(made.folder, copy, symlinks=True)
    return Demo(copy, made.text.replace(str(made.folder), str(copy)))


def _demo_of_all(factory: pytest.TempPathFactory) -> Demo:
    base = factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "demo-of-all"
    shared.mkdir(exist_ok=True)
    text = shared / "said.txt"
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not text.exists():
            command = [sys.executable, str(ROOT / "examples" / "demo.py"), "-o", str(shared / "out")]
            done = subprocess.run(command, cwd=ROOT, env=checkout(), capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            text.write_text(done.stdout)
    return Demo(shared / "out", text.read_text())


def checkout() -> dict[str, str]:
    """An environment in which a new interpreter finds this checkout, installed or not."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
