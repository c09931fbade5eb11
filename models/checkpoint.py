"""A checkpoint on disk: tensor names, types and shapes from the headers, bytes on demand. Nothing is ever unpickled.

Reads one safetensors file, or shards with their index. Arrays are views of the mapped file: reading a tensor costs no
anonymous memory. Format: 8 bytes little-endian header length, JSON header, tensor bytes without gaps.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from frtc.errors import FrtcError, nearest

if TYPE_CHECKING:
    from frtc.models.evidence import Fact

# safetensors' name -> (name in the IR, NumPy type)
DTYPES: dict[str, tuple[str, np.dtype[Any]]] = {
    "F64": ("f64", np.dtype(np.float64)),
    "F32": ("f32", np.dtype(np.float32)),
    "F16": ("f16", np.dtype(np.float16)),
    "BF16": ("bf16", np.dtype(ml_dtypes.bfloat16)),
    "F8_E4M3": ("e4m3", np.dtype(ml_dtypes.float8_e4m3fn)),
    "F8_E5M2": ("e5m2", np.dtype(ml_dtypes.float8_e5m2)),
    "I64": ("i64", np.dtype(np.int64)),
    "I32": ("i32", np.dtype(np.int32)),
    "I8": ("i8", np.dtype(np.int8)),
    "U8": ("u8", np.dtype(np.uint8)),
    "BOOL": ("bool", np.dtype(np.bool_)),
}
NUMPY = dict(DTYPES.values())

# float type -> (unsigned type of its width, mask of its magnitude, magnitude of infinity): NaN and Inf are >= the last
BITS: dict[str, tuple[type[np.unsignedinteger[Any]], int, int]] = {
    "f64": (np.uint64, 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
    "f32": (np.uint32, 0x7FFF_FFFF, 0x7F80_0000),
    "f16": (np.uint16, 0x7FFF, 0x7C00),
    "bf16": (np.uint16, 0x7FFF, 0x7F80),
}

MAX_HEADER = 100_000_000  # bytes; the format's own limit
PIECE = 1 << 20  # elements checked at once: small enough for the cache
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `dtype` is spelled as in the IR ("bf16"); `offset` counts bytes from the start of `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class Checkpoint:
    """Tensors by name and the folder they came from.

    path       what the user gave: a folder or a file
    folder     where side files (config.json, statistics) lie
    config     contents of config.json, {} where there is none
    facts      what is worth saying of how its tensors come to be
    """

    def __init__(self, path: Path, files: tuple[Path, ...], tensors: Mapping[str, TensorInfo]) -> None:
        self.path, self.files, self.tensors = path, files, tensors
        self.folder = path if path.is_dir() else path.parent
        self.config = _config(self.folder / "config.json")
        self.facts: tuple[Fact, ...] = ()
        self._maps: dict[Path, mmap.mmap] = {}
        self._checked: set[str] = set()

    def __str__(self) -> str:
        return f"{self.path} ({len(self.tensors)} tensors)"

    def header(self, file: Path) -> bytes:
        """What identifies one of the files without reading the weights: its header."""
        with file.open("rb") as f:
            return f.read(int.from_bytes(f.read(8), "little"))

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """The tensor as a read-only view of the file, after a look at every value: NaN or infinity is an error."""
        info = self.tensors[name]
        if not info.nbytes:
            return np.empty(info.shape, NUMPY[info.dtype])
        if info.file not in self._maps:
            with info.file.open("rb") as f:
                self._maps[info.file] = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        count = info.nbytes // NUMPY[info.dtype].itemsize
        flat = np.frombuffer(self._maps[info.file], NUMPY[info.dtype], count, info.offset)
        if name not in self._checked and info.dtype in BITS:
            require_finite(info, flat)
            self._checked.add(name)
        return flat.reshape(info.shape)


def open_checkpoint(path: Path | str, adapter: Path | None = None) -> Checkpoint:
    """Headers of every file of the checkpoint; no tensor is read.

    adapter   folder of a LoRA adapter for it; one that lies beside the weights needs no naming
    """
    from frtc.models import detect, lora  # they show checkpoints, too

    with _readable(Path(path)):
        base = _open(Path(path))
        folder = lora.require_one(base.folder, adapter)
        return base if folder is None else lora.adapted(base, folder, detect(base).canonical)


def open_file(path: Path) -> Checkpoint:
    """One safetensors file, whatever lies beside it."""
    with _readable(path):
        return Checkpoint(path, (path,), read_header(path))


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    if not path.exists():
        raise FrtcError("checkpoint.not_found", f"{path} does not exist", hint="pass a checkpoint folder or file")
    try:
        yield
    except OSError as e:
        raise FrtcError("checkpoint.read", f"cannot read {path}: {e.strerror}", [("file", str(e.filename))]) from None


def _open(path: Path) -> Checkpoint:
    from frtc.models import lora

    if path.name == lora.TENSORS or (path.is_dir() and lora.alone(path)):
        raise lora.without_base(path)
    if path.is_file():
        return Checkpoint(path, (path,), read_header(path))
    if tree := _open_tree(path):
        return tree
    if (path / INDEX).is_file():
        return _open_shards(path, path / INDEX)
    if not (path / SINGLE).is_file():
        raise _nothing_to_read(path)
    return Checkpoint(path, (path / SINGLE,), read_header(path / SINGLE))


def _open_tree(path: Path) -> Checkpoint | None:
    """A JAX checkpoint, where the folder is one; with torch weights beside it nobody can say which are meant."""
    from frtc.models import orbax  # it is a Checkpoint, too

    tree = orbax.tree_of(path)
    if tree is None:
        return None
    if torch := sorted(p.name for p in path.glob("*.safetensors") if p.name.startswith("model")):
        rows = [("torch", torch[0]), ("JAX", str(tree.relative_to(path)))]
        what = f"{path} holds weights in two layouts"
        raise FrtcError("checkpoint.mixed", what, rows, "pass the one that is meant: the file, or the folder params")
    return orbax.OrbaxCheckpoint(path, tree)


def _open_shards(path: Path, index: Path) -> Checkpoint:
    """All shards that the index names; index and headers must agree."""
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(shard, str) for shard in placed.values()):
        raise FrtcError("checkpoint.index", f"{index.name} has no weight_map of names to files", [("file", str(index))])
    tensors: dict[str, TensorInfo] = {}
    shards = sorted(set(placed.values()))
    for shard in shards:
        if Path(shard).name != shard or not (path / shard).is_file():
            rows = [("index", str(index)), ("nearest", nearest(shard, (p.name for p in path.iterdir())) or "none")]
            raise FrtcError("checkpoint.shard", f"the index names {shard}, which is not in the folder", rows)
        for name, info in read_header(path / shard).items():
            if name in tensors:
                rows = [("first", tensors[name].file.name), ("second", shard)]
                raise FrtcError("checkpoint.duplicate", f"two shards hold {name}", rows)
            tensors[name] = info
    astray = sorted(n for n in {*placed, *tensors} if n not in tensors or placed.get(n) != tensors[n].file.name)
    if astray:
        what = f"{len(astray)} tensors are not where {index.name} says, the first is {astray[0]}"
        found = tensors[astray[0]].file.name if astray[0] in tensors else "nowhere"
        raise FrtcError("checkpoint.index", what, [("says", placed.get(astray[0], "nothing of it")), ("found", found)])
    return Checkpoint(path, tuple(path / shard for shard in shards), tensors)


def _nothing_to_read(path: Path) -> FrtcError:
    present = sorted(p.name for p in path.iterdir())
    rows = [("looked for", f"{SINGLE}, {INDEX}, params/"), ("folder", ", ".join(present[:8]) or "empty")]
    if "train_state" in present:
        what = f"{path} holds only the trainer's state, no weights for inference"
        return FrtcError("orbax.train_state", what, rows, "copy the folder params of the same step, too")
    pickles = [n for n in present if n.endswith(PICKLES)]
    if pickles:
        return FrtcError(
            "checkpoint.pickle",
            f"{pickles[0]} is a pickle, and a pickle can run code: frtc reads safetensors only",
            rows,
            "convert it with safetensors.torch.save_file",
        )
    return FrtcError("checkpoint.not_found", f"no checkpoint in {path}", rows)


def _config(path: Path) -> dict[str, Any]:
    """{} only where there is nothing of this name: a folder or a link to nowhere is no configuration of defaults."""
    if not os.path.lexists(path):
        return {}
    if not path.is_file():
        what = f"cannot read {path}: it is {'a folder' if path.is_dir() else 'no file'}"
        raise FrtcError("checkpoint.read", what, [("file", str(path))], "put the file that was saved with the weights")
    return read_json(path)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a side file."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as e:
        raise FrtcError("checkpoint.read", f"cannot read {path}: {e.strerror}", [("file", str(path))]) from None
    except (ValueError, RecursionError) as e:
        raise FrtcError("checkpoint.json", f"{path.name} is not JSON: {e}", [("file", str(path))]) from None
    if not isinstance(value, dict):
        raise FrtcError("checkpoint.json", f"{path.name} is not a JSON object", [("file", str(path))])
    return value


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Tensors of one safetensors file, every offset checked against its size."""
    size = path.stat().st_size
    with path.open("rb") as f:
        head = f.read(9)
        length = struct.unpack("<Q", head[:8])[0] if len(head) >= 8 else 0
        if not 2 <= length <= MAX_HEADER or head[8:] not in (b"", b"{"):
            pickled = head.startswith((b"PK\x03\x04", b"\x80"))
            raise _not_safetensors(path, "it looks like a pickle" if pickled else "it does not begin with a header")
        if 8 + length > size:
            raise _truncated(path, size, 8 + length)
        raw = head[8:] + f.read(length - 1)
    try:
        entries = json.loads(raw, object_pairs_hook=_unique)
    except _Duplicate as e:
        raise FrtcError("checkpoint.duplicate", f"{path.name} holds {e} twice", [("file", str(path))]) from None
    except (ValueError, RecursionError):
        raise _not_safetensors(path, "its header is not JSON") from None
    if not isinstance(entries, dict):
        raise _not_safetensors(path, "its header is not a JSON object")
    entries.pop("__metadata__", None)
    tensors = {name: _tensor_info(path, 8 + length, name, entry) for name, entry in entries.items()}
    _require_tiling(path, 8 + length, size, tensors.values())
    return tensors


class _Duplicate(Exception):
    """A key that stands twice in one JSON object."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise _Duplicate(key)
        out[key] = value
    return out


def _tensor_info(path: Path, base: int, name: str, entry: Any) -> TensorInfo:
    try:
        kind, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        valid = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        valid = False
    if not valid:
        raise _not_safetensors(path, f"the header's entry of {name} is malformed")
    if kind not in DTYPES:
        rows = [("file", str(path)), ("known", ", ".join(DTYPES))]
        raise FrtcError("checkpoint.dtype", f"{name} has the unknown element type {kind}", rows)
    dtype, numpy = DTYPES[kind]
    nbytes = numpy.itemsize
    for extent in shape:
        nbytes *= extent
    if end - begin != nbytes:
        raise _not_safetensors(path, f"{name} has {end - begin} bytes where its shape needs {nbytes}")
    return TensorInfo(name, dtype, shape, path, base + begin, nbytes)


def _require_tiling(path: Path, base: int, size: int, tensors: Iterable[TensorInfo]) -> None:
    """The tensors cover the file's data once, without gap or overlap."""
    at = base
    for t in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if t.offset != at:
            raise _not_safetensors(path, f"{t.name} begins at byte {t.offset}, the tensor before it ends at {at}")
        at += t.nbytes
    if at > size:
        raise _truncated(path, size, at)
    if at < size:
        raise _not_safetensors(path, f"{size - at} bytes follow the last tensor")


def _not_safetensors(path: Path, why: str) -> FrtcError:
    return FrtcError("checkpoint.format", f"{path.name} is not a safetensors file: {why}", [("file", str(path))])


def _truncated(path: Path, size: int, wanted: int) -> FrtcError:
    rows = [("file", str(path)), ("found", f"{size} bytes"), ("wants", f"{wanted} bytes")]
    return FrtcError("checkpoint.truncated", f"{path.name} is cut off", rows, "copy or download it again")


def require_finite(info: TensorInfo, flat: np.ndarray[Any, Any]) -> None:
    unsigned, mask, infinity = BITS[info.dtype]
    bits = flat.view(unsigned)
    for start in range(0, bits.size, PIECE):
        magnitude = bits[start : start + PIECE] & unsigned(mask)
        if magnitude.max() >= infinity:
            first = start + int(np.argmax(magnitude >= infinity))
            where = ",".join(str(int(i)) for i in np.unravel_index(first, info.shape))
            rows = [
                ("tensor", f"{info.name} {info}"),
                ("first at", f"[{where}] = {flat[first]}"),
                ("file", str(info.file)),
            ]
            raise FrtcError("checkpoint.nonfinite", f"{info.name} holds NaN or infinity", rows)
