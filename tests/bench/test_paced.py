"""The paced bench by the emulator: what it says of a Plan, and that inferences change."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from bench import paced
from frtc.policy import Policy
from frtc.runtime.emulator import Emulator
from frtc.runtime.plan_file import open_plan


def test_states_and_prompts_change(tiny_plan: Path) -> None:
    plan = open_plan(tiny_plan)
    with Policy(plan, Emulator(plan)) as policy:
        first, second = itertools.islice(paced.observations(policy), 2)
    assert first.keys() == second.keys() and first["prompt"] != second["prompt"]
    assert not np.array_equal(first["state"], second["state"]) and np.array_equal(first["base"], second["base"])


def test_times_of_a_plan(
    tiny_plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    assert paced.main([str(tiny_plan), "--device", "cpu", "--replays", "2", "--count", "2", "--rate", "0.2"]) == 0
    row = json.loads((tmp_path / "paced.json").read_text())
    assert row["replays"]["count"] == 2
    busy, slow = row["inferences"]
    assert (busy["rate"], slow["rate"], slow["count"]) == (0.0, 0.2, 2)
    assert slow["late"] == 0 and slow["gap"]["max"] > busy["gap"]["max"] + 1e5, "it idles between inferences"
    said = capsys.readouterr().out
    assert "0.2 Hz, 0 of 2 late: total" in said and "2 replays" in said
