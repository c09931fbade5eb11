"""Checkpoints of openpi's JAX models: an Orbax tree (OCDBT and zarr v2), shown under the names of openpi's torch files.

A leaf holds all layers, often in one chunk of gigabytes. So it is decoded once, chunk by chunk, into a scratch file,
and each tensor is arranged in another at its first use; `read` returns views. Memory in use is one decoded chunk, or
BATCH where chunks are smaller. The scratch files take as much disk as the leaves whose chunks span layers, and KEPT for
all others.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from frtc.errors import EnvironmentFault, FrtcError, nearest
from frtc.models.checkpoint import BITS, NUMPY, Checkpoint, TensorInfo, read_json, require_finite
from frtc.models.evidence import Fact
from frtc.models.jax_names import LORAS, ROWS, Lora, Row, norms_of
from frtc.models.lora import merge, require_range
from frtc.models.scratch import Scratch

Array = np.ndarray[Any, Any]

ROOT = "params"  # folder of the tree beside assets/, and the tree's root key
MANIFEST, METADATA = "manifest.ocdbt", "_METADATA"
TRAINER = ".value"  # ends every path in a tree that the trainer saved
STATE = ("opt_state.", "step", "params.opt_state.")  # begin the paths of a trainer's state
ZARR = "/.zarray"
TYPES = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "int8": "i8", "uint8": "u8"}
BATCH = 1 << 28  # bytes that are decoded at once where chunks are smaller
BAND = 64  # elements
MOST_LAYERS = 1024  # more is no model's: names would fill the memory
SHOWN = 6  # rows of one error


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of the tree. `array` is tensorstore's; `chunk` the shape that its chunks have."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    array: Any

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def tree_of(path: Path) -> Path | None:
    """The folder of the tree, where the user gave one or the checkpoint around it; None for anything else."""
    if (path / MANIFEST).is_file() or (path / METADATA).is_file():
        return path
    return path / ROOT if (path / ROOT).is_dir() else None


class OrbaxCheckpoint(Checkpoint):
    """The tree's arrays as openpi's torch tensors, in their stored type; where LoRA factors lie beside, merged: f64."""

    def __init__(self, path: Path, tree: Path) -> None:
        self._leaves = read_leaves(tree)
        self._rows, self._loras = _complete(self._leaves)
        self._extents = extents = _extents(self._leaves, self._rows, self._loras)
        self._places: dict[str, tuple[Row, int]] = {}
        tensors: dict[str, TensorInfo] = {}
        for row in self._rows:
            leaf = self._leaves[row.leaf]
            dtype = "f64" if row.leaf in self._loras else leaf.dtype
            for layer in range(leaf.shape[0] if row.layers else 1):
                name, shape = row.name.replace("#", str(layer)), row.shape(extents)
                nbytes = math.prod(shape) * NUMPY[dtype].itemsize
                tensors[name] = TensorInfo(name, dtype, shape, tree / MANIFEST, 0, nbytes)
                self._places[name] = row, layer
        known = {row.leaf for row in self._rows}
        for leaf in (leaf for name, leaf in self._leaves.items() if name not in known and not _is_lora(name)):
            tensors[leaf.path] = TensorInfo(leaf.path, leaf.dtype, leaf.shape, tree / MANIFEST, 0, 0)
        super().__init__(path, tuple(f for f in (tree / METADATA, tree / MANIFEST) if f.is_file()), tensors)
        self.folder = tree.parent
        if self._loras:
            ranks = sorted({extents[lora.a[-1]] for lora in self._loras.values()})
            what = f"{len(self._loras)} arrays merged, rank {', '.join(map(str, ranks))}"
            self.facts = (Fact("lora", what, "factors in the tree"),)
        self._scratch, self._decoding = Scratch(), Lock()

    def header(self, file: Path) -> bytes:
        """The manifest names the root of all data by its random name, so the two small files identify the tree."""
        return file.read_bytes()

    def read(self, name: str) -> Array:
        """The tensor, read-only; NaN or infinity is an error."""
        row, layer = self._places[name]
        array = self._tensor(row, layer) if row.leaf not in self._loras else self._merged(row, layer)
        array = array.reshape(self.tensors[name].shape)
        if name not in self._checked and self.tensors[name].dtype in BITS:
            if row.leaf in self._loras:
                require_range(self.tensors[name], array, self._loras[row.leaf].a_leaf)
            else:
                require_finite(self.tensors[name], array.reshape(-1))
            self._checked.add(name)
        array.flags.writeable = False
        return array

    def _tensor(self, row: Row, layer: int) -> Array:
        """The tensor with the letters of `row.result` as its axes, contiguous."""
        leaf = self._leaves[row.leaf]
        together = leaf.chunk[0] if row.layers else leaf.shape[0]
        first = layer // together * together

        def entry() -> Array:
            slab = self._slab(leaf, first, together, keep=row.layers and together > 1)
            return slab[row.entry(layer - first)].transpose(row.order)

        if row.order == tuple(sorted(row.order)):
            return entry()
        shape, dtype = self._shape(row), NUMPY[leaf.dtype]
        return self._scratch.get((row.name, layer), shape, dtype, lambda out: arrange(entry(), out), keep=False)

    def _shape(self, row: Row) -> tuple[int, ...]:
        return tuple(self._extents[letter] for letter in row.result if letter != " ")

    def _slab(self, leaf: Leaf, first: int, count: int, keep: bool) -> Array:
        """Entries [first, first + count) of the leaf's first axis."""
        stop = min(first + count, leaf.shape[0])
        shape, dtype = (stop - first, *leaf.shape[1:]), NUMPY[leaf.dtype]

        def fill(out: Array) -> None:
            with self._decoding:  # one at a time: a chunk may be gigabytes
                _unpack(leaf, first, stop, out)

        return self._scratch.get((leaf.path, first), shape, dtype, fill, keep)

    def _merged(self, row: Row, layer: int) -> Array:
        """weight + a b in float64, the letters of `row.result` as its axes."""
        lora = self._loras[row.leaf]

        def fill(out: Array) -> None:
            a, b = (self._factor(name, row, layer) for name in (lora.a_leaf, lora.b_leaf))
            add_product(lora, row, self._tensor(row, layer), a, b, out)

        key = (row.name, layer, "merged")
        return self._scratch.get(key, self._shape(row), np.dtype(np.float64), fill, keep=False)

    def _factor(self, name: str, row: Row, layer: int) -> Array:
        """What one factor holds for a tensor: f64, without the axes of layers and picked entries."""
        leaf = self._leaves[name]
        factor: Array = self._slab(leaf, 0, leaf.shape[0], keep=True)[row.entry(layer)].astype(np.float64)
        return factor


def add_product(lora: Lora, row: Row, weight: Array, a: Array, b: Array, out: Array) -> None:
    """out = weight + a b, all with their own letters as axes, of one tensor.

    Heads that both factors have stay apart: for each, [out, in] + [out, rank] [rank, in] as in torch adapters.
    """
    letters = ["".join(x for axis, x in enumerate(text) if axis not in {0, *row.picks}) for text in (lora.a, lora.b)]
    for letter in lora.alone:
        b = reduce(np.add, np.moveaxis(b, letters[1].index(letter), 0))
        letters[1] = letters[1].replace(letter, "")
    rank = letters[0][-1]
    result = [x for x in row.result if x != " "]
    heads = [x for x in result if x in letters[0] and x in letters[1]]
    inner, outer = ([x for x in result if x in text and x not in heads] for text in letters)
    assert result == [*heads, *outer, *inner], "the table's order"
    a = a.transpose([letters[0].index(x) for x in (*heads, rank, *inner)])
    b = b.transpose([letters[1].index(x) for x in (*heads, *outer, rank)])
    batch, r = math.prod(a.shape[: len(heads)]), a.shape[len(heads)]
    a, b = a.reshape(batch, r, -1), b.reshape(batch, -1, r)
    into = out.reshape(batch, b.shape[1], a.shape[2])
    for one, w, left, right in zip(into, weight.reshape(into.shape), a, b, strict=True):
        one[...] = merge(w, left, right, 1.0)


def tensorstore() -> Any:
    """The library, where it is installed."""
    try:
        return importlib.import_module("tensorstore")
    except ImportError:
        what = "JAX checkpoints are read with tensorstore, which is not installed"
        raise EnvironmentFault("env.package", what, hint="pip install 'frtc[jax]'") from None


def read_leaves(tree: Path) -> dict[str, Leaf]:
    """All arrays of the tree by path, without the root key and without the ending that the trainer writes."""
    if not (tree / MANIFEST).is_file():
        rows = [("folder", str(tree)), ("looked for", MANIFEST)]
        hint = "an incomplete copy, or a tree saved without OCDBT: save it again with use_ocdbt=True"
        raise FrtcError("orbax.manifest", f"the tree has no {MANIFEST}", rows, hint)
    ts, metadata = tensorstore(), read_json(tree / METADATA) if (tree / METADATA).is_file() else {}
    # mapped: what is compressed is no memory of ours. No cache: a chunk is decoded once
    base = {"driver": "file", "path": f"{tree}/", "file_io_mode": {"mode": "memmap"}}
    store, context = {"driver": "ocdbt", "base": base}, ts.Context({"cache_pool": {"total_bytes_limit": 1 << 24}})
    zeros = not metadata.get("store_array_data_equal_to_fill_value", False)  # older trees leave chunks of zeros out
    try:
        keys = [key.decode() for key in ts.KvStore.open(store, context=context).result().list().result()]
        names = _names(sorted(key.removesuffix(ZARR) for key in keys if key.endswith(ZARR)), tree)
        spec = {"driver": "zarr", "fill_missing_data_reads": zeros}
        opened = {
            path: ts.open({**spec, "kvstore": {**store, "path": f"{path}/"}}, open=True, read=True, context=context)
            for path in names
        }
        return {names[path]: _leaf(path, future.result()) for path, future in opened.items()}
    except (ValueError, OSError, RuntimeError) as e:
        raise FrtcError("orbax.damaged", f"the tree in {tree} cannot be read", [("reason", _reason(e))]) from None


def _leaf(path: str, array: Any) -> Leaf:
    if array.dtype.name not in TYPES:
        what = f"{path} has the element type {array.dtype.name}"
        raise FrtcError("checkpoint.dtype", what, [("known", ", ".join(TYPES))])
    return Leaf(path, TYPES[array.dtype.name], array.shape, array.chunk_layout.read_chunk.shape, array)


def _names(paths: Sequence[str], tree: Path) -> dict[str, str]:
    """Path in the store -> path in the model: without the root key and without the ending that a trainer writes."""
    where = [("folder", str(tree))]
    if not paths:
        raise FrtcError("orbax.format", f"{tree} holds no arrays in zarr v2", where, "save it with use_zarr3=False")
    if state := [path for path in paths if path.startswith(STATE)]:
        what = "the tree is a trainer's state, no weights for inference"
        raise FrtcError("orbax.train_state", what, [("found", state[0]), *where], f"pass the folder {ROOT} beside it")
    if astray := [path for path in paths if not path.startswith(f"{ROOT}.")]:
        raise FrtcError("orbax.format", f"the tree's root is not {ROOT}: it holds {astray[0]}", where)
    trained = [path.endswith(TRAINER) for path in paths]
    if any(trained) and not all(trained):
        rows = [("with", paths[trained.index(True)]), ("without", paths[trained.index(False)])]
        what = f"some paths of the tree end in {TRAINER}, others do not: two layouts are mixed"
        raise FrtcError(
            "orbax.mixed", what, rows, "a trainer writes it after every path, a released checkpoint nowhere"
        )
    return {path: path.removeprefix(f"{ROOT}.").removesuffix(TRAINER) for path in paths}


def _is_lora(name: str) -> bool:
    return any(name in (lora.a_leaf, lora.b_leaf) for lora in LORAS)


def _complete(leaves: Mapping[str, Leaf]) -> tuple[list[Row], dict[str, Lora]]:
    """Rows of the tree's kind, and the LoRA of each leaf that has one. Nothing may be missing, nothing may be left.

    A tree without an action expert is another model's: its known leaves get their names, and detection refuses it.
    """
    if not any("_einsum_1." in name for name in leaves):
        return [row for row in ROWS if row.leaf in leaves], {}
    norms = norms_of(leaves)
    rows = [row for row in ROWS if row.norms in ("", norms)]
    wanted = {row.leaf for row in rows}
    spare = [name for name in leaves if name not in wanted and not _is_lora(name)]
    if missing := sorted(wanted - leaves.keys()):
        near = nearest(missing[0], spare or leaves) or "none"
        what = f"{len(missing)} of {len(wanted)} arrays of the tree are missing"
        raise FrtcError("orbax.missing", what, [*(("array", n) for n in missing[:SHOWN]), ("nearest", near)])
    if spare:
        near = nearest(spare[0], wanted) or "none"
        what = f"{len(spare)} arrays of the tree have no place in the model"
        raise FrtcError("orbax.unexpected", what, [*((n, str(leaves[n])) for n in spare[:SHOWN]), ("nearest", near)])
    return rows, _loras(leaves)


def _loras(leaves: Mapping[str, Leaf]) -> dict[str, Lora]:
    """LoRA comes for all leaves of one expert's attention, or of its MLP, with both factors."""
    found = {lora.leaf: lora for lora in LORAS if lora.a_leaf in leaves or lora.b_leaf in leaves}
    ranks = {lora.a[-1] for lora in found.values()}  # one letter for each attention and each MLP
    for lora in (lora for lora in LORAS if lora.a[-1] in ranks):
        for name, other in ((lora.a_leaf, lora.b_leaf), (lora.b_leaf, lora.a_leaf)):
            if name not in leaves:
                rows = [("missing", name), ("beside", other if other in leaves else lora.leaf)]
                raise FrtcError("orbax.lora", "a LoRA is not complete", rows, "the copy is damaged, or was edited")
    return found


def _extents(leaves: Mapping[str, Leaf], rows: Sequence[Row], loras: Mapping[str, Lora]) -> dict[str, int]:
    """What each letter counts; every leaf has the axes that the table says, and all agree."""
    written = [(row.leaf, row.axes) for row in rows]
    for lora in loras.values():
        written += [(lora.leaf, lora.weight), (lora.a_leaf, lora.a), (lora.b_leaf, lora.b)]
    extents: dict[str, tuple[int, str]] = {}
    for name, axes in written:
        leaf = leaves[name]
        if any(row.layers and row.leaf == name for row in rows) and leaf.shape[:1] > (MOST_LAYERS,):
            raise FrtcError("orbax.shape", f"{name} is {leaf}: more than {MOST_LAYERS} layers")
        if len(leaf.shape) != len(axes) or 0 in leaf.shape:
            raise FrtcError("orbax.shape", f"{name} is {leaf}, which is not an array of {len(axes)} axes")
        for axis, letter in enumerate(axes):
            wanted, first = extents.setdefault(letter, (leaf.shape[axis], name))
            if letter.isdigit():
                taken = {row.axes[axis] for row in rows if row.leaf == name}
                wanted, first = len(taken), "the model"
            if leaf.shape[axis] != wanted:
                known = f"{wanted} of {first}" + (f" {leaves[first]}" if first in leaves else "")
                what = f"axis {axis} of {name} is {leaf.shape[axis]}, which contradicts {known}"
                raise FrtcError("orbax.shape", what, [("array", f"{name} {leaf}")])
    for lora in loras.values():
        if lora.scaled and lora.rank != (rank := extents[lora.a[-1]][0]):
            what = f"{lora.a_leaf} has rank {rank}: how it is scaled is not written in the checkpoint"
            hint = f"openpi's own configurations have rank {lora.rank} there; merge the LoRA into the weights first"
            raise FrtcError("orbax.lora_rank", what, [("array", f"{lora.a_leaf} {leaves[lora.a_leaf]}")], hint)
    return {letter: extent for letter, (extent, _) in extents.items()}


def arrange(source: Array, out: Array) -> None:
    """Copies between two orders of the axes, in bands: whole rows would touch more pages than fit in the caches."""
    for first in range(0, out.shape[-1], BAND):
        out[..., first : first + BAND] = source[..., first : first + BAND]


def _unpack(leaf: Leaf, first: int, stop: int, out: Array) -> None:
    """Decodes entries [first, stop) of the first axis into `out`."""
    ts = tensorstore()
    target = ts.array(out)
    limits = [(first, stop), *((0, extent) for extent in leaf.shape[1:])]
    grid = itertools.product(*(range(low, high, step) for (low, high), step in zip(limits, leaf.chunk, strict=True)))
    at_once = max(1, BATCH // max(1, math.prod(leaf.chunk) * out.itemsize))
    while corners := list(itertools.islice(grid, at_once)):
        try:
            for future in [_copy(ts, leaf, corner, limits, target) for corner in corners]:
                future.result()
        except (ValueError, OSError, RuntimeError) as e:
            rows = [("array", f"{leaf.path} {leaf}"), ("reason", _reason(e))]
            raise FrtcError(
                "orbax.damaged", f"{leaf.path} cannot be decoded", rows, "copy the checkpoint again"
            ) from None


def _copy(ts: Any, leaf: Leaf, corner: tuple[int, ...], limits: Sequence[tuple[int, int]], target: Any) -> Any:
    """One chunk, on its way to its place."""
    box = [slice(low, min(low + step, high)) for low, step, (_, high) in zip(corner, leaf.chunk, limits, strict=True)]
    here = (slice(box[0].start - limits[0][0], box[0].stop - limits[0][0]), *box[1:])
    return target[here].write(leaf.array[tuple(box)][ts.d[:].translate_to[0]])


def _reason(error: BaseException) -> str:
    return str(error).split("\n")[0][:300]
