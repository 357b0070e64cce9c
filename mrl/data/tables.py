"""Rows of Parquet and Arrow files, a few hundred at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

BATCH_ROWS = 64
"""A table keeps a text once for many rows. A large one would come out of it as often as there are rows in a batch."""
LARGE_BATCH_BYTES = 64 << 20
"""Of such batches Python gets one row at a time."""
MAX_ROWS_PER_BYTE = 8
"""Of a Parquet file of more rows than these. Even one that says the same in every row has fewer."""
MIN_REFUSED_ROWS = 1 << 20
MAX_EXPANSION = 200
"""Of a column of texts by decompression, from 16 MiB on."""
MIN_REFUSED_BYTES = 16 << 20


def table_rows(path: Path) -> Iterator[dict[str, object]]:
    """All rows of a `.parquet` file, or of an `.arrow` file as `datasets` writes it, in order.

    Raises:
        ValueError: it is no such file, or one that is packed as no rows are.
    """
    for batch in _small_batches(path):
        yield from batch.to_pylist()


def table_rows_at(path: Path, is_wanted: Callable[[int], bool]) -> Iterator[tuple[int, dict[str, object] | None]]:
    """`(row from 1, fields)` of a table, in order; the fields only of rows for whose index, from 0, `is_wanted` holds.

    Raises:
        ValueError: as `table_rows`.
    """
    first = 0
    for batch in _small_batches(path):
        wanted = [index for index in range(batch.num_rows) if is_wanted(first + index)]
        rows = dict(zip(wanted, batch.take(pyarrow.array(wanted, pyarrow.int64())).to_pylist(), strict=True))
        for index in range(batch.num_rows):
            yield first + index + 1, rows.get(index)
        first += batch.num_rows


def _small_batches(path: Path) -> Iterator[pyarrow.RecordBatch]:
    """The rows, as many at once as Python can hold."""
    try:
        for whole in _batches(path):
            for first in range(0, whole.num_rows, BATCH_ROWS):
                batch = whole.slice(first, BATCH_ROWS)
                # An Arrow file may keep its texts apart, so that every row can be as large as all of them.
                times = batch.num_rows if any(map(pyarrow.types.is_dictionary, batch.schema.types)) else 1
                step = BATCH_ROWS if batch.nbytes * times < LARGE_BATCH_BYTES else 1
                yield from (batch.slice(start, step) for start in range(0, batch.num_rows, step))
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is not readable as a table ({error}); correct or replace the file") from error


def _batches(path: Path) -> Iterator[pyarrow.RecordBatch]:
    return _parquet_batches(path) if path.suffix == ".parquet" else _arrow_batches(path)


def _parquet_batches(path: Path) -> Iterator[pyarrow.RecordBatch]:
    with pyarrow.parquet.ParquetFile(path) as file:
        _check_size(path, file.metadata)
        yield from file.iter_batches(BATCH_ROWS)


def _check_size(path: Path, metadata: pyarrow.parquet.FileMetaData) -> None:
    size = path.stat().st_size
    if metadata.num_rows > max(MIN_REFUSED_ROWS, MAX_ROWS_PER_BYTE * size):
        raise ValueError(f"{path} has {size} bytes and claims {metadata.num_rows} rows, as no table of rows does; replace the file")
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        for column in map(group.column, range(group.num_columns)):
            num_bytes, is_text = column.total_uncompressed_size, column.physical_type == "BYTE_ARRAY"
            if is_text and num_bytes > max(MIN_REFUSED_BYTES, MAX_EXPANSION * column.total_compressed_size):
                raise ValueError(
                    f"{path}: column {column.path_in_schema} unpacks from {column.total_compressed_size} to "
                    f"{num_bytes} bytes, as no rows do; replace the file"
                )


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
