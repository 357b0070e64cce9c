"""Lists the cache of converted models; removes leftovers of dead processes and entries unused for long, but none that is in use."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from conversion.cache import BUILDING, ENTRIES, HASHES, LEASES, MARKER, CacheEntry, read_entry, remove_entry
from conversion.files.owners import CANARIES, is_alive, owned, owner_of, remove_leftover, retire_canary, time_of_folder

DAY_S = 86400.0


@dataclass(frozen=True)
class Item:
    """An entry of the cache, or the folder that a builder fills or left behind."""

    path: Path
    key: str
    entry: CacheEntry | None
    """None if it is not a complete entry."""
    num_bytes: int
    used: float
    """When it was last used or touched, in seconds since the epoch."""
    is_live: bool
    """Whether a process uses or builds it now."""


@dataclass(frozen=True)
class Removal:
    """An item that gc removed, and why."""

    item: Item
    reason: str


def cache_items(root: Path) -> list[Item]:
    """Everything in the cache at `root`: entries, the longest unused first, then folders of builders."""
    entries = [_item(path, path.name) for path in (root / ENTRIES).glob("*")]
    leftovers = []
    for path in owned(root / BUILDING):
        parsed = owner_of(path.name)
        assert parsed is not None, "owned lists only such names"
        leftovers.append(_item(path, parsed[0]))
    return sorted(filter(None, entries), key=lambda item: (item.used, item.key)) + [item for item in leftovers if item is not None]


def collect_garbage(root: Path, *, now: float, older_than_days: float | None = None, max_bytes: int | None = None) -> list[Removal]:
    """Removes leftovers of dead processes, entries not used for `older_than_days`, and then the longest unused beyond `max_bytes`.

    Entries in use stay, whatever their age and size.
    """
    removals = [Removal(item, "left by a process that is gone") for item in cache_items(root) if item.path.parent.name == BUILDING]
    removals = [removal for removal in removals if not removal.item.is_live and remove_leftover(removal.item.path)]
    for path in owned(root / LEASES):
        if not is_alive(path):
            path.unlink(missing_ok=True)
    for path in owned(root / CANARIES):
        if not is_alive(path):
            retire_canary(path)
    _forget_hashes(root / HASHES, now=now, older_than_days=older_than_days)
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
        if reason is not None and remove_entry(item.path, lambda _, item=item: _is_unused(item)):
            removals.append(Removal(item, reason))
            num_bytes -= item.num_bytes
    return removals


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
    """Whether no lease exists now. A user takes a lease first and looks for the entry afterwards; gc looks for leases last."""
    # A network file system lists a folder anew for a process that has changed it.
    time_of_folder(item.path.parent.parent / LEASES)
    return not _is_leased(item.path, item.key)


def _is_leased(entry: Path, key: str) -> bool:
    return any(is_alive(lease) for lease in owned(entry.parent.parent / LEASES, key))


def _forget_hashes(folder: Path, *, now: float, older_than_days: float | None) -> None:
    for path in folder.glob("*"):
        # Another gc may be faster.
        with suppress(FileNotFoundError):
            if older_than_days is not None and now - path.stat().st_mtime > older_than_days * DAY_S:
                path.unlink()
