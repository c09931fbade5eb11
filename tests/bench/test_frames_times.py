"""Times from raw frames, rehearsed: by the emulator, and on a driver that does nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import frames_times
from frtc.kernels.cubin import parameters_of, resources_of
from frtc.kernels.smxx_frames import CUBIN
from frtc.runtime import driver
from frtc.runtime.emulator import Emulator
from frtc.runtime.plan_file import Plan, open_plan
from tests.runtime.null_driver import NullApi


@pytest.fixture
def plan(tiny_plan: Path) -> Plan:
    return open_plan(tiny_plan)


def test_by_the_emulator(plan: Plan) -> None:
    with Emulator(plan) as executor:
        found = frames_times.from_frames(plan, executor, 1)
    assert list(found) == ["total", "finish"] and not frames_times.bars_of(found, 0.0)


def test_on_a_driver_that_does_nothing(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [bytes(data) for name, data in plan.files().items() if name.startswith(("cubin.", CUBIN))]
    api = NullApi({symbol: parameters_of(image, symbol) for image in images for symbol in resources_of(image)})
    monkeypatch.setattr(driver, "_bindings", lambda: api)
    places: dict[str, Any] = {"pageable": lambda frame: frame, "mirrored": lambda frame: frame[:, ::-1]}
    monkeypatch.setattr(frames_times, "kinds", lambda: places)
    rows = frames_times.of_plan(plan, (48, 64), 3)
    assert [row["frames"] for row in rows] == ["pageable", "mirrored", "resized by the host"]
    assert rows[0]["kernel_us"] == pytest.approx(1 / frames_times.CHAIN) and rows[0]["size"] == "2 x 48 x 64"
    for row in rows:
        parts = sum(row[part]["min"] for part in ("copy", "launch", "wait", "finish"))
        assert 0 < parts <= row["total"]["max"] + 0.01
    assert rows[2]["copy"]["max"] == 0.0 and "calls_us" not in rows[2]
    calls = {name: at["calls"] for name, at in rows[0]["calls_us"].items()}
    once = ("cuCtxPushCurrent", "cuGraphLaunch", "cuStreamSynchronize", "cuCtxPopCurrent")
    assert calls == dict.fromkeys(once, 1) | {"cuMemcpyHtoDAsync": 2}  # pixels of two cameras
    assert rows[0]["copied_by_calls"]["launch"]["min"] > 0 and api.calls["cuMemcpyDtoHAsync"] >= 3
    lines = frames_times.shown(rows).splitlines()
    assert len(lines) >= 4 and "launch p99" in lines[0] and "2 x 48 x 64" in lines[-1]


@pytest.mark.parametrize(("total", "launch", "held"), [(6500, 90, (True, True)), (6700, 120, (False, False))])
def test_bars(total: float, launch: float, held: tuple[bool, bool]) -> None:
    frames = {"total": {"p50": total}, "launch": {"p99": launch}}
    assert tuple(frames_times.bars_of(frames, 6000.0).values()) == held


def test_a_picture_is_noise() -> None:
    assert np.unique(frames_times.picture((40, 40), 0)).size > 200
