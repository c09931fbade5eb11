"""LoRA adapters as peft writes them: a base checkpoint that shows merged tensors, W + scale * B @ A in float64.

    adapter_config.json          rank, alpha, targets; per module by pattern
    adapter_model.safetensors    base_model.model.NAME.lora_A.weight [r, in], .lora_B.weight [out, r]; whole tensors of
                                 modules_to_save under their own names

The adapter lies beside the base's weights or in a folder of its own. Names are compared in the model's current
spelling, so that an adapter that was trained on one origin's files fits the other's. What an adapter asks for beyond
this (DoRA, biases, embeddings, bases that its start has changed, …) is refused: merged wrongly, it would still move.
Sources: the public peft 0.21 (config fields, names, scaling, patterns).
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from frtc.errors import FrtcError, UsageError, nearest
from frtc.models.checkpoint import INDEX, SINGLE, Checkpoint, TensorInfo, read_header, read_json
from frtc.models.evidence import Fact
from frtc.models.lora_config import CONFIG, LoraConfig, read_config

Array = np.ndarray[Any, Any]

TENSORS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"
SIDE_FILES = ("config.json", "policy_preprocessor.json", "assets")  # of a fine-tune: then its statistics count
KEPT = 3 << 30  # bytes of merged tensors that are kept: a weight is read in pieces, and each piece asks again
SUMS = 1 << 17  # elements merged at once: 1 MiB of float64 stays in the cache
FACTOR = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.(?P<adapter>(?!weight$|bias$)[^.]+))?(?:\.(?P<end>weight|bias))?"
)
SAVED = re.compile(r"(?P<module>.+?)(?:\.modules_to_save(?:\.(?P<adapter>[^.]+))?)?\.(?P<end>weight|bias)")
ROOT = "base_model.model."
LARGEST = (2 - 2.0**-7) * 2.0**127  # of bfloat16; in a Plan, more becomes infinity
FLOATS = ("f64", "f32", "f16", "bf16")


@dataclass(frozen=True, slots=True)
class Factors:
    """a [r, in], b [out, r]: names of tensors in the adapter's file. `module` as the adapter spells it."""

    module: str
    a: str
    b: str
    scale: float


def adapter_in(folder: Path) -> bool:
    return (folder / CONFIG).is_file() or (folder / TENSORS).is_file() or (folder / PICKLE).is_file()


def adapted(base: Checkpoint, folder: Path, canonical: Callable[[str], str]) -> Adapted:
    """The base with the adapter in `folder` merged. canonical: a tensor's name in the model's current spelling."""
    config, tensors = read_config(folder), _open(folder)
    factors, saved = _sorted(tensors, config)
    targets = _Targets(base, canonical, tensors)
    merged: dict[str, Factors] = {}
    for f in factors:
        name = targets.take(f"{f.module}.weight")
        _require_fit(base.tensors[name], f, tensors, config.fan_in_fan_out)
        merged[name] = f
    replaced = {targets.take(name): key for name, key in saved.items()}
    for name, key in replaced.items():
        _require_same(base.tensors[name], tensors.tensors[key])
    _require_all(config, base, canonical, {canonical(n) for n in (*merged, *replaced)}, tensors)
    return Adapted(base, tensors, merged, replaced, config)


class Adapted(Checkpoint):
    """A checkpoint that shows merged tensors (f64) and replaced ones (as the adapter stores them).

    Side files are the adapter's where it has any: the statistics of the data that it was trained on.
    """

    def __init__(
        self,
        base: Checkpoint,
        adapter: Checkpoint,
        merged: Mapping[str, Factors],
        replaced: Mapping[str, str],
        config: LoraConfig,
    ) -> None:
        self.base, self.adapter, self._merged, self._replaced = base, adapter, merged, replaced
        self._transposed = config.fan_in_fan_out
        tensors = {n: replace(base.tensors[n], dtype="f64", nbytes=8 * _size(base.tensors[n])) for n in merged}
        tensors |= {n: replace(adapter.tensors[key], name=n) for n, key in replaced.items()}
        super().__init__(base.path, (*base.files, *adapter.files), {**base.tensors, **tensors})
        own = adapter.folder != base.folder and any((adapter.folder / name).exists() for name in SIDE_FILES)
        side = adapter if own else base
        self.folder, self.config = side.folder, side.config
        self.facts = (*base.facts, *_facts(config, merged, replaced, own))
        self._kept: OrderedDict[str, Array] = OrderedDict()
        self._busy = Lock()

    def __str__(self) -> str:
        return f"{self.base}, adapter {self.adapter.path}"

    def header(self, file: Path) -> bytes:
        return self.adapter.header(file) if file in self.adapter.files else self.base.header(file)

    def read(self, name: str) -> Array:
        if name in self._replaced:
            return self.adapter.read(self._replaced[name])
        if name not in self._merged:
            return self.base.read(name)
        with self._busy:
            if name in self._kept:
                self._kept.move_to_end(name)
                return self._kept[name]
        factors = self._merged[name]
        a, b = self.adapter.read(factors.a), self.adapter.read(factors.b)
        value = merge(self.base.read(name), a, b, factors.scale, self._transposed)
        require_range(self.tensors[name], value, str(self.adapter.path))
        value.flags.writeable = False
        with self._busy:
            self._kept[name] = value
            while len(self._kept) > 1 and sum(v.nbytes for v in self._kept.values()) > KEPT:
                self._kept.popitem(last=False)
        return value


def merge(w: Array, a: Array, b: Array, scale: float, transposed: bool = False) -> Array:
    """w [out, in] + scale * (b [out, r] @ a [r, in]) in float64; transposed: w is [in, out].

    One rank after the other, so that the bits are the same on every machine; some rows of b at a time.
    """
    a, b = a.astype(np.float64), b.astype(np.float64)
    merged = w.astype(np.float64)
    rows_of = merged.T if transposed else merged
    step = max(1, SUMS // max(1, a.shape[1]))
    for first in range(0, len(b), step):
        rows = b[first : first + step]
        sums, products = np.zeros((len(rows), a.shape[1])), np.empty((len(rows), a.shape[1]))
        with np.errstate(over="ignore", invalid="ignore"):  # see require_range
            for k in range(a.shape[0]):
                np.multiply(rows[:, k, None], a[k], out=products)
                sums += products
            rows_of[first : first + step] += scale * sums
    return merged


def require_range(info: TensorInfo, merged: Array, adapter: str) -> None:
    """Finite parts may have a sum that is not, or that no weight can hold. min and max pass NaN on, without a copy."""
    if not merged.size or (merged.min() >= -LARGEST and merged.max() <= LARGEST):
        return
    first = int(np.argmax(~(np.abs(merged) <= LARGEST)))
    where = ",".join(str(int(i)) for i in np.unravel_index(first, merged.shape))
    rows = [
        ("tensor", f"{info.name} {info}"),
        ("first at", f"[{where}] = {merged.reshape(-1)[first]:g}"),
        ("largest", f"{LARGEST:g}"),
        ("adapter", adapter),
    ]
    what = f"{info.name} is not finite once the LoRA is merged"
    raise FrtcError("checkpoint.nonfinite", what, rows, "lora_alpha was edited, or the training run diverged")


# --- reading --------------------------------------------------------------------------------------------------------


def _open(folder: Path) -> Checkpoint:
    if not (folder / TENSORS).is_file():
        found = PICKLE if (folder / PICKLE).is_file() else "neither"
        hint = "save it again: model.save_pretrained(..., safe_serialization=True)" if found == PICKLE else ""
        raise FrtcError("adapter.missing", f"{folder} holds no {TENSORS}", [("found", found)], hint)
    return Checkpoint(folder, (folder / TENSORS,), read_header(folder / TENSORS))


def _sorted(tensors: Checkpoint, config: LoraConfig) -> tuple[list[Factors], dict[str, str]]:
    """(pairs of factors, base name -> whole tensor that replaces it); every tensor of the file has its place."""
    parts: dict[str, dict[str, str]] = {}
    saved: dict[str, str] = {}
    names: set[str] = set()
    for key in tensors.tensors:
        spelled = key.removeprefix(ROOT)
        if match := FACTOR.fullmatch(spelled):
            _require_plain(match, key)
            _put(parts.setdefault(match["module"], {}), match["part"], key)
        elif (match := SAVED.fullmatch(spelled)) and config.saves(match["module"]):
            _put(saved, f"{match['module']}.{match['end']}", key)
        else:
            rows = [("tensor", f"{key} {tensors.tensors[key]}"), ("modules_to_save", ", ".join(config.saved) or "none")]
            raise FrtcError("adapter.tensor", f"{key} is neither a LoRA factor nor a module to save", rows)
        names |= {match["adapter"]} - {None}
    if len(names) > 1:
        rows = [("found", ", ".join(sorted(names)))]
        raise FrtcError("adapter.two", f"{TENSORS} holds {len(names)} adapters", rows, "save one of them alone")
    if not parts and not saved:
        raise FrtcError("adapter.empty", f"{TENSORS} holds no factors", [("file", str(tensors.path / TENSORS))])
    return [_factors(module, found, tensors, config) for module, found in parts.items()], saved


def _put(into: dict[str, str], name: str, key: str) -> None:
    if name in into:
        raise FrtcError("adapter.two", f"two tensors of the adapter are {name}", [("one", into[name]), ("other", key)])
    into[name] = key


def _require_plain(match: re.Match[str], key: str) -> None:
    part, feature = match["part"], ""
    if part == "lora_magnitude_vector":
        feature = "DoRA"
    elif part.startswith("lora_embedding"):
        feature = "LoRA of an embedding table"
    elif match["end"] != "weight":
        feature = "biases of LoRA factors" if match["end"] else "LoRA of a parameter without a module"
    if feature:
        raise FrtcError("adapter.unsupported", f"the adapter uses {feature}, which is not merged", [("tensor", key)])


def _factors(module: str, found: Mapping[str, str], tensors: Checkpoint, config: LoraConfig) -> Factors:
    if absent := {"lora_A", "lora_B"} - found.keys():
        rows = [("has", next(iter(found.values())))]
        raise FrtcError("adapter.missing", f"{module} has no {min(absent)} in the adapter", rows, "the file is cut off")
    if not config.selects(module):
        rows = [("target_modules", config.show_targets()), ("file", str(tensors.path / CONFIG))]
        raise FrtcError("adapter.target", f"{module} is no target of the adapter's configuration", rows)
    rank, scale = config.rank(module), config.scale(module)
    for part, axis in (("lora_A", 0), ("lora_B", 1)):
        info = tensors.tensors[found[part]]
        if len(info.shape) != 2 or info.dtype not in FLOATS:
            what = f"{info.name} is {info}; only matrices of floats are merged"
            raise FrtcError("adapter.unsupported", what, [("module", module)])
        if info.shape[axis] != rank:
            rows = [("tensor", f"{info.name} {info}"), ("configured", f"rank {rank}")]
            what = f"{module} has rank {info.shape[axis]}, the adapter's configuration says {rank}"
            raise FrtcError("adapter.rank", what, rows)
    return Factors(module, found["lora_A"], found["lora_B"], scale)


# --- the base -------------------------------------------------------------------------------------------------------


class _Targets:
    """Tensors of the base by canonical name; each is taken once."""

    def __init__(self, base: Checkpoint, canonical: Callable[[str], str], adapter: Checkpoint) -> None:
        self.base, self.canonical, self.adapter = base, canonical, adapter
        self.known = {canonical(n): n for n in base.tensors}
        self.taken: dict[str, str] = {}

    def take(self, spelled: str) -> str:
        name = self.known.get(self.canonical(spelled))
        if name is None:
            near = nearest(self.canonical(spelled), self.known) or "none"
            rows = [("base", str(self.base)), ("nearest", near), ("adapter", str(self.adapter.path))]
            what = f"the adapter changes {spelled}, which the base does not have"
            raise FrtcError("adapter.base", what, rows, "it belongs to another model")
        if name in self.taken:
            rows = [("one", self.taken[name]), ("other", spelled)]
            raise FrtcError("adapter.two", f"two modules of the adapter change {name}", rows)
        self.taken[name] = spelled
        return name


def _require_fit(info: TensorInfo, f: Factors, tensors: Checkpoint, transposed: bool) -> None:
    if info.dtype not in FLOATS:
        what = f"the adapter changes {f.module}, whose weights are {info.dtype}"
        raise FrtcError("adapter.base", what, [("base", f"{info.name} {info}")], "pass the unquantised base")
    shape = tensors.tensors[f.b].shape[0], tensors.tensors[f.a].shape[1]
    if info.shape != (shape[::-1] if transposed else shape):
        rows = [("base", f"{info.name} {info}"), ("adapter", f"{list(shape)} = B @ A of {f.module}")]
        what = f"the adapter's change of {f.module} has another shape than the base"
        raise FrtcError("adapter.base", what, rows, "it belongs to another model")


def _require_same(base: TensorInfo, saved: TensorInfo) -> None:
    if base.shape != saved.shape:
        rows = [("base", f"{base.name} {base}"), ("adapter", f"{saved.name} {saved}")]
        what = f"the adapter replaces {base.name} by a tensor of another shape"
        raise FrtcError("adapter.base", what, rows, "it belongs to another model")


def _require_all(
    config: LoraConfig, base: Checkpoint, canonical: Callable[[str], str], changed: set[str], tensors: Checkpoint
) -> None:
    """Every module that a list of targets names has its factors: an adapter that was cut off lacks some."""
    wanted = [n for n in map(canonical, base.tensors) if n.endswith(".weight") and config.lists(n[: -len(".weight")])]
    if absent := [n for n in wanted if n not in changed]:
        rows = [("first", absent[0]), ("target_modules", config.show_targets()), ("adapter", str(tensors.path))]
        what = f"{len(absent)} of {len(wanted)} modules that the adapter targets have no factors in its file"
        raise FrtcError("adapter.missing", what, rows, "the file is cut off, or belongs to another configuration")


def _facts(config: LoraConfig, merged: Mapping[str, Any], replaced: Mapping[str, Any], own: bool) -> Iterator[Fact]:
    ranks = sorted({config.rank(f.module) for f in merged.values()})
    what = f"{len(merged)} tensors merged, rank {', '.join(map(str, ranks)) or 'none'}, {len(replaced)} replaced"
    yield Fact("adapter", what, TENSORS)
    yield Fact("adapter_base", config.base or "not said", f"{CONFIG}: base_model_name_or_path")
    if own:
        yield Fact("side_files", "the adapter's", "its folder holds a configuration or statistics")


def _size(info: TensorInfo) -> int:
    return math.prod(info.shape)


def require_one(folder: Path, adapter: Path | None) -> Path | None:
    """The adapter's folder: the one that was chosen, or the base's own folder; both is one too many."""
    beside = adapter_in(folder)
    if adapter is None:
        return folder if beside else None
    if not adapter.is_dir():
        what = f"--adapter {adapter} is no folder"
        raise UsageError("adapter.missing", what, hint=f"a folder with {CONFIG} and {TENSORS}")
    if beside and adapter.resolve() != folder.resolve():
        rows = [("beside the base", str(folder)), ("--adapter", str(adapter))]
        hint = "frtc merges one; merge the first into the base, or take it out of the folder"
        raise UsageError("adapter.two", "there are two adapters", rows, hint)
    return adapter


def alone(folder: Path) -> bool:
    """An adapter, and nothing that could be its base."""
    return adapter_in(folder) and not any((folder / name).exists() for name in (SINGLE, INDEX, "params"))


def without_base(path: Path) -> FrtcError:
    folder = path if path.is_dir() else path.parent
    said = read_json(folder / CONFIG).get("base_model_name_or_path") if (folder / CONFIG).is_file() else None
    rows = [("folder", str(folder)), ("trained on", str(said or "not said"))]
    hint = f"frtc compile BASE --adapter {folder}, where BASE is the checkpoint that it was trained on"
    return FrtcError("adapter.alone", "this is a LoRA adapter, without the weights that it changes", rows, hint)
