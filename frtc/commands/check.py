"""`frtc check CHECKPOINT`: what headers and side files prove, without compiling; do the statistics fit some data?"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frtc.compiler import CompileOptions, Opened, open_model
from frtc.console import Progress, Result, size, table
from frtc.errors import FrtcError
from frtc.models.checkpoint import Checkpoint
from frtc.observation import reason
from frtc.options import add_policy_options, choices, pathname, policy_options
from frtc.report import facts_text
from frtc.runtime.paths import require_file
from frtc.runtime.policy import Norm
from frtc.runtime.steps_vector import Normaliser, apply

NARROW = 0.02  # of the statistics' range: a dimension that moves less than this is near-constant in the data


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=pathname)
    parser.add_argument("--weights", action="store_true", help="also read every tensor: NaN and infinity are errors")
    parser.add_argument("--data", type=pathname, metavar="FILE",
                        help=".npz with `state` or `actions` [N, dim]: do the statistics fit them?")  # fmt: skip
    add_policy_options(parser)


def run(args: argparse.Namespace) -> Result:
    opened = open_model(args.checkpoint, CompileOptions(policy_options(args), **choices(args)))
    if args.weights:
        _read_all(opened.checkpoint)
    facts = tuple((f.name, f.value, f.source) for f in opened.facts)
    assumed = (*opened.files.assumed, *opened.assumed)
    held = sum(t.nbytes for t in opened.checkpoint.tensors.values())
    fits = _fits(opened, args.data) if args.data else []
    lines = [
        f"{opened.checkpoint.path}: {opened.model.title}, {len(opened.checkpoint.tensors)} tensors, {size(held)}",
        facts_text(facts, assumed),
        "cameras, in the model's order",
        table([(c.role, c.source, f"{c.layout} {c.pixel}") for c in opened.files.cameras]),
    ]
    if fits:
        lines += ["statistics against the data", table([("dimension", "outside [-1, 1]", "moves"), *map(_row, fits)])]
    data = {
        "model": opened.model.name,
        "tensors": len(opened.checkpoint.tensors),
        "nbytes": held,
        "facts": facts,
        "assumed": [asdict(a) for a in assumed],
        "cameras": [asdict(c) for c in opened.files.cameras],
        "data": fits,
    }
    return Result("\n".join(lines), data)


def _read_all(checkpoint: Checkpoint) -> None:
    progress = Progress()
    for i, name in enumerate(checkpoint.tensors):
        checkpoint.read(name)
        progress("read weights", (i + 1) / len(checkpoint.tensors))
    progress.close()


def _fits(opened: Opened, path: Path) -> list[dict[str, Any]]:
    """Per dimension: the share of values outside [-1, 1] once normalised, and how much of that range they cover."""
    found, told = [], opened.files.told
    for name, norm, dim, steps in (
        ("state", told.state.norm, told.state.dim, told.state_steps),
        ("actions", told.action, told.action_dim, ()),  # in the units and relative to what they were trained as
    ):
        values = _recorded(path, name, dim)
        if values is not None:
            found += _dimensions(name, norm, apply(steps, values))
    if not found:
        hint = "np.savez(FILE, state=[N, dim], actions=[N, dim])"
        raise FrtcError("data.empty", f"{path} holds neither `state` nor `actions`", hint=hint)
    return found


def _dimensions(name: str, norm: Norm, values: NDArray[Any]) -> list[dict[str, Any]]:
    normal = np.stack([Normaliser(norm).normalise(row) for row in values.astype(np.float32)])
    outside, span = (np.abs(normal) > 1).mean(0), np.ptp(normal, axis=0) / 2
    return [
        {"name": f"{name}[{i}]", "outside": float(o), "moves": float(s), "constant": bool(s < NARROW)}
        for i, (o, s) in enumerate(zip(outside, span, strict=True))
    ]


def _recorded(path: Path, name: str, dim: int) -> NDArray[Any] | None:
    values, hint = None, "a .npz file of numbers: np.savez(FILE, state=[N, dim], actions=[N, dim])"
    try:
        require_file(path)
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            raise ValueError("it is one array, without a name")
        with found as file:
            values = file[name] if name in file.files else None
        if values is not None and values.dtype.kind not in "fiu":
            raise ValueError(f"{name} is {values.dtype}, not numbers")
    except Exception as fault:  # NumPy fails on a damaged file in any way
        raise FrtcError("input.file", f"{path} cannot be read: {reason(fault)}", hint=hint) from None
    if values is not None and (values.ndim != 2 or values.shape[1] != dim or not len(values)):
        what = f"{name} in {path} is {list(values.shape)}, the checkpoint's has {dim} dimensions"
        raise FrtcError("data.shape", what, hint=f"[N, {dim}], one row per recorded step")
    return values


def _row(fit: dict[str, Any]) -> tuple[str, str, str]:
    note = "   near-constant" if fit["constant"] else ""
    return fit["name"], f"{fit['outside']:.1%}", f"{fit['moves']:.2f} of the range{note}"
