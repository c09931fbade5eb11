"""Synthetic checkpoints as openpi's JAX training saves them: an Orbax tree, its weights those of the torch layout."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from frtc.models.jax_names import ROWS, Lora, Row
from frtc.models.orbax import MANIFEST, METADATA, ROOT, TRAINER, arrange, tensorstore
from frtc.models.scratch import allocate
from frtc.models.synthetic import NUMPY, Drawn, bits, known, pieces, tensors, uniform

Array = np.ndarray[Any, Any]

# The types of keys and values in Orbax's description of the tree: a dict's key, an array
DICT_KEY, ARRAY = 2, "jax.Array"
TREE = {"use_ocdbt": True, "use_zarr3": False, "store_array_data_equal_to_fill_value": True, "custom_metadata": None}
ZARR_TYPES = {"bf16": "bfloat16", "f32": "<f4"}
COMPRESSOR = {"id": "zstd", "level": 1}
LORA_GAIN = np.float32(0.02)


class TreeWriter:
    """Arrays by path into the folder of a tree; `close` describes them as Orbax does."""

    def __init__(self, folder: Path, trainer: bool = False, together: int = 0) -> None:
        """trainer: paths end in "value"; together: layers of one chunk, 0: all"""
        folder.mkdir(parents=True)
        self._folder, self._ending, self._together = folder, TRAINER if trainer else "", together
        self._described: dict[str, Any] = {}

    def write(self, leaf: str, axes: str, array: Array, dtype: str) -> None:
        path = f"{ROOT}.{leaf}{self._ending}"
        layered = self._together and axes[0] in "lv"
        chunks = (self._together, *array.shape[1:]) if layered else array.shape
        base = {"driver": "file", "path": f"{self._folder}/", "file_io_sync": False}
        store = {"driver": "ocdbt", "base": base, "path": f"{path}/"}
        metadata = {"shape": array.shape, "chunks": chunks, "dtype": ZARR_TYPES[dtype], "compressor": COMPRESSOR}
        spec = {"driver": "zarr", "kvstore": store, "metadata": metadata, "store_data_equal_to_fill_value": True}
        tensorstore().open(spec, create=True).result().write(array).result()
        keys = path.split(".")
        self._described[str(tuple(keys))] = {
            "key_metadata": [{"key": key, "key_type": DICT_KEY} for key in keys],
            "value_metadata": {"value_type": ARRAY, "skip_deserialize": False, "write_shape": array.shape},
        }

    def close(self) -> None:
        (self._folder / METADATA).write_text(json.dumps({"tree_metadata": self._described, **TREE}))
        assert (self._folder / MANIFEST).is_file()


def write(
    folder: Path,
    kind: str,
    config: Any,
    seed: int,
    dtype: str,
    threads: int,
    *,
    trainer: bool = False,
    together: int = 0,
    loras: Iterable[Lora] = (),
) -> None:
    """The folder `params` of a checkpoint.

    trainer, together   as TreeWriter
    loras               which leaves get factors beside them; the weights stay what they are without
    """
    drawn = {t.name: t for t in tensors(config, "jax", dtype, kind)}
    extents = _extents(config, drawn)
    writer = TreeWriter(folder / ROOT, trainer, together)
    with ThreadPoolExecutor(threads) as pool:
        for leaf, found in itertools.groupby(ROWS, key=lambda row: row.leaf):
            rows = list(found)
            counted = {**extents, **dict.fromkeys("0123456789", len(rows))}
            parts = [(row, layer, t) for row in rows for layer, t in enumerate(_tensors(row, drawn))]
            if parts:  # else the leaf is the other kind's
                array = allocate(tuple(counted[letter] for letter in rows[0].axes), NUMPY[dtype])
                places = [(t, array[row.entry(layer)].transpose(row.order)) for row, layer, t in parts]
                for done in [pool.submit(_fill, kind, seed, *place) for place in places]:
                    done.result()
                writer.write(leaf, rows[0].axes, array, dtype)
    for lora in loras:
        for name, axes in ((lora.a_leaf, lora.a), (lora.b_leaf, lora.b)):
            shape = tuple({**extents, "t": 2, lora.a[-1]: lora.rank}[letter] for letter in axes)
            values = uniform(bits(seed, name), math.prod(shape)).reshape(shape) * LORA_GAIN
            writer.write(name, axes, values.astype(NUMPY[dtype]), dtype)
    writer.close()


def _fill(kind: str, seed: int, t: Drawn, place: Array) -> None:
    """The tensor's values, each rounded once, into its place in the leaf."""
    made = place if place.flags.c_contiguous else np.empty(place.shape, place.dtype)
    rows = made.reshape(t.shape[0], -1)
    for at, values in pieces(seed, t, known(kind)[1]):
        rows[at : at + len(values)] = values
    if made is not place:
        arrange(made, place)


def _extents(c: Any, drawn: Mapping[str, Drawn]) -> dict[str, int]:
    """What each letter of the table counts: heads from the configuration, the rest from the tensors."""
    tower, llm = c.vision, c.prefix
    extents = {"a": tower.heads, "e": tower.head_dim, "v": tower.layers}
    extents |= {"n": llm.heads, "k": llm.kv_heads, "h": llm.head_dim, "l": llm.layers}
    for row in ROWS:
        for t in itertools.islice(_tensors(row, drawn), 1):
            extents |= {g: n for g, n in zip(row.result.split(), t.shape, strict=True) if len(g) == 1}
    return extents


def _tensors(row: Row, drawn: Mapping[str, Drawn]) -> Iterable[Drawn]:
    """The row's tensors, layer by layer."""
    names = (row.name.replace("#", str(layer)) for layer in itertools.count())
    for name in names if row.layers else (row.name,):
        if name not in drawn:
            return
        yield drawn[name]
