"""Folders are published whole and once; the files of a Hugging Face folder are found."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conversion.files.durable import publish, write_atomic
from conversion.files.hf_folder import INDEX_FILE, SINGLE_FILE, weight_files


def test_of_many_who_publish_one_wins(tmp_path: Path):
    asides = [tmp_path / f"aside-{index}" for index in range(16)]
    for aside in asides:
        aside.mkdir()
        (aside / "content").write_text(aside.name)
    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(lambda aside: publish(aside, tmp_path / "final"), asides))
    assert won.count(True) == 1
    assert (tmp_path / "final" / "content").read_text() == asides[won.index(True)].name
    assert [aside.exists() for aside in asides] == [not has_won for has_won in won]


def test_what_is_not_a_lost_race_is_an_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        publish(tmp_path / "none", tmp_path / "final")


def test_a_rename_whose_answer_got_lost_has_won(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rename = Path.rename

    def rename_twice(path: Path, target: Path) -> None:
        rename(path, target)
        rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_twice)
    (tmp_path / "aside").mkdir()
    assert publish(tmp_path / "aside", tmp_path / "final")


def test_atomic_writes_leave_nothing_else(tmp_path: Path):
    write_atomic(tmp_path / "a", "1")
    write_atomic(tmp_path / "a", "2")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "2")]


def test_weight_files_are_those_of_the_index_before_the_single_file(tmp_path: Path):
    (tmp_path / SINGLE_FILE).touch()
    assert weight_files(tmp_path) == [tmp_path / SINGLE_FILE]
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "2.safetensors", "b": "1.safetensors", "c": "2.safetensors"}}))
    assert weight_files(tmp_path) == [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]


@pytest.mark.parametrize("index", [None, "{", "{}", "[]", '{"weight_map": 3}'])
def test_a_folder_without_weights_is_refused(tmp_path: Path, index: str | None):
    if index is not None:
        (tmp_path / INDEX_FILE).write_text(index)
    with pytest.raises(ValueError, match="name a Hugging Face folder"):
        weight_files(tmp_path)
