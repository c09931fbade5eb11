"""A full-size Plan updated from another checkpoint on two cores: how long, how much memory, equal to a fresh compile?

Needs 30 GB under FRTC_SCRATCH (or the tests' own folder), cleaned as it goes. Figures go to
bench/results/full_update.json.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from frtc.codegen.recipe import RECIPE
from frtc.models.checkpoint import open_checkpoint
from frtc.models.lora import TENSORS
from frtc.models.lora_config import CONFIG
from frtc.runtime.plan_file import open_plan
from tests.conftest import ROOT
from tests.full.test_full_size import COMPILE_ANON_MOST, compiled, scratch, synthetic
from tests.full.watched import Watched, watch

pytestmark = pytest.mark.full
__all__ = ["scratch"]  # a fixture

UPDATE_MOST = 90  # seconds
RECIPE_MOST = 1 << 20  # bytes
RANK = 16
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def figures() -> Iterator[dict[str, Any]]:
    found: dict[str, Any] = {"cores": os.cpu_count(), "command": "pytest -m full tests/full/test_full_update.py"}
    yield found
    text = json.dumps(found, indent=1)
    print(f"\n{text}")
    (ROOT / "bench" / "results" / "full_update.json").write_text(text + "\n")


@pytest.fixture(scope="module")
def old(scratch: Path, figures: dict[str, Any]) -> Path:
    """A Plan of seed 0, bf16; its checkpoint is gone."""
    checkpoint = synthetic(scratch, "bfloat16")
    found = compiled(checkpoint, scratch, 50, "--no-self-test")
    figures["compile of the old checkpoint"] = found.figures()
    figures["recipe, bytes"] = len(open_plan(found.plan, verify=False).files()[RECIPE])
    shutil.rmtree(checkpoint)
    return found.plan


@pytest.fixture(scope="module")
def new(scratch: Path) -> Path:
    return synthetic(scratch, "bfloat16", seed=1)


def updated(plan: Path, checkpoint: Path, out: Path, *options: str) -> Watched:
    return watch(["-m", "frtc", "update", str(plan), str(checkpoint), "-o", str(out), "--json", *options])


def test_update_in_time_and_equal_to_a_fresh_compile(
    old: Path, new: Path, scratch: Path, figures: dict[str, Any]
) -> None:
    out = scratch / "updated.plan"
    found = updated(old, new, out)
    figures["update from another checkpoint"] = found.figures() | {"said_seconds": json.loads(found.out)["seconds"]}
    again = compiled(new, scratch, 50, "--no-self-test")
    figures["fresh compile of it"] = again.figures()
    assert json.loads(found.out)["plan_id"] == again.report["plan_id"]
    assert open_plan(out, verify=False).evidence == open_plan(again.plan, verify=False).evidence
    figures["equal"] = filecmp.cmp(out, again.plan, shallow=False)
    again.plan.unlink()
    out.unlink()
    assert figures["equal"]
    assert found.judged_seconds <= UPDATE_MOST and found.peak_anon <= COMPILE_ANON_MOST
    assert figures["recipe, bytes"] <= RECIPE_MOST


def test_an_adapter_for_every_layer(old: Path, new: Path, scratch: Path, figures: dict[str, Any]) -> None:
    """LoRA on all projections of vision, language model and expert."""
    rng, tensors = np.random.default_rng(0), dict[str, np.ndarray]()
    for name, info in open_checkpoint(new).tensors.items():
        stem = name.removesuffix(".weight")
        if stem != name and stem.rpartition(".")[2] in TARGETS:
            a, b = (RANK, info.shape[1]), (info.shape[0], RANK)
            tensors[f"base_model.model.{stem}.lora_A.weight"] = rng.standard_normal(a, np.float32)
            tensors[f"base_model.model.{stem}.lora_B.weight"] = rng.standard_normal(b, np.float32) / 100
    folder, out = scratch / "adapter", scratch / "adapted.plan"
    folder.mkdir()
    save_file(tensors, folder / TENSORS)
    (folder / CONFIG).write_text(
        json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": TARGETS})
    )
    found = updated(old, new, out, "--adapter", str(folder))
    figures["update with an adapter"] = found.figures() | {"tensors merged": len(tensors) // 2}
    out.unlink()
    assert found.peak_anon <= COMPILE_ANON_MOST
