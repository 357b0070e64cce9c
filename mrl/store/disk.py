# SPDX-License-Identifier: Apache-2.0
"""The way out of an error of a disk, by its number: one table for all that a run writes."""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from mrl.shortage import WAY_OUT, is_shortage

_NUMBER = re.compile(r"\[Errno (\d+)\]")
ELSEWHERE = "or choose another folder"
_FEW_INODES, _MANY_BYTES = 8, 1 << 20


def _full(folder: Path) -> str:
    with suppress(OSError):
        while not folder.exists():
            folder = folder.parent
        found = os.statvfs(folder)
        # A failed writer has removed what it began, and with it freed some.
        has_bytes = found.f_bavail * found.f_frsize > _MANY_BYTES
        if found.f_files and found.f_favail < _FEW_INODES and has_bytes:
            left = f"{found.f_favail} of {found.f_files:,} inodes of that disk are free, and each file takes one"
            return f"{left}: remove files there, {ELSEWHERE}"
    return f"free space there, {ELSEWHERE}"


def _refused(path: Path) -> str:
    return f"let this user (id {os.getuid()}) read and write {path} and what is in it, {ELSEWHERE}"


def _too_large(_: Path) -> str:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit == resource.RLIM_INFINITY:
        return f"the file system there takes no file of that size: {ELSEWHERE[3:]}"
    return f"ulimit -f allows files of {limit // 1024:,} KiB: raise it, or fsize in /etc/security/limits.conf"


_WAYS_OUT: Mapping[int, Callable[[Path], str]] = {
    errno.ENOSPC: _full,
    errno.EFBIG: _too_large,
    errno.EDQUOT: lambda _: f"the quota there is used up: remove files, ask for more, {ELSEWHERE}",
    errno.EROFS: lambda _: (
        "it is mounted read-only, as the kernel does after an error of a disk (dmesg names it): have it mended and "
        f"mounted again, {ELSEWHERE}"
    ),
    errno.EACCES: _refused,
    errno.EPERM: _refused,
    errno.EIO: lambda _: f"its disk or file server fails (dmesg names it): have it mended, {ELSEWHERE}",
    errno.ESTALE: lambda _: f"its file server has lost it: have it mounted again, {ELSEWHERE}",
    errno.ENOMEM: lambda _: WAY_OUT,
    errno.EMFILE: lambda _: "this process has too many files open: raise ulimit -n",
    errno.ENAMETOOLONG: lambda _: "choose a folder with a shorter path",
}


def way_out(error: Exception | str, folder: Path) -> str:
    """Advice on an error of the disk of `folder`, by its number (`[Errno N]` in a rank's text), or of no memory; or "".

    An error that names a path elsewhere is one of that path.
    """
    number = error.errno if isinstance(error, OSError) and error.errno else None
    if number is None and (found := _NUMBER.search(str(error))) is not None:
        number = int(found[1])
    if number is None and is_shortage(error):
        return WAY_OUT
    named = Path(error.filename) if isinstance(error, OSError) and isinstance(error.filename, str) else folder
    place = folder if named.is_relative_to(folder) else named
    return _WAYS_OUT[number](place) if number is not None and number in _WAYS_OUT else ""
