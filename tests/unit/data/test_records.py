# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from mrl.data import fields, records
from mrl.data.fields import RowError, json_object

ROWS = [
    {"question": f"{index}+1=", "answer": str(index + 1), "extra": {"index": index, "tags": ["a", None]}}
    for index in range(700)
]
LINES = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


def write_jsonl(path: Path) -> None:
    path.write_bytes(LINES)


def write_array(path: Path) -> None:
    path.write_text("\n" + json.dumps(ROWS, indent=1))


def write_gzip(path: Path) -> None:
    path.write_bytes(gzip.compress(LINES))


def write_parquet(path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=300)


def write_arrow_stream(path: Path) -> None:
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=300)


def write_arrow_file(path: Path) -> None:
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=300)


KINDS = {
    "rows.jsonl": write_jsonl,
    "rows.json": write_jsonl,
    "array.json": write_array,
    "rows.jsonl.gz": write_gzip,
    "rows.parquet": write_parquet,
    "stream.arrow": write_arrow_stream,
    "file.arrow": write_arrow_file,
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_has_the_same_rows(tmp_path: Path, name: str):
    path = tmp_path / name
    KINDS[name](path)
    found = list(records.records(path))
    assert [json_object(record.line) for record in found] == ROWS
    assert [record.number for record in found] == list(range(1, 701))
    assert found[-1].share == 1 and all(0 < record.share <= 1 for record in found)


def test_mark_line_ends_and_blank_lines_are_no_error(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \n{"a": 2}')
    found = list(records.records(path))
    assert [(record.number, record.line) for record in found] == [(1, b'{"a": 1}'), (4, b'{"a": 2}')]


def test_an_overlong_line_is_one_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(records, "MAX_LINE_BYTES", 64)
    monkeypatch.setattr(fields, "MAX_LINE_BYTES", 64)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": "' + b"x" * 500 + b'"}\n{"a": 2}\n')
    found = list(records.records(path))
    assert [record.number for record in found] == [1, 2, 3]
    assert found[2].line == b'{"a": 2}'
    with pytest.raises(RowError, match="the line is longer than"):
        json_object(found[1].line)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"question": "q", "answer": "a"', "invalid JSON at column"),
        (b"not json", "invalid JSON at column 1"),
        (b'{"question": "q"} {"answer": "a"}', "invalid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'["q", "a"]', "must be a JSON object, not list"),
        (b"null", "must be a JSON object, not NoneType"),
        (b'{"question": "q\0", "answer": "a"}', "NUL byte at column 16"),
        (b'{"question": "\xff", "answer": "a"}', "invalid UTF-8 at byte 15"),
        (b'{"a": ' + b"9" * 5000 + b"}", "invalid JSON: Exceeds the limit"),
    ],
)
def test_what_is_wrong_with_a_line(line: bytes, reason: str):
    with pytest.raises(RowError) as caught:
        json_object(line)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("rows.parquet", b"PAR1 and nothing else", "is not readable as a table"),
        ("rows.arrow", b"nothing", "is not readable as a table"),
        ("rows.json", b'[{"a": 1}, ', "begins as a JSON array and is none"),
        ("rows.jsonl.gz", b"not packed", "cannot be read"),
        ("missing.jsonl", None, "cannot be read: No such file"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: bytes | None, reason: str):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        list(records.records(tmp_path / name))
