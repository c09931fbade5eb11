"""The session on a real GPU, with the small Plan compiled for it: against NumPy, the emulator and itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frtc.errors import EnvironmentFault, FrtcError
from frtc.kernels.targets import load_targets
from frtc.runtime.driver import Driver
from frtc.runtime.emulator import Emulator
from frtc.runtime.plan_file import Plan, open_plan
from frtc.runtime.session import Session
from tests.runtime import small_plan

pytestmark = pytest.mark.gpu
BUILDS = ("Alloc", "Create", "Load", "Instantiate", "Register", "Capture", "Retain", "AddKernel", "SetParams")


class Counting:
    """The driver's bindings with every call counted."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self.bindings: Any = driver
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.bindings, name)
        if not name.startswith("cu"):
            return found

        def call(*arguments: Any) -> Any:
            self.calls[name] += 1
            return found(*arguments)

        return call


class OnGpu:
    """Device memory that the test owns."""

    def __init__(self, driver: Driver, shape: tuple[int, ...]) -> None:
        self.driver, self.nbytes = driver, 4 * int(np.prod(shape))
        with driver.current():
            self.address = driver.alloc(self.nbytes)
        self.shape = shape
        about = {"shape": shape, "typestr": "<f4", "data": (self.address, False), "strides": None, "version": 3}
        self.__cuda_array_interface__ = about

    def write(self, values: np.ndarray[Any, Any]) -> None:
        with self.driver.current():
            self.driver.call("cuMemcpyHtoD", self.address, values.ctypes.data, values.nbytes)
            self.driver.call("cuCtxSynchronize")  # the copy may still be under way, and no stream waits for it

    def read(self) -> np.ndarray[Any, Any]:
        values = np.empty(self.shape, np.float32)
        with self.driver.current():
            self.driver.call("cuMemcpyDtoH", values.ctypes.data, self.address, values.nbytes)
        return values


@pytest.fixture(scope="module")
def sm() -> int:
    try:
        driver = Driver()
    except EnvironmentFault as fault:
        pytest.skip(f"no CUDA device: {fault.what}")
    driver.release()
    return driver.device.sm


@pytest.fixture(scope="module")
def path(sm: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = [t.name for t in load_targets().values() if t.sm == sm]
    if not names:
        pytest.skip(f"no target for sm_{sm}")
    path = tmp_path_factory.mktemp("plan") / "small.plan"
    small_plan.write(path, small_plan.program(names[0]))
    return path


@pytest.fixture
def plan(path: Path) -> Plan:
    return open_plan(path)


@pytest.fixture
def session(plan: Plan) -> Iterator[Session]:
    with Session(plan) as session:
        session.warm()
        yield session


def run(session: Session | Emulator, seed: int) -> np.ndarray[Any, Any]:
    session.set("x", small_plan.inputs(seed)["x"])
    session.run()
    return session.get("y")


def test_against_numpy_and_the_emulator(session: Session, plan: Plan) -> None:
    emulator = Emulator(plan)
    for seed in range(5):
        found = run(session, seed)
        np.testing.assert_allclose(found, small_plan.answer(small_plan.inputs(seed)["x"]), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found, run(emulator, seed), rtol=1e-5, atol=1e-6)


def test_thousand_inferences(plan: Plan) -> None:
    """Nothing is allocated, loaded or built after warm(); results are those of fresh sessions, bit for bit."""
    api = Counting()
    with Session(plan, driver=Driver(api=api)) as session:
        session.warm()
        before = api.calls.copy()
        found = {seed: run(session, seed) for seed in range(1000)}
        made = api.calls - before
        assert made["cuGraphLaunch"] == 1000
        assert not [name for name in made if any(word in name for word in BUILDS)]
    for seed in (0, 123, 999):
        with Session(plan) as fresh:
            assert np.array_equal(run(fresh, seed), found[seed])


def test_stages_and_rounds(session: Session) -> None:
    expected = run(session, 1)
    session.run_stage("in")
    for k in range(small_plan.ROUNDS):
        session.run_stage("step", k)
    assert np.array_equal(session.get("y"), expected)
    session.run_stage("in")
    for k in (2, 0, 1):  # products in another order: only roundings differ
        session.run_stage("step", k)
    np.testing.assert_allclose(session.get("y"), expected, rtol=1e-5, atol=1e-6)
    session.run_stage("in")
    for _ in range(small_plan.ROUNDS):
        session.run_stage("step", 0)
    assert not np.allclose(session.get("y"), expected)


def test_bound_memory(session: Session) -> None:
    """Inputs and outputs in the caller's memory, before and after the graph is built, and back again."""
    expected = {seed: run(session, seed) for seed in (1, 2, 3)}
    driver = session.driver
    x, y = OnGpu(driver, (3, 8)), OnGpu(driver, (3, 4))
    session.bind("x", x)
    session.bind("y", y)
    for seed in (1, 2):
        x.write(small_plan.inputs(seed)["x"])
        session.replay()
        session.synchronize()
        assert np.array_equal(y.read(), expected[seed])
    other = OnGpu(driver, (3, 8))
    other.write(small_plan.inputs(3)["x"])
    session.bind("x", other)
    session.run()
    assert np.array_equal(y.read(), expected[3])
    session.unbind("x")
    session.unbind("y")
    assert np.array_equal(run(session, 1), expected[1])
    with driver.current():
        for array in (x, y, other):
            driver.call("cuMemFree", array.address)


def test_torch_tensors_and_stream(plan: Plan) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA")
    stream = torch.cuda.Stream()
    values = small_plan.inputs(4)["x"]
    with torch.cuda.stream(stream), Session(plan, stream=stream) as session:
        x, y = torch.from_numpy(values).to("cuda"), torch.zeros(3, 4, device="cuda")
        session.bind("x", x)
        session.bind("y", y)
        session.warm()
        session.replay()
        doubled = (y * 2).cpu().numpy()  # on the same stream: after the replay
    np.testing.assert_allclose(doubled, 2 * small_plan.answer(values), rtol=1e-5, atol=1e-6)


def test_two_sessions_share_the_context(plan: Plan) -> None:
    with Session(plan) as first, Session(plan) as second:
        expected = run(first, 1)
        run(second, 2)
        assert np.array_equal(first.get("y"), expected)
        assert np.array_equal(run(second, 1), expected)
    with Session(plan) as third:
        assert np.array_equal(run(third, 1), expected)


@pytest.mark.parametrize("registers", [True, False])
def test_weights_arrive(plan: Plan, monkeypatch: pytest.MonkeyPatch, registers: bool) -> None:
    """By registering the mapping, and through pinned buffers."""
    from frtc.runtime import upload

    if not registers:
        monkeypatch.setattr(Driver, "register", lambda self, address, nbytes: False)
        monkeypatch.setattr(upload, "PIECE", 256)
    with Session(plan) as session:
        found = np.empty(plan.program.weights_nbytes, np.uint8)
        with session.driver.current():
            session.driver.call("cuMemcpyDtoH", found.ctypes.data, session.addresses["weights"], found.nbytes)
    assert found.tobytes() == bytes(plan.weights)


def test_registering_works_here(plan: Plan) -> None:
    """The quick path of the upload is the one that is taken on a GPU with its own memory."""
    api = Counting()
    with Session(plan, driver=Driver(api=api)) as session:
        if session.driver.device.integrated:
            pytest.skip("one memory for CPU and GPU")
    assert api.calls["cuMemHostUnregister"] == 1


def test_states_start_at_zero(session: Session) -> None:
    run(session, 1)
    session.reset()
    state = np.ones(session.program.state_nbytes, np.uint8)
    with session.driver.current():
        session.driver.call("cuMemcpyDtoH", state.ctypes.data, session.addresses["state"], state.nbytes)
    assert not state.any()


def test_warm_runs_on_zeros_whatever_memory_held(plan: Plan) -> None:
    driver = Driver()
    with driver.current():
        held = [driver.alloc(1 << 20) for _ in range(64)]
        for at in held:
            driver.call("cuMemsetD8", at, 0xFF, 1 << 20)
        for at in held:
            driver.call("cuMemFree", at)
    with closing(Session(plan, driver=driver)) as session:
        session.warm()
        inputs = [session.addresses["slot" + name] for name in session.inputs]
        for at, slot in zip(inputs, session.inputs.values(), strict=True):
            held_now = np.ones(slot.nbytes, np.uint8)
            with driver.current():
                driver.call("cuMemcpyDtoH", held_now.ctypes.data, at, slot.nbytes)
            assert not held_now.any()


def test_timing(session: Session) -> None:
    timing = session.time(runs=50)
    middle = {name: spread.percentiles["p50"] for name, spread in timing.parts.items()}
    assert list(middle) == ["total", "replay", "input", "in", "step", "output"]
    assert all(0 < us < 1e5 for us in middle.values())
    assert middle["total"] > middle["in"] + middle["step"]
    print(timing.table())


def test_memory_is_what_was_planned(session: Session) -> None:
    memory = session.memory()
    assert memory.used - memory.planned <= 64 << 20
    print(memory)


def test_another_gpu_is_refused(tmp_path: Path, sm: int) -> None:
    other = "a100" if sm != 80 else "hopper"
    small_plan.write(tmp_path / "other.plan", small_plan.program(other))
    with pytest.raises(EnvironmentFault) as caught:
        Session(open_plan(tmp_path / "other.plan"))
    assert caught.value.code == "plan.target"


def test_damaged_weights_are_refused(path: Path, tmp_path: Path) -> None:
    plan, raw = open_plan(path), bytearray(path.read_bytes())
    raw[raw.index(bytes(plan.weights)) + 3] ^= 1
    (tmp_path / "damaged.plan").write_bytes(raw)
    with pytest.raises(FrtcError) as caught:
        Session(open_plan(tmp_path / "damaged.plan", verify=False))
    assert caught.value.code == "plan.damaged"
