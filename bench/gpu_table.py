"""Rows of gpu_bench as a table, and the bars that they can decide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bench import frames_times
from bench.full_model import STATIC
from frtc.console import table as columns

Row = dict[str, Any]
BASELINE = "baseline"
TAIL_BAR = 1.03  # p99 over p50, host to host with changing prompts
# Milliseconds of a replay by (policy, precision, shape): bars of Plans with kernels of the GPU's own.
P50_MS = {
    ("pi05", STATIC, "v2-p48-c50"): 5.8,
    ("pi05", STATIC, "v2-p48-c10"): 5.2,
    ("pi05", STATIC, "v1-p48-c10"): 4.4,
    ("pi05", STATIC, "v3-p48-c10"): 6.3,
    ("pi05", "bf16", "v2-p48-c50"): 9.0,
    ("pi0", STATIC, "v2-p48-c50"): 6.0,
}
FULL_MS = {("pi05", STATIC, "v2-p200-c50"): 6.5}  # likewise, with as many tokens as the budget has
# Of Pi0.5 with static scales, two views, a budget of 48 tokens; of all rounds, by the actions of a chunk.
STAGES_MS = {"vision": 0.95, "prefix": 2.05}
ROUNDS_MS = {"c50": 2.9, "c10": 2.2}
BUDGET_MS = 0.4  # what a budget of 200 tokens costs more than one of 48, with 48 valid ones
NODES = 1250
BASELINE_P50_MS, BASELINE_BUDGET_MS, BASELINE_NODES, BASELINE_FP8_NODES = 30.0, 1.5, 2000, 1400


def bars_of(rows: Sequence[Row], policy: str = "pi05") -> dict[str, bool]:
    own = {label_of(r): r for r in rows if "graph_nodes" in r}
    bars: dict[str, bool] = {}
    for label, row in own.items():
        shape, precision, family = label.split()
        p50, most = row["device_us"]["p50"] / 1e3, nodes_bar(precision, family)
        bars[f"graph nodes {label}"] = row["graph_nodes"] <= most
        if (bar := p50_bar(policy, shape, precision, family)) is not None:
            bars[f"p50 {label}"] = p50 <= bar
        if family != BASELINE and (bar := FULL_MS.get((policy, precision, shape))) and "full_us" in row:
            bars[f"full prompt {label}"] = row["full_us"]["p50"] / 1e3 <= bar
        bars |= {f"{stage} {label}": ok for stage, ok in _stages(row, policy, precision, family)}
        twin = own.get(label.replace("-p200-", "-p48-"))
        if "-p200-" in label and twin is not None:
            most_ms = BASELINE_BUDGET_MS if family == BASELINE else BUDGET_MS
            bars[f"budget 200 {label}"] = p50 - twin["device_us"]["p50"] / 1e3 <= most_ms
        held = frames_times.bars_of(row.get("frames_us", {}), row["device_us"]["p50"])
        bars |= {f"{bar} {label}": ok for bar, ok in held.items()}
        if tail := row.get("changing_prompts_us"):
            bars[f"p99 over p50 {label}"] = tail["p99"] <= TAIL_BAR * tail["p50"]
    return bars


def label_of(row: Row) -> str:
    """Shape, precision, families: "v2-p48-c50 fp8 baseline"."""
    return " ".join([row["shape"], *row["contender"].split()[1:]])


def p50_bar(policy: str, shape: str, precision: str, family: str) -> float | None:
    """Milliseconds; None where nobody set one."""
    return BASELINE_P50_MS if family == BASELINE else P50_MS.get((policy, precision, shape))


def nodes_bar(precision: str, family: str) -> int:
    if family != BASELINE:
        return NODES
    return BASELINE_FP8_NODES if precision == STATIC else BASELINE_NODES


def _stages(row: Row, policy: str, precision: str, family: str) -> Iterator[tuple[str, bool]]:
    if family != BASELINE and (policy, precision) == ("pi05", STATIC) and row["shape"].startswith("v2-p48-"):
        actions = row["shape"].rpartition("-")[2]
        rounds = {"denoise": ROUNDS_MS[actions]} if actions in ROUNDS_MS else {}
        for stage, bar in {**STAGES_MS, **rounds}.items():
            yield stage, row["stages"][stage]["p50"] / 1e3 <= bar


def line_of(row: Row) -> str:
    """What is printed when a row is there."""
    at, name = row["device_us"], label_of(row) if "graph_nodes" in row else f"{row['contender']} {row['shape']}"
    return f"{name:56s} p50 {at['p50'] / 1e3:7.3f} ms   p99 {at['p99'] / 1e3:7.3f} ms"


def table(rows: Sequence[Row]) -> str:
    """Milliseconds: replay, host to host, the same from raw frames with its parts, then stages with their share of the
    roofline, then classes of kernels."""
    replays = [("contender", *(f"replay {p}" for p in PERCENTILES), *(f"host {p}" for p in PERCENTILES), "nodes")]
    stages, classes = [("stage", "p50", "p99", "roof", "share")], [("class", "launches", "in graph", "roof", "share")]
    frames = [("raw frames to actions", *(f"{part} {p}" for part in frames_times.PARTS for p in ("p50", "p99")))]
    for row in rows:
        name = line_of(row).split(" p50 ")[0].strip()
        host = row.get("host_us")
        replays.append((name, *_ms(row["device_us"]), *(_ms(host) if host else [""] * 3), _text(row, "graph_nodes")))
        if seen := row.get("frames_us"):
            parts = [(seen.get(part), p) for part in frames_times.PARTS for p in ("p50", "p99")]
            frames.append((name, *(f"{at[p] / 1e3:.3f}" if at else "" for at, p in parts)))
        for stage, at in row.get("stages", {}).items():
            ms = [f"{at[key] / 1e3:.3f}" for key in ("p50", "p99", "roof_us")]
            stages.append((f"{name} {stage}", ms[0], ms[1], ms[2], _share(at)))
        for kind, at in row.get("classes", {}).items():
            took = f"{at['in_graph_us'] / 1e3:.3f}" if "in_graph_us" in at else "-"
            classes.append((f"{name} {kind}", _text(at, "launches"), took, f"{at['roof_us'] / 1e3:.3f}", _share(at)))
    return "\n\n".join(columns(lines) for lines in (replays, frames, stages, classes) if len(lines) > 1)


PERCENTILES = ("p50", "p99", "p99.9")


def _ms(spread: Row) -> list[str]:
    return [f"{spread[p] / 1e3:.3f}" for p in PERCENTILES]


def _text(row: Row, key: str) -> str:
    return str(row.get(key, ""))


def _share(at: Row) -> str:
    return f"{at['share']:.0%}" if at.get("share") else "-"
