"""The fit of the cost models: what was planted is found, and what is wrong fails."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import fit
from frtc.estimate import Fitted

BEFORE = Fitted("hopper", "no GPU", "nothing", {"sm_100": 0.7}, {"sm_100 product": 1.7}, {}, (), {})
TRUE = {"baseline product": 1.3, "baseline attention": 1.6, "baseline moves data": 0.9}
GAP_US = 0.4
FIT = ["a 0", "a 3", "a 6"]


def stage(products: float, attention: float, moves: float, launches: int) -> dict[str, Any]:
    """Measured as TRUE and GAP_US say."""
    costs = dict(zip(TRUE, ((products, launches), (attention, launches), (moves, launches)), strict=True))
    us = sum(TRUE[label] * cost + GAP_US * n for label, (cost, n) in costs.items())
    return {"costs": costs, "p50_us": us}


def row(i: int) -> dict[str, Any]:
    stages = {
        "vision": stage(1000.0 + 300 * i, 200 + 20 * i, 100, 60),
        "prefix": stage(4000.0 + 900 * i, 100 + 100 * i, 90, 40),
        "denoise": stage(2000.0 + 50 * i, 1500 + 100 * i, 300 + 30 * i, 400),
        "let.x": {"costs": {"baseline moves data": (1.0, 1)}, "p50_us": 3.0},  # too short to be fitted
    }
    return {"label": f"a {i}", "stages": stages, "device_us": {"p50": sum(s["p50_us"] for s in stages.values())}}


@pytest.fixture
def result() -> dict[str, Any]:
    return {"device": "NVIDIA H200", "target": "hopper", "commit": "abc", "rows": [row(i) for i in range(9)]}


def judged(result: Mapping[str, Any], labels: list[str] = FIT) -> tuple[Fitted, list[str]]:
    return fit.judged(result, labels, BEFORE, "here")


def test_what_was_planted_is_found(result: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found, wrong = judged(result)
    assert not wrong and max(map(abs, found.held_out.values())) < 0.01
    monkeypatch.setattr(fit, "PRIOR", 1e-6)
    found, wrong = judged(result)
    assert {n: found.factors[n] for n in TRUE} == pytest.approx(TRUE, rel=1e-3)
    assert found.gaps_us["baseline"] == pytest.approx(GAP_US, rel=1e-2)
    assert set(found.held_out) == {f"a {i}" for i in (1, 2, 4, 5, 7, 8)} and found.fit == tuple(FIT)


def test_what_was_not_measured_stays_as_it_was(result: dict[str, Any]) -> None:
    found, _ = judged(result)
    assert found.factors["sm_100 product"] == 1.7 and found.gaps_us["sm_100"] == 0.7
    assert (found.gpu, found.target, found.source) == ("NVIDIA H200", "hopper", "here")


def test_a_few_microseconds_get_no_factor(result: dict[str, Any]) -> None:
    for measured in result["rows"]:
        measured["stages"]["vision"]["costs"]["baseline rare"] = (5.0, 1)
    found, wrong = judged(result)
    assert not wrong and "baseline rare" not in found.factors


def test_no_factor_becomes_negative(result: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that took nothing at all: products must not make up for a factor below LEAST."""
    monkeypatch.setattr(fit, "PRIOR", 1e-6)
    for measured in result["rows"]:
        for name, (us, _) in (
            (n, s["costs"]["baseline attention"]) for n, s in measured["stages"].items() if n != "let.x"
        ):
            measured["stages"][name]["p50_us"] -= 2.2 * us
    assert judged(result)[0].factors["baseline attention"] == fit.LEAST


def test_a_held_out_configuration_that_is_far_off_fails(result: dict[str, Any]) -> None:
    result["rows"][4]["device_us"]["p50"] *= 1.25
    _, wrong = judged(result)
    assert len(wrong) == 1 and wrong[0].startswith("a 4: -")
    result["rows"][4]["device_us"]["p50"] /= 1.25
    result["rows"][3]["device_us"]["p50"] *= 1.25  # fitted: its stages count, not the whole
    assert not judged(result)[1]


def test_too_little_was_measured(result: dict[str, Any]) -> None:
    assert any("at most 3" in line for line in judged({**result, "rows": result["rows"][:7]})[1])
    assert any("at most 3" in line for line in judged(result, [*FIT, "a 1"])[1])
    assert "b 1 was not measured" in judged(result, ["a 0", "b 1"])[1][0]
    few = judged(result, ["a 0"])[1]
    assert any(line == "4 numbers fitted to 3 stages" for line in few)


@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (1.5, 3)])
def test_the_command(
    result: dict[str, Any], factor: float, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What fails is not written."""
    result["rows"][8]["device_us"]["p50"] *= factor
    source, into = tmp_path / "gpu_scale.json", tmp_path / "fitted.json"
    source.write_text(json.dumps(result))
    before = json.dumps(vars_of(BEFORE))
    into.write_text(before)
    assert fit.main([str(source), "--fit", *FIT, "--write", "--into", str(into)]) == code
    assert (into.read_text() == before) == (code == 3)
    said = capsys.readouterr().out
    assert "baseline product" in said and ("FAILED a 8" in said) == (code == 3)
    if not code:
        assert Fitted.read(into) == replace(Fitted.read(into), source="gpu_scale.json at abc", fit=tuple(FIT))


def vars_of(fitted: Fitted) -> dict[str, Any]:
    return {name: getattr(fitted, name) for name in Fitted.__dataclass_fields__}
