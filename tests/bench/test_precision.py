"""The precision table: the models' float32 islands are those that the rule keeps, and the measurement measures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.precision import BAR, NUMBERS, RULE, SYNTHETIC, islands, keys, measure, rounded, shares, stays
from frtc.lowering.interpret import run
from frtc.lowering.ir import Module
from frtc.lowering.text import parse_module
from frtc.models import load_models
from frtc.trace import trace
from tests.truth.traced import subject

TABLE: dict[str, Any] = json.loads((Path(__file__).parents[2] / "bench" / "results" / "precision.json").read_text())


def served(kind: str) -> Module:
    """The tiny model as it serves, from integer frames where it takes them."""
    model = load_models()[kind]
    config = model.tiny()
    return trace(kind, model.stages(config, torch.bfloat16, True), model.schedule(config))


@pytest.mark.parametrize("kind", SYNTHETIC)
def test_islands_are_what_the_rule_keeps(kind: str) -> None:
    """A site that the model computes in float32 stands in the table, and the rule says float32 of its numbers."""
    sites = TABLE["kinds"][kind]["sites"]
    assert TABLE["rule"] == RULE and TABLE["bar"] == BAR
    assert set(islands(served(kind))) == set(sites)
    for site, row in sites.items():
        assert stays(max(row["alone"].values()), row["bytes"]) == row["float32"], site
        assert row["float32"], f"{site} is float32 in the model, but the rule does not keep it there"


def test_the_rule() -> None:
    assert stays(0.11 * BAR, 1.0) and stays(0.0, 0.9e-3)
    assert not stays(0.09 * BAR, 1.1e-3)


def test_the_table_is_what_the_golden_model_gives() -> None:
    """Measured again: the same errors, to the digits that the table shows."""
    table, whole = measure(subject("pi0.golden", "f32"), subject("pi0.golden", "bf16").module)
    known = TABLE["kinds"]["pi0"]
    for site, found in table.items():
        assert found.alone == pytest.approx(known["sites"][site]["alone"]["golden"], rel=0.1), site
    assert whole["served"] == pytest.approx(known["whole"]["golden"]["served"], rel=0.1)


def test_bytes_count_what_is_left_to_read() -> None:
    """The matrix behind the MLP of action and time is read in each step; tables and norms are next to nothing."""
    found = shares(load_models()["pi0"], served("pi0"))
    assert 1e-3 < found["denoise.mlp_out"] < 1e-2
    assert 0 < found["denoise.mlp_in"] < 1e-3 and 0 < found["vision.tower.patch"] < 1e-3
    assert 0 < found["denoise.layers.#.norm#"] < 1e-3 and found["denoise.layers.#"] == 0


TEXT = """
module m

graph weights() {
  %0 = tensor(key=w) : f32[2,2]
  return w=%0
}

graph denoise(x: f32[1,2]) {
  @w : f32[2,2]
  %0 = linear(%x, @w) : f32[1,2]  # head m.py:1
  %1 = neg(%0) : f32[1,2]  # m.py:2
  return y=%1
}

schedule {
  run denoise
  return y=y
}
"""


def test_a_site_is_rounded_operands_and_result_alone() -> None:
    module = parse_module(TEXT)
    (graph,) = module.graphs
    assert set(keys(graph).values()) == {("denoise", "head", "linear"), ("denoise", "(itself)", "neg")}
    x, w = np.array([[1.0005, 2.0]], np.float32), np.array([[1.003, 0.0], [0.0, 1.0]], np.float32)

    def y(places: tuple[str, ...]) -> list[float]:
        changed = rounded(module, lambda key: key[1] in places)
        return run(changed.graphs[0], {"x": x}, lambda name: w)["y"][0].tolist()  # type: ignore[no-any-return]

    exact = [-float(np.float32(1.0005) * np.float32(1.003)), -2.0]
    assert y(()) == pytest.approx(exact, rel=1e-6)
    assert y(("head",)) == [-1.0, -2.0], "1.0005 and 1.003 are 1 in bfloat16"
    assert y(("(itself)",))[0] == -1.0 and y(NUMBERS) == pytest.approx(exact, rel=1e-6)
