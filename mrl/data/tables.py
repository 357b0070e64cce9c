"""Rows of Parquet and Arrow files, a few hundred at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

ROWS_AT_ONCE = 256


def table_rows(path: Path) -> Iterator[dict[str, object]]:
    """All rows of a `.parquet` file, or of an `.arrow` file as `datasets` writes it, in order.

    Raises:
        ValueError: it is no such file.
    """
    batches = _parquet_batches(path) if path.suffix == ".parquet" else _arrow_batches(path)
    try:
        for batch in batches:
            for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                yield from batch.slice(start, ROWS_AT_ONCE).to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is not readable as a table ({error}); correct or replace the file") from error


def _parquet_batches(path: Path) -> Iterator[pyarrow.RecordBatch]:
    with pyarrow.parquet.ParquetFile(path) as file:
        yield from file.iter_batches(ROWS_AT_ONCE)


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
