"""Observations in an .npz file: one picture array per camera, `state` and `prompt`, one row per observation.

  images.<camera> or any other name   u8 [N, H, W, 3]
  state                               numbers [N, D], robot units
  prompt                              text [N], as np.array(["...", ...]) makes it

Rows are read one after the other out of the archive, so that memory holds one of each array.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from frtc.dataset_format import Array, Asked, Frame, Place, check_picture, too_large
from frtc.errors import FrtcError
from frtc.observation import reason

STATE, PROMPT = "state", "prompt"
TEXT = 1 << 18  # bytes of one prompt at most
SKIP = 1 << 20  # bytes that are unpacked at once where rows are passed over
BOMB = 1 << 30, 200  # what unpacks to more bytes than this and this many times itself, is none
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


@dataclass(frozen=True, slots=True)
class Member:
    """An array of the archive, as its header declares it."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    @property
    def row_bytes(self) -> int:
        size = self.dtype.itemsize
        for extent in self.shape[1:]:
            size *= extent
        return size


@dataclass(frozen=True, slots=True)
class Npz:
    path: Path
    members: dict[str, Member]

    kind = "npz"

    @staticmethod
    def open(path: Path) -> Npz:
        try:
            with zipfile.ZipFile(path) as archive:
                names = [n.removesuffix(".npy") for n in archive.namelist() if n.endswith(".npy")]
                members = {name: _declared(archive, name) for name in names}
        except FrtcError:
            raise
        except Exception as fault:  # a damaged archive makes zipfile and NumPy fail in any way
            raise _unreadable(path, fault) from None
        found = Npz(path, members)
        found._check()
        return found

    @property
    def cameras(self) -> tuple[str, ...]:
        return tuple(m.name for m in self.members.values() if len(m.shape) == 4)

    @property
    def lengths(self) -> Sequence[int]:
        """All rows are one episode."""
        named = [self.members[name] for name in (*self.cameras, STATE, PROMPT) if name in self.members]
        return (named[0].shape[0],) if named else ()

    def read(self, places: Sequence[Place], asked: Asked) -> Iterator[Frame]:
        names = [*asked.cameras, *([STATE] if asked.state else []), *([PROMPT] if asked.prompt else [])]
        for name in names:
            if name not in self.members:
                rows = [("data", f"{self.path}: {', '.join(self.members)}")]
                code = "dataset.task" if name == PROMPT else "dataset.shape"
                raise FrtcError(code, f"the file has no array {name}", rows, f"np.savez(FILE, {name}=..., ...)")
        try:
            with ExitStack() as stack:
                archive = stack.enter_context(zipfile.ZipFile(self.path))
                files = {name: stack.enter_context(archive.open(name + ".npy")) for name in names}
                starts = {name: _skip_header(file) for name, file in files.items()}
                for place in places:
                    rows_ = {n: _row(files[n], starts[n], self.members[n], place.frame) for n in names}
                    pictures = {name: rows_[name] for name in asked.cameras}
                    prompt = str(rows_[PROMPT].item()) if asked.prompt else None
                    yield Frame(pictures, rows_.get(STATE), prompt)
                for file in files.values():  # the archive's checksums are compared at the end
                    while file.read(SKIP):
                        pass
        except FrtcError:
            raise
        except Exception as fault:
            raise _unreadable(self.path, fault) from None

    def _check(self) -> None:
        """Every array that is a camera's, the state or the prompt has its form, and all have as many rows."""
        for name in self.cameras:
            member = self.members[name]
            check_picture(member.shape[1:], member.dtype, f"{self.path}: array {name}, each row,")
        forms = {STATE: (2, "fiu", "numbers [N, D]"), PROMPT: (1, "U", "text [N]")}
        for name, (axes, kinds, form) in forms.items():
            if name not in self.members:
                continue
            member = self.members[name]
            if len(member.shape) != axes or member.dtype.kind not in kinds:
                what = f"{self.path}: array {name} is {member.dtype}{list(member.shape)}, not {form}"
                raise FrtcError("dataset.shape", what)
            if member.row_bytes > TEXT:
                raise too_large(f"{self.path}: array {name}", f"{member.row_bytes} bytes a row", f"{TEXT} bytes")
        named = {n: m.shape[0] for n, m in self.members.items() if n in (*self.cameras, STATE, PROMPT)}
        if len(set(named.values())) > 1:
            rows = [(name, f"{count} rows") for name, count in named.items()]
            raise FrtcError("dataset.shape", f"the arrays of {self.path} have different numbers of rows", rows)


def _declared(archive: zipfile.ZipFile, name: str) -> Member:
    info = archive.getinfo(name + ".npy")
    if info.file_size > BOMB[0] and info.file_size > BOMB[1] * info.compress_size:
        raise too_large(f"array {name}", f"{info.file_size} bytes in {info.compress_size}", f"{BOMB[1]} times")
    with archive.open(info) as file:
        shape, fortran, dtype = _header(file)
        start = file.tell()
    if dtype.hasobject:
        raise ValueError(f"array {name} holds Python objects, which are never read")
    member = Member(name, shape, dtype)
    if not shape:
        return member
    if fortran and len(shape) > 1:
        raise ValueError(f"array {name} is in Fortran order: np.ascontiguousarray makes it readable row by row")
    if start + shape[0] * member.row_bytes != info.file_size:
        raise ValueError(f"array {name} declares {list(shape)}, and is {info.file_size} bytes long")
    return member


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    """Shape, Fortran order and type. NumPy reads the header as a literal, at most 10000 characters of it."""
    version = np.lib.format.read_magic(file)
    if version not in HEADERS:
        raise ValueError(f"version {version} of the .npy format")
    shape, fortran, dtype = HEADERS[version](file)
    return shape, fortran, dtype


def _skip_header(file: IO[bytes]) -> int:
    _header(file)
    return file.tell()


def _row(file: IO[bytes], start: int, member: Member, row: int) -> Array:
    """Row of an array; rows are asked for in rising order, so a packed archive is unpacked once."""
    while (ahead := start + row * member.row_bytes - file.tell()) > 0:
        file.read(min(ahead, SKIP))
    data = file.read(member.row_bytes)
    if len(data) != member.row_bytes:
        raise ValueError(f"array {member.name} ends in row {row}")
    return np.frombuffer(data, member.dtype).reshape(member.shape[1:])


def _unreadable(path: Path, fault: Exception) -> FrtcError:
    hint = "a file of arrays, as np.savez(FILE, **{'images.front': ..., 'state': ..., 'prompt': ...}) writes it"
    return FrtcError("dataset.npz", f"{path} cannot be read: {reason(fault)}", hint=hint)
