"""What a parquet file will unpack to, from its footer and the headers of its pages, before anything is unpacked.

Both are structs in Thrift's compact protocol (parquet-format's parquet.thrift, thrift's thrift-compact-protocol.md).
NOTE: pyarrow's own accessors of a footer's numbers end the process where it is damaged: exceptions of its C++ cross
them uncaught (26.0.1). And its readers believe the pages, not the footer: 94 bytes unpack to 50 million numbers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

MAGIC = b"PAR1"
LARGEST = 1 << 26  # bytes; lerobot writes a row group per episode, 2 kB each
DEPTH = 16  # structs and lists inside each other; the format needs 6
TRUE, FALSE, BYTE, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12
# fields of FileMetaData, RowGroup, ColumnChunk and ColumnMetaData
ROW_GROUPS, COLUMNS, ROWS, ELSEWHERE, META, PATH, PACKED, PAGES, DICTIONARY = 4, 1, 3, 1, 3, 3, 7, 9, 11
# fields of PageHeader: sizes, and the headers of three kinds of pages, which all begin with the number of values
PAGE_UNPACKED, PAGE_PACKED, KINDS, VALUES = 2, 3, (5, 7, 8), 1
SHORT, HEADER = 1 << 9, 1 << 16  # bytes of a page's header as a rule, and at most: statistics hold up to 4 kB each


@dataclass(frozen=True, slots=True)
class Column:
    """Of one row group."""

    path: str  # of its leaf, parts joined by dots
    start: int  # in the file, bytes
    size: int  # in the file, bytes


@dataclass(frozen=True, slots=True)
class Group:
    rows: int
    columns: tuple[Column, ...]


def read_footer(path: Path) -> tuple[Group, ...]:
    """Raises OSError or ValueError."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 8, 0))
        tail = file.read(8)
        length = int.from_bytes(tail[:4], "little")
        if len(tail) < 8 or tail[4:] != MAGIC or length > size - 12:
            raise ValueError("it is no parquet file, or ends early")
        if length > LARGEST:
            raise ValueError(f"its footer is {length} bytes long")
        file.seek(size - 8 - length)
        data = file.read(length)
    try:
        groups = Compact(data).struct()[ROW_GROUPS]
        return tuple(_group(group) for group in groups)
    except (KeyError, TypeError, AttributeError, IndexError) as fault:
        raise ValueError(f"its footer is damaged: {fault!r}") from None


def _group(group: Mapping[int, Any]) -> Group:
    columns = []
    for column in group[COLUMNS]:
        if ELSEWHERE in column:
            raise ValueError("its columns lie in other files")
        meta = column[META]
        start = min(meta[PAGES], meta.get(DICTIONARY) or meta[PAGES])
        columns.append(Column(b".".join(meta[PATH]).decode(), _count(start), _count(meta[PACKED])))
    return Group(_count(group[ROWS]), tuple(columns))


def unpacked(file: IO[bytes], column: Column) -> tuple[int, int]:
    """Values and bytes of all pages. Raises OSError or ValueError."""
    values, size, at = 0, 0, column.start
    try:
        while at < column.start + column.size:
            header, length = _page_header(file, at)
            values += sum(_count(header[kind][VALUES]) for kind in KINDS if kind in header)
            size += _count(header[PAGE_UNPACKED])
            at += length + _count(header[PAGE_PACKED])
    except (KeyError, TypeError, AttributeError, IndexError) as fault:
        raise ValueError(f"a page of {column.path} is damaged: {fault!r}") from None
    return values, size


def _page_header(file: IO[bytes], at: int) -> tuple[dict[int, Any], int]:
    """The header and its length; one without long statistics is a hundred bytes."""
    file.seek(at)
    data = file.read(SHORT)
    try:
        page = Compact(data)
        return page.struct(), page.at
    except (ValueError, IndexError):
        page = Compact(data + file.read(HEADER))
        return page.struct(), page.at


def _count(value: int) -> int:
    if not 0 <= value < 1 << 62:
        raise ValueError(f"its footer counts {value}")
    return value


class Compact:
    """A reader of Thrift's compact protocol: structs as dicts by field number."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        if depth > DEPTH:
            raise ValueError("its footer is nested too deeply")
        found: dict[int, Any] = {}
        field = 0
        while head := self._byte():
            field = field + (head >> 4) if head >> 4 else self._zigzag()
            if field in found:
                raise ValueError(f"its footer has field {field} twice")
            kind = head & 15
            found[field] = kind == TRUE if kind in (TRUE, FALSE) else self._value(kind, depth + 1)
        return found

    def _value(self, kind: int, depth: int) -> Any:
        if BYTE < kind < DOUBLE:
            return self._zigzag()
        if kind == BINARY:
            return self._take(self._varint())
        if kind == STRUCT:
            return self.struct(depth)
        if kind in (LIST, SET):
            return self._list(depth)
        if kind == MAP:
            raise ValueError("its footer holds a map: the format has none")
        return self._take({TRUE: 1, FALSE: 1, BYTE: 1, DOUBLE: 8}[kind])

    def _list(self, depth: int) -> list[Any]:
        head = self._byte()
        size = head >> 4 if head >> 4 < 15 else self._varint()
        if size > len(self.data) - self.at or depth > DEPTH:  # an element is a byte or more
            raise ValueError("its footer is shorter than its lists")
        return [self._value(head & 15, depth + 1) for _ in range(size)]

    def _byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def _take(self, size: int) -> bytes:
        self.at += size
        if self.at > len(self.data):
            raise ValueError("its footer ends early")
        return self.data[self.at - size : self.at]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("its footer holds a number of more than 64 bits")

    def _zigzag(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)
