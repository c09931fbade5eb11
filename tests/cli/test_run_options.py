"""Options of `run`, files with arrays, and a policy's misuse: what is wrong is said before anything runs."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import frtc
from frtc import observation
from frtc.errors import EnvironmentFault, FrtcError
from frtc.kernels.cubin import parameters_of, resources_of
from frtc.kernels.smxx_frames import CUBIN
from frtc.policy import Policy
from frtc.runtime import driver
from frtc.runtime.plan_file import open_plan
from tests.cli.face import call
from tests.conftest import Demo
from tests.runtime.timed_driver import TimedApi

Capture = pytest.CaptureFixture[str]


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("it ran")


@pytest.mark.parametrize("option", ["--actions", "--report"])
@pytest.mark.parametrize("place", ["no/where/a.npy", "folder", "pipe"])
def test_a_place_for_a_file_is_known_before_the_run(
    place: str, option: str, demo: Demo, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Policy, "load", refuse)
    (tmp_path / "folder").mkdir()
    (tmp_path / "pipe").symlink_to("/dev/null")
    said = call(capsys, "run", demo.plan, option, tmp_path / place)
    assert (said.code, said.error) == (2, "output.folder"), said.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "pipe"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--report", "PLAN"), "--report PLAN would replace the Plan"),
        (("--actions", "PLAN"), "--actions PLAN would replace the Plan"),
        (("--actions", "LINK"), "--actions LINK would replace the Plan"),
        (("--report", "new", "--actions", "sub/../new"), "--report new would replace --actions"),
        (("--state", "old", "--actions", "old"), "--actions old would replace --state"),
        (("--image", "base=old", "--report", "old"), "--report old would replace --image"),
    ],
)
def test_no_output_replaces_an_input_or_the_other(
    words: tuple[str, ...], said: str, demo: Demo, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Policy, "load", refuse)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "LINK").symlink_to(demo.plan)
    (tmp_path / "old").write_text("mine")
    (tmp_path / "sub").mkdir()
    before = demo.plan.stat()
    found = call(capsys, "run", demo.plan, *(word.replace("PLAN", str(demo.plan)) for word in words))
    assert (found.code, found.error) == (2, "output.exists") and said.replace("PLAN", str(demo.plan)) in found.err
    assert demo.plan.stat() == before and (tmp_path / "old").read_text() == "mine" and not Path("new").exists()


@pytest.mark.parametrize("option", ["--actions", "--report"])
@pytest.mark.parametrize("place", ["/proc/x.html", "n" * 300])
def test_a_folder_that_takes_no_file_is_known_before_the_run(
    place: str, option: str, demo: Demo, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Policy, "load", refuse)
    monkeypatch.chdir(tmp_path)
    said = call(capsys, "run", demo.plan, option, place)
    assert (said.code, said.error) == (4, "output.write"), said.err
    assert not list(tmp_path.iterdir())


def test_actions_under_their_name_and_nothing_half_written(
    demo: Demo, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("run", demo.plan, "--device", "cpu", "--actions", tmp_path / "actions")
    (tmp_path / "actions.tmp").write_text("the user's own")
    assert call(capsys, *words).code == 0
    assert (tmp_path / "actions.tmp").read_text() == "the user's own"
    written = (tmp_path / "actions").read_bytes()
    assert np.load(tmp_path / "actions").shape == (10, 14)

    def full(file: object, _: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    said = call(capsys, *words)
    assert (said.code, said.error) == (4, "output.write") and "No space left" in said.err
    assert (tmp_path / "actions").read_bytes() == written and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("option", ["--profile", "--report=page.html"])
def test_the_emulator_has_no_launches_to_time(
    option: str, demo: Demo, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Policy, "load", refuse)
    said = call(capsys, "run", demo.plan, "--device", "cpu", option)
    assert (said.code, said.error) == (5, "env.no_gpu") and "without --profile and --report" in said.err
    assert not Path("page.html").exists()


def test_without_a_gpu_the_emulator_is_offered_only_to_who_times_no_launches(
    demo: Demo, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*_: object, **__: object) -> None:
        raise EnvironmentFault("env.no_gpu", "there is no GPU", hint="--device cpu emulates the Plan")

    monkeypatch.setattr(Policy, "load", absent)
    hints = [call(capsys, "run", demo.plan, *words).err for words in ((), ("--profile",))]
    assert "hint  --device cpu emulates the Plan" in hints[0]
    assert "hint  time launches on the Plan's GPU; `frtc run PLAN --device cpu` without --profile" in hints[1]


def test_profile_and_report(demo: Demo, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a driver where attention takes 40 us and everything else 2."""
    plan = open_plan(demo.plan)
    images = [bytes(data) for name, data in plan.files().items() if name.startswith(("cubin.", CUBIN))]
    sizes = {symbol: parameters_of(image, symbol) for image in images for symbol in resources_of(image)}
    us = defaultdict(lambda: 2.0, {symbol: 40.0 for symbol in sizes if "attention" in symbol})
    monkeypatch.setattr(driver, "_bindings", lambda: TimedApi(sizes, us, sm=plan.program.target.sm))
    page = tmp_path / "page.html"
    page.write_text("older")
    words = ("run", demo.plan, "--runs", "2", "--report", page)
    said = call(capsys, *words)
    assert said.code == 0, said.err
    lines = said.out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("launches by time in the graph")) + 2
    assert " attention " in lines[first] and "40.0" in lines[first]
    launches = [
        (s.name, c, k) for s in plan.program.stages for c, x in enumerate(s.calls) for k in range(len(x.launches))
    ]
    text = page.read_text()
    assert text.startswith("<!DOCTYPE html>") and "Null GPU" in text
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
    found = json.loads(call(capsys, "run", demo.plan, "--runs", "2", "--profile", "--json").out)["profile"]
    assert {(row["stage"], row["call"], row["launch"]) for row in found["launches"]} == set(launches)
    assert found["sum_us"] == pytest.approx(found["replay_us"], rel=0.01)
    assert found["classes"]["attention"]["in_graph_us"] == pytest.approx(
        sum(40 * row["count"] for row in found["launches"] if row["op"] == "attention"), rel=0.01
    )


@pytest.mark.parametrize(
    ("option", "values", "limits"),
    [
        ("--budget", ("nan", "-1", "inf", "x"), "from 0 to 1000000000"),
        ("--rate", ("nan", "-1", "inf", "0"), "from 0.001 to 1000000"),
        ("--idle", ("nan", "-1", "inf"), "from 0 to 86400"),
        ("--runs", ("0", "-1", "1.5", "9" * 5000), "from 1 to 1000000"),
    ],
)
def test_numbers_of_run(option: str, values: tuple[str, ...], limits: str, capsys: Capture) -> None:
    for value in values:
        said = call(capsys, "run", "nowhere.plan", f"{option}={value}")
        assert (said.code, said.error) == (2, "usage.option"), said.err
        assert f"argument {option}: " in said.err and limits in said.err


def test_a_size_beyond_its_bound(capsys: Capture) -> None:
    said = call(capsys, "check", "nowhere", "--prompt-tokens", "99999999")
    assert said.code == 2 and "--prompt-tokens: '99999999' is not a whole number from 1 to 1000000" in said.err


def test_data_that_is_no_archive_of_numbers(demo: Demo, tmp_path: Path, capsys: Capture) -> None:
    np.save(tmp_path / "one.npy", np.zeros((4, 14)))
    np.savez(tmp_path / "objects.npz", state=np.array([[None] * 14]))
    np.savez(tmp_path / "words.npz", state=np.array([["x"] * 14]))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "words.npz").read_bytes()[:100])
    (tmp_path / "empty.npz").touch()
    (tmp_path / "text.npz").write_text("state")
    for path in tmp_path.iterdir():
        said = call(capsys, "check", demo.checkpoint, "--data", path)
        assert (said.code, said.error) == (4, "input.file"), f"{path}: {said.err}"
        assert "allow_pickle" not in said.err


def test_a_state_that_is_no_array(demo: Demo, tmp_path: Path, capsys: Capture) -> None:
    np.savez(tmp_path / "several.npz", np.zeros(14))
    np.save(tmp_path / "objects.npy", np.array([None] * 14))
    (tmp_path / "empty.npy").touch()
    for path in tmp_path.iterdir():
        said = call(capsys, "run", demo.plan, "--device", "cpu", "--state", path)
        assert (said.code, said.error) == (4, "input.file"), f"{path}: {said.err}"
        assert "allow_pickle" not in said.err


@pytest.mark.parametrize("path", [None, 3, "", b"x.plan", "a\0b", ["x.plan"]])
def test_paths_that_are_none(demo: Demo, path: Any) -> None:
    for use in (
        lambda: frtc.load(path, device="cpu"),
        lambda: frtc.compile(path, "thor", "x.plan"),
        lambda: frtc.compile(demo.checkpoint, "thor", path),
    ):
        with pytest.raises(FrtcError) as caught:
            use()
        assert (caught.value.code, repr(path) in caught.value.what) == ("option.path", True)


def test_a_plan_is_a_regular_file(tmp_path: Path) -> None:
    """A pipe that nobody writes into is not waited for."""
    os.mkfifo(tmp_path / "pipe")
    for path, what in ((tmp_path, "a folder"), (tmp_path / "pipe", "no regular file"), ("\ud800", "not allowed")):
        with pytest.raises(FrtcError, match=what) as caught:
            frtc.load(path, device="cpu")
        assert caught.value.code == "plan.missing"


P50S = ("NaN", "1e999", "0", "true", '"9"')


@pytest.mark.parametrize("text", ["[" * 100_000, *(f'{{"host_us": {{"total": {{"p50": {p50}}}}}}}' for p50 in P50S)])
def test_a_baseline_that_nothing_could_exceed(text: str, demo: Demo, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "b.json").write_text(text)
    said = call(capsys, "run", demo.plan, "--device", "cpu", "--baseline", tmp_path / "b.json")
    assert (said.code, said.error) == (4, "run.baseline_file"), said.err


@pytest.mark.parametrize(
    "device", ["gpu", "cuda:x", "cuda:-1", "cuda:²", "cuda:" + "9" * 5000, "", None, 1.0, -1, True]
)
def test_devices_that_are_none(demo: Demo, device: Any) -> None:
    with pytest.raises(FrtcError) as caught:
        frtc.load(demo.plan, device=device)
    assert (caught.value.code, repr(device) in caught.value.what) == ("option.device", True)


def test_an_inference_in_the_middle_of_another(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before it touches the inputs; the one under way, and the next one, are as they would be."""
    with frtc.load(demo.plan, device="cpu") as policy:
        seen = observation.seeded(policy.steps)
        other = {**seen, "state": np.zeros_like(seen["state"]), "prompt": "another"}
        wanted, draw_ahead = policy.infer(seen, draw=0).actions, policy.steps.draw_ahead

        def another() -> None:
            draw_ahead()
            with pytest.raises(FrtcError) as caught:
                policy.infer(other)
            assert caught.value.code == "session.busy"

        monkeypatch.setattr(policy.steps, "draw_ahead", another)
        assert np.array_equal(policy.infer(seen, draw=0).actions, wanted)
        monkeypatch.setattr(policy.steps, "draw_ahead", draw_ahead)
        with pytest.raises(FrtcError, match="not a mapping"):
            policy.infer(3)  # type: ignore[arg-type]
        assert np.array_equal(policy.infer(seen, draw=0).actions, wanted)


def test_misuse_of_a_policy(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    with frtc.load(demo.plan, device="cpu") as policy:
        monkeypatch.setattr(policy.executor, "run", refuse)
        seen = observation.seeded(policy.steps)
        noise = np.zeros(policy.steps.inputs["noise"].shape, np.float32)
        for bad in (np.nan, np.inf):
            noise[-1, -1] = bad
            with pytest.raises(FrtcError) as caught:
                policy.infer({**seen, "noise": noise})
            assert (caught.value.code, "NaN" in caught.value.what) == ("input.noise", True)
        with pytest.raises(FrtcError) as caught:
            policy.infer(3)  # type: ignore[arg-type]
        assert caught.value.code == "input.observation" and "state" in caught.value.hint
    for use in (lambda: policy.infer(seen), policy.warm, policy.reset):
        with pytest.raises(FrtcError) as caught:
            use()
        assert caught.value.code == "session.closed" and caught.value.hint
