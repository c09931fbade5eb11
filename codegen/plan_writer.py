"""Write a Plan file in pieces. docs/plan-format.md explains the bytes, runtime/plan_file.py reads them.

    with PlanWriter(path, program, {"cubin.000": image, "tokenizer.json": data}) as writer:
        writer.write_weight("embed", rows, first_row=0)       # any order, any pieces, any thread
        plan_id = writer.finish({"source": ...})

The file appears under its name when it is complete, or not at all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import mmap
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from frtc.errors import EnvironmentFault, UsageError
from frtc.kernels.dtypes import DTYPES
from frtc.runtime.manifest import ZEROS, File, Manifest
from frtc.runtime.own_file import partial
from frtc.runtime.plan import SCHEMA, Program, Ref, WeightEntry
from frtc.runtime.plan_file import HEADER_MOST, PIECE, aligned, hashes, header_of, layout
from frtc.runtime.validate import check_manifest

PAGE = 4096  # bytes; the data starts at a multiple of it, so that whole pages can be registered for the upload
KINDS = {
    stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}  # fmt: skip


class PlanWriter:
    """Writes a file of its own beside `path`, and renames it when all is there. `room` is what the header keeps free
    for the evidence.

    blobs   cubins and other tensors of bytes, by name
    """

    def __init__(self, path: str | Path, program: Program, blobs: Mapping[str, bytes], room: int = 1 << 18) -> None:
        self.path, self.tmp, self.plan_id = Path(path), partial(Path(path)), ""
        self.file: BinaryIO | None = None
        self.failed: EnvironmentFault | None = None
        files = tuple(File(name, len(data)) for name, data in blobs.items())
        self.manifest = Manifest(program, files, ("0" * 64,) * (len(program.weights) + len(files)))
        check_manifest(self.manifest)
        self.tensors = layout(program, files)
        self.rows: dict[str, list[tuple[int, int]]] = {w.name: [] for w in program.weights}
        self.entries = {w.name: w for w in program.weights}
        self.size = self.tensors[-1].stop if self.tensors else 0
        self.base = aligned(8 + len(self._header({})) + room, PAGE)
        try:
            self._begin(blobs)
        except BaseException:
            self.abort()
            raise

    def _begin(self, blobs: Mapping[str, bytes]) -> None:
        with self._guard():
            self.file = open(self.tmp, "x+b", buffering=0)  # noqa: SIM115
            os.posix_fallocate(self.file.fileno(), 0, self.base + self.size)  # a full disk is found out now
            for tensor, data in zip(self.tensors[len(self.entries) :], blobs.values(), strict=True):
                self._write(data, tensor.start)

    def write_weight(self, name: str, rows: np.ndarray[Any, Any], first_row: int) -> None:
        """Rows [first_row, first_row + len(rows)) of a weight along its leading axis, in its element type."""
        entry = self.entries[name]
        count, inner = (entry.shape[0], entry.shape[1:]) if entry.shape else (1, ())
        expected = (DTYPES[entry.dtype].numpy, inner)
        assert (rows.dtype, rows.shape[1:]) == expected, f"{name}: {rows.dtype}{rows.shape} for {expected}"
        assert 0 <= first_row <= count - len(rows), f"{name}: row {first_row} and {len(rows)} more of {count}"
        if entry.stored_shape != entry.shape:
            padded = np.zeros((*rows.shape[:-1], entry.stored_shape[-1]), rows.dtype)
            padded[..., : rows.shape[-1]] = rows
            rows = padded
        self.rows[name].append((first_row, first_row + len(rows)))
        data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
        with self._guard():
            self._write(data, entry.offset + first_row * (entry.nbytes // max(count, 1)))

    def seal(self) -> str:
        """Hash what was written; from now on `tmp` opens as a Plan without evidence. Returns the plan_id."""
        for name, entry in self.entries.items():
            _check_coverage(name, entry, self.rows[name])
        with self._guard():
            assert self.file is not None
            mapping = memoryview(mmap.mmap(self.file.fileno(), 0, prot=mmap.PROT_READ))
            found = hashes(mapping[self.base :], self.tensors)
            self.manifest = replace(self.manifest, sha256=tuple(found))
            self.plan_id = write_manifest(self.manifest)[1]
            self._write(self._header({}).ljust(self.base - 8), 8 - self.base)
            self._write(struct.pack("<Q", self.base - 8), -self.base)
        return self.plan_id

    def finish(self, evidence: Mapping[str, Any]) -> str:
        """Add the evidence, make the file durable and give it its name. Returns the plan_id."""
        if not self.plan_id:
            self.seal()
        header = self._header(evidence)
        with self._guard():
            assert self.file is not None
            if 8 + len(header) > self.base:
                self._move_data(aligned(8 + len(header), PAGE))
            self._write(header.ljust(self.base - 8), 8 - self.base)
            self._write(struct.pack("<Q", self.base - 8), -self.base)
            os.fsync(self.file.fileno())
            require_replaceable(self.path)  # minutes have passed since the first look
            self.file.close()
            os.replace(self.tmp, self.path)
            self.file = None
            _sync_folder(self.path.parent)
        return self.plan_id

    def abort(self) -> None:
        """Leave nothing behind."""
        if self.file is not None:
            self.file.close()
            self.file = None
            self.tmp.unlink(missing_ok=True)

    def __enter__(self) -> PlanWriter:
        return self

    def __exit__(self, fault: type[BaseException] | None, *_: object) -> None:
        try:
            if fault is None and self.file is not None and not self.failed:
                self.finish({})
        finally:
            self.abort()

    def _header(self, evidence: Mapping[str, Any]) -> bytes:
        program, plan_id = write_manifest(self.manifest)
        proof = json.dumps({"plan_id": plan_id, **evidence}, separators=(",", ":"), allow_nan=False)
        header = header_of(self.tensors, {"program": program, "evidence": proof})
        text = json.dumps(header, separators=(",", ":")).encode()
        assert len(text) + PAGE <= HEADER_MOST, f"a header of {len(text)} bytes is more than the format allows"
        return text

    def _write(self, data: bytes | memoryview, at: int) -> None:
        """At an offset from the start of the data."""
        assert self.file is not None, "the Plan is closed"
        rest, at = memoryview(data), at + self.base
        while len(rest):
            written = os.pwrite(self.file.fileno(), rest[: 64 << 20], at)
            rest, at = rest[written:], at + written

    def _move_data(self, base: int) -> None:
        """Move the data back to `base`, from its end on: evidence that outgrew its room."""
        assert self.file is not None
        number, old = self.file.fileno(), self.base
        os.posix_fallocate(number, 0, base + self.size)
        self.base = base
        for start in reversed(range(0, self.size, PIECE)):
            self._write(os.pread(number, min(PIECE, self.size - start), old + start), start)

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """A failed write leaves nothing behind. The file stays open: another thread may be writing to it."""
        if self.failed:
            raise self.failed
        try:
            yield
        except OSError as fault:
            if self.file is not None:
                self.tmp.unlink(missing_ok=True)
            rows = [("path", str(self.path)), ("needs", f"{self.base + self.size:,} bytes")]
            what = f"the Plan cannot be written: {fault.strerror or fault}"
            hint = "free some space, or write elsewhere with -o"
            self.failed = EnvironmentFault("plan.write", what, rows, hint)
            raise self.failed from fault


def require_replaceable(path: Path) -> None:
    """Nothing stands at `path`, or a Plan: whatever else is there is not ours to replace."""
    if not os.path.lexists(path):
        return
    try:
        kind = stat.S_IFMT(path.stat().st_mode)  # of what a link leads to
        if kind == stat.S_IFREG and _is_plan(path):
            return
        found = KINDS.get(kind, "a file that is not a Plan")
    except OSError as fault:
        found = f"there and cannot be read: {fault.strerror}"
    hint = "choose another name with -o, or remove it first"
    raise UsageError("output.exists", f"{path} is {found}; it is left as it is", hint=hint)


def _is_plan(path: Path) -> bool:
    """By what its header says of itself; a damaged Plan, or one of a later version, is a Plan."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if 2 <= length <= HEADER_MOST else b""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        return False
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    return isinstance(metadata, dict) and {"program", "evidence"} <= metadata.keys()


def _check_coverage(name: str, entry: WeightEntry, written: list[tuple[int, int]]) -> None:
    """Every row once."""
    at = 0
    for first, last in sorted(written):
        assert first == at, f"weight {name}: rows {at} to {first} are missing or written twice"
        at = last
    assert at == (entry.shape[0] if entry.shape else 1), f"weight {name} has {at} rows of {entry.shape}"


def _sync_folder(path: Path) -> None:
    """Make a rename durable."""
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write_manifest(manifest: Manifest) -> tuple[str, str]:
    """(the text, the plan_id in it)."""
    refs: dict[Ref, int] = {}
    program = _encode(manifest.program, refs)
    table = [_record(ref, {}) for ref in refs]
    fields = {"plan_id": ZEROS, "schema": SCHEMA, "program": program, "refs": table}
    fields |= {"files": _encode(manifest.files, {}), "sha256": list(manifest.sha256)}
    text = json.dumps(fields, separators=(",", ":"), allow_nan=False)
    plan_id = hashlib.sha256(text.encode()).hexdigest()
    return text.replace(ZEROS, plan_id, 1), plan_id


def _encode(value: Any, refs: dict[Ref, int]) -> Any:
    kind = type(value)
    if kind is Ref:
        return refs.setdefault(value, len(refs))
    if dataclasses.is_dataclass(kind):
        return _record(value, refs)
    if isinstance(value, (tuple, list)):
        return [_encode(item, refs) for item in value]
    if isinstance(value, Mapping):
        return {name: _encode(value[name], refs) for name in sorted(value)}
    if kind is float and not math.isfinite(value):
        return {"float": str(value)}  # JSON has no infinities
    if value is None or kind in (bool, int, float, str):
        return value
    raise TypeError(f"a manifest cannot hold a {kind.__name__}: {value!r}")


def _record(value: Any, refs: dict[Ref, int]) -> dict[str, Any]:
    fields = {}
    for field in dataclasses.fields(value):
        found = getattr(value, field.name)
        if field.default is MISSING or found != field.default:
            fields[field.name] = _encode(found, refs)
    return fields
