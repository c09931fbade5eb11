"""The process that builds trials, without a compiler.

python fake_builder.py BROKEN.json FOLDER JOB       [part of a kernel's instance that does not compile, ...]
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from frtc.codegen import build
from frtc.codegen.nvrtc import CompileFailed, Cubin, Job
from frtc.tuning import builder


def main(broken: str, folder: str, job: str) -> int:
    plants = json.loads(Path(broken).read_text())

    def compiled(jobs: Sequence[Job], **_: object) -> list[Cubin]:
        entries = [one.entry for one in jobs]
        if set(plants.get("deadly", ())) & set(entries):
            os.kill(os.getpid(), signal.SIGSEGV)
        if bad := [entry for entry in entries if entry in plants.get("broken", ())]:
            raise CompileFailed(f"{bad[0][:40]}: NVRTC_ERROR_COMPILATION\nline 3")
        return [Cubin(b"cubin", entry) for entry in entries]

    build.compile_all = compiled  # type: ignore[assignment]
    return builder.main(folder, job)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
