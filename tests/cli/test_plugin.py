"""A package of its own, installed by pip, brings a model and a target; nothing of frtc knows either."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.conftest import ROOT, Demo, checkout

SHAPES = {
    "toy.embed.weight": (1024, 16),
    "toy.colour.weight": (16, 3),
    "toy.colour.bias": (16,),
    "toy.out.weight": (32, 16),
    "toy.out.bias": (32,),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip installed the plug-in into."""
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(ROOT / "tests" / "plugin", folder / "source")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "--target", folder / "site", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "site"


def frtc(site: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    env = checkout()
    env["PYTHONPATH"] = os.pathsep.join([str(site), env["PYTHONPATH"]])
    command = [sys.executable, "-m", "frtc", *map(str, words)]
    return subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)


def toy_checkpoint(demo: Demo, folder: Path) -> Path:
    """Weights of the toy, the demo's statistics and tokenizer."""
    generator = np.random.default_rng(0)
    shutil.copytree(demo.checkpoint, folder, ignore=shutil.ignore_patterns("config.json", "*.safetensors"))
    tensors = {name: generator.standard_normal(shape).astype(np.float32) / 4 for name, shape in SHAPES.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_model_and_target_of_a_plugin(site: Path, demo: Demo, tmp_path: Path) -> None:
    known = json.loads(frtc(site, "models", "--json").stdout)
    assert [m["name"] for m in known["models"]][-1] == "toy"
    assert known["targets"][-1]["name"] == "toygpu" and known["targets"][-1]["sms"] == 46
    checkpoint, plan = toy_checkpoint(demo, tmp_path / "toy"), tmp_path / "toy.plan"
    done = frtc(site, "compile", checkpoint, "--arch", "toygpu", "-o", plan, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["target"]["nvcc"] == "sm_89" and list(report["launches"]) == ["act"]
    done = frtc(site, "verify", plan, checkpoint, "--device", "cpu", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["whole"] < 1e-6


def test_without_the_package_nobody_knows_them(demo: Demo, tmp_path: Path) -> None:
    checkpoint = toy_checkpoint(demo, tmp_path / "toy")
    done = frtc(Path(), "compile", checkpoint, "--arch", "toygpu")
    assert done.returncode == 2 and "error[option.arch]" in done.stderr
    done = frtc(Path(), "check", checkpoint)
    assert done.returncode == 4 and "error[checkpoint.kind]" in done.stderr
