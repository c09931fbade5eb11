"""The host's side of a session's slots: pinned memory, laid out as the block on the device.

    images | other inputs, then the table of frames | outputs, then what was found in frames
           behind                                   split

so that inputs go to the device in one copy, with or without `images`, and outputs come back in another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from frtc.kernels.dtypes import DTYPES
from frtc.runtime.driver import Driver, host_bytes
from frtc.runtime.frames import IMAGES
from frtc.runtime.graph import Copy
from frtc.runtime.plan import Slot
from frtc.runtime.plan_file import aligned

Array = np.ndarray[Any, Any]


class Mirror:
    """places   of the slots in the block
    arrays   of the slots here
    rooms    of frames: the table and what was found, each with its place
    """

    def __init__(
        self, driver: Driver, inputs: Mapping[str, Slot], outputs: Mapping[str, Slot], rooms: tuple[int, int]
    ) -> None:
        self.driver = driver
        self.places: dict[str, int] = {}
        at = self.split = self.behind = 0
        ends: list[int] = []
        for slots, room in zip((inputs, outputs), rooms, strict=True):
            self.split = at
            for name in sorted(slots, key=lambda name: name != IMAGES):
                self.places[name], at = at, aligned(at + slots[name].nbytes)
                if name == IMAGES and slots is inputs:
                    self.behind = at
            ends.append(at)
            at = aligned(at + room)
        self.nbytes = at
        self.address = driver.host_alloc(at)
        self.memory = host_bytes(self.address, at)
        self.memory.fill(0)
        self.rooms = [(self.memory[end : end + room], end) for end, room in zip(ends, rooms, strict=True)]
        self.arrays = {slot.name: self._array(slot) for slot in (*inputs.values(), *outputs.values())}

    def inputs(self, device: int, but_images: bool) -> Copy:
        """device: the block's address."""
        at = self.behind if but_images else 0
        return Copy(self.address + at, device + at, self.split - at)

    def outputs(self, device: int) -> Copy:
        return Copy(self.address + self.split, device + self.split, self.nbytes - self.split)

    def close(self) -> None:
        self.driver.call("cuMemFreeHost", self.address)

    def _array(self, slot: Slot) -> Array:
        at = self.places[slot.name]
        return self.memory[at : at + slot.nbytes].view(DTYPES[slot.dtype].numpy).reshape(slot.shape)
