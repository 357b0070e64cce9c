"""Files and folders that survive a crash and a race: written aside, synced, renamed. Also what a Hugging Face folder's files are called."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import stat
from pathlib import Path, PurePath

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

MAX_SMALL_BYTES = 256 << 20
"""Far more than the index of the largest model has."""

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
    with os.fdopen(open_file(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_file(path: Path) -> int:
    """A descriptor to read a regular file by, or one that a link leads to. A FIFO would block whoever opens it, and a device has no end.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is no file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = {stat.S_IFIFO: "a FIFO", stat.S_IFDIR: "a folder"}.get(stat.S_IFMT(mode), "a device")
        raise ValueError(f"{path} is {kind}, not a file; put the file there")
    os.set_blocking(descriptor, True)
    return descriptor


def read_file(path: Path, max_bytes: int = MAX_SMALL_BYTES) -> bytes:
    """The content of a regular file of at most `max_bytes`: an index, a config, a description of tensors.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no file, or a larger one.
    """
    with os.fdopen(open_file(path), "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"{path} has more than {max_bytes >> 20} MiB, and is read only up to that; put the right file there")
    return content


def read_json(path: Path) -> object:
    """The content of a JSON file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no file, or no JSON.
    """
    try:
        return json.loads(read_file(path))
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply to be read") from error


def check_files(folder: Path) -> None:
    """Returns if a folder holds only files, links to files, and folders. Libraries that read it would wait for a FIFO's writer.

    Raises:
        ValueError: names what is none of them.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path} is a FIFO or a device, not a file; remove it")


def name_inside(name: str, named_by: Path) -> str:
    """`name`, if it is one of a file in or below a folder. Links are followed, as those of snapshots of the Hub have to be.

    Raises:
        ValueError: it leads out of the folder; `named_by` is what says so.
    """
    path = PurePath(name)
    if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in name:
        raise ValueError(f"{named_by} names {name[:200]!r}, outside of its folder; it is not read")
    return name


def weights_by_file(hf: Path) -> dict[str, str]:
    """File of each tensor, as the index of a Hugging Face folder says; all of them lie in the folder.

    Raises:
        OSError: the index cannot be read.
        ValueError: it is no index, or names a file of another folder.
    """
    path = hf / INDEX_FILE
    index = read_json(path)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise ValueError(f"{path} has no weight_map, which says in which file each tensor is; download it again")
    for name, file in weight_map.items():
        # Links stay allowed: a snapshot of the Hub consists of them.
        if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\\" in file or "\0" in file:
            raise ValueError(
                f"{path} places {name[:200]} in {str(file)[:200]!r}, which is no file of this folder; it is not read. "
                "Name weight files without a path"
            )
    return weight_map


def weight_files(hf: Path) -> list[Path]:
    """The files that hold the weights of a Hugging Face folder, by name.

    Raises:
        ValueError: there is no readable index and no single file.
    """
    index = hf / INDEX_FILE
    if not index.exists() and (hf / SINGLE_FILE).exists():
        return [hf / SINGLE_FILE]
    try:
        return sorted({hf / name for name in weights_by_file(hf).values()})
    except (OSError, ValueError) as error:
        raise ValueError(f"{hf}: no readable {INDEX_FILE} or {SINGLE_FILE} ({error}); name a Hugging Face folder") from error
