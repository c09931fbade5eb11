"""Kernels of one architecture do not act on a GPU before their self-test has passed there; on a null driver."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import frtc
from frtc import selftest
from frtc.errors import EnvironmentFault
from frtc.kernels.cubin import parameters_of
from frtc.policy import executor_for
from frtc.proven import unproven
from frtc.runtime import driver
from frtc.runtime.plan_file import Plan, open_plan
from frtc.selftest import Compared, Outcome
from tests.cli.face import call
from tests.conftest import Demo
from tests.runtime import small_plan
from tests.runtime.null_driver import NullApi

PASSED = Outcome((Compared("actions", False, 1e-3),), 2e-2)
FAILED = Outcome((Compared("actions", False, 1.0),), 2e-2)


def api_of(plan: Plan) -> NullApi:
    files = {name: bytes(data) for name, data in plan.files().items()}
    sizes = {k.symbol: parameters_of(files[k.cubin], k.symbol) for k in plan.program.kernels}
    return NullApi(sizes, sm=plan.program.target.sm)


def device(plan: Plan, monkeypatch: pytest.MonkeyPatch, folder: Path) -> NullApi:
    api = api_of(plan)
    monkeypatch.setattr(driver, "_bindings", lambda: api)
    monkeypatch.setenv("FRTC_CACHE", str(folder))
    return api


def of_another_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Plans at hand, taken for Plans of kernels that are not the default."""
    monkeypatch.setattr("frtc.proven.BASELINE", "another")


@pytest.mark.parametrize(
    ("target", "family", "refused"),
    [("hopper", "baseline", False), ("hopper", "baseline+sm_90a", False), ("hopper", "sm_90a", False),
     ("thor", "baseline", False), ("thor", "baseline+sm_110a", True), ("rtx5090", "sm_120a", True)],
)  # fmt: skip
def test_what_needs_a_proof(
    target: str, family: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernels' family and whether they have run; and nothing is uploaded before."""
    made = small_plan.program(target)
    assert bool(unproven(replace(made.target, family=family))) == refused
    small_plan.write(tmp_path / "a.plan", replace(made, target=replace(made.target, family=family)))
    plan = open_plan(tmp_path / "a.plan")
    api = device(plan, monkeypatch, tmp_path)
    executor_for(plan, 0).close()  # verify and bisect load it
    if not refused:
        executor_for(plan, 0, untested=False).close()
        return
    api.calls.clear()
    with pytest.raises(EnvironmentFault, match="has not passed its self-test") as said:
        executor_for(plan, 0, untested=False)
    assert said.value.code == "plan.untested" and "frtc compile" in said.value.hint  # it holds no vectors
    assert dict(said.value.rows)["vectors"].startswith("none")
    assert not api.calls["cuMemAlloc"] and not api.contexts


def test_a_passed_self_test_is_noted(
    demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused; verified; acts; refused again on another GPU, and here after a self-test that failed."""
    plan = open_plan(demo.plan)
    api = device(plan, monkeypatch, tmp_path)
    of_another_family(monkeypatch)
    outcomes: list[Outcome] = [PASSED, FAILED]
    monkeypatch.setattr(selftest, "check", lambda policy, progress: outcomes.pop(0))

    def require_refusal() -> None:
        said = call(capsys, "run", demo.plan)
        assert (said.code, said.error) == (5, "plan.untested") and "have not run on" in said.err
        assert f"`frtc verify {demo.plan} --self-test`" in said.err

    require_refusal()
    assert not list(tmp_path.iterdir())
    said = call(capsys, "verify", demo.plan, "--self-test", "--json").json()
    note = Path(said["noted"])
    assert note.is_relative_to(tmp_path) and [note] == [p for p in tmp_path.rglob("*") if p.is_file()]
    assert plan.plan_id in note.name and json.loads(note.read_text())["worst"] == 1e-3
    frtc.load(demo.plan).close()
    api.uuid = bytes(16)
    with pytest.raises(EnvironmentFault):
        frtc.load(demo.plan)
    frtc.load(demo.plan, untested=True).close()
    api.uuid = bytes(range(16))
    frtc.load(demo.plan).close()
    assert call(capsys, "verify", demo.plan).code == 3
    require_refusal()


def test_another_program_is_not_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The note is about one plan_id."""
    small_plan.write(tmp_path / "a.plan", small_plan.program("thor"))
    first = open_plan(tmp_path / "a.plan")
    of_another_family(monkeypatch)
    device(first, monkeypatch, tmp_path / "cache")
    made = small_plan.program("thor")
    other = replace(made, target=replace(made.target, min_driver=made.target.min_driver + 1))
    small_plan.write(tmp_path / "b.plan", other)
    second = open_plan(tmp_path / "b.plan")
    monkeypatch.setattr("frtc.proven.Path.is_file", lambda self: first.plan_id in self.name)
    executor_for(first, 0, untested=False).close()
    with pytest.raises(EnvironmentFault):
        executor_for(second, 0, untested=False)


def test_a_folder_that_cannot_be_written_to(
    demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    device(open_plan(demo.plan), monkeypatch, tmp_path / "file")
    passed: Any = lambda policy, progress: PASSED  # noqa: E731
    monkeypatch.setattr(selftest, "check", passed)
    said = call(capsys, "verify", demo.plan)
    assert said.code == 0 and "could not be noted" in said.out and "FRTC_CACHE" in said.out


def test_the_emulator_needs_no_proof(demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRTC_CACHE", str(tmp_path))
    frtc.load(demo.plan, device="cpu").close()
    assert not list(tmp_path.iterdir())
