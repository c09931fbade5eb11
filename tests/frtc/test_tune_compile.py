"""`frtc compile --tune` as a whole, with planted times: what the Plan, the file and the report hold.

Whole programs run in the emulator, on weights that nobody trained, so that their results are compared.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from frtc.codegen.nvrtc import Cubin, Job
from frtc.models.synthetic import write_checkpoint
from frtc.runtime.plan_file import open_plan
from frtc.tuning import builders, search, tuned, worker
from frtc.tuning.questions import Place
from tests.cli.face import call

SIZES = ("--prompt-tokens", "72", "--steps", "3", "--horizon", "4", "--precision", "bf16", "--no-self-test")
FAST = "smxx_linear_f32 ROWS=16"  # a candidate that is planted to be fast by itself
HERE = Path(__file__).parent


@pytest.fixture
def placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Place]:
    """Of the denoise step's sites two with two candidates each: in the chain the first one's second is planted to be
    quick. With processes that tell so."""
    planted, broken = tmp_path / "planted.json", tmp_path / "broken.json"
    plants: dict[str, Any] = {"sm": 90, "times": [[FAST, 1.0]], "whole": [], "emulate": True}
    planted.write_text(json.dumps(plants))
    broken.write_text("{}")
    found, real = list[Place](), tuned.places_of

    def few(*about: Any) -> list[Place]:
        places = [p for p in real(*about, 1) if "denoise" in p.calls and FAST not in map(str, p.candidates)]
        found[:] = sorted(places, key=lambda place: -place.shares["denoise"])[:2]
        plants["whole"] = [[found[0].key, str(found[0].candidates[1]), 100.0]]
        planted.write_text(json.dumps(plants))
        return found

    def compiled(jobs: Sequence[Job], **_: object) -> list[Cubin]:
        return [Cubin(b"cubin", "kernel") for _ in jobs]

    monkeypatch.setattr(worker, "COMMAND", (sys.executable, str(HERE / "fake_tuner.py"), str(planted)))
    monkeypatch.setattr(builders, "COMMAND", (sys.executable, str(HERE / "fake_builder.py"), str(broken)))
    monkeypatch.setattr(search, "compile_all", compiled)
    monkeypatch.setattr(tuned, "places_of", few)
    return found


def test_tuned_once_used_again(tmp_path: Path, placed: list[Place], capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "ck", "openpi", "tiny", seed=1)
    plans = {name: tmp_path / f"{name}.plan" for name in ("tuned", "used")}
    tactics = tmp_path / "t.json"

    def compile(name: str, *more: str | Path) -> dict[str, Any]:
        said = call(capsys, "compile", tmp_path / "ck", "--arch", "hopper", "-o", plans[name], *SIZES, *more, "--json")
        assert said.code == 0, said.err
        return dict(said.json()["tuning"])

    tuned = compile("tuned", "--tune", "--tactics", tactics)
    used = compile("used", "--tactics", tactics)
    ids = {name: open_plan(path).plan_id for name, path in plans.items()}
    assert ids["tuned"] == ids["used"] and tuned["sites"] == used["sites"]
    (count,) = tuned["measured"].values()
    assert tuned["measured"] == {"measured now": count} and used["measured"] == {"t.json": count}
    log = open_plan(plans["tuned"]).evidence["tuning"]
    assert len(log["log"]) == count == len(json.loads(tactics.read_text())["tactics"])
    changed = [row["chosen"] for row in log["log"] if row["chosen"] != row["candidates"][0]["kernel"]]
    assert changed and all(FAST in name for name in changed)
    chain = log["chain"]
    assert chain["after"]["denoise"] == chain["before"]["denoise"] - 100.0 and not chain["stopped"]
    decided = {row["site"]: row for row in chain["log"]}
    chosen = [decided[place.key]["chosen"] for place in placed]
    assert chosen == [str(placed[0].candidates[1]), str(placed[1].candidates[0])]
    assert not [c for row in chain["log"] for c in row["candidates"] if "failed" in c]
    kept = {line["site"]: line["config"] for line in json.loads(tactics.read_text())["tactics"]}
    assert kept[placed[0].key] == dict(placed[0].candidates[1].config)
    assert "tuning" not in open_plan(plans["used"]).evidence
    updated = tmp_path / "updated.plan"  # other weights under the same launches
    assert call(capsys, "update", plans["tuned"], tmp_path / "ck", "-o", updated).code == 0
    assert open_plan(updated).evidence["tuning"] == log
    said = call(capsys, "compile", tmp_path / "ck", "--arch", "a100", "-o", plans["used"], *SIZES, "--tactics", tactics)
    assert (said.code, said.error) == (4, "tactics.target")
    said = call(capsys, "compile", tmp_path / "ck", "--arch", "a100", "-o", plans["used"], *SIZES, "--tune")
    assert (said.code, said.error) == (5, "tune.gpu")
