# SPDX-License-Identifier: Apache-2.0
"""Cache entries: their names, that each is made once, and that damage is found. test_cache_processes.py tests races."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from conversion import cache
from conversion.cache import CacheEntry, cached_mcore, check_entry, discard, entry_key, mcore_in_use, read_entry
from conversion.convert import convert_hf_to_mcore, differences
from conversion.files import reading
from conversion.files.manifest import file_faults
from conversion.files.owners import owned, owned_name, removal_name
from tests.unit.conversion.cached_models import fill_until, light_processes, save_model
from tests.unit.conversion.files.test_hashes import hub_snapshot
from tests.unit.store.conftest import Synced
from tests.waiting import HANG_S, Clock


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def never(out: Path) -> None:
    raise AssertionError("must be found")


def elsewhere(name: str) -> str:
    """The name as a process of another host would make it."""
    fields = name.split(".")
    fields[1] = "123"
    return ".".join(fields)


def test_the_first_use_converts_and_the_second_finds(hf: Path, root: Path):
    folder = cached_mcore(hf, root)
    assert file_faults(folder) == []
    check_entry(folder)
    entry = read_entry(folder.parent)
    assert entry is not None and entry.model == str(hf)
    assert entry.num_bytes == sum(
        path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"
    )
    assert cached_mcore(hf, root, build=never) == folder
    assert sorted(os.listdir(root)) == ["building", "entries", "hashes", "leases"]
    assert os.listdir(root / "building") == os.listdir(root / "leases") == []


def test_the_key_follows_from_content_alone(hf: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reading, "SETTLED_S", -1.0)
    key = entry_key(hf, root)
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("model.safetensors", "config.json"):
        (copy / name).write_bytes((hf / name).read_bytes())
    (copy / "tokenizer.json").write_text("{}")
    assert entry_key(copy, tmp_path / "other") == key

    keys = {key}
    weights = (copy / "model.safetensors").read_bytes()
    # Same names, shapes, dtypes and length: one bit of one value, in place.
    (copy / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    keys.add(entry_key(copy, root))
    (copy / "model.safetensors").write_bytes(weights)
    (copy / "config.json").write_text(json.dumps({**json.loads((hf / "config.json").read_text()), "rope_theta": 5}))
    keys.add(entry_key(copy, root))
    monkeypatch.setattr(cache, "TABLE_VERSION", cache.TABLE_VERSION + 1)
    keys.add(entry_key(hf, root))
    assert len(keys) == 4


def test_other_weights_of_the_same_headers_are_not_mistaken(hf: Path, root: Path, tmp_path: Path):
    other = save_model(tmp_path / "other", seed=1)
    assert (other / "config.json").read_bytes() == (hf / "config.json").read_bytes()
    assert (other / "model.safetensors").stat().st_size == (hf / "model.safetensors").stat().st_size
    assert cached_mcore(hf, root) != cached_mcore(other, root)


def test_shards_and_their_index_belong_to_the_key(hf: Path, root: Path, tmp_path: Path):
    tensors = load_file(hf / "model.safetensors")
    names = sorted(tensors)
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    (sharded / "config.json").write_bytes((hf / "config.json").read_bytes())
    half = {name: f"{int(index * 2 >= len(names))}.safetensors" for index, name in enumerate(names)}
    for file in set(half.values()):
        save_file({name: tensors[name] for name in names if half[name] == file}, sharded / file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": half}))
    key = entry_key(sharded, root)
    changed = dict(tensors, **{names[-1]: tensors[names[-1]] + 1})
    save_file({name: changed[name] for name in names if half[name] == "1.safetensors"}, sharded / "1.safetensors")
    assert entry_key(sharded, root) != key
    check_entry(cached_mcore(sharded, root))


@pytest.mark.parametrize("name", ["weights", "config"])
def test_an_incomplete_model_is_refused(root: Path, tmp_path: Path, name: str):
    model = save_model(tmp_path / "model")
    (model / {"weights": "model.safetensors", "config": "config.json"}[name]).unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors|config\.json"):
        cached_mcore(model, root)
    assert os.listdir(root / "entries") == os.listdir(root / "leases") == []


def test_a_failed_conversion_leaves_nothing(hf: Path, root: Path):
    def fail(out: Path) -> None:
        out.mkdir()
        (out / "part").touch()
        raise ValueError("no luck")

    with pytest.raises(ValueError, match="no luck"):
        cached_mcore(hf, root, build=fail)
    assert [os.listdir(root / name) for name in ("entries", "building", "leases")] == [[], [], []]
    check_entry(cached_mcore(hf, root))


def test_a_cache_that_cannot_be_written_is_named_with_the_way_out(hf: Path, root: Path):
    root.write_text("a file")
    with pytest.raises(ValueError, match=f"{root} cannot be used: .*MRL_CACHE=off"):
        cached_mcore(hf, root)


def test_a_cache_below_a_folder_that_takes_nothing_is_named():
    """The error names the folder above the cache that could not be made."""
    with pytest.raises(
        ValueError, match="/proc/home/cache cannot be used: .*'/proc/home'; set MRL_CACHE to a writable"
    ):
        cache.open_cache(Path("/proc/home/cache"))


def test_a_model_that_cannot_be_read_is_not_the_fault_of_the_cache(root: Path, tmp_path: Path):
    model = save_model(tmp_path / "model")
    (model / "config.json").unlink()
    (model / "config.json").mkdir()
    with pytest.raises(ValueError, match=r"config\.json is a folder"):
        cached_mcore(model, root)


def test_a_changed_byte_anywhere_is_found_by_name(hf: Path, root: Path):
    folder = cached_mcore(hf, root)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        for position in {0, len(content) // 2, len(content) - 1}:
            path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
            with pytest.raises(ValueError, match=path.name):
                check_entry(folder)
        path.write_bytes(content[:-1])
        with pytest.raises(ValueError, match=path.name):
            check_entry(folder)
        path.unlink()
        with pytest.raises(ValueError, match=path.name):
            check_entry(folder)
        path.write_bytes(content)
    check_entry(folder)


def test_the_parts_of_a_check_are_a_whole_check(hf: Path, root: Path):
    folder = cached_mcore(hf, root)
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"):
        content = path.read_bytes()
        path.write_bytes(content + b"0")
        found = 0
        for part in range(3):
            try:
                check_entry(folder, part=part, num_parts=3)
            except ValueError:
                found += 1
        assert found == 1, path
        path.write_bytes(content)


@pytest.mark.parametrize("damage", ["discarded", "no marker", "damaged marker"])
def test_an_entry_that_is_not_whole_is_made_again(hf: Path, root: Path, damage: str):
    folder = cached_mcore(hf, root)
    (folder / "iter_0000000" / "metadata.json").write_text("damaged")
    marker = folder.parent / "entry.json"
    if damage == "discarded":
        discard(folder, read_entry(folder.parent))
    elif damage == "no marker":
        marker.unlink()
    else:
        marker.write_text(marker.read_text()[:-10])
    assert cached_mcore(hf, root) == folder
    check_entry(folder)
    assert os.listdir(root / "building") == []


@pytest.mark.parametrize("moment", ["before it is looked for again", "before it is taken out"])
def test_what_another_process_publishes_meanwhile_stays(
    hf: Path, root: Path, monkeypatch: pytest.MonkeyPatch, moment: str
):
    built = cached_mcore(hf, root.with_name("elsewhere")).parent
    final = root / "entries" / built.name
    final.mkdir(parents=True)
    number, looks = built.stat().st_ino, []

    def look_too_early(folder: Path) -> CacheEntry | None:
        found = read_entry(folder)
        looks.append(folder)
        if len(looks) == (1 if moment == "before it is looked for again" else 2):
            built.rename(final)
        return found

    monkeypatch.setattr(cache, "read_entry", look_too_early)
    check_entry(cached_mcore(hf, root, build=never))
    assert final.stat().st_ino == number
    assert os.listdir(root / "building") == []


def test_a_model_that_changes_while_it_is_converted_is_refused(root: Path, tmp_path: Path):
    model, other = save_model(tmp_path / "model"), save_model(tmp_path / "other", seed=1)

    def replace_and_build(out: Path) -> None:
        shutil.copy(other / "model.safetensors", model / "model.safetensors")
        convert_hf_to_mcore(model, out)

    with pytest.raises(ValueError, match=f"{model} changed while it was converted"):
        cached_mcore(model, root, build=replace_and_build)
    assert os.listdir(root / "entries") == os.listdir(root / "building") == []


def test_damaged_bytes_of_the_hub_never_get_into_the_cache(hf: Path, root: Path, tmp_path: Path):
    data = (hf / "model.safetensors").read_bytes()
    snapshot = hub_snapshot(
        tmp_path, hashlib.sha256(data).hexdigest(), data[:-3000] + bytes(2000) + data[-1000:]
    ).parent
    shutil.copyfile(hf / "config.json", snapshot / "config.json")
    with pytest.raises(ValueError, match="model.safetensors is damaged: the sha256 of"):
        cached_mcore(snapshot, root)
    with pytest.raises(ValueError, match="model.safetensors is damaged: the sha256 of"):
        convert_hf_to_mcore(snapshot, tmp_path / "out")
    (snapshot / "model.safetensors").resolve().write_bytes(data)
    assert list(differences(cached_mcore(snapshot, root), hf)) == []


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=["no room", "ctrl-c"]
)
def test_an_interrupted_conversion_continues(hf: Path, root: Path, error: BaseException):
    child = light_processes().Process(target=fill_until, args=(hf, root, error))
    child.start()
    child.join(timeout=HANG_S)
    assert child.exitcode == 0 and os.listdir(root / "entries") == os.listdir(root / "leases") == []
    check_entry(cached_mcore(hf, root, build=never))
    assert os.listdir(root / "building") == []


def test_an_entry_that_gc_takes_out_and_puts_back_is_found(hf: Path, root: Path, monkeypatch: pytest.MonkeyPatch):
    entry = cached_mcore(hf, root).parent
    aside = root / "building" / removal_name(entry.name)
    looks = []

    def look_too_early(folder: Path) -> CacheEntry | None:
        looks.append(folder)
        found = read_entry(folder)
        if len(looks) == 1:
            entry.rename(aside)
        return found

    def put_back(out: Path) -> None:
        aside.rename(entry)
        convert_hf_to_mcore(hf, out)

    monkeypatch.setattr(cache, "read_entry", look_too_early)
    check_entry(cached_mcore(hf, root, build=put_back))
    assert len(looks) > 1


def test_only_the_entry_that_was_seen_is_discarded(hf: Path, root: Path):
    folder = cached_mcore(hf, root)
    damaged = read_entry(folder.parent)
    discard(folder, damaged)
    cached_mcore(hf, root)
    discard(folder, damaged)
    check_entry(folder)


def test_an_entry_is_on_disk_before_it_gets_its_name(hf: Path, root: Path, monkeypatch: pytest.MonkeyPatch):
    built, synced, sync = cached_mcore(hf, root.with_name("elsewhere")), Synced(), os.fsync

    def build(out: Path) -> None:
        shutil.copytree(built, out)

    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.note(descriptor), sync(descriptor)))
    folder = cached_mcore(hf, root, build=build)
    before = dict((path, size) for path, size in synced.calls if path.is_relative_to(root / "building"))
    (aside,) = {root / "building" / path.relative_to(root / "building").parts[0] for path in before}
    inside = [path.relative_to(folder.parent) for path in folder.rglob("*")]
    assert {path: before.get(aside / path) for path in inside} == {
        path: (folder.parent / path).stat().st_size for path in inside
    }


def test_a_builder_at_work_is_waited_for(hf: Path, root: Path, monkeypatch: pytest.MonkeyPatch):
    """The other one is a process of another host."""
    looks, clock = threading.Semaphore(0), Clock()

    def sleep(seconds: float) -> None:
        looks.release()
        time.sleep(0.001)

    monkeypatch.setattr(clock, "sleep", sleep)
    monkeypatch.setattr(cache, "time", clock)
    (root / "building").mkdir(parents=True)
    other = root / "building" / elsewhere(owned_name(entry_key(hf, root)))
    other.mkdir()
    found: list[Path] = []
    waiter = threading.Thread(target=lambda: found.append(cached_mcore(hf, root, build=never)))
    waiter.start()
    assert all(looks.acquire(timeout=HANG_S) for _ in range(3))
    built = cached_mcore(hf, root.with_name("elsewhere"))
    built.parent.rename(other.parent.parent / "entries" / built.parent.name)
    waiter.join(timeout=HANG_S)
    assert found == [root / "entries" / built.parent.name / "mcore"]
    assert other.exists(), "somebody else's, and alive"


def test_a_builder_that_stalls_is_not_waited_for(hf: Path, root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "time", clock := Clock())
    (root / "building").mkdir(parents=True)
    other = root / "building" / elsewhere(owned_name(entry_key(hf, root)))
    other.mkdir()
    started = clock.now
    check_entry(cached_mcore(hf, root))
    assert 0 < clock.now - started - cache.STALLED_S < 1
    assert other.exists(), "it may come back, and then finds that it has lost"


def test_an_entry_in_use_has_a_lease(hf: Path, root: Path):
    with mcore_in_use(hf, root) as folder:
        assert len(owned(root / "leases", folder.parent.name)) == 1
    assert os.listdir(root / "leases") == []
