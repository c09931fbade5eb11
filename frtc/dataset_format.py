"""What every format of data gives: episodes of frames, pictures under their own keys. Nothing here is unpickled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from frtc.errors import FrtcError

Array = NDArray[Any]
PIXELS = 1 << 26  # most of one picture: 8192 x 8192; what claims more is no camera's
ROWS = 1 << 28  # most frames of a dataset: at 30 Hz a hundred days


@dataclass(frozen=True, slots=True)
class Place:
    """Where a frame is: the episode's number in order, and the frame's in it. Both count from 0."""

    episode: int
    frame: int

    def __str__(self) -> str:
        return f"episode {self.episode}, frame {self.frame}"


@dataclass(frozen=True, slots=True)
class Frame:
    """One step as recorded.

    pictures   key -> u8 [H, W, 3], RGB
    state      numbers [D], robot units; None if it was not asked for
    prompt     the task's text; None if it was not asked for
    """

    pictures: Mapping[str, Array]
    state: Array | None
    prompt: str | None


@dataclass(frozen=True, slots=True)
class Asked:
    """What `read` is to find: cameras by their keys in the data."""

    cameras: tuple[str, ...]
    state: bool
    prompt: bool


class Format(Protocol):
    """An opened dataset. `read` takes places in rising order and holds one frame at a time."""

    @property
    def kind(self) -> str: ...

    @property
    def cameras(self) -> tuple[str, ...]: ...

    @property
    def lengths(self) -> Sequence[int]: ...  # frames of each episode

    def read(self, places: Sequence[Place], asked: Asked) -> Iterator[Frame]: ...


def check_picture(shape: Sequence[int], dtype: object, where: str) -> None:
    """Refuse what is no u8 [H, W, 3], or larger than any camera's picture."""
    if dtype != np.dtype(np.uint8) or len(shape) != 3 or shape[2] != 3 or 0 in shape:
        what = f"{where} is {dtype}{list(shape)}, not uint8[height, width, 3]"
        raise FrtcError("dataset.shape", what, hint="8-bit RGB pictures, height first")
    if shape[0] * shape[1] > PIXELS:
        raise too_large(where, f"{shape[0]} x {shape[1]} pixels", f"{PIXELS} pixels")


def too_large(where: str, found: str, bound: str) -> FrtcError:
    hint = "no recording of a robot is like this: the file is damaged, or made to exhaust the machine"
    return FrtcError("dataset.size", f"{where} claims {found}", [("at most", bound)], hint)
