"""Files and folders that survive a crash and a race: written aside, synced, renamed. Also what a Hugging Face folder's files are called."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
from pathlib import Path

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# A file system that does not answer for this long will not.
IO_TIMEOUT_S = 3600.0


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


def sync_tree(folder: Path) -> None:
    """Forces all files and folders below `folder`, and itself, to disk."""
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        else:
            sync_file(path)
    sync_folder(folder)


def write_atomic(path: Path, text: str) -> None:
    """Replaces `path` by `text` so that a reader sees the old or the new content, never a part."""
    # Not the process id: on a shared file system several hosts may write the same file.
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    aside.write_text(text, encoding="utf-8")
    sync_file(aside)
    aside.rename(path)
    sync_folder(path.parent)


def publish(aside: Path, final: Path) -> bool:
    """Renames the folder `aside` to `final`: whole or not at all. False if somebody else's `final` is already there; `aside` then stays.

    Of several processes that publish one folder exactly one gets True, on network file systems too: rename(2) decides, no lock is taken.
    """
    folder = aside.stat()
    try:
        aside.rename(final)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            return False
        # A file server that is asked again, because its answer got lost, does not find what it has renamed.
        if error.errno != errno.ENOENT or not final.exists() or not os.path.samestat(folder, final.stat()):
            raise
    sync_folder(final.parent)
    return True


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weight_files(hf: Path) -> list[Path]:
    """The files that hold the weights of a Hugging Face folder, by name.

    Raises:
        ValueError: there is no readable index and no single file.
    """
    index = hf / INDEX_FILE
    if not index.exists() and (hf / SINGLE_FILE).exists():
        return [hf / SINGLE_FILE]
    try:
        return sorted({hf / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{hf}: no readable {INDEX_FILE} or {SINGLE_FILE} ({error}); name a Hugging Face folder") from error
