"""The scale bench: weights that nobody trained are ordinary numbers; one configuration runs through the emulator."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench import gpu_scale
from bench.full_model import STATIC, Shape
from bench.gpu_bench import REHEARSAL
from bench.gpu_scale import Case, cases, compiled, measured
from frtc.kernels.dtypes import DTYPES
from frtc.runtime.plan import WEIGHTS
from frtc.tuning import trial
from frtc.tuning.trial import BLOCK, fill_weights, ordinary, plan_in_memory


@pytest.mark.parametrize(
    ("dtype", "least", "most"), [("f32", 2**-7, 2**-3), ("bf16", 2**-7, 2**-3), ("f16", 1, 1.5), ("e4m3", 0, 2)]
)
def test_ordinary_bytes_are_ordinary_numbers(dtype: str, least: float, most: float) -> None:
    values = np.abs(ordinary(1 << 16).view(DTYPES[dtype].numpy).astype(np.float64))
    assert least <= values.min() and values.max() < most and len(np.unique(values)) >= 32


def test_every_configuration_once() -> None:
    found = cases("pi05", "cuda")
    labels = [case.label for case in found]
    assert len(set(labels)) == len(labels) == 20
    assert {label.split()[1] for label in labels} == {"bf16", STATIC}
    for part in ("v1-p48-c50-s10", "v3-p48-c50-s10", "v2-p200-c50-s10", "v2-p48-c10-s10", "v2-p48-c50-s5"):
        assert f"{part} bf16" in labels and f"{part} {STATIC}" in labels


class Recorder:
    """A driver whose device memory is an array."""

    def __init__(self, memory: np.ndarray[Any, Any]) -> None:
        self.memory, self.calls = memory, list[str]()

    def current(self) -> Any:
        return nullcontext()

    def call(self, name: str, *arguments: Any) -> None:
        self.calls.append(name)
        if name == "cuMemcpyDtoD":
            to, source, count = arguments
            assert to >= source + count, "overlapping"
            self.memory[to : to + count] = self.memory[source : source + count].copy()
        elif name == "cuMemcpyHtoD":
            to, address, count = arguments
            self.memory[to : to + count] = np.ctypeslib.as_array(
                (np.ctypeslib.ctypes.c_ubyte * count).from_address(address)
            )


def test_weights_are_filled_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block again and again, up to the last byte and no further; then the exact values."""
    monkeypatch.setattr(trial, "BLOCK", 100)
    memory = np.full(1000, 7, np.uint8)
    memory[10:110] = ordinary(100)
    driver = Recorder(memory)
    program = SimpleNamespace(weights_nbytes=730)
    session: Any = SimpleNamespace(addresses={WEIGHTS: 10}, program=program, driver=driver)
    fill_weights(session, [(300, b"abc")])
    wanted = np.resize(ordinary(100), 730)
    wanted[300:303] = np.frombuffer(b"abc", np.uint8)
    assert np.array_equal(memory[10:740], wanted)
    assert (memory[:10] == 7).all() and (memory[740:] == 7).all()
    assert driver.calls[-1] == "cuCtxSynchronize"


@pytest.mark.parametrize("precision", ["bf16", STATIC])
def test_one_configuration(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled without a checkpoint, run with finite results; what it says of each stage is what the fit needs."""
    case = Case(Shape("pi05", 1, 12, 10, "tiny", precision), steps=3)
    made = compiled(case, "baseline", "cpu")
    assert made.exact and made.program.weights_nbytes < BLOCK
    plan = plan_in_memory(made.program, made.cubins, made.exact, True)
    entry = {w.offset: w for w in made.program.weights}
    for offset, data in made.exact:
        assert bytes(plan.weights[offset : offset + len(data)]) == data and len(data) == entry[offset].nbytes
    assert any(entry[offset].dtype == "i32" for offset, _ in made.exact)
    files = plan.files()
    assert {name: bytes(files[name]) for name in made.cubins} == dict(made.cubins)
    row = measured(case, made, "cpu", REHEARSAL)
    assert row["label"] == f"v1-p12-c10-s3 {precision}" and row["graph_nodes"] > 60
    assert {"vision", "prefix", "denoise"} <= row["stages"].keys()
    for stage in row["stages"].values():
        assert stage["p50_us"] > 0 and stage["launches"] == sum(n for _, n in stage["costs"].values())
        assert stage["expected_us"] > stage["roofline_us"] >= 0
    assert sum(s["launches"] for s in row["stages"].values()) == row["graph_nodes"]
    assert row["stages"]["denoise"]["rounds"] == 3
    assert row["expected_us"] == pytest.approx(sum(s["expected_us"] for s in row["stages"].values()))


@pytest.mark.gpu
def test_one_configuration_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on the device, with a block so small that it is repeated there; what lies there is read back."""
    monkeypatch.setattr(trial, "BLOCK", 1 << 16)
    seen: list[tuple[Any, np.ndarray[Any, Any]]] = []

    def filled(session: Any, exact: Any) -> None:
        fill_weights(session, exact)
        found = np.empty(session.program.weights_nbytes, np.uint8)
        with session.driver.current():
            session.driver.call("cuMemcpyDtoH", found.ctypes.data, session.addresses[WEIGHTS], found.nbytes)
        seen.append((exact, found))

    monkeypatch.setattr(gpu_scale, "fill_weights", filled)
    case = Case(Shape("pi05", 1, 12, 10, "tiny", STATIC), steps=3)
    row = measured(case, compiled(case, None, "cuda"), "cuda", REHEARSAL)
    ((exact, found),) = seen
    wanted = np.resize(ordinary(1 << 16), found.nbytes)
    for offset, data in exact:
        wanted[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
    assert np.array_equal(found, wanted)
    assert 0 < row["stages"]["denoise"]["p50_us"] < row["device_us"]["max"] * 2
