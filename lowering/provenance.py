"""Where a traced op comes from: "layers.0.mlp models/policy.py:112", without any path of this machine."""

from __future__ import annotations

import functools
import os
import re
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from frtc.lowering.ir import Node

_FRAME = re.compile(r'File "(.+?)", line (\d+), in ')
_LEAVES = frozenset({"const", "weight", "tensor", "input", "state"})
_OWN_LINKS = "frtc/"  # the package's folders are links to the top-level ones


def location(meta: Mapping[str, Any]) -> str:
    """Module path and source line of the innermost frame outside torch, from an fx node's `meta`."""
    stack = meta.get("nn_module_stack") or {}
    module = next(reversed(stack.values()))[0] if stack else ""
    return " ".join(part for part in (module, source_line(meta.get("stack_trace") or "")) if part)


def locate(node: Node, loc: str) -> None:
    """The new nodes below and including `node` come from `loc`; whatever has a location keeps it."""
    stack = [node]
    while stack:
        new = stack.pop()
        if not new.loc and new.op not in _LEAVES:
            new.loc = loc
            stack.extend(new.operands)


def source_of(error: BaseException) -> str:
    """Source line outside torch where an exception passed through last."""
    frames = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(error.__traceback__)]
    return _innermost([f for f in frames if not f[0].startswith(os.path.dirname(__file__))]) or "unknown"


@functools.lru_cache(maxsize=4096)
def source_line(stack_trace: str) -> str:
    """Innermost line outside torch of a stack trace in Python's format."""
    return _innermost([(m[1], int(m[2])) for m in _FRAME.finditer(stack_trace)])


def _innermost(frames: list[tuple[str, int]]) -> str:
    for path, line in reversed(frames):
        short = relative(path)
        if not short.startswith("torch/") and not path.startswith("<"):
            return f"{short}:{line}"
    return ""


@functools.lru_cache(maxsize=1024)
def relative(path: str) -> str:
    """The path below the longest entry of sys.path that holds it; the file's name alone where none does."""
    roots = {os.path.abspath(entry) for entry in sys.path}
    inside = [root for root in roots if path.startswith(root + os.sep)]
    short = os.path.relpath(path, max(inside, key=len)) if inside else os.path.basename(path)
    return short.replace(os.sep, "/").removeprefix(_OWN_LINKS)
