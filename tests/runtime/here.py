"""What tests that need a GPU find on this machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from frtc.errors import EnvironmentFault
from frtc.kernels.targets import Target, load_targets
from frtc.runtime.driver import Driver


def target_here(able: Callable[[Target], bool] = lambda target: True, what: str = "target") -> Target:
    """The target that the GPU is; a test without one, or where it is not `able`, is skipped. what: it is not, then."""
    try:
        driver = Driver()
    except EnvironmentFault as fault:
        pytest.skip(f"no CUDA device: {fault.what}")
    driver.release()
    found = [t for t in load_targets().values() if t.sm == driver.device.sm and able(t)]
    if not found:
        pytest.skip(f"no {what} for sm_{driver.device.sm}")
    return found[0]
