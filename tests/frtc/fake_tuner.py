"""A measuring process without a GPU: it tells planted times, and misbehaves where that is planted.

    python fake_tuner.py PLANTED.json        {"sm": 90, "times": [[part of a label, us or what it does], ...]}

The first part that a candidate's label holds decides: a number is its time, "crash" is a signal, "exit" an end, "hang"
an answer that never comes, "garbage", "list" and "negative" answers that mean nothing, "fault" an error of the GPU,
"wrong", "lazy" and "long" a quick launch with other results, none, or too many. Others take 50 us. Each start is noted
by a byte in the file beside PLANTED.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import time
from pathlib import Path

import frtc.tuning.chain  # noqa: F401 - here, so that an answer takes no time


def answer(planted: object) -> str:
    if planted == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if planted == "exit":
        print("planted", file=sys.stderr)
        raise SystemExit(7)
    if planted == "hang":
        time.sleep(600)
    if planted == "wrong":
        return json.dumps({"us": 0.5, "results": [[1.0, 2.5]]})
    if planted == "long":
        return '{"us": 0.5, "results": [[1.0, 2.0, 3.0]]}'
    if planted == "lazy":
        return '{"us": 0.5, "results": [[NaN, NaN]]}'
    said = {"garbage": "Segmentation fault (core dumped)", "negative": '{"us": -1}', "list": "[1, 2]"}
    if planted == "fault":
        return '{"error": "cuStreamSynchronize failed: CUDA_ERROR_LAUNCH_FAILED"}'
    return said[planted] if isinstance(planted, str) else json.dumps({"us": planted, "results": [[1.0, 2.0]]})


def main() -> None:
    path = Path(sys.argv[1])
    planted = json.loads(path.read_text())
    with path.with_suffix(".starts").open("ab") as starts:
        starts.write(b".")
    device = {"name": "Planted", "sm": planted["sm"], "integrated": False, "branch": 580, "cuda": 13000}
    print(json.dumps({"device": device}), flush=True)
    for line in sys.stdin:
        chain = pickle.loads(Path(line.strip()).read_bytes())
        times = [us for part, us in planted["times"] if part in chain.label]
        print(answer(times[0] if times else 50.0), flush=True)


if __name__ == "__main__":
    main()
