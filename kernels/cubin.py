"""What a cubin says of itself, read from its ELF: the SM it was built for and the resources of its kernels.

Layout read here (CUDA 13 cubins, seen with `readelf`): e_flags holds the SM in bits 8..15; section `.nv.info` is a list
of records (format u8, attribute u8, size u16, payload) of which 0x2f gives registers and 0x11 the stack frame, each as
(symbol index u32, value u32); the size of `.nv.shared.<kernel>` is the static shared memory. In `.nv.info.<kernel>`,
0x17 describes one parameter: index u32, ordinal u16, offset u16, flags u32 with the size in bytes from bit 18 on.
`.text.<kernel>` is the code, instructions of 16 bytes whose lowest 12 bits are the operation; 0x82e is what PTX calls
griddepcontrol.wait on sm_90, sm_110 and sm_120 (found by compiling one kernel with it and without).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

SIZED = 4  # record format whose payload length is the size field; the others carry their value in that field
FRAME_SIZE, REGISTERS, PARAMETER = 0x11, 0x2F, 0x17
INSTRUCTION, OPERATION, GRID_WAIT = 16, 0xFFF, 0x82E
FUNCTION = 2  # STT_FUNC
RESERVED_SMEM = 1024  # bytes at the start of shared memory that sm_90 and later keep for the system; counted in the ELF


@dataclass(frozen=True, slots=True)
class Resources:
    """Of one kernel: registers and bytes of stack a thread (0: nothing spilled), bytes of static smem a block."""

    registers: int
    local: int
    smem: int


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    offset: int
    size: int


def sm_of(image: bytes) -> int:
    """The compute capability that a cubin was built for: 90 for sm_90a."""
    _require_elf(image)
    return (int(struct.unpack_from("<I", image, 48)[0]) >> 8) & 0xFF


def resources_of(image: bytes) -> dict[str, Resources]:
    """Resources of every kernel in a cubin, by mangled name."""
    _require_elf(image)
    sections = {section.name: section for section in _sections(image)}
    names = _symbol_names(image, sections[".symtab"], sections[".strtab"])
    info = sections[".nv.info"]
    found: dict[str, dict[int, int]] = {}
    for attribute, payload in _records(image[info.offset : info.offset + info.size]):
        if attribute in (FRAME_SIZE, REGISTERS):
            index, value = struct.unpack("<II", payload)
            found.setdefault(names[index], {})[attribute] = value
    reserved = RESERVED_SMEM if sm_of(image) >= 90 else 0
    return {
        name: Resources(values[REGISTERS], values[FRAME_SIZE], _static_smem(sections, name, reserved))
        for name, values in sorted(found.items())
        if f".text.{name}" in sections
    }


def parameters_of(image: bytes, kernel: str) -> tuple[int, ...]:
    """Bytes of each parameter of a kernel, in order."""
    _require_elf(image)
    found = {}
    for section in _sections(image):
        if section.name == f".nv.info.{kernel}":
            for attribute, payload in _records(image[section.offset : section.offset + section.size]):
                if attribute == PARAMETER:
                    _, ordinal, _, flags = struct.unpack("<IHHI", payload)
                    found[ordinal] = flags >> 18
    return tuple(found[i] for i in range(len(found)))


def waits(image: bytes, kernel: str) -> bool:
    """Whether a kernel waits, somewhere, for the grids before it: grid_wait() in ptx.cuh."""
    return GRID_WAIT in operations_of(image, kernel)


def operations_of(image: bytes, kernel: str) -> tuple[int, ...]:
    """The operation of each instruction of a kernel, in the order of its code."""
    _require_elf(image)
    code = next(section for section in _sections(image) if section.name == f".text.{kernel}")
    starts = range(code.offset, code.offset + code.size - INSTRUCTION + 1, INSTRUCTION)
    return tuple(struct.unpack_from("<H", image, at)[0] & OPERATION for at in starts)


def _static_smem(sections: dict[str, _Section], kernel: str, reserved: int) -> int:
    section = sections.get(f".nv.shared.{kernel}")
    return max(0, section.size - reserved) if section else 0


def _require_elf(image: bytes) -> None:
    machine = struct.unpack_from("<H", image, 18)[0] if len(image) >= 64 else 0
    if image[:4] != b"\x7fELF" or machine != 190:  # EM_CUDA
        raise ValueError("not a cubin")


def _sections(image: bytes) -> list[_Section]:
    (table,) = struct.unpack_from("<Q", image, 40)
    entry_size, count, names_index = struct.unpack_from("<HHH", image, 58)
    rows = [struct.unpack_from("<IIQQQQ", image, table + i * entry_size) for i in range(count)]
    names = rows[names_index][4]
    return [_Section(_text(image, names + row[0]), row[4], row[5]) for row in rows]


def _symbol_names(image: bytes, symbols: _Section, strings: _Section) -> dict[int, str]:
    names = {}
    for index in range(symbols.size // 24):
        name, info = struct.unpack_from("<IB", image, symbols.offset + index * 24)
        if info & 0xF == FUNCTION:
            names[index] = _text(image, strings.offset + name)
    return names


def _records(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        kind, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        payload = data[at : at + size] if kind == SIZED else b""
        at += len(payload)
        yield attribute, payload


def _text(image: bytes, at: int) -> str:
    return image[at : image.index(b"\0", at)].decode()
