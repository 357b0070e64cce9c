# SPDX-License-Identifier: Apache-2.0
"""Rows of Parquet and Arrow files. `datasets` reads them; this first refuses files that unpack to more than rows do."""

from __future__ import annotations

import glob
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import datasets
import pyarrow
import pyarrow.compute
import pyarrow.ipc
import pyarrow.parquet
from datasets.exceptions import DatasetsError

from mrl.data.fields import Fields

BATCH_ROWS = 64
"""Rows in memory at once. Parquet stores a repeated text once, but each row that is read has its own copy."""
MAX_ROWS_PER_BYTE = 8
"""Parquet files with more rows are refused, from `MIN_REFUSED_ROWS` on. Even a file of equal rows has fewer."""
MIN_REFUSED_ROWS = 1 << 20
MAX_EXPANSION = 200
"""Columns of texts that unpack to more than this multiple are refused, from `MIN_REFUSED_BYTES` on."""
MIN_REFUSED_BYTES = 16 << 20


def table_rows(path: Path) -> Iterator[tuple[Fields, float]]:
    """The rows of a `.parquet` or `.arrow` file, in order, each with the share of the file that has been read after it.

    `datasets` streams them: it downloads nothing, and its lock file goes into a temporary folder.
    """
    kind, number = path.suffix.lower()[1:], 0
    # Otherwise `datasets` tells a server of Hugging Face that its reader of tables was used.
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    # `datasets` takes a path for a pattern.
    files, settings = glob.escape(str(path.absolute())), {"batch_size": BATCH_ROWS} if kind == "parquet" else {}
    try:
        num_rows = _check_parquet(path) if kind == "parquet" else _check_arrow(path)
        with tempfile.TemporaryDirectory() as cache:
            rows = datasets.load_dataset(
                kind, data_files=files, split="train", streaming=True, cache_dir=cache, **settings
            )
            for batch in rows.with_format("arrow").iter(BATCH_ROWS):
                for row in _rows_of(batch):
                    number += 1
                    yield row, number / num_rows
    except (pyarrow.ArrowException, DatasetsError, NotImplementedError, ValueError) as error:
        raise ValueError(f"{path} is not readable as a table ({error}); correct or replace the file") from error


def chosen_rows(path: Path, choose: Callable[[int], Sequence[int]]) -> Iterator[tuple[int, Fields]]:
    """Some rows of a `.parquet` or `.arrow` file, numbered from 1: `choose` gives rising indices for the row count."""
    is_parquet = path.suffix.lower() == ".parquet"
    try:
        chosen, first = choose(_check_parquet(path) if is_parquet else _check_arrow(path)), 0
        for size, batches in _groups(path) if is_parquet else _batches(path):
            inside, end = [index for index in chosen if first <= index < first + size], first + size
            for batch in batches if inside else ():
                for index in (index for index in inside if first <= index < first + batch.num_rows):
                    yield index + 1, next(_rows_of(batch.slice(index - first, 1)))
                first += batch.num_rows
            first = end
    except (pyarrow.ArrowException, NotImplementedError, ValueError) as error:
        raise ValueError(f"{path} is not readable as a table ({error}); correct or replace the file") from error


def _groups(path: Path) -> Iterator[tuple[int, Iterable[pyarrow.RecordBatch]]]:
    """The row groups of a Parquet file: number of rows, and batches of them, which are unpacked when someone asks."""
    with pyarrow.parquet.ParquetFile(path) as file:
        for group in range(file.metadata.num_row_groups):
            yield file.metadata.row_group(group).num_rows, file.iter_batches(row_groups=[group])


def _batches(path: Path) -> Iterator[tuple[int, Iterable[pyarrow.RecordBatch]]]:
    with pyarrow.memory_map(str(path)) as source:
        yield from ((batch.num_rows, [batch]) for batch in _arrow_batches(source))


def _arrow_batches(source: pyarrow.NativeFile) -> Iterable[pyarrow.RecordBatch]:
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    reader = pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)
    return map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader


def _rows_of(batch: pyarrow.RecordBatch | pyarrow.Table) -> Iterator[Fields]:
    nested = [
        field
        for field in batch.schema
        if pyarrow.types.is_nested(field.type) or isinstance(field.type, pyarrow.JsonType)
    ]
    for row in batch.to_pylist(maps_as_pydicts="strict"):
        yield row | {field.name: _as_written(row[field.name], field.type) for field in nested}


def _as_written(value: object, kind: pyarrow.DataType) -> object:
    """The value as its row had it before it became a table's: objects that `datasets`' Json feature keeps as texts are
    parsed, and objects lack the keys that are null, since a table gives every object each key that another row's has.
    Nulls in lists and in JSON are the row's.
    """
    if isinstance(kind, pyarrow.JsonType) and isinstance(value, str):
        return json.loads(value)
    if isinstance(kind, pyarrow.ListType | pyarrow.LargeListType | pyarrow.FixedSizeListType) and isinstance(
        value, list
    ):
        return [_as_written(entry, kind.value_type) for entry in value]
    if isinstance(kind, pyarrow.MapType) and isinstance(value, dict):
        return {key: _as_written(entry, kind.item_type) for key, entry in value.items()}
    if isinstance(kind, pyarrow.StructType) and isinstance(value, dict):
        return {
            field.name: _as_written(value[field.name], field.type) for field in kind if value[field.name] is not None
        }
    return value


def _check_parquet(path: Path) -> int:
    """Number of rows; refuses a file whose few bytes claim to be many rows or long texts."""
    size = path.stat().st_size
    with pyarrow.parquet.ParquetFile(path) as file:
        metadata = file.metadata
    if metadata.num_rows > max(MIN_REFUSED_ROWS, MAX_ROWS_PER_BYTE * size):
        raise ValueError(f"{size} bytes claim to be {metadata.num_rows} rows, as no table of rows does")
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            if column.physical_type == "BYTE_ARRAY":
                _check_expansion(column.path_in_schema, column.total_compressed_size, column.total_uncompressed_size)
    return metadata.num_rows


def _check_arrow(path: Path) -> int:
    """Number of rows; refuses a batch that repeats long texts, for `datasets` writes out all its texts at once."""
    num_rows = 0
    with pyarrow.memory_map(str(path)) as source:
        for batch in _arrow_batches(source):
            num_rows += batch.num_rows
            for field, column in zip(batch.schema, batch.columns, strict=True):
                if isinstance(column, pyarrow.DictionaryArray) and column.type.value_type in (
                    pyarrow.string(),
                    pyarrow.large_string(),
                ):
                    lengths = pyarrow.compute.binary_length(column.dictionary).take(column.indices)
                    _check_expansion(field.name, column.nbytes, pyarrow.compute.sum(lengths).as_py() or 0)
                elif "dictionary<" in str(field.type):
                    raise ValueError(f"column {field.name} has the type {field.type}; write its values out")
    return num_rows


def _check_expansion(column: str, packed_bytes: int, unpacked_bytes: int) -> None:
    if unpacked_bytes > max(MIN_REFUSED_BYTES, MAX_EXPANSION * packed_bytes):
        raise ValueError(f"column {column} unpacks from {packed_bytes} to {unpacked_bytes} bytes, as no rows do")
