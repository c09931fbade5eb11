"""Cells of a parquet file, read a batch at a time. What the file's own index claims is bounded before anything is read.

NOTE: Arrow's extension types that hold pickles are gone since pyarrow 21, and never loaded by themselves since 14.0.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from frtc.dataset_format import too_large
from frtc.errors import FrtcError

VALUES = 1 << 26  # most numbers of one column in one row group
BYTES = 1 << 32  # most bytes of one column in one row group, unpacked
NUMBERS, LARGE = 4096, 1  # rows that are unpacked together: of numbers; of pictures and texts


class Table:
    """An opened file. Columns are named as the dataset names them; names may hold dots and slashes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.file = pq.ParquetFile(path, page_checksum_verification=True)
            self.starts = [0]
            for group in range(self.file.metadata.num_row_groups):
                self.starts.append(self.starts[-1] + int(self.file.metadata.row_group(group).num_rows))
            self.names: list[str] = self.file.schema_arrow.names
            if len(set(self.names)) != len(self.names):
                raise ValueError("it has columns of the same name")
        except Exception as fault:  # Arrow has a type for every way of being damaged
            raise self.damaged(fault) from None

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
            rows = [("found", ", ".join(sorted(self.names)[:40]))]
            raise FrtcError("dataset.parquet", f"{self.path} has no column {', '.join(missing)}", rows)

    def batches(self, names: Sequence[str], size: int, groups: Sequence[int] | None = None) -> Iterator[Any]:
        """Record batches of these columns, or of `column.field`, with at most `size` rows each."""
        self._bound(names)
        chosen = list(range(len(self.starts) - 1)) if groups is None else list(groups)
        try:
            yield from self.file.iter_batches(size, row_groups=chosen, columns=list(names), use_threads=False)
        except Exception as fault:
            raise self.damaged(fault) from None

    def column(self, name: str, size: int = NUMBERS) -> Iterator[Any]:
        """Every value of a small column, as Python has it."""
        self.require([name])
        for batch in self.batches([name], size):
            yield from batch.column(0).to_pylist()

    def pictures(self, rows: Sequence[int], names: Sequence[str]) -> Iterator[list[Any]]:
        """For each row, in rising order: the encoded picture of each column (`bytes` of the pair that is stored)."""
        self._require_pictures(names)
        wanted = iter(rows)
        row = next(wanted, None)
        for group, (start, stop) in enumerate(zip(self.starts, self.starts[1:], strict=False)):
            if row is None or not start <= row < stop:
                continue
            for batch in self.batches([f"{name}.bytes" for name in names], LARGE, [group]):
                if row == start:
                    yield [_field(batch.column(name)[0].as_py()) for name in names]
                    row = next(wanted, None)
                start += batch.num_rows
                if row is None or row >= stop:
                    break

    def _require_pictures(self, names: Sequence[str]) -> None:
        self.require(names)
        for name in names:
            found = self.file.schema_arrow.field(name).type
            if not pa.types.is_struct(found) or found.get_field_index("bytes") < 0:
                raise FrtcError("dataset.image", f"{self.path}: column {name} holds {found}, no pictures")

    def _bound(self, names: Sequence[str]) -> None:
        """NOTE: what a page unpacks to is bounded by its column's claim, which Arrow compares with what it finds."""
        for group in range(len(self.starts) - 1):
            found = self.file.metadata.row_group(group)
            for i in range(found.num_columns):
                column = found.column(i)
                path = column.path_in_schema
                if not any(path == name or path.startswith(f"{name}.") for name in names):
                    continue
                where = f"{self.path}: column {path}"
                if column.num_values > VALUES:
                    raise too_large(where, f"{column.num_values} values", str(VALUES))
                if column.total_uncompressed_size > BYTES:
                    raise too_large(where, f"{column.total_uncompressed_size} bytes", str(BYTES))

    def damaged(self, fault: Exception) -> FrtcError:
        if isinstance(fault, FileNotFoundError):
            hint = "the copy is not complete: download the whole dataset"
            return FrtcError("dataset.parquet", f"there is no {self.path}", hint=hint)
        said = (str(fault) or type(fault).__name__).splitlines()[0]
        return FrtcError("dataset.parquet", f"{self.path} cannot be read: {said}", hint="copy it again")


def _field(pair: object) -> Any:
    return pair.get("bytes") if isinstance(pair, dict) else None
