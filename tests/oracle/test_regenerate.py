"""Fixtures made anew by lerobot are the committed ones."""

from __future__ import annotations

import filecmp
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

pytest.importorskip("lerobot", reason="lerobot is only in the environment of `make oracle-venv`")

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "tests/fixtures"
GEMMA = Path(os.environ.get("FRTC_GEMMA_TOKENIZER", ROOT / ".cache/gemma-tokenizer/tokenizer.json"))
SETS = ("pi05_lerobot", "pi0_lerobot", "smolvla_lerobot")
RESULTS = {Path(name) / "expected.safetensors" for name in SETS}
REPORTS = {Path(name) / "fixture.json" for name in SETS}  # hold errors of bf16 runs, which the arrays decide


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fixtures")
    command = [sys.executable, str(ROOT / "tools/make_fixtures.py"), "-o", str(out)]
    subprocess.run(command + (["--gemma-tokenizer", str(GEMMA)] if GEMMA.exists() else []), check=True)
    return out


def test_every_file_is_made_and_all_but_the_results_are_the_same_bytes(made):
    written = {path.relative_to(made) for path in made.rglob("*") if path.is_file()}
    kept = {path.relative_to(COMMITTED) for path in COMMITTED.rglob("*") if path.is_file()}
    kept = {path for path in kept if path.parts[0] in (*SETS, "gemma_prompts.json")}
    assert written == kept if GEMMA.exists() else written == kept - {Path("gemma_prompts.json")}
    _, differing, unread = filecmp.cmpfiles(
        made, COMMITTED, [str(path) for path in written - RESULTS - REPORTS], shallow=False
    )
    assert not differing and not unread


@pytest.mark.parametrize("results", sorted(RESULTS), ids=lambda path: path.parent.name)
def test_results_are_the_same_to_1e_6(made, results):
    """bf16 runs round differently on other CPUs: they agree within the error of such a run, the rest within fp32's."""
    found, wanted = load_file(made / results), load_file(COMMITTED / results)
    assert found.keys() == wanted.keys()
    for name in wanted:
        error = np.linalg.norm(found[name] - wanted[name]) / np.linalg.norm(wanted[name])
        assert error <= (1.5e-2 if name.endswith("velocity_bf16") else 1e-6), name
