"""Rows of Parquet and Arrow files, a few hundred at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

ROWS_AT_ONCE = 256
BATCH_ROWS = 4096


def table_rows(path: Path) -> Iterator[dict[str, object]]:
    """All rows of a `.parquet` file, or of an `.arrow` file as `datasets` writes it, in order.

    Raises:
        ValueError: it is no such file.
    """
    try:
        for batch in _batches(path):
            for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                yield from batch.slice(start, ROWS_AT_ONCE).to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is not readable as a table ({error}); correct or replace the file") from error


def table_rows_at(path: Path, is_wanted: Callable[[int], bool]) -> Iterator[tuple[int, dict[str, object] | None]]:
    """`(row from 1, fields)` of a table, in order; the fields only of rows for whose index, from 0, `is_wanted` holds.

    Raises:
        ValueError: it is no table.
    """
    first = 0
    try:
        for batch in _batches(path):
            wanted = [index for index in range(batch.num_rows) if is_wanted(first + index)]
            rows = dict(zip(wanted, batch.take(pyarrow.array(wanted, pyarrow.int64())).to_pylist(), strict=True))
            for index in range(batch.num_rows):
                yield first + index + 1, rows.get(index)
            first += batch.num_rows
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is not readable as a table ({error}); correct or replace the file") from error


def _batches(path: Path) -> Iterator[pyarrow.RecordBatch]:
    return _parquet_batches(path) if path.suffix == ".parquet" else _arrow_batches(path)


def _parquet_batches(path: Path) -> Iterator[pyarrow.RecordBatch]:
    with pyarrow.parquet.ParquetFile(path) as file:
        yield from file.iter_batches(BATCH_ROWS)


def _arrow_batches(path: Path) -> Iterator[pyarrow.RecordBatch]:
    with pyarrow.memory_map(str(path)) as source:
        # save_to_disk writes the stream format; others give the suffix to the file format.
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        if is_file:
            reader = pyarrow.ipc.open_file(source)
            yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            yield from pyarrow.ipc.open_stream(source)
