"""What was measured where, for `frtc models`: frtc/measured.json from the files of results under bench/results.

    python tools/measured.py [--check]

One row for each model, precision, kernel family and shape that an frtc Plan ran at on a GPU: median and tail of the
replay, graph nodes, the worst step's velocity error, and the commit and command of both. Rehearsals and small models
are left out. Run it after every bench; a test compares.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from frtc.kernels.targets import load_targets

ROOT = Path(__file__).resolve().parents[1]
RESULTS, OUT = ROOT / "bench" / "results", ROOT / "frtc" / "measured.json"
OURS = "frtc "  # begins the contender's name in a row of times: "frtc bf16 baseline"
FIRST = "pi05"  # the model of files that are older than the second one and do not say it
Key = tuple[str, str, str, str, str]  # model, precision, family, shape, GPU


def measured(results: Path) -> list[dict[str, Any]]:
    """One row per key. A later file, in the order of names, replaces what an earlier one says."""
    rows: dict[Key, dict[str, Any]] = {}
    for path in sorted(results.glob("gpu_*.json"), key=lambda p: p.stem):
        found = json.loads(path.read_text())
        if target_of(str(found.get("device"))) and not path.stem.endswith("_tiny") and "scale" not in path.stem:
            for key, values in _times(found) if path.stem.startswith("gpu_bench") else _accuracies(found):
                rows.setdefault(key, {}).update(values)
    names = ("model", "precision", "family", "shape", "gpu")
    return [
        dict(zip(names, key, strict=True)) | {"target": target_of(key[-1])} | values
        for key, values in sorted(rows.items(), key=_order)
        if "p50_us" in values
    ]


def _order(item: tuple[Key, Any]) -> tuple[Any, ...]:
    """By model, precision and family, then by the numbers in the shape."""
    *kind, shape, _ = item[0]
    return *kind, [int(n) for n in re.findall(r"\d+", shape)]


def target_of(device: str) -> str:
    """The target whose title names this device; "" if none does."""
    model = device.split()[-1] if device.startswith("NVIDIA") else "?"
    return next((t.name for t in load_targets().values() if model in t.title.split()), "")


def _source(found: dict[str, Any]) -> dict[str, str]:
    return {"commit": found.get("commit", ""), "command": found.get("command", "")}


def _times(found: dict[str, Any]) -> Iterator[tuple[Key, dict[str, Any]]]:
    for row in found["rows"]:
        if not row["contender"].startswith(OURS):
            continue
        precision, family = row["contender"].removeprefix(OURS).split()
        at = row["device_us"]
        values = {"nodes": row["graph_nodes"], "p50_us": round(at["p50"], 1), "p99_us": round(at["p99"], 1)}
        key = (found.get("policy", FIRST), precision, family, row["shape"], found["device"])
        yield key, values | {"times": _source(found)}


def _accuracies(found: dict[str, Any]) -> Iterator[tuple[Key, dict[str, Any]]]:
    """Of one precision, or of several, which share what all say alike."""
    for result in found.get("results", [{}]):
        yield from _accuracy({**found, **result})


def _accuracy(found: dict[str, Any]) -> Iterator[tuple[Key, dict[str, Any]]]:
    """Checks run a Plan that times were taken of, or one like it; of the baseline family where they do not say."""
    observed = found.get("accuracy", [found])
    worst = max(max(row["velocity_errors"]) for row in observed)
    kind = (found.get("precision", "bf16"), found.get("family", "baseline"))
    key = (found.get("policy", FIRST), *kind, found["shape"], found["device"])
    yield key, {"velocity_error": float(f"{worst:.3g}"), "accuracy": _source(found)}


def text(results: Path = RESULTS) -> str:
    """The file's contents."""
    return json.dumps(measured(results), indent=1) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit 3 if the file is out of date; nothing is written")
    if parser.parse_args().check:
        return 0 if OUT.is_file() and OUT.read_text() == text() else 3
    OUT.write_text(text())
    print(f"{OUT}: {len(json.loads(text()))} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
