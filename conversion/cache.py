# SPDX-License-Identifier: Apache-2.0
"""Cache of converted models for all nodes and runs. `ROOT/entries/KEY/mcore` is a checkpoint as hf-to-mcore writes it.

Takes no locks: a builder fills a folder of its own, and rename(2) publishes it whole, once. Others wait for a running
builder only to spare themselves the same work. Garbage collection removes leftovers of dead processes and entries
unused for long, but none in use.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from conversion.families.common import MegatronParallel
from conversion.files.durable import publish, sync_tree, write_atomic
from conversion.files.hf_folder import INDEX_FILE, weight_files
from conversion.files.manifest import MANIFEST, TABLE_VERSION, check_files, read_manifest
from conversion.files.owners import (
    CANARIES,
    heartbeat,
    is_alive,
    owned,
    owned_name,
    owner_of,
    removal_name,
    remove_leftover,
    retire_canary,
    time_of_folder,
)
from conversion.files.reading import file_hashes, sha256_file
from conversion.progress import log_progress

logger = logging.getLogger(__name__)

MARKER = "entry.json"
CHECKPOINT_FOLDER = "mcore"
# Converted, but the source may have changed since its key was taken.
_UNCHECKED = "unchecked"
ENTRIES, BUILDING, LEASES, HASHES = "entries", "building", "leases", "hashes"

POLL_S = 0.2
# Nobody waits longer for a builder that did not touch its folder for this long, by the waiter's clock.
STALLED_S = 60.0
MAX_BACKOFF_S = 0.2
REPORT_S = 30.0
MAX_WAIT_S = 6 * 3600.0
DAY_S = 86400.0

ONE_FILE = MegatronParallel()

Build = Callable[[Path], None]
"""Makes the checkpoint folder, whole or not at all. An interrupted call may leave files next to it, with which the next
call continues.
"""


@dataclass(frozen=True)
class CacheEntry:
    """The marker of an entry, which its builder writes last."""

    model: str
    num_bytes: int
    created: float
    manifest_sha256: str


def entry_key(hf: Path, root: Path, *, reads_all: bool = False) -> str:
    """Entry name of a Hugging Face folder: a sha256 of its weight files, config.json and the table version.

    Checksums of files that were read before come from the cache; with `reads_all`, none does.
    """
    files = [*weight_files(hf), hf / "config.json"]
    files += [hf / INDEX_FILE] if (hf / INDEX_FILE).exists() else []
    found = file_hashes(files, root / HASHES, reads_all=reads_all)
    hashes = {path.relative_to(hf).as_posix(): digest for path, digest in found.items()}
    # None: as in the keys of caches that exist.
    content = {"files": hashes, "dtype": None, "table_version": TABLE_VERSION}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def cached_mcore(hf: Path, root: Path, *, parallel: MegatronParallel = ONE_FILE, build: Build | None = None) -> Path:
    """The Megatron checkpoint of a Hugging Face folder in the cache at `root`; converts it now if it is missing.

    Tensors keep their dtypes. `parallel` is how a conversion cuts its files; any layout can load them. `build` replaces
    the conversion.
    """
    with mcore_in_use(hf, root, parallel=parallel, build=build) as folder:
        return folder


@contextmanager
def mcore_in_use(
    hf: Path, root: Path, *, parallel: MegatronParallel = ONE_FILE, build: Build | None = None
) -> Iterator[Path]:
    """`cached_mcore`, with a lease: no gc removes the entry in the `with` block."""

    def convert(out: Path) -> None:
        # Finding an entry must not import torch.
        from conversion.convert import convert_hf_to_mcore

        convert_hf_to_mcore(hf, out, parallel=parallel, progress=log_progress("conversion"))

    open_cache(root)
    with _usable(root):
        key = entry_key(hf, root)
        lease = root / LEASES / owned_name(key)
        lease.touch()
    try:
        with heartbeat(lease):
            with _usable(root):
                _fill(hf, root, key, build or convert)
            yield root / ENTRIES / key / CHECKPOINT_FOLDER
    finally:
        lease.unlink(missing_ok=True)


def open_cache(root: Path) -> None:
    """Creates the folders of a cache where they are missing."""
    with _usable(root):
        for name in (ENTRIES, BUILDING, LEASES, HASHES):
            (root / name).mkdir(parents=True, exist_ok=True)
        probe = root / LEASES / owned_name("probe")
        probe.touch()
        probe.unlink()


def check_entry(folder: Path, *, part: int = 0, num_parts: int = 1) -> None:
    """Raises ValueError unless a cached checkpoint is byte for byte as built. Processes can each check a part."""
    entry = read_entry(folder.parent)
    if entry is None or not (folder / MANIFEST).exists() or sha256_file(folder / MANIFEST) != entry.manifest_sha256:
        raise ValueError(
            f"{folder / MANIFEST} is not the one that was published; remove {folder.parent}: it will be converted again"
        )
    files = read_manifest(folder).files
    names = sorted(files, key=lambda name: (-files[name].size, name))
    check_files(folder, names[part::num_parts])


def discard(folder: Path, seen: CacheEntry | None) -> None:
    """Removes a damaged checkpoint, `seen` with this marker (None: unreadable), from the cache; not its replacement."""
    remove_entry(folder.parent, lambda entry: read_entry(entry) == seen)


def root_of(folder: Path) -> Path:
    """The root of the cache that a cached checkpoint lies in."""
    return folder.parent.parent.parent


def remove_entry(entry: Path, may_go: Callable[[Path], bool]) -> bool:
    """Removes an entry; returns whether it did. `may_go` judges the entry before and after the rename that hides it."""
    if not may_go(entry):
        return False
    # Not under a builder's name: no builder may take over a half-removed entry.
    aside = entry.parent.parent / BUILDING / removal_name(entry.name)
    try:
        entry.rename(aside)
    except FileNotFoundError:
        return False
    if not may_go(aside) and publish(aside, entry):
        return False
    shutil.rmtree(aside, ignore_errors=True)
    return True


def read_entry(folder: Path) -> CacheEntry | None:
    """The marker of an entry; None if the entry is not complete."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        return CacheEntry(**{field.name: marker[field.name] for field in fields(CacheEntry)})
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError):
        return None


def _mark_used(entry: Path) -> bool:
    try:
        # Only the owner of a file may touch it.
        with suppress(PermissionError):
            os.utime(entry / MARKER)
    except FileNotFoundError:
        return False
    return True


def _fill(hf: Path, root: Path, key: str, build: Build) -> None:
    final = root / ENTRIES / key
    watch, deadline = _Watch(root / BUILDING, key), time.monotonic() + MAX_WAIT_S
    # The entry disappears for a moment where gc takes it out and then sees the lease.
    while read_entry(final) is None or not _mark_used(final):
        if final.exists():
            if remove_entry(final, lambda entry: read_entry(entry) is None):
                logger.warning("%s had no readable %s: it is made again", final, MARKER)
            continue
        if watch.others_at_work():
            if time.monotonic() > deadline:
                where = f"{root / BUILDING}/{key}*"
                raise ValueError(
                    f"others have been at work on {where} for {MAX_WAIT_S / 3600:g} h; end them, or set another "
                    "MRL_CACHE"
                )
            time.sleep(POLL_S)
            continue
        aside = root / BUILDING / owned_name(key)
        aside.mkdir()
        # A builder that sees no other is seen by all later ones. Where new names show late, two may build; one
        # publishes. An earlier builder has published by now, or died.
        if watch.others_at_work(besides=aside) or final.exists():
            aside.rmdir()
            time.sleep(random.uniform(0, MAX_BACKOFF_S))
            continue
        try:
            with heartbeat(aside):
                _build(hf, root, key, aside, build)
        except ValueError:
            # After any other error, or a kill, the next builder continues with these files.
            shutil.rmtree(aside, ignore_errors=True)
            raise


def _build(hf: Path, root: Path, key: str, aside: Path, build: Build) -> None:
    started, is_empty = time.monotonic(), True
    final, folder = root / ENTRIES / key, aside / CHECKPOINT_FOLDER
    dead = [path for path in owned(root / BUILDING, key) if not is_alive(path)]
    logger.info("First use of %s: converting it into the cache, %s", hf, final)
    for leftover in dead:
        parsed = owner_of(leftover.name)
        # Takes over one of this boot of this host: after a power loss files may have their length and not their
        # content.
        if is_empty and parsed is not None and parsed[1].is_visible():
            with suppress(FileNotFoundError):
                leftover.rename(aside)
                is_empty = False
                continue
        remove_leftover(leftover)
    if not folder.exists():
        unchecked = aside / _UNCHECKED
        shutil.rmtree(unchecked, ignore_errors=True)
        build(unchecked)
        # By what the files hold now: one that was read weeks ago may have become unsound on the disk without another
        # time.
        if entry_key(hf, root, reads_all=True) != key:
            raise ValueError(
                f"{hf} changed while it was converted, or is damaged; start again when its writer is done, or "
                "download it again"
            )
        unchecked.rename(folder)
    for path in aside.iterdir():
        if path != folder:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    sync_tree(aside)
    num_bytes = sum(record.size for record in read_manifest(folder).files.values())
    entry = CacheEntry(str(hf.absolute()), num_bytes, time.time(), sha256_file(folder / MANIFEST))
    write_atomic(aside / MARKER, json.dumps(asdict(entry), indent=1))
    if publish(aside, final):
        logger.info("%s is in the cache (%.2f GB, %.1f s)", hf, num_bytes / 1e9, time.monotonic() - started)
    else:
        logger.info("another process has put %s into the cache meanwhile", hf)
        shutil.rmtree(aside, ignore_errors=True)


class _Watch:
    """Watches the other builders of an entry. Remembers since when nobody has touched a builder's folder."""

    def __init__(self, building: Path, key: str) -> None:
        self._building = building
        self._key = key
        self._touched: dict[Path, tuple[float, float]] = {}
        self._reported = time.monotonic()

    def others_at_work(self, *, besides: Path | None = None) -> bool:
        others = [path for path in owned(self._building, self._key) if path != besides and self._is_at_work(path)]
        if others and time.monotonic() - self._reported > REPORT_S:
            self._reported = time.monotonic()
            logger.info("waiting for another process to convert the model: %s", others[0])
        return bool(others)

    def _is_at_work(self, path: Path) -> bool:
        parsed = owner_of(path.name)
        if parsed is None or (parsed[1].is_visible() and not parsed[1].is_running()):
            return False
        try:
            touched = path.stat().st_mtime
        except FileNotFoundError:
            return False
        before, since = self._touched.get(path, (None, 0.0))
        if before != touched:
            since = time.monotonic()
            self._touched[path] = (touched, since)
        return time.monotonic() - since <= STALLED_S


@contextmanager
def _usable(root: Path) -> Iterator[None]:
    """Turns errors of the cache's file system into a ValueError that names the way out."""
    try:
        yield
    except OSError as error:
        # Only writing fails for lack of space; errors of the model's folder name a file there. A folder above the root
        # is named where that could not be made, as in a home that is read-only.
        named = Path(error.filename) if error.filename else None
        is_ours = named and (named.is_relative_to(root) or root.is_relative_to(named))
        if not is_ours and (named or error.errno not in (errno.ENOSPC, errno.EDQUOT)):
            raise
        raise ValueError(
            f"the cache of converted models at {root} cannot be used: {error}; set MRL_CACHE to a writable folder "
            "with room that all nodes share, or MRL_CACHE=off to read the Hugging Face files directly"
        ) from error


@dataclass(frozen=True)
class Item:
    """An entry of the cache, or a builder's folder."""

    path: Path
    key: str
    entry: CacheEntry | None
    num_bytes: int
    used: float
    is_live: bool


@dataclass(frozen=True)
class Removal:
    """An item that gc removed, and why."""

    item: Item
    reason: str


def cache_items(root: Path) -> list[Item]:
    """Everything in the cache at `root`: entries, the longest unused first, then folders of builders."""
    entries = [item for path in (root / ENTRIES).glob("*") if (item := _item(path, path.name)) is not None]
    leftovers = [(path, parsed[0]) for path in owned(root / BUILDING) if (parsed := owner_of(path.name)) is not None]
    builders = [item for path, key in leftovers if (item := _item(path, key)) is not None]
    return sorted(entries, key=lambda item: (item.used, item.key)) + builders


def collect_garbage(
    root: Path,
    *,
    now: float,
    older_than_days: float | None = None,
    max_bytes: int | None = None,
    is_trial: bool = False,
) -> list[Removal]:
    """Removes what dead processes left, entries unused for `older_than_days`, then the longest unused over `max_bytes`.

    Entries in use stay, whatever their age and size. With `is_trial` all stay, and the removals are those to come.
    """
    removals = [
        Removal(item, "left by a process that is gone")
        for item in cache_items(root)
        if item.path.parent.name == BUILDING
    ]
    removals = [
        removal for removal in removals if not removal.item.is_live and (is_trial or remove_leftover(removal.item.path))
    ]
    if not is_trial:
        _forget(root, now=now, older_than_days=older_than_days)
    entries = [item for item in cache_items(root) if item.path.parent.name == ENTRIES]
    num_bytes = sum(item.num_bytes for item in entries)
    for item in entries:
        reason = None
        if item.entry is None:
            reason = "not complete"
        elif older_than_days is not None and now - item.used > older_than_days * DAY_S:
            reason = f"not used for {(now - item.used) / DAY_S:.1f} days"
        elif max_bytes is not None and num_bytes > max_bytes:
            reason = "longest unused, and the cache is larger than asked for"
        if reason is None:
            continue
        is_gone = _is_unused(item) if is_trial else remove_entry(item.path, lambda _, item=item: _is_unused(item))
        if is_gone:
            removals.append(Removal(item, reason))
            num_bytes -= item.num_bytes
    return removals


def _forget(root: Path, *, now: float, older_than_days: float | None) -> None:
    """Removes the small files of dead processes, and hashes unused for `older_than_days`."""
    for path in owned(root / LEASES):
        if not is_alive(path):
            path.unlink(missing_ok=True)
    for path in owned(root / CANARIES):
        if not is_alive(path):
            retire_canary(path)
    for path in (root / HASHES).glob("*"):
        with suppress(FileNotFoundError):
            if older_than_days is not None and now - path.stat().st_mtime > older_than_days * DAY_S:
                path.unlink()


def _item(path: Path, key: str) -> Item | None:
    entry = read_entry(path) if path.parent.name == ENTRIES else None
    try:
        used = (path / MARKER if entry else path).stat().st_mtime
        num_bytes = entry.num_bytes if entry else sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    except FileNotFoundError:
        return None
    is_live = _is_leased(path, key) if path.parent.name == ENTRIES else is_alive(path)
    return Item(path, key, entry, num_bytes, used, is_live)


def _is_unused(item: Item) -> bool:
    """True if no lease exists. A user takes a lease before it looks for the entry; gc looks for leases last."""
    # A network file system lists a folder anew for a process that has changed it.
    time_of_folder(item.path.parent.parent / LEASES)
    return not _is_leased(item.path, item.key)


def _is_leased(entry: Path, key: str) -> bool:
    return any(is_alive(lease) for lease in owned(entry.parent.parent / LEASES, key))
