"""The Plan file: safetensors format, read by mapping it. docs/plan-format.md explains the bytes.

plan = open_plan(path)                # checked from end to end; codegen/plan_writer.py writes it
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frtc.errors import FrtcError
from frtc.kernels.smxx_frames import CUBIN
from frtc.runtime.manifest import File, read_manifest
from frtc.runtime.paths import path_of, require_file
from frtc.runtime.plan import Program
from frtc.runtime.validate import check_cubins, check_frames, check_manifest

ALIGN = 256  # bytes; of every tensor
PIECE = 16 << 20  # bytes hashed at a time
HEADER_MOST = 100_000_000  # bytes; a limit of the format
TYPES = {
    "f64": "F64", "f32": "F32", "f16": "F16", "bf16": "BF16", "e4m3": "F8_E4M3", "e5m2": "F8_E5M2",
    "i64": "I64", "i32": "I32", "i8": "I8", "u8": "U8", "bool": "BOOL",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the file. `start` and `end` count from the start of the data; up to `stop` follows a filler."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    stop: int

    def pieces(self) -> list[tuple[int, int]]:
        """What is hashed, each piece on its own: the tensor and its filler."""
        return [(at, min(at + PIECE, self.stop)) for at in range(self.start, self.stop, PIECE)]


def aligned(nbytes: int, to: int = ALIGN) -> int:
    return -(-nbytes // to) * to


def layout(program: Program, files: Sequence[File]) -> tuple[Tensor, ...]:
    """Every tensor in the order of the file: the weights at their offsets in device memory, then the files."""
    entries = [(f"w:{w.name}", TYPES[w.dtype], w.stored_shape, w.offset, w.nbytes) for w in program.weights]
    at = aligned(program.weights_nbytes)
    stops = [w.offset for w in program.weights[1:]] + [at] * bool(program.weights)
    for file in files:
        entries.append((file.name, "U8", (file.nbytes,), at, file.nbytes))
        at = aligned(at + file.nbytes)
        stops.append(at)
    return tuple(
        Tensor(name, dtype, shape, start, start + nbytes, stop)
        for (name, dtype, shape, start, nbytes), stop in zip(entries, stops, strict=True)
    )


def header_of(tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> dict[str, Any]:
    """The safetensors header. The format forbids gaps between tensors: fillers cover them."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    for i, t in enumerate(tensors):
        header[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [t.start, t.end]}
        if t.stop > t.end:
            header[f"__pad{i}"] = {"dtype": "U8", "shape": [t.stop - t.end], "data_offsets": [t.end, t.stop]}
    return header


def hashes(data: memoryview, tensors: Sequence[Tensor]) -> list[str]:
    """Of each tensor: the SHA-256 of the SHA-256 digests of its pieces. Pieces are hashed by all cores."""
    pieces = [piece for t in tensors for piece in t.pieces()]
    cores = min(len(os.sched_getaffinity(0)), len(pieces)) or 1
    with ThreadPoolExecutor(cores) as pool:
        digests = pool.map(lambda piece: hashlib.sha256(data[piece[0] : piece[1]]).digest(), pieces)
        return [hashlib.sha256(b"".join(next(digests) for _ in t.pieces())).hexdigest() for t in tensors]


@dataclass(slots=True)
class Plan:
    """An open Plan. Its bytes are a read-only mapping of the file, alive as long as anything refers to it.

    evidence   what was found out about this program; empty where it belongs to another one
    notes      what every open says: evidence that was ignored, and why
    """

    path: Path
    program: Program
    plan_id: str
    evidence: dict[str, Any]
    notes: tuple[str, ...]
    data: memoryview = field(repr=False)
    tensors: tuple[Tensor, ...] = field(repr=False)
    sha256: tuple[str, ...] = field(repr=False)
    verified: bool = False

    @property
    def weights(self) -> memoryview:
        """The weights block, as it lies in device memory."""
        return self.data[: self.program.weights_nbytes]

    def files(self) -> dict[str, memoryview]:
        """Cubins and blobs by name."""
        return {t.name: self.data[t.start : t.end] for t in self.tensors[len(self.program.weights) :]}

    def verify(self) -> None:
        """Compare all tensors with their hashes, on all cores."""
        self._compare(self.tensors, self.sha256)
        self.verified = True

    def _compare(self, tensors: Sequence[Tensor], stated: Sequence[str]) -> None:
        found = hashes(self.data, tensors)
        bad = [t.name for t, a, b in zip(tensors, found, stated, strict=True) if a != b]
        if bad:
            rows = [("file", str(self.path)), *(("tensor", name) for name in bad[:5])]
            what = f"{len(bad)} of {len(self.tensors)} tensors are damaged: {bad[0]}"
            raise FrtcError("plan.damaged", what, rows, "copy the file again, or compile it again")


def open_plan(path: str | Path, verify: bool = True) -> Plan:
    """Map a Plan and check everything it says. `verify=False` leaves the hashes of the weights to `Plan.verify`."""
    path = path_of("the Plan", path)
    data, header = _map(path)
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or set(metadata) != {"program", "evidence"}:
        raise _no_plan(path, "its metadata has no program and evidence")
    if not all(isinstance(text, str) for text in metadata.values()):
        raise _no_plan(path, "its metadata is not text")
    manifest, plan_id = read_manifest(metadata["program"])
    check_manifest(manifest)
    tensors = layout(manifest.program, manifest.files)
    _check_header(path, header, tensors, len(data))
    if len(manifest.sha256) != len(tensors):
        raise FrtcError("plan.invalid", f"sha256 has {len(manifest.sha256)} hashes for {len(tensors)} tensors")
    evidence, notes = _evidence(metadata["evidence"], plan_id)
    plan = Plan(path, manifest.program, plan_id, evidence, notes, data, tensors, manifest.sha256)
    count = len(manifest.program.weights)
    plan._compare(tensors[count:], manifest.sha256[count:])
    files = plan.files()
    check_cubins(manifest.program, {name: bytes(files[name]) for name in {k.cubin for k in plan.program.kernels}})
    if CUBIN in files:
        check_frames(manifest.program, bytes(files[CUBIN]))
    if verify:
        plan.verify()
    return plan


def _map(path: Path) -> tuple[memoryview, dict[str, Any]]:
    """(the data behind the header, the header)."""
    try:
        require_file(path)
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if size else b""
    except (OSError, ValueError) as fault:  # ValueError: no name that the system can have
        what = f"the Plan cannot be opened: {getattr(fault, 'strerror', None) or fault}"
        raise FrtcError("plan.missing", what, [("path", str(path))]) from None
    if size <= 8:
        raise FrtcError("plan.truncated", f"the file ends after {size} bytes", [("path", str(path))])
    (length,) = struct.unpack_from("<Q", mapping)
    if not 2 <= length <= HEADER_MOST or mapping[8:9] != b"{":
        raise _no_plan(path, "it is not in safetensors format")
    if 8 + length > size:
        rows = [("path", str(path)), ("header", f"{length:,} bytes"), ("file", f"{size:,} bytes")]
        raise FrtcError("plan.truncated", "the file ends inside its header", rows, "copy the file again")
    try:
        header = json.loads(mapping[8 : 8 + length])
    except (ValueError, RecursionError) as fault:
        raise FrtcError("plan.damaged", f"the header is not JSON: {fault}", [("path", str(path))]) from None
    if not isinstance(header, dict):
        raise _no_plan(path, "its header is no record")
    return memoryview(mapping)[8 + length :], header


def _check_header(path: Path, found: dict[str, Any], tensors: Sequence[Tensor], size: int) -> None:
    """The header's tensors are those that follow from the program, and the file holds them all."""
    wanted = header_of(tensors, {})
    del wanted["__metadata__"]
    for name in {**wanted, **found}:
        if found.get(name) != wanted.get(name):
            rows = [("path", str(path)), ("wants", str(wanted.get(name))), ("found", str(found.get(name))[:80])]
            raise FrtcError("plan.damaged", f"tensor {name} is not where the program says", rows)
    end = tensors[-1].stop if tensors else 0
    if size != end:
        code, what = ("truncated", "ends too early") if size < end else ("damaged", "goes on after its last tensor")
        rows = [("path", str(path)), ("wants", f"{end:,} bytes of tensors"), ("found", f"{size:,} bytes")]
        raise FrtcError(f"plan.{code}", f"the file {what}", rows, "copy the file again, or compile it again")


def _evidence(text: str, plan_id: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(evidence, notes). Evidence decides no action: what does not belong to this program is left out, and said."""
    try:
        evidence = json.loads(text)
    except (ValueError, RecursionError):
        evidence = None
    if not isinstance(evidence, dict):
        return {}, ("the evidence of this Plan cannot be read and is ignored",)
    about = evidence.pop("plan_id", None)
    if about != plan_id:
        return {}, (f"the evidence of this Plan is about another program and is ignored: {str(about)[:64]}",)
    return evidence, ()


def _no_plan(path: Path, why: str) -> FrtcError:
    hint = "a Plan is made by `frtc compile`"
    return FrtcError("plan.invalid", f"this file is not a Plan: {why}", [("path", str(path))], hint)
