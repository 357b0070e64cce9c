"""`python -m mrl.convert cache list|gc`: what is in the cache of converted models, and removing from it."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from conversion.cache_gc import DAY_S, Item, cache_items, collect_garbage
from mrl import env

logger = logging.getLogger(__name__)

KEY_LENGTH = 12


def list_cache() -> None:
    """Logs one line for each entry, and for what is being built or was left behind.

    Raises:
        ValueError: the cache is switched off.
    """
    root = cache_folder()
    lines = [("key", "size", "unused for", "state", "dtype", "model")]
    items = cache_items(root)
    for item in items:
        entry = item.entry
        dtype, model = (entry.dtype or "as stored", entry.model) if entry else ("", "")
        lines.append((item.key[:KEY_LENGTH], _size(item.num_bytes), _age(time.time() - item.used), _state(item), dtype, model))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        logger.info("%s", "  ".join(field.ljust(width) for field, width in zip(line, widths, strict=True)).rstrip())
    logger.info("%s in %s", _size(sum(item.num_bytes for item in items)), root)


def clean_cache(*, older_than_days: float | None, max_bytes: int | None) -> None:
    """Removes what `conversion.cache_gc.collect_garbage` finds, and logs each removal.

    Raises:
        ValueError: the cache is switched off.
    """
    removals = collect_garbage(cache_folder(), now=time.time(), older_than_days=older_than_days, max_bytes=max_bytes)
    for removal in removals:
        model = removal.item.entry.model if removal.item.entry else ""
        logger.info("%s  %s  removed (%s)  %s", removal.item.key[:KEY_LENGTH], _size(removal.item.num_bytes), removal.reason, model)
    logger.info("%s removed", _size(sum(removal.item.num_bytes for removal in removals)))


def cache_folder() -> Path:
    """The folder of the cache.

    Raises:
        ValueError: the cache is switched off.
    """
    root = env.cache_root()
    if root is None:
        raise ValueError(f"{env.MRL_CACHE.name}=off: there is no cache to look at; unset it, or set it to the folder of the cache")
    return root


def _state(item: Item) -> str:
    if item.entry is not None:
        return "in use" if item.is_live else "complete"
    return "being built" if item.is_live else "leftover"


def _size(num_bytes: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes / 1e3:.1f} kB"


def _age(seconds: float) -> str:
    return f"{seconds / DAY_S:.1f} days" if seconds >= DAY_S else f"{max(seconds, 0) / 3600:.1f} hours"
