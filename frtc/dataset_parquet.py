"""Cells of a parquet file, read a batch at a time. What the file claims is bounded before anything is unpacked.

NOTE: Arrow's extension types that hold pickles are never loaded by themselves since pyarrow 14.0.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from frtc.dataset_footer import read_footer, unpacked
from frtc.dataset_format import too_large
from frtc.errors import FrtcError

VALUES = 1 << 26  # most numbers of one column in one row group
BYTES = 1 << 32  # most bytes of one column in one row group, unpacked
STREAM = 1 << 20  # bytes that are read ahead: without it Arrow loads whole row groups
NUMBERS, LARGE = 4096, 1  # rows that are unpacked together: of numbers; of pictures and texts


class Table:
    """An opened file. Columns are named as the dataset names them; names may hold dots and slashes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.groups = read_footer(path)
            self.file = pq.ParquetFile(path, buffer_size=STREAM, pre_buffer=False, page_checksum_verification=True)
            self.names: list[str] = self.file.schema_arrow.names
            if len(set(self.names)) != len(self.names):
                raise ValueError("it has columns of the same name")
        except Exception as fault:  # Arrow has a type for every way of being damaged
            raise self.damaged(fault) from None
        self.starts = [0]
        for group in self.groups:
            self.starts.append(self.starts[-1] + group.rows)

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *fault: object) -> None:
        self.file.close()

    @property
    def rows(self) -> int:
        return self.starts[-1]

    def require(self, names: Sequence[str]) -> None:
        missing = [name for name in names if name not in self.names]
        if missing:
            rows = [("found", ", ".join(self.names[:40]))]
            raise FrtcError("dataset.parquet", f"{self.path} has no column {', '.join(missing)}", rows)

    def batches(self, names: Sequence[str], size: int, groups: Sequence[int] | None = None) -> Iterator[Any]:
        """Record batches of these columns, or of `column.field`, with at most `size` rows each."""
        chosen = list(range(len(self.groups)) if groups is None else groups)
        self._bound(names, chosen)
        try:
            yield from self.file.iter_batches(size, row_groups=chosen, columns=list(names), use_threads=False)
        except Exception as fault:
            raise self.damaged(fault) from None

    def cell(self, batch: Any, name: str, row: int) -> Any:
        """As Python has it."""
        try:
            return batch.column(name)[row].as_py()
        except Exception as fault:  # text that is no UTF-8, for instance
            raise self.damaged(fault) from None

    def lines(self, names: Sequence[str], size: int = NUMBERS) -> Iterator[dict[str, Any]]:
        """Every row of small columns."""
        self.require(names)
        for batch in self.batches(names, size):
            for row in range(batch.num_rows):
                yield {name: self.cell(batch, name, row) for name in names}

    def pictures(self, rows: Sequence[int], names: Sequence[str]) -> Iterator[list[Any]]:
        """For each row, in rising order: the encoded picture of each column (`bytes` of the pair that is stored)."""
        self._require_pictures(names)
        wanted = iter(rows)
        row = next(wanted, None)
        for group, (start, stop) in enumerate(pairwise(self.starts)):
            if row is None or not start <= row < stop:
                continue
            for batch in self.batches([f"{name}.bytes" for name in names], LARGE, [group]):
                if row == start:
                    yield [(self.cell(batch, name, 0) or {}).get("bytes") for name in names]
                    row = next(wanted, None)
                start += batch.num_rows
                if row is None or row >= stop:
                    break
        if row is not None:
            raise self.damaged(ValueError(f"it ends before row {row}"))

    def _require_pictures(self, names: Sequence[str]) -> None:
        self.require(names)
        for name in names:
            found = self.file.schema_arrow.field(name).type
            if not pa.types.is_struct(found) or found.get_field_index("bytes") < 0:
                raise FrtcError("dataset.image", f"{self.path}: column {name} holds {found}, no pictures")

    def _bound(self, names: Sequence[str], groups: Sequence[int]) -> None:
        starts = tuple(f"{name}." for name in names)
        try:
            with self.path.open("rb") as file:
                for column in (column for group in groups for column in self.groups[group].columns):
                    if column.path in names or column.path.startswith(starts):
                        self._bound_column(column.path, *unpacked(file, column))
        except (OSError, ValueError) as fault:
            raise self.damaged(fault) from None

    def _bound_column(self, name: str, values: int, size: int) -> None:
        where = f"{self.path}: column {name}"
        if values > VALUES:
            raise too_large(where, f"{values} values", str(VALUES))
        if size > BYTES:
            raise too_large(where, f"{size} bytes", str(BYTES))

    def damaged(self, fault: Exception) -> FrtcError:
        if isinstance(fault, FileNotFoundError):
            hint = "the copy is not complete: download the whole dataset"
            return FrtcError("dataset.parquet", f"there is no {self.path}", hint=hint)
        said = (str(fault) or type(fault).__name__).splitlines()[0]
        return FrtcError("dataset.parquet", f"{self.path} cannot be read: {said}", hint="copy it again")
