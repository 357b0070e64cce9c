# SPDX-License-Identifier: Apache-2.0
"""The cache commands, from the command line to what is left in the folder."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from conversion.cache import DAY_S, cache_items, cached_mcore, mcore_in_use
from conversion.files.owners import owned_name
from mrl.convert import main
from tests.unit.conversion.cached_models import save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "other", seed=1)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MRL_CACHE", str(tmp_path))
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    capsys.readouterr()
    assert main(["cache", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_list_shows_entries_and_what_is_being_built(
    root: Path, model: Path, other: Path, capsys: pytest.CaptureFixture[str]
):
    key = cached_mcore(model, root).parent.name
    old = cached_mcore(other, root).parent
    # As it was written when entries had a dtype of their own.
    marker = json.loads((old / "entry.json").read_text())
    (old / "entry.json").write_text(json.dumps(marker | {"dtype": None}))
    used = time.time() - 3 * DAY_S
    os.utime(old / "entry.json", (used, used))
    (root / "building" / owned_name("f" * 64)).mkdir()
    with mcore_in_use(model, root):
        header, *lines, total = run(capsys, "list")
    assert header.split("  ")[0] == "key" and total.endswith(f"in {root}")
    described = [" ".join(line.split()) for line in lines]
    assert described[0].startswith(old.name[:12]) and described[0].endswith(f"MB 3.0 days complete {other}")
    assert described[1].startswith(key[:12]) and described[1].endswith(f"MB 0.0 hours in use {model}")
    assert described[2] == f"{'f' * 12} 0 kB 0.0 hours being built"
    assert len(lines) == 3


def test_gc_removes_by_age_and_size_and_says_what(
    root: Path, model: Path, other: Path, capsys: pytest.CaptureFixture[str]
):
    entries = [cached_mcore(folder, root).parent for folder in (model, other)]
    used = time.time() - 3 * DAY_S
    os.utime(entries[1] / "entry.json", (used, used))
    assert run(capsys, "gc") == ["0 kB removed"]
    to_come, _ = run(capsys, "gc", "--older-than", "2.5", "--dry-run")
    assert entries[1].name[:12] in to_come and "to be removed (not used for 3.0 days)" in to_come
    assert len(cache_items(root)) == 2
    removed, _ = run(capsys, "gc", "--older-than", "2.5")
    assert entries[1].name[:12] in removed and "not used for 3.0 days" in removed
    assert [item.path for item in cache_items(root)] == [entries[0]]
    assert run(capsys, "gc", "--max-size", "1GB") == ["0 kB removed"]
    assert len(run(capsys, "gc", "--max-size", "0.001MB")) == 2
    assert cache_items(root) == []


@pytest.mark.parametrize(
    ("cache", "arguments", "message"),
    [
        ("off", ["list"], "MRL_CACHE=off"),
        ("", ["gc", "--max-size", "many"], "--max-size 'many' is not a positive number"),
    ],
)
def test_what_cannot_be_done_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache: str, arguments: list[str], message: str
):
    monkeypatch.setenv("MRL_CACHE", cache)
    assert main(["cache", *arguments]) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert message in line
