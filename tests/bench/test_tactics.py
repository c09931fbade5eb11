"""What is measured for the target's own table: the sites of a policy as its Plan has them. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from bench import full_model, tactics
from bench.full_model import Shape
from frtc.kernels.tactic import Tactic, read_tactics
from frtc.tuning import tuned as tuned_module
from frtc.tuning.search import Found


class NoWorker:
    device = {"name": "NVIDIA H200"}  # noqa: RUF012

    def __enter__(self) -> NoWorker:
        return self

    def __exit__(self, *fault: object) -> None:
        pass

    def start(self) -> None:
        pass


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The sites that are asked about; the first candidate is the fastest."""
    found: list[str] = []

    def search(questions: object, *_: object) -> Found:
        chosen = []
        for q in questions:  # type: ignore[attr-defined]
            found.append(q.key)
            chosen.append(Tactic(q.key, q.candidates[0].kernel.name, dict(q.candidates[0].config), 1.0))
        return Found(tuple(chosen), (), 0, "")

    monkeypatch.setattr(full_model, "SCRATCH", tmp_path)
    monkeypatch.setattr(tuned_module, "require_gpu", lambda target: None)
    monkeypatch.setattr(tuned_module, "Worker", NoWorker)
    monkeypatch.setattr(tuned_module, "search", search)
    yield found


def test_both_precisions_end_up_in_one_file(asked: list[str], tmp_path: Path) -> None:
    file = tmp_path / "hopper.json"
    reports = [tactics.tuned(Shape(size="tiny", precision=p), file, 1.0) for p in ("bf16", "fp8-rows")]
    assert any("e4m3" in key for key in asked) and any("e4m3" not in key for key in asked)
    assert set(read_tactics(file, "hopper").by_site) == set(asked)
    assert all(sum(report.measured.values()) and not report.ignored for report in reports)
