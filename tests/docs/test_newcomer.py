"""Following docs/adding-a-target.md and docs/adding-an-op.md in a copy: only the files that they name change."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, checkout
from tests.docs.test_docs import blocks

ROOMS = ("frtc", "runtime", "models", "lowering", "passes", "codegen", "kernels", "tests")
CODE = """
from pathlib import Path
import numpy as np
from frtc.codegen.build import build
from frtc.codegen.fusible import implements
from frtc.commands.explain import read_ir
from frtc.kernels.cubin import sm_of
from frtc.kernels.targets import load_targets
from frtc.lowering.interpret import run_module
from frtc.passes.pipeline import run_passes
from frtc.passes.standard import pipeline

Path("g.ir").write_text('''graph g(x: f32[8,64]) {
  %0 = softsign(%x) : f32[8,64]
  %1 = mul(%0, %x) : f32[8,64]
  return y=%1
}
''')
target, module = load_targets()["l40s"], read_ir(Path("g.ir"))
x = np.linspace(-4, 4, 512, dtype=np.float32).reshape(8, 64)
wanted = x / (1 + np.abs(x)) * x
assert np.allclose(run_module(module, {"x": x}, lambda name: x)["y"], wanted, rtol=1e-6)
module, _ = run_passes(module, pipeline(implements(target)))
built = build(module, target)
assert [sm_of(image) for image in built.cubins.values()] == [89] and built.program.target.name == "l40s"
assert "softsign" in str(module.graphs[0].nodes[-1].get("expr"))
"""


def put(path: Path, anchor: str, text: str, after: bool = False) -> None:
    """`text` before (or after) the first `anchor`."""
    source = path.read_text()
    assert source.count(anchor) >= 1, f"{path.name} has no {anchor!r}"
    path.write_text(source.replace(anchor, anchor + text if after else text + anchor, 1))


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("newcomer")
    ignore = shutil.ignore_patterns("__pycache__", "golden", "fixtures")
    for name in ROOMS:
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def add_target(copy: Path) -> list[str]:
    (code,) = blocks(ROOT / "docs/adding-a-target.md", "python")
    (copy / "kernels/targets/l40s.py").write_text(code)
    put(copy / "kernels/targets/__init__.py", '"hopper"', ', "l40s"', after=True)
    return ["kernels/targets/l40s.py", "kernels/targets/__init__.py"]


def add_op(copy: Path) -> list[str]:
    page = ROOT / "docs/adding-an-op.md"
    row, reference = blocks(page, "python")
    (device,) = blocks(page, "cpp")
    put(copy / "lowering/ops.py", "@op\ndef silu(", row + "\n\n")
    put(copy / "lowering/ops.py", '"neg abs exp', "")
    text = (copy / "lowering/ops.py").read_text().replace('"neg abs exp', '"softsign neg abs exp', 1)
    (copy / "lowering/ops.py").write_text(text)
    put(copy / "kernels/reference/pointwise.py", '    "silu": _unary(', reference)
    put(copy / "kernels/smxx_pointwise.cuh", "__device__ __forceinline__ float silu(", device)
    put(copy / "kernels/smxx_pointwise.py", '"gelu_tanh", "gelu_erf"}', '"softsign", ')
    put(copy / "tests/lowering/every_op.py", "neg abs exp", "softsign ")
    return ["lowering/ops.py", "kernels/reference/pointwise.py", "kernels/smxx_pointwise.cuh",
            "kernels/smxx_pointwise.py", "tests/lowering/every_op.py"]  # fmt: skip


def python(copy: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**checkout(), "PYTHONPATH": str(copy)}
    return subprocess.run([sys.executable, *words], cwd=copy, env=env, capture_output=True, text=True)


def test_a_target_and_an_op_by_the_book(copy: Path) -> None:
    for page, touched in (("adding-a-target", add_target(copy)), ("adding-an-op", add_op(copy))):
        text = (ROOT / "docs" / f"{page}.md").read_text()
        named = [re.sub("<[^>]+>", "*", name) for name in re.findall(r"`([\w/<>*.-]+\.(?:py|cuh))`", text)]
        for path in touched:
            assert any(Path(path).match(name) for name in named), f"docs/{page}.md does not name {path}"
    done = python(copy, "-c", CODE)
    assert done.returncode == 0, done.stderr
    listed = python(copy, "-m", "frtc", "models")
    assert "l40s" in listed.stdout and "sm_89" in listed.stdout, listed.stderr
    chosen = ("tests/lowering/test_text.py", "-k", "softsign or every_op_is_here")
    tested = python(copy, "-m", "pytest", "-v", "-p", "no:cacheprovider", *chosen)
    assert tested.returncode == 0 and "2 passed" in tested.stdout, tested.stdout
