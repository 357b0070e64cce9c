"""The rows of data files, raw: read through once, and found again by their position. In memory a row is a few numbers."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from conversion.files.reading import open_file
from mrl.data.fields import MAX_LINE_BYTES

MAX_EXPANSION = 50
"""How often over rows may outgrow the packed file that they come from: ten times what text does."""
MAX_SMALL_EXPANSION = 1000
"""The same up to `SMALL_BYTES`: a small table may say one thing in every row."""
SMALL_BYTES = 64 << 20
MAX_BLANK_LINES = 1_000_000
_BLOCK_BYTES = 1 << 20

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Record:
    """One line of a file that is not blank."""

    number: int
    """From 1; of a table, the row."""
    offset: int
    line: bytes
    """Without the line end. Of an overlong line, its beginning."""


class RecordFile:
    """A data file as lines of JSON. What is no such file is copied to a temporary one, which goes with the process."""

    def __init__(self, path: Path) -> None:
        """Opens the file; of a table or a compressed file, reads it through.

        Raises:
            ValueError: it cannot be read, or is of an unknown kind.
        """
        self.path = path
        try:
            self._file = _open_lines(path)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror or error}; give a file of rows that you may read") from error

    @property
    def num_bytes(self) -> int:
        """Size of the lines."""
        return os.fstat(self._file.fileno()).st_size

    def place(self, number: int) -> str:
        """`file:line` of a record."""
        return f"{self.path}:{number}"

    def records(self) -> Iterator[Record]:
        """All lines that are not blank, in order. A byte order mark and CRLF are no error.

        Raises:
            ValueError: a million lines are blank.
        """
        self._file.seek(0)
        number = offset = num_blank = 0
        while line := self._file.readline(MAX_LINE_BYTES + 1):
            number += 1
            start, offset = offset, offset + len(line)
            rest = line
            while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
                rest = self._file.readline(MAX_LINE_BYTES + 1)
                offset += len(rest)
            if number == 1 and line.startswith(_BYTE_ORDER_MARK):
                line, start = line[len(_BYTE_ORDER_MARK) :], len(_BYTE_ORDER_MARK)
            if line.strip():
                yield Record(number, start, line.rstrip(b"\r\n"))
            elif (num_blank := num_blank + 1) > MAX_BLANK_LINES:
                raise ValueError(f"{self.place(number)}: more than {MAX_BLANK_LINES:,} lines are blank, as in no file of rows; remove them")

    def read(self, offset: int, length: int) -> bytes:
        """A line of that length, again. Any thread may call it at any time."""
        return os.pread(self._file.fileno(), length, offset)


class _Copy:
    """A temporary file of the rows of another one, which must not outgrow that by more than rows do."""

    def __init__(self, path: Path) -> None:
        self.file = tempfile.TemporaryFile()
        self._path = path
        size = path.stat().st_size
        self._left = max(min(SMALL_BYTES, MAX_SMALL_EXPANSION * max(size, 1 << 14)), MAX_EXPANSION * size)

    def write(self, data: bytes) -> None:
        """Appends some rows.

        Raises:
            ValueError: they are too many by now.
        """
        self._left -= len(data)
        if self._left < 0:
            raise ValueError(
                f"{self._path} unpacks to more than {MAX_EXPANSION} times its size, as no rows do; unpack and check it yourself"
            )
        self.file.write(data)


def _open_lines(path: Path) -> IO[bytes]:
    name = path.name.lower()
    file = os.fdopen(open_file(path), "rb")
    if name.endswith((".parquet", ".arrow")):
        return _copied_table(path)
    if name.endswith(".gz"):
        return _unpacked(path, file)
    if name.endswith(".json") and file.read(64).lstrip(_BYTE_ORDER_MARK).lstrip().startswith(b"["):
        return _copied_array(path)
    return file


def _unpacked(path: Path, file: IO[bytes]) -> IO[bytes]:
    copy = _Copy(path)
    try:
        with gzip.open(file, "rb") as packed:
            while block := packed.read(_BLOCK_BYTES):
                copy.write(block)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} cannot be read: it is cut off or no gzip file ({error}); copy or download it again") from error
    return copy.file


def _copied_table(path: Path) -> IO[bytes]:
    from mrl.data.tables import table_rows  # needs a library that files of JSON do without

    copy = _Copy(path)
    for row in table_rows(path):
        copy.write(json.dumps(row, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass") + b"\n")
    return copy.file


def _copied_array(path: Path) -> IO[bytes]:
    """The rows of a file that is one JSON array, as lines."""
    try:
        rows = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} begins as a JSON array and is none: {error}; correct it, or write one row a line") from error
    copy = tempfile.TemporaryFile()
    for row in rows:
        copy.write(json.dumps(row).encode("ascii") + b"\n")
    return copy
