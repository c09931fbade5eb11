"""Facts about the device that a policy runs on."""

from __future__ import annotations

import platform
from dataclasses import asdict
from typing import Any

from frtc.policy import Policy
from frtc.runtime.emulator import Emulator


def about(policy: Policy) -> dict[str, Any]:
    """Name, capability, driver and memory, for reports."""
    program = policy.plan.program
    if isinstance(policy.executor, Emulator):
        planned = program.weights_nbytes + program.arena_nbytes + program.state_nbytes
        memory = {"planned": planned, "weights": program.weights_nbytes}
        return {"name": f"the emulator ({platform.machine()} CPU)", "kind": "cpu", "memory": memory}
    session: Any = policy.executor
    return {**asdict(session.driver.device), "kind": "cuda", "memory": asdict(session.memory())}
