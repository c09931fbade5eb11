"""`frtc compile --tune` as a whole, with a planted measuring process: what the Plan, the file and the report hold."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from frtc.codegen.nvrtc import Cubin, Job
from frtc.models.synthetic import write_checkpoint
from frtc.runtime.plan_file import open_plan
from frtc.tuning import search, worker
from tests.cli.face import call

SIZES = ("--prompt-tokens", "72", "--steps", "3", "--horizon", "4", "--precision", "bf16", "--no-self-test")
FAST = "smxx_linear_f32 ROWS=16"  # a candidate that is planted to be fast


def test_tuned_once_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compiled(jobs: Sequence[Job], **_: object) -> list[Cubin]:
        return [Cubin(b"cubin", "kernel") for _ in jobs]

    planted = tmp_path / "planted.json"
    planted.write_text(json.dumps({"sm": 90, "times": [[FAST, 1.0]]}))
    fake = (sys.executable, str(Path(__file__).with_name("fake_tuner.py")), str(planted))
    monkeypatch.setattr(worker, "COMMAND", fake)
    monkeypatch.setattr(search, "compile_all", compiled)
    write_checkpoint(tmp_path / "ck", "openpi", "tiny", seed=1)
    plans = {name: tmp_path / f"{name}.plan" for name in ("tuned", "used")}
    tactics = tmp_path / "t.json"

    def compile(name: str, *more: str | Path) -> dict[str, object]:
        said = call(capsys, "compile", tmp_path / "ck", "--arch", "hopper", "-o", plans[name], *SIZES, *more, "--json")
        assert said.code == 0, said.err
        return dict(said.json()["tuning"])

    tuned = compile("tuned", "--tune", "--tactics", tactics)
    used = compile("used", "--tactics", tactics)
    ids = {name: open_plan(path).plan_id for name, path in plans.items()}
    assert ids["tuned"] == ids["used"] and tuned["sites"] == used["sites"]
    (count,) = tuned["measured"].values()  # type: ignore[attr-defined]
    assert tuned["measured"] == {"measured now": count} and used["measured"] == {"t.json": count}
    log = open_plan(plans["tuned"]).evidence["tuning"]
    assert len(log["log"]) == count == len(json.loads(tactics.read_text())["tactics"])
    changed = [row["chosen"] for row in log["log"] if row["chosen"] != row["candidates"][0]["kernel"]]
    assert changed and all(FAST in name for name in changed)
    assert "tuning" not in open_plan(plans["used"]).evidence
    updated = tmp_path / "updated.plan"  # other weights under the same launches
    assert call(capsys, "update", plans["tuned"], tmp_path / "ck", "-o", updated).code == 0
    assert open_plan(updated).evidence["tuning"] == log
    said = call(capsys, "compile", tmp_path / "ck", "--arch", "a100", "-o", plans["used"], *SIZES, "--tactics", tactics)
    assert (said.code, said.error) == (4, "tactics.target")
    said = call(capsys, "compile", tmp_path / "ck", "--arch", "a100", "-o", plans["used"], *SIZES, "--tune")
    assert (said.code, said.error) == (5, "tune.gpu")
