# SPDX-License-Identifier: Apache-2.0
"""Some rows of a data file: the first, the last and random ones in between, without reading all of a large file."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO

from conversion.files.reading import open_file
from mrl.data.fields import MAX_LINE_BYTES
from mrl.data.records import TABLES, Record, begins_as_array, records, table_record

NUM_ENDS = 16
NUM_BETWEEN = 32
MAX_WHOLE_ROWS = 1000
MAX_BYTES = 1 << 20
# Packed files and JSON arrays have no place to jump to; so much of them is read in a second.
MAX_STREAM_BYTES = 128 << 20
# Counting the lines of a larger file takes seconds.
MAX_COUNTED_BYTES = 1 << 30
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Excerpt:
    """Rows of one file, in its order."""

    records: list[Record]
    """Records; those of a very large file have the number 0."""
    is_whole: bool = False
    """True when these are all rows."""
    is_cut: bool = False
    """True when the end of the file is missing."""


def excerpt(path: Path) -> Excerpt:
    """First, last and random rows of a data file, the same ones each time. ValueError: it cannot be read."""
    name = path.name.lower()
    if name.endswith(TABLES):
        return _of_table(path)
    if name.endswith(".gz") or begins_as_array(path):
        return _of_stream(path)
    first = list(islice(records(path), MAX_WHOLE_ROWS + 1))
    if len(first) <= MAX_WHOLE_ROWS:
        return _bounded([first[index] for index in _chosen(len(first))], len(first))
    try:
        return _bounded(_of_lines(path, first[:NUM_ENDS]))
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror or error}; give a file of rows that you may read"
        ) from error


def _bounded(found: list[Record], num_rows: int = -1, *, is_cut: bool = False) -> Excerpt:
    kept, left = [], MAX_BYTES
    for index, record in enumerate(found):
        left -= len(record.line)
        if left >= 0 or index in (0, len(found) - 1):
            kept.append(record)
    return Excerpt(kept, is_whole=len(kept) == num_rows and not is_cut, is_cut=is_cut)


def _chosen(num_rows: int) -> list[int]:
    if num_rows <= MAX_WHOLE_ROWS:
        return list(range(num_rows))
    between = random.Random(0).sample(range(NUM_ENDS, num_rows - NUM_ENDS), NUM_BETWEEN)
    return [*range(NUM_ENDS), *sorted(between), *range(num_rows - NUM_ENDS, num_rows)]


def _of_table(path: Path) -> Excerpt:
    from mrl.data.tables import chosen_rows  # takes a second to import, which files of JSON do without

    num_rows = 0

    def choose(found: int) -> list[int]:
        nonlocal num_rows
        num_rows = found
        return _chosen(found)

    return _bounded(
        [table_record(number, row, number / num_rows) for number, row in chosen_rows(path, choose)], num_rows
    )


def _of_stream(path: Path) -> Excerpt:
    found, num_bytes = list[Record](), 0
    if not path.name.lower().endswith(".gz") and path.stat().st_size > 2 * MAX_STREAM_BYTES:
        return Excerpt([], is_cut=True)
    for record in records(path):
        found.append(record)
        num_bytes += len(record.line)
        if num_bytes > MAX_STREAM_BYTES:
            break
    return _bounded([found[index] for index in _chosen(len(found))], len(found), is_cut=num_bytes > MAX_STREAM_BYTES)


def _of_lines(path: Path, first: list[Record]) -> list[Record]:
    found = dict[int, bytes]()
    with os.fdopen(open_file(path), "rb") as file:
        size, draw = os.fstat(file.fileno()).st_size, random.Random(0)
        for place in sorted(draw.randrange(size) for _ in range(NUM_BETWEEN)):
            found |= _lines_behind(file, place, 1)
        found |= _lines_behind(file, max(0, size - _BLOCK_BYTES))
        starts = sorted(found)
        numbers = _numbers(file, starts) if size <= MAX_COUNTED_BYTES else dict.fromkeys(starts, 0)
    later = [Record(numbers[start], found[start].rstrip(b"\r\n"), start / size) for start in starts]
    return [*first, *(record for record in later if not record.number or record.number > first[-1].number)]


def _lines_behind(file: IO[bytes], place: int, num_lines: int | None = None) -> dict[int, bytes]:
    """Start and bytes of the first lines with content that begin behind a place, or of the last ones of the file."""
    file.seek(place)
    lines, start = dict[int, bytes](), place + len(file.readline(MAX_LINE_BYTES + 1))
    while len(lines) != num_lines and (line := file.readline(MAX_LINE_BYTES + 1)):
        if line.strip() and start - place <= MAX_LINE_BYTES:
            lines[start] = line
        start += len(line)
    return lines if num_lines is not None else dict(list(lines.items())[-NUM_ENDS:])


def _numbers(file: IO[bytes], starts: Iterable[int]) -> dict[int, int]:
    """Number of the line that begins at each of these places, which rise."""
    numbers, count, at = {}, 1, 0
    file.seek(0)
    for start in starts:
        while at < start:
            block = file.read(min(_BLOCK_BYTES, start - at))
            count += block.count(b"\n")
            at += len(block) or start
        numbers[start] = count
    return numbers
