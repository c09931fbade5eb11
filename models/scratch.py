"""Arrays that are too large to keep in memory and too costly to make twice: in unnamed files, gone with the process."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any

import numpy as np

from frtc.errors import EnvironmentFault

Array = np.ndarray[Any, Any]

SMALL = 1 << 20  # bytes: below, plain memory
KEPT = 6 << 30  # bytes of arrays that may be made again; the oldest leave first


class Scratch:
    """Arrays by key, each made once at its first use, from any thread. A view of an array that has left stays valid."""

    def __init__(self, limit: int = KEPT) -> None:
        self._arrays: OrderedDict[Hashable, tuple[Array, bool]] = OrderedDict()
        self._limit = limit
        self._busy = Lock()
        self._making: defaultdict[Hashable, Lock] = defaultdict(Lock)

    def get(
        self, key: Hashable, shape: tuple[int, ...], dtype: np.dtype[Any], fill: Callable[[Array], None], keep: bool
    ) -> Array:
        """The array of `key`, filled at its first use; with `keep` it never leaves. `fill` may ask for other keys."""
        with self._busy:
            making = self._making[key]
        with making:
            with self._busy:
                if key in self._arrays:
                    self._arrays.move_to_end(key)
                    return self._arrays[key][0]
            array = allocate(shape, dtype)
            fill(array)
            with self._busy:
                self._arrays[key] = array, keep
                self._evict()
            return array

    def _evict(self) -> None:
        """The newest stays, whatever its size."""
        loose = [key for key, (_, keep) in self._arrays.items() if not keep]
        size = sum(self._arrays[key][0].nbytes for key in loose)
        for key in loose[:-1]:
            if size <= self._limit:
                return
            size -= self._arrays.pop(key)[0].nbytes


def allocate(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An array in a file that has no name any more; every byte of it has its place on the disk."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < SMALL:
        return np.empty(shape, dtype)
    folder = tempfile.gettempdir()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)  # a full disk is an error here, not a signal later
            memory = mmap.mmap(file.fileno(), nbytes)
    except OSError as e:
        rows = [("folder", folder), ("wanted", f"{nbytes / 1e9:.2f} GB"), ("reason", str(e.strerror))]
        hint = "set TMPDIR to a folder on a disk with room for the whole checkpoint"
        raise EnvironmentFault("env.scratch", "there is no room for unpacked weights", rows, hint) from None
    return np.frombuffer(memory, dtype).reshape(shape)
