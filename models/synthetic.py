"""Checkpoints with random weights in the layouts of real ones: `python -m frtc.models.synthetic pi05 -o DIR`.

Every tensor has its own random stream, keyed by seed and name, so neither threads nor the layout change a weight. The
streams are raw Philox4x64 bits and the arithmetic is elementwise float32, so every NumPy gives the same bytes. Weights
are uniform with variance 1 / fan-in. As in trained models, the residual streams have outlier channels: what writes to
them has 1 % of its output channels scaled by 30. (With outliers in every matrix, scores saturate and a rounding error
of bfloat16 grows to the size of the result.) And as GPT-2 is initialised, what the n layers of a stack write to their
stream is scaled by 1 / sqrt(2 n), so that a stream is no plain sum of its last layers: without it an error of 4 % in
every product, which is what e4m3 makes, grows to 20 % of the velocity, in PyTorch as here (docs/numerics.md).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import math
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

from frtc.errors import FrtcError, UsageError, nearest
from frtc.models import load_models
from frtc.models.stages import Model, Synthetic
from frtc.models.streaming import SafetensorsWriter
from frtc.models.synthetic_files import side_files

Array = np.ndarray[Any, np.dtype[Any]]
LAYOUTS = ("openpi", "lerobot")  # one file of torch tensors
JAX = "jax"  # a tree of arrays; frtc.models.synthetic_jax writes it
TYPES = {"bf16": "bfloat16", "f32": "float32"}
NUMPY = {"bf16": np.dtype(ml_dtypes.bfloat16), "f32": np.dtype(np.float32)}
OUTLIERS, OUTLIER_GAIN = 0.01, 30.0
PIECE = 1 << 22  # values drawn at once: 8 MB of random bits

# As in Synthetic.scales, for names that every model gives its parameters; the first match counts
SCALES: tuple[tuple[str, bool, float, float], ...] = (
    ("tower.position", False, 0.5, 0.0),
    ("tower.norm.weight", False, 0.2, 1.0),
    ("tower.layers.#.norm1.weight", False, 0.2, 1.0),
    ("tower.layers.#.norm2.weight", False, 0.2, 1.0),
    ("norm1.weight", False, 0.2, 0.0),
    ("norm2.weight", False, 0.2, 0.0),
    ("norm.weight", False, 0.2, 0.0),
    ("dense.weight", True, 0.5, 0.0),
    ("dense.bias", False, 0.5, 0.0),  # gates of order one: no branch is lost
    ("q.weight", True, 1.5, 0.0),  # scores far enough apart that attention is no plain average
    (".bias", False, 0.1, 0.0),
    ("", True, 1.0, 0.0),
)
RESIDUAL_WRITERS = ("patch.weight", "o.weight", "fc2.weight", "projector.weight", "down.weight")


@dataclass(frozen=True, slots=True)
class Drawn:
    """One tensor of the file. `stream` names its random stream: the parameter's name where it has one.

    layers   of the stack that the tensor is in; 0 if it is in none
    """

    name: str
    stream: str
    dtype: str
    shape: tuple[int, ...]
    layers: int = 0


def known(kind: str) -> tuple[Model, Synthetic]:
    """The model of that name, and how to write it."""
    writable = {model.name: (model, model.synthetic) for model in load_models().values() if model.synthetic is not None}
    if kind not in writable:
        rows = [("known", ", ".join(writable)), ("nearest", nearest(kind, writable) or "none")]
        raise UsageError("option.value", f"no synthetic checkpoint of kind {kind!r}", rows)
    return writable[kind]


def tensors(c: Any, layout: str, dtype: str, kind: str = "pi05") -> list[Drawn]:
    """Everything that a real file holds, dead tensors included.

    openpi converts every tensor to one type and keeps the second copy of a tied table instead of the first; lerobot
    stores both, and in float32 what a bfloat16 policy holds in float32.
    """
    model, spec = known(kind)
    with torch.device("meta"):
        parameters = dict(model.build(c, torch.bfloat16).named_parameters())
    prefix = "model." if layout == "lerobot" else ""
    out = []
    for parameter, value in parameters.items():
        file = spec.weights.file_name(parameter)
        if layout == "openpi" and parameter in spec.weights.tied:
            file = spec.weights.tied[parameter]
        kept = "f32" if layout == "lerobot" and value.dtype == torch.float32 else dtype
        out.append(Drawn(prefix + file, parameter, kept, tuple(value.shape), layers_of(parameter, parameters)))
    return out + [Drawn(prefix + name, name, dtype, shape) for name, shape in spec.unread(c, layout).items()]


def layers_of(parameter: str, parameters: Iterable[str]) -> int:
    """How many layers the stack has that the parameter is in: "a.layers.3.b" is in that of "a.layers."."""
    stack, found, _ = parameter.partition("layers.")
    numbers = {name[len(stack + found) :].split(".")[0] for name in parameters if name.startswith(stack + found)}
    return len(numbers) if found else 0


def bits(seed: int, stream: str) -> np.random.Philox:
    """The generator of one stream."""
    key = hashlib.sha256(f"{seed}:{stream}".encode()).digest()
    return np.random.Philox(key=int.from_bytes(key[:16], "little"))


def uniform(generator: np.random.Philox, count: int) -> Array:
    """f32 [count], mean 0 and variance 1, from 16 bits each."""
    raw = np.asarray(generator.random_raw(-(-count // 4)), "<u8").view("<u2")[:count]
    return (raw.astype(np.float32) - np.float32(32767.5)) * np.float32(math.sqrt(12) / 65536)


def outliers(seed: int, stream: str, channels: int) -> Array:
    """Which channels are scaled: 1 % of them, at least one."""
    order = np.argsort(bits(seed, stream + ":outliers").random_raw(channels), kind="stable")
    return order[: max(1, round(OUTLIERS * channels))]


def pieces(seed: int, t: Drawn, spec: Synthetic) -> Iterator[tuple[int, Array]]:
    """(first row, values f32 [rows, rest]) of one tensor, from first to last."""
    rows, width = t.shape[0], math.prod(t.shape[1:])
    pattern = ".".join("#" if part.isdigit() else part for part in t.stream.split("."))
    by_fan, deviation, mean = next(scale for part, *scale in (*spec.scales, *SCALES) if part in pattern)
    gain = np.float32(deviation / math.sqrt(width) if by_fan else deviation)
    table = t.stream in spec.tables
    writer = t.stream.endswith(RESIDUAL_WRITERS + spec.writers)
    by_row, by_column = np.full(rows, gain, np.float32), np.ones(width, np.float32)
    if writer:
        by_row *= np.float32(1 / math.sqrt(2 * max(t.layers, 0.5)))
        by_row[outliers(seed, t.stream, rows)] *= np.float32(OUTLIER_GAIN)
    if table:
        by_column[outliers(seed, t.stream, width)] = OUTLIER_GAIN
    generator, step = bits(seed, t.stream), max(1, PIECE // width)
    for first in range(0, rows, step):
        scale = by_row[first : first + step, None]
        values = uniform(generator, scale.size * width).reshape(scale.size, width)
        values *= scale
        if table:
            values *= by_column
        yield first, values + np.float32(mean) if mean else values


def write_weights(
    path: Path, drawn: Sequence[Drawn], spec: Synthetic, seed: int, threads: int, metadata: Mapping[str, str]
) -> None:
    """Streams all tensors to one file; memory in use is a few pieces per thread."""
    with SafetensorsWriter(path, {t.name: (t.dtype, t.shape) for t in drawn}, metadata) as writer:

        def fill(t: Drawn) -> None:
            row_bytes = math.prod(t.shape[1:]) * NUMPY[t.dtype].itemsize
            for first, values in pieces(seed, t, spec):
                writer.write(t.name, values.astype(NUMPY[t.dtype]), first * row_bytes)

        largest_first = sorted(drawn, key=lambda t: -math.prod(t.shape))
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(fill, t) for t in largest_first]:
                done.result()


def write_checkpoint(
    folder: Path,
    layout: str = "openpi",
    size: str = "tiny",
    seed: int = 0,
    dtype: str = "bf16",
    threads: int = 0,
    kind: str = "pi05",
) -> None:
    """A whole checkpoint folder; it appears by one rename, or not at all."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError("output.exists", f"{folder} exists and is not an empty folder", hint="choose another folder")
    _, spec = known(kind)
    if layout not in spec.layouts:
        raise UsageError("option.value", f"{kind} has no {layout} layout", [("known", ", ".join(spec.layouts))])
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        _fill(partial, kind, layout, spec.sizes[size](), seed, dtype, threads or os.cpu_count() or 1)
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    except OSError as e:
        raise FrtcError("output.write", f"cannot write {folder}: {e.strerror}", [("folder", str(folder))]) from e
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fill(folder: Path, kind: str, layout: str, config: Any, seed: int, dtype: str, threads: int) -> None:
    """Weights and side files of one checkpoint, into an empty folder."""
    _, spec = known(kind)
    if layout == JAX:
        importlib.import_module("frtc.models.synthetic_jax").write(folder, kind, config, seed, dtype, threads)
    else:
        metadata = {"format": "pt"}
        if layout == "openpi":
            metadata |= {spec.weights.file_name(p): kept for p, kept in spec.weights.tied.items()}
        drawn = tensors(config, layout, dtype, kind)
        write_weights(folder / "model.safetensors", drawn, spec, seed, threads, metadata)
    for name, content in side_files(kind, spec, config, layout, TYPES[dtype], seed).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m frtc.models.synthetic", description=(__doc__ or "").split("\n")[0])
    specs = {model.name: model.synthetic for model in load_models().values() if model.synthetic is not None}
    parser.add_argument("kind", choices=list(specs))
    parser.add_argument("--layout", choices=(*LAYOUTS, JAX), help="by default the first that the kind has")
    parser.add_argument(
        "--size", choices=sorted({size for spec in specs.values() for size in spec.sizes}), default="tiny"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=list(TYPES.values()), default="bfloat16")
    parser.add_argument("--threads", type=int, default=0, help="0: one per core")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    args = parser.parse_args(argv)
    start = time.monotonic()
    dtype = next(short for short, name in TYPES.items() if name == args.dtype)
    layout = args.layout or specs[args.kind].layouts[0]
    try:
        write_checkpoint(args.output, layout, args.size, args.seed, dtype, args.threads, args.kind)
    except FrtcError as e:
        print(e, file=sys.stderr)
        return e.exit_code
    size = sum(f.stat().st_size for f in args.output.rglob("*") if f.is_file())
    print(f"{args.output}: {args.kind}, {layout} layout, {size / 1e6:,.1f} MB in {time.monotonic() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
