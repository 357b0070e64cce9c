"""Files that survive a crash: written aside, synced, renamed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def sync_file(path: Path) -> None:
    """Forces a file's content to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Forces a folder's entries (names, renames) to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, text: str) -> None:
    """Replaces `path` by `text` so that a reader sees the old or the new content, never a part."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    sync_file(aside)
    aside.rename(path)
    sync_folder(path.parent)


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
