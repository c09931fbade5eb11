"""New evidence in a Plan that is there: its program stays, byte for byte. docs/plan-format.md explains the bytes.

The file is written anew beside the old one and takes its name when it is complete: whoever has the Plan open, or opens
it meanwhile, sees one of the two, whole.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from frtc.codegen.plan_writer import PAGE
from frtc.runtime.own_file import partial
from frtc.runtime.plan_file import PIECE, aligned, open_plan

Evidence = dict[str, Any]


def change_evidence(path: Path, plan_id: str, change: Callable[[Evidence], Evidence]) -> str:
    """Give the evidence of the Plan at `path` to `change` and keep what it returns.

    Returns why this could not be: "" where it is done. plan_id: of the Plan that the caller knows.
    """
    path = path.resolve()  # a link stays one
    try:
        found = path.stat()
        if not found.st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
            return "the Plan is read-only"
        plan = open_plan(path, verify=False)  # as it is now: others record, too
        if plan.plan_id != plan_id:
            return "another Plan has taken its place meanwhile"
        temporary = partial(path)
        try:
            _write(path, temporary, plan.data, plan_id, change(plan.evidence))
            os.chmod(temporary, stat.S_IMODE(found.st_mode))
            assert open_plan(temporary, verify=False).plan_id == plan_id
            if os.stat(path).st_ino != found.st_ino:
                return "another Plan has taken its place meanwhile"
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as fault:
        return f"the Plan cannot be written: {fault.strerror or fault}"
    return ""


def _write(path: Path, temporary: Path, data: memoryview, plan_id: str, evidence: Evidence) -> None:
    """The header of `path` with other evidence, then the data where it was, or behind a header that has grown."""
    with open(path, "rb") as old:
        (length,) = struct.unpack("<Q", old.read(8))
        header = json.loads(old.read(length))
    proof = json.dumps({"plan_id": plan_id, **evidence}, separators=(",", ":"), allow_nan=False)
    header["__metadata__"]["evidence"] = proof
    text = json.dumps(header, separators=(",", ":")).encode()
    base = max(8 + length, aligned(8 + len(text), PAGE))
    with open(temporary, "xb") as file:
        os.posix_fallocate(file.fileno(), 0, base + len(data))  # a full disk is found out now
        file.write(struct.pack("<Q", base - 8) + text.ljust(base - 8))
        for at in range(0, len(data), PIECE):
            file.write(data[at : at + PIECE])
        file.flush()
        os.fsync(file.fileno())
