"""Weights from the mapped file to the device, once.

Where GPU and CPU have memories of their own, the mapping is registered and copied at the speed of the bus. Where they
share one, or registering fails, pieces go through a few pinned buffers: registering would keep a second copy resident.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from frtc.runtime.driver import Driver, host_bytes

Array = np.ndarray[Any, Any]

PIECE, THREADS = 16 << 20, 8  # bytes of a pinned buffer, and how many threads fill one each


def upload(driver: Driver, source: memoryview, address: int, stream: object) -> None:
    """Copy `source` to device memory at `address` and wait until it is there."""
    data = np.frombuffer(source, np.uint8)
    if not data.nbytes:
        return
    if not driver.device.integrated and driver.register(data.ctypes.data, data.nbytes):
        driver.call("cuMemcpyHtoDAsync", address, data.ctypes.data, data.nbytes, stream)
        driver.call("cuStreamSynchronize", stream)
        driver.call("cuMemHostUnregister", data.ctypes.data)
        return
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda first: _staged(driver, data, address, stream, first), range(THREADS)))


def _staged(driver: Driver, data: Array, address: int, stream: object, first: int) -> None:
    """Every THREADS-th piece, from piece `first` on, through one pinned buffer."""
    if first * PIECE >= data.nbytes:
        return
    with driver.current():
        pinned = driver.host_alloc(PIECE)
        done = driver.call("cuEventCreate", 0)
        for at in range(first * PIECE, data.nbytes, THREADS * PIECE):
            piece = data[at : at + PIECE]
            driver.call("cuEventSynchronize", done)
            host_bytes(pinned, piece.nbytes)[:] = piece
            driver.call("cuMemcpyHtoDAsync", address + at, pinned, piece.nbytes, stream)
            driver.call("cuEventRecord", done, stream)
        driver.call("cuEventSynchronize", done)
        driver.call("cuEventDestroy", done)
        driver.call("cuMemFreeHost", pinned)
