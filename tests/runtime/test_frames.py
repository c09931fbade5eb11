"""Camera frames of a session on a null driver, the kernel on the CPU: the bits of the host step, what is refused, and
what a steady camera costs."""

from __future__ import annotations

import ctypes
import gc
import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cu

from frtc import selftest
from frtc.codegen.plan_writer import PlanWriter
from frtc.errors import EnvironmentFault, FrtcError, UsageError
from frtc.kernels import smxx_frames
from frtc.policy import Policy
from frtc.runtime.driver import Driver
from frtc.runtime.emulator import Emulator
from frtc.runtime.frames import taps
from frtc.runtime.plan_file import Plan, open_plan
from frtc.runtime.policy import Camera, Noise, Norm, State
from frtc.runtime.policy import Policy as Spec
from frtc.runtime.policy_steps import PolicySteps
from frtc.runtime.session import Session
from frtc.runtime.steps_image import RESIZES, fit
from tests.kernels import frames_cpu
from tests.runtime.frames_plan import FramesApi, OnNull, images, write
from tests.runtime.test_policy_images import HOSTILE, picture

RULES = {"pil_bilinear": 7.0, "torch_bilinear": -3.0, "torch_bilinear01": 0.25}
FORMS = [(layout, pixel) for layout in ("hwc", "chw") for pixel in ("rgb8", "bgr8", "rgb01", "bgr01")]
SIZES = [(48, 64), (32, 32), (32, 45), (45, 32), (16, 16), (5, 32), (1, 1), (2, 3), (90, 1), (7, 200), (270, 480)]
SIZES += [tuple(int(v) for v in np.random.default_rng(3).integers(3, 130, 2)) for _ in range(12)]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    frames_cpu.library()


def as_form(image: np.ndarray, layout: str, pixel: str) -> np.ndarray:
    """An RGB picture u8 [h, w, 3] as a camera of this form gives it."""
    if pixel.startswith("bgr"):
        image = image[..., ::-1]
    if pixel.endswith("01"):
        image = image.astype(np.float32) / np.float32(255)
    return np.ascontiguousarray(image.transpose(2, 0, 1) if layout == "chw" else image)


def opened(path: Path, *defines: str) -> tuple[Policy, FramesApi]:
    plan = open_plan(path)
    api = FramesApi(plan, *defines)
    return Policy(plan, Session(plan, driver=Driver(api=api))), api


def both(path: Path, seen: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """`images` as the device made them and as the host's step does."""
    policy, _ = opened(path)
    plan = open_plan(path)
    with policy, Policy(plan, Emulator(plan)) as host:
        return policy.infer(seen).output, host.infer(seen).output


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("frames") / "base.plan", images([Camera("base", "x")]))


@pytest.mark.parametrize("place", ["center", "end"])
@pytest.mark.parametrize("resize", RULES)
def test_the_bits_of_the_host_step(resize: str, place: str, tmp_path: Path) -> None:
    """Every form at sizes of all kinds, two cameras of different sizes."""
    for i, (layout, pixel) in enumerate(FORMS):
        cameras = [Camera("base", "x", layout, pixel), Camera("wrist", "y", layout, pixel)]  # type: ignore[arg-type]
        path = write(tmp_path / f"{i}.plan", images(cameras, 32, resize, RULES[resize], place))
        policy, _ = opened(path)
        plan = open_plan(path)
        with policy, Policy(plan, Emulator(plan)) as host:
            for size, other in zip(SIZES[i % 2 :: 2], SIZES[::-1], strict=False):
                seen = {
                    "base": as_form(picture(*size), layout, pixel),
                    "wrist": as_form(picture(*other), layout, pixel),
                }
                if min(min(fit_or_zero(*s)) for s in (size, other)) < 1:
                    continue
                found, wanted = policy.infer(seen).output, host.infer(seen).output
                assert found.tobytes() == wanted.tobytes(), (size, other, layout, pixel)


def fit_or_zero(height: int, width: int) -> tuple[int, int]:
    try:
        return fit(height, width, 32, "")
    except FrtcError:
        return 0, 0


@pytest.mark.parametrize("defect", ["FRTC_SABOTAGE_LAST_TAP", "FRTC_SABOTAGE_TRUNCATED"])
def test_a_defect_shows(defect: str, base: Path) -> None:
    seen = {"base": picture(48, 64)}
    policy, _ = opened(base, defect)
    with policy:
        assert not np.array_equal(policy.infer(seen).output, both(base, seen)[1])


@pytest.mark.parametrize("resize", RULES)
@pytest.mark.parametrize(("n", "m"), [(640, 224), (224, 224), (10, 224), (1, 3), (8192, 224), (225, 224), (9, 1)])
def test_taps_stay_inside_and_rise(resize: str, n: int, m: int) -> None:
    """What the kernel relies on: it reads where the taps say, rows from the first tap of its first output to the last
    tap of its last."""
    made = taps(resize, n, m, True)["index"]
    assert made.min() >= 0 and made.max() < n
    assert (np.diff(made, axis=0) >= 0).all() and (np.diff(made, axis=1) >= 0).all()


# ---- frames of all kinds of memory -----------------------------------------------------------------------------------

WHOLE = np.arange(60 * 80 * 3, dtype=np.uint8).reshape(60, 80, 3) * 7
VIEWS = {
    "upside down": lambda a: a[::-1], "mirrored": lambda a: a[:, ::-1], "bgr": lambda a: a[..., ::-1],
    "all backwards": lambda a: a[::-1, ::-1, ::-1], "cropped": lambda a: a[5:50, 7:70],
    "every other": lambda a: a[::2, ::3],
    "fortran": np.asfortranarray, "planes": lambda a: np.ascontiguousarray(a.transpose(2, 0, 1)).transpose(1, 2, 0),
    "one colour": lambda a: np.broadcast_to(a[:1, :1], a.shape), "turned": lambda a: a.transpose(1, 0, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", VIEWS)
def test_views_on_the_host(name: str, base: Path) -> None:
    view = VIEWS[name](WHOLE)
    found, wanted = both(base, {"base": view})
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("name", VIEWS)
def test_views_on_the_device(name: str, base: Path) -> None:
    """No copy: the kernel reads the caller's memory, with the caller's strides."""
    view = VIEWS[name](WHOLE)
    policy, api = opened(base)
    with policy:
        before = api.calls["cuMemcpyHtoDAsync"]
        policy.infer({"base": OnNull(api, view)})
        before = api.calls["cuMemcpyHtoDAsync"]
        found = policy.infer({"base": OnNull(api, view)}).output
        assert api.calls["cuMemcpyHtoDAsync"] == before
    assert np.array_equal(found, both(base, {"base": view})[1])


@pytest.mark.parametrize("name", ["upside down", "bgr", "planes"])
def test_pinned_frames_are_copied_from_where_they_are(name: str, base: Path) -> None:
    view = VIEWS[name](WHOLE.copy())
    policy, api = opened(base)
    with policy:
        lowest = view.ctypes.data + sum(min(0, (n - 1) * s) for n, s in zip(view.shape, view.strides, strict=True))
        api.known_pinned.add(lowest)
        found = policy.infer({"base": view}).output
        copies = [c for c in api.log if c[0] == "cuMemcpyHtoDAsync" and c[2] == lowest]
        assert len(copies) == 1 and copies[0][3] == view.nbytes
    assert np.array_equal(found, both(base, {"base": view})[1])


def test_the_stream_of_a_device_frame_is_waited_for(base: Path) -> None:
    policy, api = opened(base)
    with policy:
        policy.infer({"base": OnNull(api, WHOLE, stream=7)})
        recorded = next(c for c in api.log if c[0] == "cuEventRecord")
        waited = next(c for c in api.log if c[0] == "cuStreamWaitEvent")
        assert recorded[2] == 7 and waited[2] == recorded[1]


class Shared:
    """A frame on the GPU as DLPack has it, of the null driver's memory."""

    def __init__(self, api: FramesApi, array: np.ndarray, fails: bool = False) -> None:
        memory = bytearray(array.tobytes())
        self.array, self.fails = np.frombuffer(memory, array.dtype).reshape(array.shape), fails
        self.streams: list[int] = []
        api.live[self.array.ctypes.data] = memory

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, stream: int) -> Any:
        if self.fails:
            raise BufferError("it needs gradients")
        self.streams.append(stream)
        return self.array[3:50, 5:70].__dlpack__()


def test_a_frame_through_dlpack(base: Path) -> None:
    """With its strides; its owner is told which stream reads it."""
    policy, api = opened(base)
    with policy:
        frame = Shared(api, WHOLE)
        assert np.array_equal(policy.infer({"base": frame}).output, both(base, {"base": WHOLE[3:50, 5:70]})[1])
        assert frame.streams == [int(policy.executor.stream)]  # type: ignore[attr-defined]
        with pytest.raises(UsageError, match="the array is not shared: it needs gradients") as caught:
            policy.infer({"base": Shared(api, WHOLE, fails=True)})
        assert caught.value.code == "slot.array"


class Says:
    """A frame that says of itself what a test wants."""

    def __init__(self, device: Any, shared: Any = None) -> None:
        self.device, self.shared = device, shared

    def __dlpack_device__(self) -> Any:
        if isinstance(self.device, Exception):
            raise self.device
        return self.device

    def __dlpack__(self, stream: int) -> Any:
        return self.shared


def test_frames_whose_dlpack_is_none(base: Path) -> None:
    """Errors of frtc, whatever an array says."""
    nowhere = np.lib.stride_tricks.as_strided(WHOLE, WHOLE.shape, (0, 0, 0))
    shared = nowhere.__dlpack__()
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    ctypes.c_void_p.from_address(address(shared, b"dltensor")).value = None
    policy, _ = opened(base)
    with policy:
        for frame, code in (
            (Says(BufferError("on two devices")), "input.image_dtype"), (Says(None), "input.image_dtype"),
            (Says((2, 0)), "slot.array"), (Says((2, 0), WHOLE.__dlpack__(max_version=(1, 0))), "slot.array"),
            (Says((2, 0), shared), "input.image_device"),
        ):  # fmt: skip
            with pytest.raises(FrtcError) as caught:
                policy.infer({"base": frame})
            assert caught.value.code == code


def test_places_mix_and_change(tmp_path: Path) -> None:
    """Host, device, other sizes, one after the other on two cameras."""
    path = write(tmp_path / "two.plan", images([Camera("base", "x"), Camera("wrist", "y")]))
    policy, api = opened(path)
    plan = open_plan(path)
    small, large = picture(20, 31), picture(300, 200)
    with policy, Policy(plan, Emulator(plan)) as host:
        for one, two in [(small, large), (large, small), (small, small), (large, large), (large, small)]:
            wanted = host.infer({"base": one, "wrist": two}).output
            for seen in ((one, two), (OnNull(api, one), two), (one, OnNull(api, two)), (one, two)):
                assert np.array_equal(policy.infer(dict(zip(("base", "wrist"), seen, strict=True))).output, wanted)
        assert len(api.pinned) == 3  # slots, and one a camera


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("camera", "image", "code", "message"), HOSTILE)
def test_hostile_pictures_as_on_the_host(camera: Camera, image: Any, code: str, message: str, tmp_path: Path) -> None:
    policy, api = opened(write(tmp_path / "h.plan", images([camera, replace(camera, role="wrist")])))
    with policy:
        before = len(api.log)
        shape = (4, 4, 3) if camera.layout == "hwc" else (3, 4, 4)
        good = np.zeros(shape, np.uint8 if camera.pixel.endswith("8") else np.float32)
        for role, seen in (("base", {"base": image, "wrist": good}), ("wrist", {"base": good, "wrist": image})):
            with pytest.raises(FrtcError, match=re.escape(message.replace("base", role))) as caught:
                policy.infer(seen)
            assert caught.value.code == f"input.{code}"
        assert "cuGraphLaunch" not in {call[0] for call in api.log[before:]}


def test_a_masked_frame_like_the_last_one(base: Path) -> None:
    policy, _ = opened(base)
    with policy:
        policy.infer({"base": WHOLE})
        with pytest.raises(FrtcError, match="image base is a masked array") as caught:
            policy.infer({"base": np.ma.array(WHOLE, mask=True)})
        assert caught.value.code == "input.masked"


def test_the_largest_picture(base: Path) -> None:
    wide = np.broadcast_to(np.uint8(9), (8192, 8192, 3))
    found, wanted = both(base, {"base": wide[:300]})
    assert np.array_equal(found, wanted)
    for shape in ((8193, 8192, 3), (8192, 8193, 3)):
        with pytest.raises(FrtcError, match="more than 8192 on a side") as caught:
            both(base, {"base": np.broadcast_to(np.uint8(9), shape)})
        assert caught.value.code == "input.image_shape"


@pytest.mark.parametrize("value", [np.nan, 1.01, -0.5, np.inf])
def test_a_float_out_of_range_on_the_device(value: float, tmp_path: Path) -> None:
    """Found by the kernel in what it reads; no actions come back, and the next frame is a good one."""
    camera = Camera("base", "x", "hwc", "rgb01")
    for resize in RULES:
        path = write(tmp_path / f"{resize}.plan", images([camera, replace(camera, role="wrist")], 32, resize))
        policy, api = opened(path)
        good = picture(16, 16).astype(np.float32) / np.float32(255)
        bad = good.copy()
        bad[3, 4, 1] = value
        with policy:
            for _ in range(2):
                with pytest.raises(FrtcError, match=r"image wrist leaves \[0, 1\]") as caught:
                    policy.infer({"base": OnNull(api, good), "wrist": OnNull(api, bad)})
                assert caught.value.code == "input.image_range"
                with pytest.raises(FrtcError, match="leaves"):
                    policy.executor.get("seen")
                with pytest.raises(FrtcError, match="leaves"):  # once more on the same `images`
                    policy.executor.run()
            assert np.isfinite(policy.infer({"base": OnNull(api, good), "wrist": good}).output).all()


def test_device_frames_that_are_refused(base: Path) -> None:
    policy, api = opened(base)
    with policy:
        for array, code in (
            (WHOLE.astype(np.float32), "input.image_dtype"), (WHOLE.astype(np.int16), "input.image_dtype"),
            (WHOLE[..., :2].copy(), "input.image_shape"), (np.zeros((0, 4, 3), np.uint8), "input.image_shape"),
            (WHOLE[None].copy(), "input.image_shape"),
        ):  # fmt: skip
            with pytest.raises(FrtcError) as caught:
                policy.infer({"base": OnNull(api, array)})
            assert caught.value.code == code
        elsewhere = OnNull(api, WHOLE)
        elsewhere.__cuda_array_interface__["data"] = (64, False)
        with pytest.raises(FrtcError, match="is at 0x40 on no GPU, the Plan on GPU 0") as caught:
            policy.infer({"base": elsewhere})
        assert caught.value.code == "input.image_device"
        plan, there = open_plan(base), OnNull(api, WHOLE)
        with Policy(plan, Emulator(plan)) as host, pytest.raises(FrtcError, match="is a OnNull, not a uint8 array"):
            host.infer({"base": there})


# ---- beside `images` as an input -------------------------------------------------------------------------------------


def test_images_may_still_be_set(base: Path) -> None:
    """By benches, the self-test and verify: what was set last counts, for runs of the whole and of one stage."""
    policy, api = opened(base)
    given = np.arange(32 * 32 * 3, dtype=np.uint8).reshape(1, 32, 32, 3)
    with policy:
        session, wanted = policy.executor, both(base, {"base": WHOLE})[1]
        for _ in range(2):
            session.set("images", given)
            session.run()
            assert np.array_equal(session.get("seen"), given)
            assert np.array_equal(policy.infer({"base": WHOLE}).output, wanted)
            session.run()  # on what frames made
            assert np.array_equal(session.get("seen"), wanted)
            session.run_stage("see")
            assert np.array_equal(session.get("seen"), wanted)
        mine = OnNull(api, given)
        session.bind("images", mine)  # type: ignore[attr-defined]
        with pytest.raises(UsageError, match="lives in memory of the caller"):
            policy.infer({"base": WHOLE})
        session.run()
        assert np.array_equal(session.get("seen"), given)
        session.unbind("images")  # type: ignore[attr-defined]
        assert np.array_equal(policy.infer({"base": WHOLE}).output, wanted)


def test_a_stage_alone_sees_the_frames_that_were_taken(base: Path) -> None:
    policy, _ = opened(base)
    frame = picture(48, 64)
    with policy:
        session, wanted = policy.executor, both(base, {"base": frame})[1]
        policy.infer({"base": WHOLE})
        for _ in range(2):
            session.take({"base": frame})
            with pytest.raises(UsageError, match="frames were taken that it would leave out") as caught:
                session.replay()  # type: ignore[attr-defined]
            assert caught.value.code == "input.frames"
            session.run_stage("see")
            assert np.array_equal(session.get("seen"), wanted)
            session.run()  # `images` stay as they are
            assert np.array_equal(session.get("seen"), wanted)


def test_a_session_says_which_frames_it_lacks(tmp_path: Path) -> None:
    """And has none then."""
    policy, _ = opened(write(tmp_path / "two.plan", images([Camera("base", "x"), Camera("wrist", "y")])))
    with policy:
        policy.executor.take({"base": WHOLE, "wrist": WHOLE})
        with pytest.raises(FrtcError, match="the frames lack wrist") as caught:
            policy.executor.take({"base": WHOLE})
        assert caught.value.code == "input.camera_missing"
        assert policy.executor.frames and not policy.executor.frames.given


@pytest.mark.parametrize("run", ["run", "see"])
def test_a_run_that_fails_leaves_the_frames_to_the_next(run: str, base: Path) -> None:
    policy, api = opened(base)
    frame = picture(48, 64)
    with policy:
        session, wanted = policy.executor, both(base, {"base": frame})[1]
        go = session.run if run == "run" else lambda: session.run_stage(run)
        policy.infer({"base": WHOLE})
        session.take({"base": frame})
        api.fail["cuGraphLaunch"] = cu.CUresult.CUDA_ERROR_UNKNOWN
        with pytest.raises(FrtcError, match="cuGraphLaunch failed"):
            go()
        del api.fail["cuGraphLaunch"]
        go()
        assert np.array_equal(session.get("seen"), wanted)


def test_a_steady_camera_builds_nothing(base: Path) -> None:
    """A handful of calls an inference: a copy of the frame, the launch, the wait; the graph copies all else."""
    policy, api = opened(base)
    with policy:
        policy.warm()
        policy.infer({"base": picture(48, 64)})
        before, live = api.calls.copy(), dict(api.live)
        for _ in range(100):
            policy.infer({"base": picture(48, 64)})
        made = {name: count / 100 for name, count in (api.calls - before).items()}
        assert api.live.keys() == live.keys()
        assert made.pop("cuCtxPushCurrent") == made.pop("cuCtxPopCurrent") == 1
        assert made.pop("cuPointerGetAttribute", 0) <= 1
        assert made == {"cuMemcpyHtoDAsync": 1, "cuGraphLaunch": 1, "cuStreamSynchronize": 1}


def test_the_graph_from_frames_copies_in_and_out(base: Path) -> None:
    """First of all the table of frames, last of all the outputs, between pinned memory and the device."""
    policy, _ = opened(base)
    with policy:
        policy.warm()
        session = policy.executor
        nodes = session.graphs["\0frames"].executable.nodes  # type: ignore[attr-defined]
        (first, _, _, there), lead, widen, (_, after, kind, back) = nodes
        slots, pinned, images = session.slots, session.mirror.address, 32 * 32 * 3  # type: ignore[attr-defined]
        assert there == (True, pinned + images, slots + images, 256)
        assert lead[1:3] == ([first], "kernel") and widen[1:3] == ([lead[0]], "kernel")
        assert after == [widen[0]] and kind == "copy"
        seen = session.addresses["slotseen"]  # type: ignore[attr-defined]
        assert back[:3] == (False, pinned + seen - slots, seen) and back[3] >= 4 * images
        assert {node[2] for node in session._graph("").executable.nodes} == {"kernel"}  # type: ignore[attr-defined]


RANGE = Norm("openpi_range", (-1.0, 0.0, 2.0), (1.0, 4.0, 2.5))
MORE = (State(3, RANGE, width=8), Noise(5, 8))


def test_the_other_inputs_reach_the_device(tmp_path: Path) -> None:
    """They are written where the launch copies from, by one inference as by the next, whatever `set` left there."""
    policy, api = opened(write(tmp_path / "more.plan", images([Camera("base", "x")]), more=MORE))
    with policy:
        session, steps = policy.executor, PolicySteps(policy.spec)
        seen = {"base": WHOLE, "state": np.array([0.5, 1.0, 2.25], np.float32)}
        for draw in range(3):
            policy.infer(seen, draw)
            wanted = steps.prepare(seen, draw).inputs
            for name in ("state", "noise"):
                at = session.addresses["slot" + name]  # type: ignore[attr-defined]
                assert bytes(api.device(at, wanted[name].nbytes)) == wanted[name].tobytes()
                session.set(name, np.full_like(wanted[name], 7))
        before, live, pinned = api.calls.copy(), [*api.live], [*api.pinned]
        policy.infer(seen)
        once = ("cuCtxPushCurrent", "cuMemcpyHtoDAsync", "cuGraphLaunch", "cuStreamSynchronize", "cuCtxPopCurrent")
        assert api.calls - before == dict.fromkeys(once, 1)
        assert [*api.live] == live and [*api.pinned] == pinned


def test_an_inference_rehearses_the_next_while_the_device_works(tmp_path: Path) -> None:
    """Between the launch and the wait for its end, and writes nothing that the device reads."""
    policy, api = opened(write(tmp_path / "more.plan", images([Camera("base", "x")]), more=MORE))
    with policy:
        seen, calls = {"base": WHOLE, "state": np.array([0.5, 1.0, 2.25], np.float32)}, list[list[str]]()
        rehearse = policy.steps.rehearse

        def watched() -> None:
            calls.append([name for name, *_ in api.log])
            before = {name: array.tobytes() for name, array in policy.inputs.items()}
            rehearse()
            assert {name: array.tobytes() for name, array in policy.inputs.items()} == before

        policy.steps.rehearse = watched  # type: ignore[method-assign]
        for _ in range(3):
            policy.infer(seen)
            api.log.append(("answered",))
        for so_far in calls:
            assert so_far[-1] == "cuGraphLaunch"
        assert [so_far.count("answered") for so_far in calls] == [0, 1, 2]


def test_an_inference_leaves_no_garbage(tmp_path: Path) -> None:
    """All that it makes is freed by counting: a loop may go without the collector."""
    policy, _ = opened(write(tmp_path / "more.plan", images([Camera("base", "x")]), more=MORE))
    with policy:
        for i in range(20):
            policy.infer({"base": WHOLE, "state": np.array([i / 20, 1.0, 2.25], np.float32)})
        while gc.collect():  # of other tests
            pass
        gc.disable()
        try:
            for i in range(20):
                policy.infer({"base": WHOLE, "state": np.array([i / 20, 1.0, 2.25], np.float32)})
            assert gc.collect() == 0
        finally:
            gc.enable()


def test_inputs_that_are_bound_are_refused(tmp_path: Path) -> None:
    policy, api = opened(write(tmp_path / "more.plan", images([Camera("base", "x")]), more=MORE))
    with policy:
        seen = {"base": WHOLE, "state": np.array([0.5, 1.0, 2.25], np.float32)}
        policy.executor.bind("noise", OnNull(api, np.zeros((5, 8), np.float32)))  # type: ignore[attr-defined]
        with pytest.raises(UsageError, match="slot noise lives in memory of the caller") as caught:
            policy.infer(seen)
        assert caught.value.code == "slot.bound"
        policy.executor.unbind("noise")  # type: ignore[attr-defined]
        policy.infer(seen)
        policy.executor.close()
        with pytest.raises(UsageError, match="the policy is closed"):
            policy.infer(seen)


def test_a_result_that_is_bound_is_refused_before_anything_is_launched(tmp_path: Path) -> None:
    policy, api = opened(write(tmp_path / "base.plan", images([Camera("base", "x")])))
    with policy:
        policy.infer({"base": WHOLE})
        policy.executor.bind("seen", OnNull(api, np.zeros((1, 32, 32, 3), np.float32)))  # type: ignore[attr-defined]
        before = api.calls["cuGraphLaunch"]
        with pytest.raises(UsageError, match="slot seen lives in memory of the caller"):
            policy.infer({"base": WHOLE})
        assert api.calls["cuGraphLaunch"] == before


def test_a_policy_whose_inputs_are_not_the_programs(base: Path) -> None:
    """Said when it is opened."""
    plan = open_plan(base)
    for steps, what in (
        (Spec((images([Camera("base", "x")], 16),), ()), r"input images is uint8\[1, 16, 16, 3\]"),
        (Spec((images([Camera("base", "x")]), Noise(5, 8)), ()), "no input 'noise'"),
        (Spec((), ()), "no step of the Plan's policy makes the input images"),
    ):
        mixed = replace(plan, program=replace(plan.program, policy=steps.to_json()))
        with pytest.raises(FrtcError, match=what):
            Policy(mixed, Emulator(mixed))


def test_the_self_test_looks_at_them(base: Path) -> None:
    for defines, exact in (((), True), (("FRTC_SABOTAGE_TRUNCATED",), False)):
        policy, _ = opened(base, *defines)
        with policy:
            (found,) = selftest.by_frames(policy)
            assert found.exact == exact and found.bar == 0.0 and (found.error > 0) != exact
    plan = open_plan(base)
    with Policy(plan, Emulator(plan)) as host:
        assert not list(selftest.by_frames(host))


def test_latency_and_memory(base: Path) -> None:
    policy, api = opened(base)
    with policy:
        policy.warm()
        before = policy.executor.memory()  # type: ignore[attr-defined]
        latency = policy.infer({"base": picture(480, 640)}).latency_us
        assert list(latency) == ["total", "prepare", "run", "finish", "copy", "launch", "wait"]
        parts = sum(latency[name] for name in ("copy", "launch", "wait", "finish"))
        assert parts == pytest.approx(latency["total"], rel=0.02) and 0 < latency["copy"] < latency["run"]
        assert policy.executor.memory().slots - before.slots >= 480 * 640 * 3  # type: ignore[attr-defined]
    assert not api.live and not api.pinned


def test_a_plan_without_the_kernel(tmp_path: Path) -> None:
    """As older frtc wrote them: the host resizes, the answer is the same."""
    step = images([Camera("base", "x")])
    old, new = write(tmp_path / "old.plan", step, frames=False), write(tmp_path / "new.plan", step)
    policy, api = opened(old)
    with policy:
        assert policy.executor.frames is None
        wanted = both(new, {"base": WHOLE})[0]
        assert np.array_equal(policy.infer({"base": WHOLE}).output, wanted)
        with pytest.raises(FrtcError, match="no raw frames are taken here"):
            policy.executor.take({"base": WHOLE})
        with pytest.raises(FrtcError, match="is a OnNull, not a uint8 array"):
            policy.infer({"base": OnNull(api, WHOLE)})


def test_the_kernel_is_part_of_the_program(tmp_path: Path) -> None:
    """Readers that do not know it see one more blob; a damaged one is refused."""
    path = write(tmp_path / "a.plan", images([Camera("base", "x")]))
    plan: Plan = open_plan(path)
    assert list(plan.files()) == ["cubin.000", "frames.1"]
    assert [entry.cubin for entry in plan.program.kernels] == ["cubin.000"]
    at = path.read_bytes().find(bytes(plan.files()["frames.1"]))
    data = bytearray(path.read_bytes())
    data[at + 5000] ^= 1
    (tmp_path / "b.plan").write_bytes(data)
    with pytest.raises(FrtcError, match=r"damaged: frames\.1"):
        open_plan(tmp_path / "b.plan")
    files = {name: bytes(data) for name, data in plan.files().items()}
    with PlanWriter(tmp_path / "c.plan", plan.program, files | {"frames.1": files["cubin.000"]}) as writer:
        writer.finish({})
    with pytest.raises(FrtcError, match=r"frames\.1: holds 2 kernels, not one") as caught:
        open_plan(tmp_path / "c.plan")
    assert caught.value.code == "plan.invalid"
    nowhere = bytearray(files["frames.1"])
    nowhere[47] = 0x80  # the sections begin at byte 2**63
    with PlanWriter(tmp_path / "d.plan", plan.program, files | {"frames.1": bytes(nowhere)}) as writer:
        writer.finish({})
    with pytest.raises(FrtcError, match=r"frames\.1: is no cubin") as caught:
        open_plan(tmp_path / "d.plan")
    assert caught.value.code == "plan.invalid"


@pytest.mark.parametrize("name", ["cuMemAlloc", "cuMemHostAlloc"])
def test_no_room_for_a_larger_frame(name: str, base: Path) -> None:
    """An error of the environment; nothing leaks, no run goes on with other frames, and there may be room later."""
    policy, api = opened(base)
    with policy:
        wanted = policy.infer({"base": WHOLE}).output
        api.fail[name] = cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        for go in (lambda: policy.infer({"base": picture(480, 640)}), policy.executor.run) * 2:
            with pytest.raises(EnvironmentFault, match="too little free memory"):
                go()
        del api.fail[name]
        policy.executor.run()
        assert np.array_equal(policy.executor.get("seen"), both(base, {"base": picture(480, 640)})[1])
        assert np.array_equal(policy.infer({"base": WHOLE}).output, wanted)
    assert not api.live and not api.pinned


def test_warm_reads_no_frame(base: Path) -> None:
    """The last frames' memory may be gone: the caller's, or ours where a larger frame found no room."""
    policy, api = opened(base)
    with policy:
        frame = OnNull(api, WHOLE)
        policy.infer({"base": frame})
        del api.live[frame.__cuda_array_interface__["data"][0]]  # its owner gives the memory back
        policy.warm()
        wanted = policy.infer({"base": WHOLE}).output
        api.fail["cuMemAlloc"] = cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        with pytest.raises(EnvironmentFault, match="too little free memory"):
            policy.infer({"base": picture(480, 640)})
        del api.fail["cuMemAlloc"]
        policy.warm()
        for _ in range(2):
            assert np.array_equal(policy.infer({"base": WHOLE}).output, wanted)
            policy.warm()


def test_a_device_frame_lives_until_the_next_frame(base: Path) -> None:
    """Also where that one is on the host."""
    policy, api = opened(base)
    with policy:
        frame = OnNull(api, WHOLE)
        alive = weakref.ref(frame)
        policy.infer({"base": frame})
        del frame
        assert alive()
        policy.infer({"base": WHOLE})
        assert not alive()


def test_rules_have_one_number_each() -> None:
    assert smxx_frames.RULES.keys() == RESIZES.keys() and len({*smxx_frames.RULES.values()}) == len(RESIZES)
