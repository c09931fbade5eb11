"""A measuring process without a GPU: it tells planted times, and misbehaves where that is planted.

    python fake_tuner.py PLANTED.json        {"sm": 90, "times": [[part of a label, us or what it does], ...],
                                              "whole": [[part of a site, of its label, us or what it does], ...],
                                              "emulate": true}

The first part that a candidate's label holds decides: a number is its time, "crash" is a signal, "exit" an end, "hang"
an answer that never comes, "garbage", "list" and "negative" answers that mean nothing, "fault" an error of the GPU,
"wrong", "lazy" and "long" a quick launch with other results, none, or too many. Others take 50 us.

Each program of a whole takes 1000 us less what is planted in "whole" for the kernels of all its sites, or does what is
planted for one of them; a tenth more from answer "slow" on. With "emulate" its results are those of the emulator. Each
start is noted by a byte in the file beside PLANTED.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import frtc.tuning.chain  # noqa: F401 - here, so that an answer takes no time
from frtc.tuning.trial import Asked, Trial, run

SAID = {
    "garbage": "Segmentation fault (core dumped)",
    "negative": '{"us": -1}',
    "list": "[1, 2]",
    "fault": '{"error": "cuStreamSynchronize failed: CUDA_ERROR_LAUNCH_FAILED"}',
}
ANSWERS = count()
RESULTS: dict[str, Any] = {"wrong": [[1.0, 2.5]], "long": [[1.0, 2.0, 3.0]], "lazy": [[float("nan")] * 2]}


def misbehave(planted: object) -> None:
    if planted == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if planted == "exit":
        print("planted", file=sys.stderr)
        raise SystemExit(7)
    if planted == "hang":
        time.sleep(600)


def answer(planted: Any) -> str:
    misbehave(planted)
    if planted in SAID:
        return SAID[planted]
    if planted in RESULTS:
        return json.dumps({"us": 0.5, "results": RESULTS[planted]})
    return json.dumps({"us": planted, "results": [[1.0, 2.0]]})


def whole(asked: Asked, planted: dict[str, Any]) -> str:
    trial: Trial = pickle.loads(Path(asked.path).read_bytes())
    named, plants = trial.kernels.items(), planted.get("whole", ())
    found = [does for key, name in named for site, part, does in plants if site in key and part == name]
    for does in found:
        misbehave(does)
        if does in SAID:
            return SAID[does]
    said: dict[str, Any] = {"outputs": [[1.0, 2.0]], "probes": {key: [[1.0, 2.0]] for key in asked.probes}}
    if planted.get("emulate"):
        said = run(trial, asked.probes, gpu=False)
    for does in found:
        if does in RESULTS:
            said["probes"] = dict.fromkeys(asked.probes, RESULTS[does])
        if does == "astray":  # what it computes itself is as it was
            said["outputs"] = RESULTS["wrong"]
    us = 1000.0 - sum(does if isinstance(does, float) else 500.0 for does in found)
    us *= 1.1 if next(ANSWERS) >= planted.get("slow", 1 << 30) else 1.0
    names = ["total", "replay", "input", *(stage.name for stage in trial.program.stages), "output"]
    return json.dumps(said | {"times": dict.fromkeys(names, us)})


def main() -> None:
    path = Path(sys.argv[1])
    planted = json.loads(path.read_text())
    with path.with_suffix(".starts").open("ab") as starts:
        starts.write(b".")
    device = {"name": "Planted", "sm": planted["sm"], "integrated": False, "branch": 580, "cuda": 13000}
    print(json.dumps({"device": device}), flush=True)
    for line in sys.stdin:
        asked = pickle.loads(Path(line.strip()).read_bytes())
        if isinstance(asked, Asked):
            print(whole(asked, json.loads(path.read_text())), flush=True)
            continue
        times = [us for part, us in planted["times"] if part in asked.label]
        print(answer(times[0] if times else 50.0), flush=True)


if __name__ == "__main__":
    main()
