# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

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
    rows = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [{"x": 1}]}], "answer": "2"}] * 2
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
    with pytest.raises(ValueError, match=r"rows.arrow is not readable as a table \(column a has the type list<.*dictionary<"):
        rows_of(write_arrow(table, tmp_path / "rows.arrow"))
