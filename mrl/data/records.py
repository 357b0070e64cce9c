# SPDX-License-Identifier: Apache-2.0
"""Raw rows of data files, one at a time: lines of JSON, a JSON array, either packed by gzip, and tables.

`datasets` reads tables, see `mrl.data.tables`. It does not read JSON here, because it gives all rows of a data set one
schema (packaged_modules/json/json.py of version 5.2): a row gets every key that another row has, as null; a key or type
that first appears after the first 10 MB is a `CastError` or an `ArrowInvalid`; one bad row fails the whole file, and
the error names no line. Rows of several environments in one file differ like that.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from conversion.files.reading import open_file
from mrl.data.fields import MAX_LINE_BYTES, Fields, RowError, as_json

TABLES = (".parquet", ".arrow")
SUFFIXES = (*TABLES, ".jsonl", ".json", ".jsonl.gz", ".json.gz")
MAX_EXPANSION = 50
"""Limit of rows' size over the packed file's: ten times that of text."""
MAX_SMALL_EXPANSION = 1000
SMALL_BYTES = 64 << 20
MAX_BLANK_LINES = 1_000_000
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_OTHER_FORMATS = {
    b"\x1f\x8b": "packed by gzip: let its name end in .gz",
    b"(\xb5/\xfd": "packed by zstd: unpack it",
    b"PK\x03\x04": "a zip archive: unpack it",
    b"PAR1": "a Parquet file: let its name end in .parquet",
    b"\xff\xfe": "text in UTF-16: save it as UTF-8",
    b"\xfe\xff": "text in UTF-16: save it as UTF-8",
    b"version https://git-lfs": "a pointer of Git LFS: fetch the file itself with `git lfs pull`",
}
"""First bytes of files that are not lines of JSON, and what to do with such a file."""


@dataclass(frozen=True)
class Record:
    """One row, still as JSON: its number from 1, its line without the end (of an overlong one the beginning), the share
    of the file that has been read after it, 0 to 1, and why the row has no form in JSON, if so; then its line is for
    people only."""

    number: int
    line: bytes
    share: float
    fault: str = ""


def records(path: Path) -> Iterator[Record]:
    """The rows of a data file, in order. Skips blank lines; accepts a byte order mark and CRLF."""
    name = path.name.lower()
    try:
        with os.fdopen(open_file(path), "rb") as file:
            if name.endswith(TABLES):
                from mrl.data.tables import table_rows  # takes a second to import, which files of JSON do without

                budget = _Budget(path)
                for number, (row, share) in enumerate(table_rows(path), 1):
                    record = table_record(number, row, share)
                    budget.spend(len(record.line))
                    yield record
            elif name.endswith(".gz"):
                with gzip.open(file, "rb") as unpacked:
                    yield from _lines(path, unpacked, file.tell)
            elif begins_as_array(path):
                try:
                    rows = json.loads(path.read_bytes())
                except (ValueError, RecursionError) as error:
                    raise ValueError(
                        f"{path} begins as a JSON array and is none: {error}; correct it, or write one row a line"
                    ) from error
                for number, row in enumerate(rows, 1):
                    yield Record(number, json.dumps(row).encode("ascii"), number / len(rows))
            else:
                start = file.read(64)
                if other := next((text for magic, text in _OTHER_FORMATS.items() if start.startswith(magic)), None):
                    raise ValueError(f"{path} does not hold lines of JSON, it is {other}")
                if start.removeprefix(_BYTE_ORDER_MARK).lstrip().startswith(b"["):
                    raise ValueError(
                        f"{path} begins as a JSON array: let its name end in .json, or write one row a line"
                    )
                file.seek(0)
                yield from _lines(path, file, file.tell)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(
            f"{path} cannot be read: it is cut off or no gzip file ({error}); copy or download it again"
        ) from error
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror or error}; give a file of rows that you may read"
        ) from error


def begins_as_array(path: Path) -> bool:
    """True if a `.json` file is one JSON array of rows rather than a row in each line."""
    if not path.name.lower().endswith(".json"):
        return False
    with os.fdopen(open_file(path), "rb") as file:
        return file.read(64).lstrip(_BYTE_ORDER_MARK).lstrip().startswith(b"[")


def table_record(number: int, row: Fields, share: float) -> Record:
    """A row of a table as a line of JSON; its `fault` names a column that has none."""
    fault, default = "", None
    try:
        row = {key: as_json(value, f"column {key}") for key, value in row.items()}
    except RowError as error:
        fault, default = str(error), repr
    return Record(
        number, json.dumps(row, ensure_ascii=False, default=default).encode("utf-8", "surrogatepass"), share, fault
    )


class _Budget:
    """Limits the bytes that a compressed file may unpack to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        size = path.stat().st_size
        self._left = max(min(SMALL_BYTES, MAX_SMALL_EXPANSION * max(size, 1 << 14)), MAX_EXPANSION * size)

    def spend(self, num_bytes: int) -> None:
        self._left -= num_bytes
        if self._left < 0:
            raise ValueError(
                f"{self._path} unpacks to more than {MAX_EXPANSION} times its size, as no rows do; unpack and "
                "check it yourself"
            )


def _lines(path: Path, file: IO[bytes] | gzip.GzipFile, position: Callable[[], int]) -> Iterator[Record]:
    budget, size = _Budget(path), max(1, path.stat().st_size)
    number = num_blank = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        budget.spend(len(line))
        rest = line
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES + 1)
            budget.spend(len(rest))
        if number == 1:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if line.strip():
            yield Record(number, line.rstrip(b"\r\n"), position() / size)
        elif (num_blank := num_blank + 1) > MAX_BLANK_LINES:
            raise ValueError(
                f"{path}:{number}: more than {MAX_BLANK_LINES:,} lines are blank, as in no file of rows; remove them"
            )
