"""frtc: an ahead-of-time compiler for realtime robot policies.

    frtc.compile("checkpoint", "thor", "pi05.plan")       # torch and friends: pip install frtc[compile]
    policy = frtc.load("pi05.plan")                       # a GPU, or an error; device="cpu" emulates
    policy.infer({"base": img, "state": q, "prompt": "..."}).actions

Every name below is loaded when it is first used: importing frtc costs nothing, and a robot never loads the compiler.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from frtc.compiler import CompileOptions, compile
    from frtc.errors import FrtcError
    from frtc.policy import Inference, Policy, load
    from frtc.policy_options import PolicyOptions
    from frtc.runtime.plan_file import open_plan
    from frtc.runtime.session import Session

__version__ = "0.1.0"
__all__ = [
    "CompileOptions",
    "FrtcError",
    "Inference",
    "Policy",
    "PolicyOptions",
    "Session",
    "compile",
    "load",
    "open_plan",
]

_HOME = {
    "compile": "frtc.compiler",
    "CompileOptions": "frtc.compiler",
    "PolicyOptions": "frtc.policy_options",
    "FrtcError": "frtc.errors",
    "Inference": "frtc.policy",
    "Policy": "frtc.policy",
    "load": "frtc.policy",
    "Session": "frtc.runtime.session",
    "open_plan": "frtc.runtime.plan_file",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module frtc has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
