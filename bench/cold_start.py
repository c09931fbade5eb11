"""From the start of a process to its first action, a Plan in the page cache: what a robot waits for after a restart.

    PYTHONPATH=. python3 -m bench.cold_start PLAN [--times 5]

Each sample is a process of its own. Prints one JSON object: seconds of each part, best, median and worst of all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

BAR = 2.0  # seconds, docs/design.md, section 10

CHILD = """
import sys, time
marks = [("interpreter", time.time())]
import frtc
from frtc import observation
policy = frtc.load(sys.argv[1])
marks.append(("import, open, upload", time.time()))
policy.warm()
marks.append(("warm", time.time()))
answer = policy.infer(observation.seeded(policy.steps))
marks.append(("first action", time.time()))
assert abs(answer.actions).max() < float("inf")
import json
print(json.dumps(marks))
"""


def sample(plan: Path) -> dict[str, float]:
    """Seconds of each part; "total" is from before the process was made to its first action."""
    started = time.time()
    child = subprocess.run([sys.executable, "-c", CHILD, str(plan)], capture_output=True, text=True, check=True)
    parts, last = {}, started
    for name, at in json.loads(child.stdout):
        parts[name], last = at - last, at
    return parts | {"total": last - started}


def measure(plan: Path, times: int) -> dict[str, object]:
    with plan.open("rb") as file:  # into the page cache
        while file.read(1 << 26):
            pass
    samples = [sample(plan) for _ in range(times)]
    totals = sorted(s["total"] for s in samples)
    middle = {name: statistics.median(s[name] for s in samples) for name in samples[0]}
    return {"plan": plan.name, "seconds": middle, "best": totals[0], "worst": totals[-1], "samples": times}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("--times", type=int, default=5)
    arguments = parser.parse_args()
    found = measure(arguments.plan, arguments.times)
    print(json.dumps(found, indent=1))
    return 0 if float(str(found["worst"])) <= BAR else 3


if __name__ == "__main__":
    sys.exit(main())
