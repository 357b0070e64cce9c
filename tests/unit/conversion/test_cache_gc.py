# SPDX-License-Identifier: Apache-2.0
"""gc removes what the dead left and what is old or too much; never what is alive or in use."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conversion import cache
from conversion.cache import (
    DAY_S,
    MARKER,
    cache_items,
    cached_mcore,
    check_entry,
    collect_garbage,
    entry_key,
    mcore_in_use,
)
from conversion.convert import convert_hf_to_mcore
from conversion.files.owners import ABANDONED_S, owned, owned_name
from tests.unit.conversion.cached_models import save_model
from tests.waiting import HANG_S


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [save_model(folder / f"seed-{seed}", seed=seed) for seed in range(3)]


@pytest.fixture
def root(models: list[Path], tmp_path: Path) -> Path:
    """Three entries: seed-0 was not used for 30 days, seed-1 for 20, seed-2 for 10."""
    for index, model in enumerate(models):
        used = time.time() - (30 - 10 * index) * DAY_S
        os.utime(cached_mcore(model, tmp_path).parent / MARKER, (used, used))
    return tmp_path


def names(root: Path) -> list[str]:
    return [Path(item.entry.model).name for item in cache_items(root) if item.entry]


def name_of_the_dead(what: str) -> str:
    code = f"from conversion.files.owners import owned_name; print(owned_name({what!r}))"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=HANG_S
    ).stdout.strip()


def test_items_tell_model_size_and_use(root: Path):
    assert names(root) == ["seed-0", "seed-1", "seed-2"]
    for item in cache_items(root):
        assert item.entry is not None and item.num_bytes == item.entry.num_bytes > 0 and not item.is_live


def test_nothing_is_asked_and_nothing_goes(root: Path):
    assert collect_garbage(root, now=time.time()) == []
    assert len(names(root)) == 3


def test_what_is_old_goes(root: Path, models: list[Path]):
    removals = collect_garbage(root, now=time.time(), older_than_days=15)
    assert [removal.reason for removal in removals] == ["not used for 30.0 days", "not used for 20.0 days"]
    assert names(root) == ["seed-2"]
    assert os.listdir(root / "building") == []
    # It is made again when it is asked for, and is young then.
    check_entry(cached_mcore(models[0], root))
    assert collect_garbage(root, now=time.time(), older_than_days=15) == []


def test_the_longest_unused_go_until_the_rest_fits(root: Path):
    one = cache_items(root)[0].num_bytes
    assert len(collect_garbage(root, now=time.time(), max_bytes=2 * one)) == 1
    assert names(root) == ["seed-1", "seed-2"]
    assert len(collect_garbage(root, now=time.time(), max_bytes=0)) == 2


def test_a_use_makes_an_entry_young(root: Path, models: list[Path]):
    cached_mcore(models[0], root)
    assert names(root) == ["seed-1", "seed-2", "seed-0"]


def test_what_is_in_use_stays(root: Path, models: list[Path]):
    with mcore_in_use(models[0], root) as folder:
        assert len(collect_garbage(root, now=time.time(), max_bytes=0)) == 2
        check_entry(folder)
    assert len(collect_garbage(root, now=time.time(), max_bytes=0)) == 1


def test_a_use_that_begins_while_gc_decides_is_respected(root: Path, monkeypatch: pytest.MonkeyPatch):
    look, looks = cache._is_leased, []

    def look_too_early(entry: Path, key: str) -> bool:
        looks.append(key)
        found = look(entry, key)
        if len(looks) == 7:
            # Each was seen twice in the lists, and the first once more. All have been found unused; now somebody takes
            # the first.
            (root / "leases" / owned_name(looks[0])).touch()
        return found

    monkeypatch.setattr(cache, "_is_leased", look_too_early)
    assert len(collect_garbage(root, now=time.time(), max_bytes=0)) == 2
    (item,) = cache_items(root)
    assert item.is_live
    check_entry(item.path / "mcore")
    assert os.listdir(root / "building") == []


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(root: Path):
    key = cache_items(root)[0].key
    mine = owned_name(key)
    far_away = owned_name(key).split(".")
    far_away[1] = "123"
    abandoned = [*far_away[:-1], "0123"]
    for folder in ("building", "leases"):
        for name in (
            mine,
            ".".join(far_away),
            ".".join(abandoned),
            name_of_the_dead(key),
            name_of_the_dead(f"{key}.removed"),
        ):
            path = root / folder / name
            path.mkdir() if folder == "building" else path.touch()
        long_ago = time.time() - ABANDONED_S - 60
        os.utime(root / folder / ".".join(abandoned), (long_ago, long_ago))
    removals = collect_garbage(root, now=time.time())
    assert [removal.reason for removal in removals] == ["left by a process that is gone"] * 3
    for folder in ("building", "leases"):
        assert sorted(os.listdir(root / folder)) == sorted([mine, ".".join(far_away)])


@pytest.mark.parametrize("remover", ["gc", "a builder of the cache", "a conversion"])
def test_what_is_being_removed_cannot_be_taken_over(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remover: str
):
    root, out = tmp_path / "cache", tmp_path / "out"
    key = entry_key(models[0], root)
    folder, what = (tmp_path, ".out.partial") if remover == "a conversion" else (root / "building", key)
    # A builder of another boot left it, long ago.
    leftover = folder / re.sub(r"\.[0-9a-f]+\.", ".123.", owned_name(what), count=1)
    leftover.mkdir(parents=True)
    os.utime(leftover, (0, 0))
    remove, removed = shutil.rmtree, []

    def remove_slowly(path: Path, *, ignore_errors: bool = False) -> None:
        if not removed:
            removed.append(path)
            with pytest.raises(FileNotFoundError):
                leftover.rename(tmp_path / "taken over")
        remove(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", remove_slowly)
    # Builders of other hosts are waited for as long as they might be at work.
    monkeypatch.setattr(cache, "STALLED_S", 0.5)
    if remover == "gc":
        collect_garbage(root, now=time.time())
    elif remover == "a conversion":
        convert_hf_to_mcore(models[0], out)
    else:
        cached_mcore(models[0], root)
    assert removed and not removed[0].exists() and owned(folder) == []


def test_an_entry_without_its_marker_goes(root: Path):
    (cache_items(root)[1].path / MARKER).unlink()
    assert [removal.reason for removal in collect_garbage(root, now=time.time())] == ["not complete"]
    assert names(root) == ["seed-0", "seed-2"]


def test_remembered_hashes_are_forgotten_with_age(root: Path):
    (root / "hashes" / "1-2-3").write_text("0" * 64)
    assert collect_garbage(root, now=time.time(), older_than_days=15) != []
    assert (root / "hashes" / "1-2-3").exists()
    collect_garbage(root, now=time.time() + 16 * DAY_S, older_than_days=15)
    assert not (root / "hashes" / "1-2-3").exists()


def test_an_empty_cache_has_nothing_to_collect(tmp_path: Path):
    assert collect_garbage(tmp_path / "none", now=time.time(), older_than_days=0, max_bytes=0) == []
