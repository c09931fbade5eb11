"""The session on a null driver: graph structure, addresses, order, and that nothing is built after warm()."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cu

from frtc.errors import EnvironmentFault, FrtcError, UsageError
from frtc.kernels.cubin import parameters_of
from frtc.runtime import driver as driver_module
from frtc.runtime import upload
from frtc.runtime.driver import Driver, DriverFault
from frtc.runtime.emulator import Emulator
from frtc.runtime.plan import Call, Program
from frtc.runtime.plan_file import Plan, open_plan
from frtc.runtime.session import TURNS, Session
from tests.runtime import small_plan
from tests.runtime.null_driver import Graph, Kernel, NullApi

STEADY = {"cuCtxPushCurrent", "cuCtxPopCurrent", "cuMemcpyHtoDAsync", "cuGraphLaunch", "cuMemcpyDtoHAsync"}
STEADY |= {"cuStreamSynchronize"}
LAUNCHES = {"cuGraphLaunch", "cuLaunchKernel", "cuLaunchKernelEx"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "small.plan"
    small_plan.write(path)
    return path


@pytest.fixture
def plan(path: Path) -> Plan:
    return open_plan(path)


def null_api(plan: Plan, **about: Any) -> NullApi:
    image = bytes(plan.files()["cubin.000"])
    return NullApi({name: parameters_of(image, name) for name in small_plan.KERNELS}, **about)


@pytest.fixture
def api(plan: Plan) -> NullApi:
    return null_api(plan)


@pytest.fixture
def session(plan: Plan, api: NullApi) -> Session:
    return Session(plan, driver=Driver(api=api))


def whole(session: Session) -> list[tuple[int, list[int], str, Any]]:
    """Nodes of the inference's graph; handles replaced by positions."""
    session.warm()
    return numbered(session.graphs[""].executable)


def numbered(graph: Graph) -> list[tuple[int, list[int], str, Any]]:
    at = {node[0]: i for i, node in enumerate(graph.nodes)}
    return [(at[handle], [at[a] for a in after], kind, what) for handle, after, kind, what in graph.nodes]


# ---- the graph -------------------------------------------------------------------------------------------------------


def test_structure(session: Session) -> None:
    """in: linear -> silu (one call, two launches) beside linear, then add; each step waits for all before it."""
    nodes = whole(session)
    linear, silu, scale, add = small_plan.KERNELS
    expected = [(linear, []), (silu, [0]), (linear, []), (add, [1, 2])]
    for k in range(small_plan.ROUNDS):
        expected += [(scale, [3 + 2 * k]), (linear, [4 + 2 * k])]
    assert [(what.symbol, after) for _, after, _, what in nodes] == expected
    for *_, kernel in nodes:
        assert (kernel.grid, kernel.block, kernel.smem) == ((1, 1, 1), (64, 1, 1), 0)


def test_addresses(session: Session) -> None:
    """Operands, null pointers, numbers, and tables that step from round to round."""
    at = session.addresses
    kernels: list[Kernel] = [what for *_, what in whole(session)]
    weights = {w.name: at["weights"] + w.offset for w in session.program.weights}
    x, y, arena, h = at["slotx"], at["sloty"], at["arena"], at["state"] + 256
    assert kernels[0].arguments == [x, weights["w0"], weights["b"], arena, 3, 10, 8, 8, 8, 12]
    assert kernels[1].arguments == [arena, 3, 10, 12]
    assert kernels[2].arguments == [x, weights["w0"], 0, arena + 256, 3, 10, 8, 8, 8, 12]
    for k in range(small_plan.ROUNDS):
        assert kernels[4 + 2 * k].arguments == [h, weights["table"] + k * 48, h, 3, 10, 12]
        assert kernels[5 + 2 * k].arguments == [h, weights["w1"], 0, y, 3, 4, 10, 12, 12, 4]


def test_single_stage_and_round(session: Session, api: NullApi) -> None:
    """A round changes the nodes that read a table, and only those."""
    session.run_stage("step", 0)
    nodes = session.graphs["step"].executable.nodes
    before = api.calls["cuGraphExecKernelNodeSetParams"]
    session.run_stage("step", 2)
    assert api.calls["cuGraphExecKernelNodeSetParams"] == before + 1
    table = next(w.offset for w in session.program.weights if w.name == "table")
    assert api.kernels[nodes[0][0]].arguments[1] == session.addresses["weights"] + table + 2 * 48
    session.run_stage("step", 2)
    assert api.calls["cuGraphExecKernelNodeSetParams"] == before + 1
    with pytest.raises(UsageError, match="no round 3"):
        session.run_stage("step", 3)


def test_timed_graph_has_events_between_steps(session: Session, api: NullApi) -> None:
    timing = session.time(runs=2)
    assert list(timing.parts) == ["total", "replay", "input", "in", "step", "output"]
    assert timing.parts["step"].max == pytest.approx(3.0)  # three rounds of 1 us each
    nodes = numbered(session.graphs["\0timed"].executable)
    assert [kind for _, _, kind, _ in nodes].count("event") == 1 + 1 + small_plan.ROUNDS
    assert nodes[0][1:3] == ([], "event") and nodes[5][1:3] == ([4], "event")
    assert nodes[1][1] == [0] and nodes[6][1] == [5]


# ---- steady state ----------------------------------------------------------------------------------------------------


def test_nothing_is_built_after_warm(session: Session, api: NullApi) -> None:
    session.warm(stages=True)
    before = api.calls.copy()
    for i in range(1000):
        session.set("x", small_plan.inputs(i)["x"])
        session.run()
        session.get("y")
    session.run_stage("in")
    session.run_stage("step")
    session.replay()
    session.synchronize()
    made = api.calls - before
    assert set(made) == STEADY
    assert made["cuGraphLaunch"] == 1003 and made["cuMemcpyHtoDAsync"] == made["cuMemcpyDtoHAsync"] == 1002


def test_inputs_reach_the_device_and_outputs_come_back(session: Session, api: NullApi) -> None:
    x = small_plan.inputs()["x"]
    session.set("x", x)
    session.run()
    assert bytes(api.device(session.addresses["slotx"], x.nbytes)) == x.tobytes()
    y = np.arange(12, dtype=np.float32).reshape(3, 4)
    api.device(session.addresses["sloty"], y.nbytes)[:] = y.tobytes()
    session.run()
    assert np.array_equal(session.get("y"), y)


def test_states_are_zero_at_first_after_warm_and_after_reset(session: Session, api: NullApi) -> None:
    for act in (lambda: None, session.warm, session.reset):
        act()
        state = api.device(session.addresses["state"], 512)
        assert bytes(state) == bytes(512)
        state[:] = b"\1" * 512


def test_inputs_are_zero_at_first(plan: Plan, api: NullApi) -> None:
    session = Session(plan, driver=Driver(api=api))
    assert session.inputs
    for slot in session.inputs.values():
        assert bytes(api.device(session.addresses["slot" + slot.name], slot.nbytes)) == bytes(slot.nbytes)


def test_memory_report(session: Session) -> None:
    memory = session.memory()
    assert memory.planned == memory.used == 1280 + 512 + 512 + 512


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["registered", "refused", "integrated"])
def test_upload(plan: Plan, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """One copy from the mapping where it can be registered, else pieces through pinned buffers."""
    monkeypatch.setattr(upload, "PIECE", 64)
    api = null_api(plan, integrated=case == "integrated")
    if case == "refused":
        api.fail["cuMemHostRegister"] = cu.CUresult.CUDA_ERROR_NOT_SUPPORTED
    session = Session(plan, driver=Driver(api=api))
    assert bytes(api.device(session.addresses["weights"], 1280)) == bytes(plan.weights)
    assert api.calls["cuMemcpyHtoDAsync"] == (1 if case == "registered" else 1280 // 64)
    assert api.calls["cuMemHostRegister"] == (case != "integrated")
    assert api.calls["cuMemHostUnregister"] == (case == "registered")
    assert len(api.pinned) == 1  # the slots


def test_damaged_weights_are_never_launched(path: Path, tmp_path: Path) -> None:
    raw = bytearray(path.read_bytes())
    plan = open_plan(path)
    raw[raw.index(bytes(plan.weights)) + 3] ^= 1
    damaged = tmp_path / "damaged.plan"
    damaged.write_bytes(raw)
    opened = open_plan(damaged, verify=False)
    api = null_api(opened)
    with pytest.raises(FrtcError, match="w:w0") as caught:
        Session(opened, driver=Driver(api=api))
    assert caught.value.code == "plan.damaged"
    assert not LAUNCHES & set(api.calls) and not api.live and not api.contexts


# ---- the caller's memory and stream ----------------------------------------------------------------------------------


class OnGpu:
    """An array that says it lies on GPU 0, through the array interface."""

    def __init__(self, address: int, shape: tuple[int, ...], typestr: str = "<f4", strides: Any = None) -> None:
        about = {"shape": shape, "typestr": typestr, "data": (address, False), "strides": strides, "version": 3}
        self.__cuda_array_interface__ = about


class DlPack:
    """A NumPy array whose DLPack capsule says that it lies on a GPU."""

    def __init__(self, array: np.ndarray[Any, Any], device: tuple[int, int] = (2, 0)) -> None:
        self.array, self.device = array, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, stream: int | None = None) -> Any:
        assert stream == -1
        return self.array.__dlpack__()


def test_bound_slots(session: Session, api: NullApi) -> None:
    """Nodes follow the slot; bound slots are not copied; binding the same memory again changes nothing."""
    session.warm()
    session.bind("x", OnGpu(0xABC000, (3, 8)))
    concerned = api.calls["cuGraphExecKernelNodeSetParams"]
    assert concerned == 2  # the two linears of stage "in"
    kernels = [api.kernels[handle] for handle, *_ in session.graphs[""].executable.nodes]
    assert [k.arguments[0] for k in kernels if k.symbol == "small_linear"][:2] == [0xABC000, 0xABC000]
    before = api.calls.copy()
    for _ in range(5):
        session.bind("x", OnGpu(0xABC000, (3, 8)))
        session.run()
    assert set(api.calls - before) == STEADY - {"cuMemcpyHtoDAsync"}
    with pytest.raises(UsageError, match="slot x lives in memory of the caller"):
        session.set("x", small_plan.inputs()["x"])
    session.unbind("x")
    assert api.calls["cuGraphExecKernelNodeSetParams"] == 2 * concerned
    session.set("x", small_plan.inputs()["x"])


def test_bound_results_lie_apart(session: Session) -> None:
    """x has 96 bytes, y 48."""
    session.bind("x", OnGpu(0xABC000, (3, 8)))
    with pytest.raises(UsageError, match="slots y and x share memory"):
        session.bind("y", OnGpu(0xABC000 + 80, (3, 4)))
    session.bind("y", OnGpu(0xABC000 + 96, (3, 4)))
    session.bind("y", OnGpu(0xABC000 + 112, (3, 4)))  # where it was itself does not count
    with pytest.raises(UsageError, match="slots x and y share memory"):
        session.bind("x", OnGpu(0xABC000 + 32, (3, 8)))
    session.unbind("x")
    session.bind("y", OnGpu(0xABC000, (3, 4)))


def test_bound_before_the_graph_is_built(session: Session, api: NullApi) -> None:
    session.bind("y", OnGpu(0xABC000, (3, 4)))
    nodes = whole(session)
    assert nodes[-1][3].arguments[3] == 0xABC000 and api.calls["cuGraphExecKernelNodeSetParams"] == 0


@pytest.mark.parametrize(
    "wrong", [{"data": None}, {"typestr": "zz"}, {"strides": (4,)}, {"shape": 3}, {"data": ("x", 0)}],
    ids=str,
)  # fmt: skip
def test_interfaces_that_say_nonsense(wrong: dict[str, Any], session: Session) -> None:
    array = OnGpu(0xABC000, (3, 8))
    array.__cuda_array_interface__ |= wrong
    with pytest.raises(UsageError, match="the array says nonsense of itself") as caught:
        session.bind("x", array)
    assert caught.value.code == "slot.array"


def test_dlpack(session: Session) -> None:
    memory = np.zeros(64, np.uint8)
    at = -memory.ctypes.data % 16
    array = memory[at : at + 48].view(np.float32).reshape(3, 4)
    session.bind("y", DlPack(array))
    assert session.addresses["sloty"] == array.ctypes.data


@pytest.mark.parametrize(
    ("array", "what"),
    [
        (OnGpu(0xABC000, (8, 3)), r"f32\[3, 8\] on GPU 0, the array is f32\[8, 3\]"),
        (OnGpu(0xABC000, (3, 8), "<f8"), "the array is f64"),
        (OnGpu(0xABC004, (3, 8)), "at 0xabc004"),
        (OnGpu(0, (3, 8)), "at 0x0"),
        (OnGpu(0xABC000, (3, 8), strides=(64, 4)), r"strides \[16, 1\]"),
        (np.zeros((3, 8), np.float32), "not in GPU memory"),
        (DlPack(np.zeros((3, 8), np.float32), (2, 1)), "on GPU 1"),
        ([1.0], "list is no array on the GPU"),
    ],
    ids=["shape", "type", "unaligned", "null", "strided", "host", "other GPU", "no array"],
)
def test_arrays_that_do_not_fit(session: Session, array: Any, what: str) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        session.bind("x", array)
    assert caught.value.code == "slot.array" and not session.bound


def test_slots_are_known(session: Session) -> None:
    with pytest.raises(UsageError, match="no slot 'z'"):
        session.bind("z", OnGpu(0xABC000, (3, 8)))


@pytest.mark.parametrize("kind", ["number", "torch", "protocol"])
def test_callers_stream(plan: Plan, api: NullApi, kind: str) -> None:
    members = {"torch": {"cuda_stream": 0x77}, "protocol": {"__cuda_stream__": lambda self: (0, 0x77)}}
    stream = 0x77 if kind == "number" else type("Stream", (), members[kind])()
    with Session(plan, stream=stream, driver=Driver(api=api)) as session:
        session.run()
    assert {call[2] for call in api.log if call[0] == "cuGraphLaunch"} == {0x77}
    assert not {"cuStreamCreate", "cuStreamDestroy"} & set(api.calls)


# ---- giving back, and faults -----------------------------------------------------------------------------------------


def test_two_plans_and_close(plan: Plan, api: NullApi) -> None:
    first, second = Session(plan, driver=Driver(api=api)), Session(plan, driver=Driver(api=api))
    assert api.contexts == 2 and len(api.live) == 8
    for session in (first, second):
        session.warm(stages=True)
        session.time(1)
    first.close()
    first.close()
    assert api.contexts == 1 and len(api.live) == 4
    second.run()
    second.close()
    assert not api.live and not api.pinned and not api.contexts
    for make, end in (("Graph", "Destroy"), ("GraphInstantiate", "GraphExecDestroy"), ("EventCreate", "EventDestroy")):
        makes = api.calls[f"cu{make}Create" if make == "Graph" else f"cu{make}"]
        assert makes == api.calls[f"cu{make}{end}" if make == "Graph" else f"cu{end}"] > 0
    with pytest.raises(UsageError, match="the session is closed"):
        second.run()


@pytest.mark.parametrize("kind", ["session", "emulator"])
def test_a_closed_one_touches_nothing(plan: Plan, api: NullApi, kind: str) -> None:
    """Its memory may be another session's by now."""
    made = Session(plan, driver=Driver(api=api)) if kind == "session" else Emulator(plan)
    x, y = small_plan.inputs()["x"], plan.program.stages[1].calls[1].results[0]
    made.run()
    made.close()
    asked = api.calls.copy()
    uses: list[Callable[[], object]] = [
        made.run, made.reset, made.outputs_here, lambda: made.set("x", x), lambda: made.get("y"), lambda: made.peek(y),
        lambda: made.inputs_here({"x": x}), lambda: made.run_stage("in"), lambda: made.time(1),
    ]  # fmt: skip
    if isinstance(made, Session):
        uses += [made.warm, made.replay, made.synchronize, made.memory]
    for use in uses:
        with pytest.raises(UsageError, match="the session is closed"):
            use()
    assert api.calls == asked


def test_an_interrupted_run_waits_for_the_device(session: Session, api: NullApi) -> None:
    """It may still read inputs where the next ones are written."""

    def meanwhile() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.run(meanwhile)
    assert [call[0] for call in api.log if not call[0].startswith("cuCtx")][-1] == "cuStreamSynchronize"


FAULTS = ["cuMemAlloc", "cuMemHostAlloc", "cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute"]


@pytest.mark.parametrize("call", FAULTS)
def test_failed_opening_gives_all_back(plan: Plan, api: NullApi, call: str) -> None:
    api.fail[call] = cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(EnvironmentFault) as caught:
        Session(plan, driver=Driver(api=api))
    assert caught.value.code == "env.memory" and caught.value.exit_code == 5
    assert not api.live and not api.pinned and not api.contexts


@pytest.mark.parametrize("call", ["cuGraphAddKernelNode", "cuGraphInstantiate"])
def test_a_graph_that_cannot_be_built(session: Session, api: NullApi, call: str) -> None:
    api.fail[call] = cu.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DriverFault, match=f"{call} failed: CUDA_ERROR_INVALID_VALUE"):
        session.warm()
    assert api.calls["cuGraphDestroy"] == 1 and not session.graphs


def test_a_kernel_fault_is_a_bug(session: Session, api: NullApi) -> None:
    session.warm()
    api.fail = {name: cu.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS for name in ("cuStreamSynchronize", "cuMemFree")}
    with pytest.raises(DriverFault, match="cuStreamSynchronize failed: CUDA_ERROR_ILLEGAL_ADDRESS") as caught:
        session.run()
    assert caught.value.exit_code == 1
    session.close()
    assert not api.contexts


def test_kernels_that_the_driver_refuses(plan: Plan, api: NullApi) -> None:
    api.fail["cuModuleLoadData"] = cu.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU
    with pytest.raises(EnvironmentFault, match="does not load the Plan's kernels") as caught:
        Session(plan, driver=Driver(api=api))
    assert caught.value.code == "env.driver"


def test_a_gpu_with_too_few_multiprocessors(tmp_path: Path) -> None:
    """Blocks that wait for each other would wait for ever: refused before anything is uploaded."""
    made = small_plan.program()
    small_plan.write(tmp_path / "a.plan", replace(made, target=replace(made.target, sms=132)))
    plan = open_plan(tmp_path / "a.plan")
    api = null_api(plan)
    Session(plan, driver=Driver(api=api)).close()
    api.sms = 114
    with pytest.raises(EnvironmentFault, match="too few multiprocessors") as caught:
        Session(plan, driver=Driver(api=api))
    text = str(caught.value)
    assert caught.value.code == "plan.target" and caught.value.exit_code == 5
    assert "114 on Null GPU" in text and "--family baseline" in text
    assert not api.contexts and not api.live


def with_meeting(program: Program, kernel: str, grid: tuple[int, int, int]) -> Program:
    """The program with launches of this kernel that wait for all of their blocks."""
    at = small_plan.KERNELS.index(kernel)

    def changed(call: Call) -> Call:
        return replace(
            call, launches=tuple(replace(n, grid=grid, meets=True) if n.kernel == at else n for n in call.launches)
        )

    stages = tuple(replace(stage, calls=tuple(map(changed, stage.calls))) for stage in program.stages)
    return replace(program, stages=stages, target=replace(program.target, sms=132))


@pytest.mark.parametrize(("cluster", "room", "holds"), [((0, 0, 0), 2, 264), ((1, 1, 4), 66, 264)])
def test_blocks_that_wait_for_each_other_fit(
    tmp_path: Path, cluster: tuple[int, int, int], room: int, holds: int
) -> None:
    small_plan.write(tmp_path / "a.plan", with_meeting(small_plan.program(), "small_silu", (11, 2, 12)))
    plan = open_plan(tmp_path / "a.plan")
    api = null_api(plan)
    api.clusters, api.room = {"small_silu": cluster}, room
    Session(plan, driver=Driver(api=api)).close()
    assert sum(n for name, n in api.calls.items() if "Occupancy" in name) == 1
    api.room -= 1
    with pytest.raises(EnvironmentFault, match="does not hold all blocks of a launch at once") as caught:
        Session(plan, driver=Driver(api=api))
    each = holds // room
    assert caught.value.code == "plan.room" and caught.value.exit_code == 5
    rows = dict(caught.value.rows)
    assert rows["kernel"] == "small_silu" and rows["needs"] == "264 blocks at once"
    assert rows["holds"] == f"{264 - each} on Null GPU" and "--family baseline" in str(caught.value)
    assert not api.contexts and not api.live


def test_a_cluster_fits(plan: Plan, api: NullApi) -> None:
    api.clusters = {"small_silu": (8, 1, 1)}
    Session(plan, driver=Driver(api=api)).close()
    api.room = 0
    with pytest.raises(EnvironmentFault, match="all blocks of a cluster at once") as caught:
        Session(plan, driver=Driver(api=api))
    assert dict(caught.value.rows)["needs"] == "8 blocks at once"


def test_sessions_whose_blocks_meet_take_turns(plan: Plan, api: NullApi) -> None:
    one = Session(plan, driver=Driver(api=api))
    assert one.turn is not TURNS[0]  # nobody waits here
    one.close()
    meets = replace(plan, program=replace(plan.program, target=replace(plan.program.target, sms=132)))
    two = [Session(meets, driver=Driver(api=api)) for _ in range(2)]
    assert two[0].turn is two[1].turn is TURNS[0]
    with TURNS[0], ThreadPoolExecutor(1) as pool:
        running = pool.submit(two[0].run)
        with pytest.raises(TimeoutError):
            running.result(timeout=0.2)
        TURNS[0].release()
        running.result(timeout=20)
        TURNS[0].acquire()
    for session in two:
        session.close()


def test_another_gpu(plan: Plan) -> None:
    api = null_api(plan, sm=80)
    with pytest.raises(EnvironmentFault) as caught:
        Session(plan, driver=Driver(api=api))
    text = str(caught.value)
    assert caught.value.code == "plan.target" and caught.value.exit_code == 5
    assert "hopper (sm_90a)" in text and "Null GPU (sm_80)" in text
    assert f"frtc compile CHECKPOINT --arch a100 -o {plan.path}" in text
    assert not api.contexts and not api.live


def test_old_driver(plan: Plan, api: NullApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "driver_branch", lambda: 535)
    with pytest.raises(EnvironmentFault) as caught:
        Session(plan, driver=Driver(api=api))
    assert caught.value.code == "env.driver" and caught.value.rows == (("wants", "580"), ("found", "535"))


def test_driver_branch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc = tmp_path / "version"
    monkeypatch.setattr(driver_module, "VERSION_FILES", (str(tmp_path / "absent"), str(proc)))
    assert driver_module.driver_branch() == 0
    proc.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC 12.3.0\n")
    assert driver_module.driver_branch() == 580


@pytest.mark.parametrize(
    ("status", "code"),
    [("CUDA_ERROR_NO_DEVICE", "env.no_gpu"), ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "env.driver")],
)
def test_driver_does_not_start(api: NullApi, status: str, code: str) -> None:
    api.fail["cuInit"] = getattr(cu.CUresult, status)
    with pytest.raises(EnvironmentFault) as caught:
        Driver(api=api)
    assert caught.value.code == code


def test_no_such_gpu(api: NullApi) -> None:
    with pytest.raises(EnvironmentFault, match="there is no GPU 1") as caught:
        Driver(1, api)
    assert caught.value.code == "env.no_gpu"


CHILD = """
from frtc.runtime.driver import Driver
try:
    Driver()
except Exception as fault:
    print(fault.code, fault.exit_code)
"""


def test_no_gpu_is_said_quickly() -> None:
    """The real bindings, with every GPU hidden."""
    root = str(Path(__file__).parents[2])
    start = time.perf_counter()
    environment = {"PYTHONPATH": root, "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, cwd=root, env=environment)
    assert done.stdout.split() == ["env.no_gpu", "5"], done.stderr
    assert time.perf_counter() - start < 5  # the bar of one second is the command's, on a quiet machine


def test_context_of_the_caller_stays(session: Session, api: NullApi) -> None:
    """Every push has its pop, also around a fault."""
    session.run()
    api.fail["cuGraphLaunch"] = cu.CUresult.CUDA_ERROR_UNKNOWN
    with pytest.raises(DriverFault):
        session.run()
    assert api.calls["cuCtxPushCurrent"] == api.calls["cuCtxPopCurrent"] > 0


def test_numbers_among_the_parameters(plan: Plan) -> None:
    """f32 parameters go to the driver as floats."""
    launch = replace(plan.program.stages[0].calls[0].launches[0], params=(("f32", 1.5), ("i64", -1)))
    driver = Driver(api=null_api(plan))
    node, kept = driver._node(cu.CUfunction(1), launch, [1.5, -1])
    table = (ctypes.c_void_p * 2).from_address(int(node.kernelParams))
    assert ctypes.c_float.from_address(table[0] or 0).value == 1.5
    assert ctypes.c_int64.from_address(table[1] or 0).value == -1
    assert kept
