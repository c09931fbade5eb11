"""A Plan on a GPU: its weights, memory, kernels and graphs, on the primary context and the caller's stream if given.

    with Session(plan) as session:
        session.warm()                              # from now on nothing is allocated, loaded or built
        session.set("noise", noise)
        session.run()                               # copy in, one graph, copy out, wait
        actions = session.get("actions")

Slots live in one device block beside a pinned mirror on the host, so that a run copies once in and once out; where it
begins with camera frames the graph does both. A slot that is bound to the caller's device memory is read and written
there.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock
from typing import Any

import numpy as np

from frtc.errors import FrtcError, UsageError
from frtc.kernels.dtypes import DTYPES
from frtc.kernels.smxx_frames import CUBIN
from frtc.runtime.device_array import DeviceArray
from frtc.runtime.driver import Driver
from frtc.runtime.executor import Array, Executor
from frtc.runtime.frames import IMAGES, Frames, step_of, symbol_of
from frtc.runtime.graph import Copy, Graph
from frtc.runtime.mirror import Mirror
from frtc.runtime.plan import ARENA, SLOT, STATE, WEIGHTS, Program, Ref, Slot, unrolled
from frtc.runtime.plan_file import Plan
from frtc.runtime.room import require_room
from frtc.runtime.timing import took_us
from frtc.runtime.upload import upload

POINTER_ALIGN = 16  # bytes; kernels load vectors
NON_BLOCKING = 1  # a stream that does not wait for the legacy default stream
TURNS: defaultdict[int, Lock] = defaultdict(Lock)  # of a GPU: whose inference runs
# Keys beside the stages' names: all of an inference; the same from raw frames on, and with its other copies; with
# events; frames alone.
WHOLE, FROM_FRAMES, TIMED, FRAMES = "", "\0frames", "\0timed", "\0images"


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the device. planned: the sum of the parts; used: what has gone since the context was there.

    slots   with camera frames and their filters, once there are some
    """

    weights: int
    arena: int
    state: int
    slots: int
    planned: int
    used: int


class Session(Executor):
    """`stream`: a handle, or an object with `cuda_stream` (torch) or `__cuda_stream__`.

    Where blocks of a Plan's launches wait for each other (`target.sms`), sessions of one process run one inference at a
    time on a GPU. `replay` does not wait for its end, so it is for one such session on a GPU.

    check_finite   `run` looks at the outputs' copy on the host; `replay`, and outputs that are bound, nobody looks at
    """

    def __init__(
        self,
        plan: Plan,
        device: int = 0,
        stream: Any = None,
        driver: Driver | None = None,
        check_finite: bool = True,
    ) -> None:
        super().__init__(plan.program, check_finite)
        self.driver = driver or Driver(device)
        self.ordinal = device
        self.turn = TURNS[device] if plan.program.target.sms else Lock()
        self.stream: Any = 0
        self.graphs: dict[str, Graph] = {}
        self._launch_from_frames: Callable[[], None] | None = None
        self.events: list[Any] = []
        self._undo: list[Callable[[], object]] = []
        try:
            self.driver.require(plan.program.target, plan.path)
            with self.driver.current(), ThreadPoolExecutor(1) as pool:
                check = None if plan.verified else pool.submit(plan.verify)
                self._load(plan, stream)
                if check:
                    check.result()
        except BaseException:
            self.close()
            raise

    # ---- running ----

    def warm(self, runs: int = 3, stages: bool = False, frames: bool = False) -> None:
        """Build the graph (`stages`: those of single stages too) and run it on what the inputs hold.

        Outputs are overwritten, states are zero afterwards. frames: the graph that begins with camera frames, where the
        Plan has one, instead of the one that begins with `images`; it reads no frame.
        """
        with self.driver.current():
            for name in (FROM_FRAMES if frames and self.frames else WHOLE, *(self.rounds if stages else ())):
                graph = self._graph(name)
                if self.frames and name == FROM_FRAMES:
                    self.frames.forget()
                for _ in range(runs):
                    graph.launch(self.stream)
        self.reset()

    def set(self, name: str, values: Array) -> None:
        super().set(name, values)
        self._no_frames(name)

    def _no_frames(self, name: str) -> None:
        """The slot has other contents from now on."""
        if self.frames and name == IMAGES:
            self.frames.drop()
            self.frames.shown = False

    def take(self, observation: Mapping[str, Any]) -> None:
        if self.frames is None:
            return super().take(observation)
        if self.bound:
            self._host(self.inputs[IMAGES])  # it must not be
        self.frames.take(observation)

    def _run(self, meanwhile: Callable[[], object]) -> None:
        with self.driver.current():
            if self.frames and self.frames.given:
                self._on_frames(self._launch_from_frames or self._from_frames(), meanwhile)
            else:
                self._on_frames(self._with_copies(self._graph(WHOLE)), meanwhile)

    def run_stage(self, name: str, round: int = 0) -> None:
        self._check_stage(name, round)
        with self.driver.current():
            graph = self._graph(name)
            graph.set_round(round)
            given = self.frames and self.frames.given
            self._on_frames(self._with_copies(*([self._graph(FRAMES)] if given else ()), graph))

    def _on_frames(self, begin: Callable[[], None], meanwhile: Callable[[], object] = lambda: None) -> None:
        """On the frames that were taken, where there are some; what fails leaves them to the next run.

        begin   gives the device everything; nothing comes between the frames and that
        """
        frames = self.frames
        if frames is None:
            return self._round_trip(begin, meanwhile)
        given = frames.given
        try:
            if given:
                frames.begin()
            self._round_trip(begin, meanwhile)
        except BaseException:
            if given:
                frames.given, frames.shown = given, False
            raise
        if frames.shown:  # also by an earlier run: `images` are still what it refused
            self.refused = frames.refusal()

    def replay(self) -> None:
        """Launch the inference on the stream, without copies and without waiting."""
        if self.frames and self.frames.given:
            what = "replay copies nothing, and frames were taken that it would leave out"
            raise UsageError("input.frames", what, hint="run, or set images instead of taking frames")
        with self.driver.current():
            self._graph(WHOLE).launch(self.stream)

    def synchronize(self) -> None:
        with self.driver.current():
            self.driver.call("cuStreamSynchronize", self.stream)

    def reset(self) -> None:
        with self.driver.current():
            nbytes = max(self.program.state_nbytes, 1)
            self.driver.call("cuMemsetD8Async", self.addresses[STATE], 0, nbytes, self.stream)
            self.driver.call("cuStreamSynchronize", self.stream)

    def peek(self, ref: Ref, round: int = 0) -> Array:
        dtype = DTYPES[ref.dtype].numpy
        reach = sum((n - 1) * stride for n, stride in zip(ref.shape, ref.strides, strict=True))
        host = np.empty((reach + 1) * dtype.itemsize, np.uint8)
        address = self.addresses[ref.space + ref.slot] + ref.offset + round * ref.step
        with self.driver.current():
            self.driver.call("cuMemcpyDtoH", host.ctypes.data, address, host.nbytes)
        return np.ndarray(ref.shape, dtype, host, 0, [s * dtype.itemsize for s in ref.strides]).copy()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        with suppress(FrtcError), self.driver.current():
            with suppress(FrtcError):
                self.driver.call("cuStreamSynchronize", self.stream)
            while self._undo:
                with suppress(FrtcError):  # after a fault in a kernel every call fails: give back what can be
                    self._undo.pop()()
        self.graphs.clear()
        self._launch_from_frames = None
        with suppress(FrtcError):
            self.driver.release()

    # ---- slots ----

    def bind(self, name: str, array: Any) -> None:
        """Have a slot live in the caller's device memory, until `unbind` or another `bind`."""
        slot, found = self._slot(name), DeviceArray.of(array)
        wrong = found.device not in (None, self.ordinal) or found.address % POINTER_ALIGN or not found.address
        if wrong or (found.dtype, found.shape) != (slot.dtype, slot.shape):
            about = f"{found.dtype}{list(found.shape)} at {found.address:#x} on GPU {found.device}"
            what = f"slot {name} is {slot.dtype}{list(slot.shape)} on GPU {self.ordinal}, the array is {about}"
            raise UsageError("slot.array", what, hint=f"addresses are multiples of {POINTER_ALIGN}")
        for other in self.bound.keys() - {name}:  # launches of two slots do not wait for each other
            if self.outputs.keys() & {name, other} and found.meets(self.bound[other]):
                raise UsageError("slot.array", f"the arrays of slots {name} and {other} share memory")
        self.bound[name] = found
        self._no_frames(name)
        self._move_slot(name, found.address)

    def unbind(self, name: str) -> None:
        """Have a slot live in the session's own memory again."""
        self.bound.pop(self._slot(name).name, None)
        self._move_slot(name, self.slots + self.mirror.places[name])

    def _move_slot(self, name: str, address: int) -> None:
        if self.addresses[SLOT + name] != address:
            self.addresses[SLOT + name] = address
            with self.driver.current():
                for graph in self.graphs.values():
                    graph.rebind(name)

    def _slot(self, name: str) -> Slot:
        known = {**self.inputs, **self.outputs}
        if name not in known:
            raise UsageError("slot.unknown", f"the Plan has no slot {name!r}", [("known", ", ".join(known))])
        return known[name]

    def _host(self, slot: Slot) -> Array:
        if slot.name in self.bound:
            raise UsageError("slot.bound", f"slot {slot.name} lives in memory of the caller: read or write it there")
        return self.mirror.arrays[slot.name]

    def _round_trip(self, begin: Callable[[], None], meanwhile: Callable[[], object]) -> None:
        with self.turn:
            try:
                begin()
                self.launched_ns = time.perf_counter_ns()
                meanwhile()
            finally:  # also of what was interrupted: the device may still read what the next inputs overwrite
                self.driver.call("cuStreamSynchronize", self.stream)

    def _from_frames(self) -> Callable[[], None]:
        """One launch, once the graph is built: it copies in and out by itself."""
        executable = self._graph(FROM_FRAMES).executable
        self._launch_from_frames = self.driver.repeated("cuGraphLaunch", executable, self.stream)
        return self._launch_from_frames

    def _with_copies(self, *graphs: Graph) -> Callable[[], None]:
        def begin() -> None:
            self._copy_in()
            for graph in graphs:
                graph.launch(self.stream)
            self._copy_out()

        return begin

    def _copy_in(self) -> None:
        """All inputs; where `images` on the device are those of frames, what lies behind them."""
        if self.frames or self.inputs.keys() - self.bound.keys():
            copy = self.mirror.inputs(self.slots, but_images=bool(self.frames and self.frames.shown))
            self.driver.call("cuMemcpyHtoDAsync", copy.device, copy.host, copy.nbytes, self.stream)

    def _copy_out(self) -> None:
        if self.outputs.keys() - self.bound.keys() or self.frames:
            copy = self.mirror.outputs(self.slots)
            self.driver.call("cuMemcpyDtoHAsync", copy.host, copy.device, copy.nbytes, self.stream)

    def _copies(self) -> tuple[Copy, Copy]:
        """Of an inference from frames: what lies behind `images`, and all outputs."""
        return self.mirror.inputs(self.slots, but_images=True), self.mirror.outputs(self.slots)

    # ---- timing and memory ----

    def memory(self) -> Memory:
        program = self.program
        slots = self.mirror.nbytes + (self.frames.nbytes if self.frames else 0)
        parts = (program.weights_nbytes, program.arena_nbytes, program.state_nbytes, slots)
        with self.driver.current():
            return Memory(*parts, sum(parts), self.free_at_first - self.driver.free_bytes())

    def _sample(self) -> dict[str, float]:
        total, replay = took_us(self.run), took_us(self._replay_and_wait)
        return {"total": total, "replay": replay, **self._parts()}

    def _replay_and_wait(self) -> None:
        self.replay()
        self.synchronize()

    def _parts(self) -> dict[str, float]:
        """Microseconds on the device, by a graph of its own with an event before and after each step."""
        steps = unrolled(self.program.schedule)
        with self.driver.current():
            while len(self.events) < len(steps) + 3:
                self.events.append(self._keep("cuEventCreate", "cuEventDestroy", 0))
            start, end, *marks = self.events
            self.driver.call("cuEventRecord", start, self.stream)
            self._copy_in()
            self._graph(TIMED).launch(self.stream)
            self._copy_out()
            self.driver.call("cuEventRecord", end, self.stream)
            self.driver.call("cuStreamSynchronize", self.stream)
            parts = {"input": self._us(start, marks[0])}
            for (name, _), (before, after) in zip(steps, pairwise(marks), strict=True):
                parts[name] = parts.get(name, 0.0) + self._us(before, after)
            return parts | {"output": self._us(marks[-1], end)}

    def _us(self, start: Any, end: Any) -> float:
        return float(self.driver.call("cuEventElapsedTime", start, end)) * 1e3

    # ---- building ----

    def _load(self, plan: Plan, stream: Any) -> None:
        program, driver = plan.program, self.driver
        self.free_at_first = driver.free_bytes()
        given = stream is not None
        self.stream = _handle(stream) if given else self._keep("cuStreamCreate", "cuStreamDestroy", NON_BLOCKING)
        files = plan.files()
        self.frames = self._load_frames(program, files)
        self.mirror = Mirror(driver, self.inputs, self.outputs, self.frames.rooms if self.frames else (0, 0))
        self._undo.append(self.mirror.close)
        sizes = {WEIGHTS: program.weights_nbytes, ARENA: program.arena_nbytes, STATE: program.state_nbytes}
        self.addresses = {space: self._alloc(nbytes) for space, nbytes in sizes.items()}
        self.slots = self._alloc(self.mirror.nbytes)
        self.addresses |= {SLOT + name: self.slots + at for name, at in self.mirror.places.items()}
        self._place_frames()
        upload(driver, plan.weights, self.addresses[WEIGHTS], self.stream)
        names = sorted({entry.cubin for entry in program.kernels})
        modules = {name: self._keep("cuModuleLoadData", "cuModuleUnload", bytes(files[name])) for name in names}
        self.functions = [driver.function(modules[e.cubin], e.symbol, e.smem) for e in program.kernels]
        require_room(driver, plan, self.functions)
        # `warm` runs on them before anybody sets them: what memory held might be a token beyond the table.
        driver.call("cuMemsetD8Async", self.slots, 0, max(self.mirror.nbytes, 1), self.stream)
        self.reset()

    def _load_frames(self, program: Program, files: Mapping[str, memoryview]) -> Frames | None:
        step = step_of(program, files)
        if step is None:
            return None
        image = bytes(files[CUBIN])
        module = self._keep("cuModuleLoadData", "cuModuleUnload", image)
        frames = Frames(self.driver, step, self.driver.function(module, symbol_of(image), 0), self.stream, self.ordinal)
        self._undo.append(frames.close)
        return frames

    def _place_frames(self) -> None:
        if self.frames:
            (table, table_at), (found, found_at) = self.mirror.rooms
            addresses = (self.slots + table_at, self.addresses[SLOT + IMAGES], self.slots + found_at)
            self.frames.place(table, found, addresses)

    def _alloc(self, nbytes: int) -> int:
        return int(self._keep("cuMemAlloc", "cuMemFree", max(nbytes, 1)))

    def _keep(self, make: str, destroy: str, *arguments: Any) -> Any:
        """Something of the driver's that `close` gives back."""
        made = self.driver.call(make, *arguments)
        self._undo.append(lambda: self.driver.call(destroy, made))
        return made

    def _graph(self, name: str) -> Graph:
        """Of the whole inference or of one stage; built when first asked for."""
        if name not in self.graphs:
            whole = name in (WHOLE, FROM_FRAMES, TIMED)
            steps = unrolled(self.program.schedule) if whole else [] if name == FRAMES else [(name, 0)]
            named = [(self.program.stage(stage), round) for stage, round in steps]
            events = self.events[2:] if name == TIMED else ()
            lead = self.frames.lead if self.frames and name in (FROM_FRAMES, FRAMES) else None
            copies = self._copies() if name == FROM_FRAMES else None
            overlap = self.program.overlap if name in (WHOLE, FROM_FRAMES) else None
            graph = Graph(self.driver, self.functions, self.addresses, named, events, lead, copies, overlap)
            self._undo.append(graph.destroy)
            graph.upload(self.stream)
            self.graphs[name] = graph
        return self.graphs[name]


def _handle(stream: Any) -> int:
    if hasattr(stream, "cuda_stream"):
        return int(stream.cuda_stream)
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    return int(stream)
