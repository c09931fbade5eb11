"""Camera frames on a GPU: raw frames -> `images`, by the first launch of the inference's graph.

    session.take({"base": picture, ...})     # checks all
    session.run()                            # copies them and resizes on the device, with the bits of steps_image.py

A frame on the host goes to pinned memory of ours and from there to the device while the host goes on; pinned frames are
copied from where they are, frames on the device are read there. Filter tables are made on the host by the functions of
steps_image.py. At the first frame of a new size, layout or place (host or device) a camera's memory is made anew;
after that nothing is allocated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from ctypes import memmove
from sys import intern
from typing import Any

import numpy as np

from frtc.errors import FrtcError
from frtc.kernels.cubin import resources_of
from frtc.kernels.smxx_frames import CAMERA, CUBIN, RULES, TAP, THREADS, grid_of
from frtc.runtime.device_array import DeviceArray
from frtc.runtime.driver import Driver, host_bytes
from frtc.runtime.graph import Lead
from frtc.runtime.plan import Launch, Program
from frtc.runtime.plan_file import aligned
from frtc.runtime.policy import Camera, Images, Policy
from frtc.runtime.steps_image import (
    BITS,
    Array,
    as_rgb,
    corner,
    fit,
    on_device,
    pil_weights,
    read_device,
    read_image,
    torch_weights,
)

IMAGES = "images"  # the slot
PARAMS = (("cameras", 0), ("images", 0), ("range", 0))


def step_of(program: Program, files: Mapping[str, Any]) -> Images | None:
    """The policy's image step, where the Plan has a kernel for it that this frtc knows."""
    if CUBIN not in files or not program.policy:
        return None
    policy = Policy.from_json(program.policy)
    found = {slot.name: (slot.dtype, slot.shape) for slot in program.inputs}
    return policy.find(Images) if found.get(IMAGES) == policy.device_inputs().get(IMAGES) else None


def symbol_of(image: bytes) -> str:
    """The kernel in its cubin."""
    return next(iter(resources_of(image)))


class Frames:
    """The cameras of one session.

    table    u8 on the host, in what a session copies to the device with each inference: CAMERA records
    found    u32 [V] on the host, copied back with the outputs: the serial of the inference where a float left [0, 1]
    given    frames for the next inference
    shown    the device's `images` are those of frames, not what the host was given
    copy_us  what the last inference spent copying frames on the host
    """

    def __init__(self, driver: Driver, step: Images, function: Any, stream: Any, ordinal: int) -> None:
        views = len(step.cameras)
        self.function, self.launch = function, Launch(0, grid_of(views, step.size), THREADS, 0, PARAMS)
        self.given: list[Array | DeviceArray] = []
        self.shown = False
        self.copy_us, self.serial = 0.0, 0
        self.cameras = [_Camera(driver, step, camera, stream, ordinal) for camera in step.cameras]
        self.place(np.zeros(views, CAMERA), np.zeros(views, np.uint32), (0, 0, 0))

    @property
    def rooms(self) -> tuple[int, int]:
        """Bytes of the table and of `found`."""
        return self.table.nbytes, self.found.nbytes

    def place(self, table: Array, found: Array, addresses: tuple[int, int, int]) -> None:
        """addresses: on the device, of the table, of `images` and of `found`."""
        self.table, self.found = table.view(CAMERA), found.view(np.uint32)
        self.serials = self.table["serial"]
        for camera, record in zip(self.cameras, self.table, strict=True):
            camera.record = record
        self.lead = Lead(self.function, self.launch, addresses)

    def take(self, observation: Mapping[str, Any]) -> None:
        """Check the frames and keep them for the next inference; where one is refused it has none."""
        self.drop()
        try:
            self.given = [camera.look(observation[camera.role]) for camera in self.cameras]
        except KeyError:
            if missing := [camera.role for camera in self.cameras if camera.role not in observation]:
                raise FrtcError("input.camera_missing", f"the frames lack {', '.join(missing)}") from None
            raise

    def drop(self) -> None:
        self.given = []

    def forget(self) -> None:
        """Until frames are copied anew the launch leaves pictures as they are: the last frames' memory may be gone."""
        self.table[:] = np.zeros(1, CAMERA)
        for camera in self.cameras:
            camera.form = ()

    def begin(self) -> None:
        """Begin to copy what was taken. Last of all on the host: pixels leave nothing else in its caches."""
        given, self.given = self.given, []
        started = time.perf_counter_ns()
        self.serial = self.serial % 0xFFFF_FFFF + 1
        self.serials.fill(self.serial)
        self.shown = True
        for camera, frame in zip(self.cameras, given, strict=True):
            camera.put(frame)
        self.copy_us = (time.perf_counter_ns() - started) / 1e3

    def refusal(self) -> FrtcError | None:
        """What to say where the inference read a float outside of [0, 1]."""
        if not (self.found == self.serial).any():
            return None
        wrong = [c.camera for c, serial in zip(self.cameras, self.found, strict=True) if serial == self.serial]
        roles = ", ".join(camera.role for camera in wrong)
        declared = [("declared", f"{camera.role}: float32 {camera.pixel}, {camera.layout}") for camera in wrong]
        return FrtcError("input.image_range", f"image {roles} leaves [0, 1]", declared)

    @property
    def nbytes(self) -> int:
        """Of device memory, beside the slots."""
        return sum(camera.room for camera in self.cameras)

    def close(self) -> None:
        for camera in self.cameras:
            camera.close()


class _Camera:
    """One camera's frame in pinned and in device memory, and behind it on both sides its filter tables.

    form   of the last frame, as `_form` has it; () if the next one has to be looked at anyhow
    """

    def __init__(self, driver: Driver, step: Images, camera: Camera, stream: Any, ordinal: int) -> None:
        self.driver, self.step, self.camera, self.stream, self.ordinal = driver, step, camera, stream, ordinal
        self.role, self.is_float = intern(camera.role), not camera.pixel.endswith("8")
        self.record: Any = None  # in the table
        self.form: tuple[Any, ...] = ()
        self.room, self.pinned, self.device = 0, 0, 0
        self.nbytes = self.below = 0  # of a frame; how far its lowest byte lies below its first element
        self.packed = False  # the frame has no gaps: its memory is copied as it lies
        self.staged = np.zeros(0, np.uint8)
        self.as_staged: Callable[[Array], Array] = lambda frame: frame
        self.seen: tuple[int, bool] = (0, False)  # an address, and whether it was pinned
        self.upload: Callable[[], None] = lambda: None  # of a frame in our pinned memory
        self.event: Any = None  # of other streams
        self.owner: Any = None  # keeps a frame on the device alive until the next

    def look(self, frame: Any) -> Array | DeviceArray:
        """The frame, on the host or on the device; an error where it is not as declared."""
        if type(frame) is np.ndarray and self.form == _form(frame) and not self.is_float:
            return frame  # as the last one; of floats the values are looked at each time, of subclasses all
        on_host = isinstance(frame, np.ndarray) or not on_device(frame)
        if on_host:
            found: Array | DeviceArray = read_image(self.camera, frame)
        else:
            found = read_device(self.camera, frame, self.driver, self.ordinal, self.stream)
        height, width = found.shape[:2]
        fit(height, width, self.step.size, self.role)  # it does not vanish
        return frame if on_host else found

    def put(self, frame: Array | DeviceArray) -> None:
        """What `look` has found good, to the device where it is not there."""
        self.owner = None  # of the last frame, whose inference is over
        if self.form != _form(frame):
            self._prepare(frame)
        if isinstance(frame, DeviceArray):
            if frame.made_on is not None:
                self._wait_for(frame.made_on)
            self.owner, self.record["frame"] = frame.owner, frame.address
            return
        lowest = frame.ctypes.data - self.below
        if self.packed and self._is_pinned(lowest):
            self.driver.call("cuMemcpyHtoDAsync", self.device, lowest, self.nbytes, self.stream)
            return
        if self.packed:
            memmove(self.pinned, lowest, self.nbytes)
        else:
            np.copyto(self.staged, self.as_staged(frame))
        self.upload()

    def _is_pinned(self, address: int) -> bool:
        """Asked once for an address: where memory there is another by now, the copy is only slower."""
        if self.seen[0] != address:
            self.seen = address, self.driver.is_pinned(address)
        return self.seen[1]

    def _wait_for(self, other: int) -> None:
        """Our stream goes on when another one has done what it was given so far."""
        if self.event is None:
            self.event = self.driver.call("cuEventCreate", 0)
        self.driver.call("cuEventRecord", self.event, other)
        self.driver.call("cuStreamWaitEvent", self.stream, self.event, 0)

    # ---- a frame of a new form ----

    def _prepare(self, given: Array | DeviceArray) -> None:
        frame = as_rgb(self.camera, given) if isinstance(given, np.ndarray) else given
        height, width = frame.shape[:2]
        step, record = self.step, self.record
        h, w = fit(height, width, step.size, self.role)
        resized = (h, w) != (height, width)
        tables = taps(step.resize, width, w, resized), taps(step.resize, height, h, resized)
        self.form = ()
        self.nbytes = 0 if isinstance(frame, DeviceArray) else frame.size * frame.itemsize
        at = [aligned(self.nbytes)]
        at.append(at[0] + aligned(tables[0].nbytes))
        self._reserve(at[1] + tables[1].nbytes)
        host = host_bytes(self.pinned, self.room)
        for start, table in zip(at, tables, strict=True):
            host[start : start + table.nbytes] = table.reshape(-1).view(np.uint8)
            self.driver.call("cuMemcpyHtoDAsync", self.device + start, self.pinned + start, table.nbytes, self.stream)
        top, left = corner(step.size - h, step.size - w, step.place)
        wide, is_float = (len(tables[0]), len(tables[1])), frame.dtype in ("f32", np.float32)
        strides = self._stage(frame, host) if isinstance(frame, np.ndarray) else frame.byte_strides
        record["across"], record["down"] = self.device + at[0], self.device + at[1]
        record["row"], record["column"], record["channel"] = strides
        record["across_taps"], record["down_taps"] = wide
        record["height"], record["width"], record["top"], record["left"] = h, w, top, left
        record["size"], record["is_float"], record["rule"] = step.size, is_float, RULES[step.resize]
        record["border"] = step.border
        if isinstance(given, np.ndarray):
            self.below = -sum(min(0, (n - 1) * by) for n, by in zip(given.shape, given.strides, strict=True))
            copy = (self.device, self.pinned, self.nbytes, self.stream)
            self.upload = self.driver.repeated("cuMemcpyHtoDAsync", *copy)
        self.form = _form(given)

    def _stage(self, frame: Array, host: Array) -> tuple[int, ...]:
        """How frames of this form lie in pinned and device memory: axes in the order of memory, steps upwards, no gaps.
        Returns the strides of [height, width, RGB] there, in bytes."""
        order = sorted(range(3), key=lambda axis: -abs(frame.strides[axis]))
        turned = tuple(slice(None, None, -1) if step < 0 else slice(None) for step in frame.strides)
        shape = tuple(frame.shape[axis] for axis in order)
        self.staged = host[: self.nbytes].view(frame.dtype).reshape(shape)
        self.as_staged = lambda given: as_rgb(self.camera, given)[turned].transpose(order)
        self.packed = frame[turned].transpose(order).flags.c_contiguous
        strides, first = [0, 0, 0], [0, 0, 0]
        for axis, step in zip(order, self.staged.strides, strict=True):
            down = frame.strides[axis] < 0
            strides[axis], first[axis] = (-step, step * (frame.shape[axis] - 1)) if down else (step, 0)
        self.record["frame"] = self.device + sum(first)
        return tuple(strides)

    def _reserve(self, nbytes: int) -> None:
        """As much memory on both sides; what was there is free, or stays where it is enough."""
        if nbytes > self.room:
            self._free()
            self.device = self.driver.alloc(nbytes)
            try:
                self.pinned = self.driver.host_alloc(nbytes)
            except BaseException:
                self.driver.call("cuMemFree", self.device)
                raise
            self.room = nbytes
        else:
            self.driver.call("cuStreamSynchronize", self.stream)  # copies from it may still be under way

    def close(self) -> None:
        self.owner = None
        if self.event is not None:
            self.driver.call("cuEventDestroy", self.event)
        self._free()

    def _free(self) -> None:
        if self.room:
            self.driver.call("cuStreamSynchronize", self.stream)
            self.room = 0
            self.driver.call("cuMemFreeHost", self.pinned)
            self.driver.call("cuMemFree", self.device)


def _form(frame: Array | DeviceArray) -> tuple[Any, ...]:
    """What has to be the same for a frame to be like another."""
    if isinstance(frame, DeviceArray):
        return "device", frame.shape, frame.strides, frame.dtype
    return frame.shape, frame.strides, frame.dtype


def taps(resize: str, n: int, m: int, resized: bool) -> Array:
    """For m outputs over n inputs: TAP [taps, m], in the order of their sum. resized: the picture, in any direction."""
    if resize == "pil_bilinear":
        index, weight = pil_weights(n, m) if n != m else (np.arange(m)[None], np.full((1, m), 1 << BITS))
        return _taps(index, weight.reshape(index.shape))
    if not resized:
        return _taps(np.arange(m)[None], np.ones((1, m), np.float32).view(np.int32))
    low, high, left, right = torch_weights(n, m)
    return _taps(np.stack([low, high]), np.stack([left[:, 0], right[:, 0]]).view(np.int32))


def _taps(index: Array, weight: Array) -> Array:
    made = np.empty(index.shape, TAP)
    made["index"], made["weight"] = index, weight
    return made
