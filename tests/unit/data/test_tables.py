# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from mrl.data.fields import RowError, as_json
from mrl.data.records import records
from mrl.data.tables import table_rows


def write_arrow(table: pyarrow.Table, path: Path) -> Path:
    with pyarrow.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
    return path


def write_parquet(table: pyarrow.Table, path: Path) -> Path:
    pyarrow.parquet.write_table(table, path)
    return path


def rows_of(path: Path) -> list[dict[str, object]]:
    return [row for row, _ in table_rows(path)]


def test_the_share_grows_to_one(tmp_path: Path):
    path = write_parquet(pyarrow.table({"a": list(range(130))}), tmp_path / "rows.parquet")
    assert [share for _, share in table_rows(path)] == [number / 130 for number in range(1, 131)]


def test_tables_need_no_network_and_leave_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def connect(*address: object) -> None:
        raise AssertionError(f"connects to {address}")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    table = pyarrow.table({"a": [1, 2]})
    for path in (write_parquet(table, tmp_path / "rows.parquet"), write_arrow(table, tmp_path / "rows.arrow")):
        assert rows_of(path) == [{"a": 1}, {"a": 2}]
    assert {path.name for path in tmp_path.iterdir()} == {"rows.parquet", "rows.arrow", "tmp"}
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_path_is_no_pattern(tmp_path: Path):
    (tmp_path / "a[1] *").mkdir()
    assert rows_of(write_parquet(pyarrow.table({"a": [1]}), tmp_path / "a[1] *" / "rows.parquet")) == [{"a": 1}]


def test_objects_that_datasets_keeps_as_json_come_out_as_objects(tmp_path: Path):
    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [{"x": 1}]}], "answer": "2"}
    ] * 2
    saved = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    assert "Json" in str(saved.features["messages"])
    saved.to_parquet(tmp_path / "rows.parquet")
    saved.save_to_disk(str(tmp_path / "saved"))
    for path in (tmp_path / "rows.parquet", *(tmp_path / "saved").glob("*.arrow")):
        assert rows_of(path) == rows


@pytest.mark.parametrize(("name", "write"), [("rows.parquet", write_parquet), ("rows.arrow", write_arrow)])
def test_categories_are_read_as_their_values(tmp_path: Path, name: str, write: Callable[[pyarrow.Table, Path], Path]):
    table = pyarrow.table({"a": pyarrow.array(["x", "y", "x"]).dictionary_encode()})
    assert rows_of(write(table, tmp_path / name)) == [{"a": "x"}, {"a": "y"}, {"a": "x"}]


def test_categories_within_lists_are_refused(tmp_path: Path):
    categories = pyarrow.array(["x", "y"]).dictionary_encode()
    table = pyarrow.table({"a": pyarrow.ListArray.from_arrays(pyarrow.array([0, 2], pyarrow.int32()), categories)})
    with pytest.raises(
        ValueError, match=r"rows.arrow is not readable as a table \(column a has the type list<.*dictionary<"
    ):
        rows_of(write_arrow(table, tmp_path / "rows.arrow"))


def test_keys_that_a_table_has_filled_in_are_left_out(tmp_path: Path):
    rows = [
        {"tools": [{"name": "f", "parameters": {"a": {"default": 1}}}], "given": '{"b": null}', "answer": None},
        {"tools": [{"name": "g", "parameters": {"b": {"enum": [None, "x"]}}}], "given": "{}", "answer": "2"},
    ]
    for path in (
        write_parquet(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet"),
        write_arrow(pyarrow.Table.from_pylist(rows), tmp_path / "rows.arrow"),
    ):
        assert rows_of(path) == rows


# Each value as its column has it, and what JSON has for it: hand-written, after RFC 8259, ISO 8601 and RFC 9562.
TYPES: dict[str, tuple[pyarrow.Array, object]] = {
    "binary": (pyarrow.array(["2+2 = é?".encode()], pyarrow.binary()), "2+2 = é?"),
    "large_binary": (pyarrow.array([b"4"], pyarrow.large_binary()), "4"),
    "list of binary": (pyarrow.array([[b"4", None]], pyarrow.list_(pyarrow.binary())), ["4", None]),
    "struct of binary": (
        pyarrow.array([{"role": b"user"}], pyarrow.struct([("role", pyarrow.binary())])),
        {"role": "user"},
    ),
    "date": (pyarrow.array([date(2024, 1, 5)]), "2024-01-05"),
    "time": (pyarrow.array([time(3, 4)]), "03:04:00"),
    "timestamp": (
        pyarrow.array([datetime(2024, 1, 5, 6, tzinfo=UTC)], pyarrow.timestamp("us", "UTC")),
        "2024-01-05T06:00:00+00:00",
    ),
    "decimal": (pyarrow.array([Decimal("12.50")]), 12.5),
    "large decimal": (pyarrow.array([Decimal(10**30)], pyarrow.decimal128(38, 0)), 10**30),
    "half": (pyarrow.array([0.5], pyarrow.float16()), 0.5),
    "unsigned": (pyarrow.array([2**64 - 1], pyarrow.uint64()), 2**64 - 1),
}


@pytest.mark.parametrize("name", TYPES)
def test_types_that_json_lacks_become_what_it_has(tmp_path: Path, name: str):
    column, expected = TYPES[name]
    path = write_parquet(pyarrow.table({"a": column}), tmp_path / "rows.parquet")
    assert [(json.loads(record.line), record.fault) for record in records(path)] == [({"a": expected}, "")]


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        (pyarrow.array([b"\x89PNG"]), "column a is binary, and no text in UTF-8 (invalid start byte at byte 1)"),
        (pyarrow.array([{"bytes": b"\xff", "path": "a.png"}]), "column a.bytes is binary"),
        (
            pyarrow.array([timedelta(1)]),
            "column a is datetime.timedelta(days=1), a timedelta, for which JSON has no form",
        ),
        (pyarrow.array([Decimal("0.1234567890123456789")]), "column a is Decimal('0.1234567890123456789'), a Decimal"),
    ],
)
def test_values_that_no_type_of_json_holds_are_a_fault_of_their_row(tmp_path: Path, column: pyarrow.Array, reason: str):
    (record,) = records(write_parquet(pyarrow.table({"a": column, "b": ["x"]}), tmp_path / "rows.parquet"))
    assert record.fault.startswith(reason) and record.number == 1 and b'"b": "x"' in record.line


def test_values_of_functions_that_json_lacks():
    own = {
        "a": np.array([[1, 2]]),
        "b": np.float32(0.5),
        "c": (np.bool_(True),),
        "d": uuid.UUID(int=1),
        "e": np.str_("x"),
    }
    expected = {"a": [[1, 2]], "b": 0.5, "c": [True], "d": "00000000-0000-0000-0000-000000000001", "e": "x"}
    assert json.dumps(as_json(own, "row")) == json.dumps(expected)
    for value, reason in (
        ({1: "a"}, "row.x has the key 1"),
        ({"y": {"a"}}, "row.x.y is {'a'}, a set"),
        (np.datetime64("2024"), "row.x is "),
    ):
        with pytest.raises(RowError, match=reason):
            as_json({"x": value}, "row")
