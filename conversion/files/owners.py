# SPDX-License-Identifier: Apache-2.0
"""Ownership of files and folders that hosts share, encoded in their names; canaries show that hosts see one folder.

Takes no locks. On the owner's host its process decides whether the owner is alive. Elsewhere only time can tell: owners
touch what they own, and a file that nobody touched for long is abandoned. Standard library only.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HEARTBEAT_S = 10.0
# No suspended host, broken network or wrong clock lasts this long.
ABANDONED_S = 3600.0
REMOVED = ".removed"
"""Ends the name of a file or folder that is being removed."""
CANARIES = "canaries"
# Network file systems may show a new name late.
PATIENCE_S = 20.0
POLL_S = 0.05

logger = logging.getLogger(__name__)

_NAME = re.compile(
    r"(?P<what>.+)@(?P<host>[^@]*)\.(?P<boot>[0-9a-f]+)\.(?P<namespace>\d+)\.(?P<pid>\d+)\.(?P<start>\d+)\.[0-9a-f]+"
)


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, identified across all hosts and boots."""

    host: str
    """Host name, for people; it is not unique."""
    boot: str
    namespace: int
    """Namespace of process ids: containers of one host count their processes separately."""
    pid: int
    start: int
    """Start of the process in clock ticks since the boot; process ids are used again."""

    def is_visible(self) -> bool:
        """True if /proc of this process shows the owner's processes."""
        return (self.boot, self.namespace) == (_boot_id(), _pid_namespace())

    def is_running(self) -> bool:
        """True if the process exists. Only for visible owners."""
        return start_of(self.pid) == self.start


def this_process() -> Owner:
    """The calling process."""
    start = start_of(os.getpid())
    assert start is not None, "/proc shows the calling process"
    return Owner(socket.gethostname(), _boot_id(), _pid_namespace(), os.getpid(), start)


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", "").strip()


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def start_of(pid: int) -> int | None:
    """A process's start in clock ticks since the boot; None if it is gone, or only its exit code is left."""
    try:
        # The program's name, in parentheses, may contain any character.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def owned_name(what: str) -> str:
    """A file name that nobody else uses; `owner_of` reads `what` and the calling process from it."""
    owner = this_process()
    host = re.sub(r"[^A-Za-z0-9-]", "_", owner.host)[:40]
    return f"{what}@{host}.{owner.boot}.{owner.namespace}.{owner.pid}.{owner.start}.{secrets.token_hex(4)}"


def owner_of(name: str) -> tuple[str, Owner] | None:
    """The thing and the owner that `owned_name` put into a file name; None for other names."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return match["what"], Owner(
        match["host"], match["boot"], int(match["namespace"]), int(match["pid"]), int(match["start"])
    )


def owned(folder: Path, what: str | None = None) -> list[Path]:
    """Files and folders in `folder` that have an owner, sorted by name; only those of one thing if `what` names it."""
    found = [(path, owner_of(path.name)) for path in sorted(folder.glob("*@*"))]
    return [path for path, parsed in found if parsed is not None and what in (None, parsed[0])]


def is_alive(path: Path) -> bool:
    """True if the owner of `path`, named by `owned_name`, may still be using it."""
    parsed = owner_of(path.name)
    assert parsed is not None, f"{path} has a name of owned_name"
    return may_live(parsed[1], path)


def may_live(owner: Owner, path: Path) -> bool:
    """True if the owner of `path`, which it touches, may still work. If invisible, the time of `path` decides."""
    if owner.is_visible():
        return owner.is_running()
    try:
        touched = path.stat().st_mtime
    except FileNotFoundError:
        return False
    return time_of_folder(path.parent) - touched < ABANDONED_S


def removal_name(what: str) -> str:
    """`owned_name` of a thing that is being removed, which nobody takes over."""
    return owned_name(f"{what.removesuffix(REMOVED)}{REMOVED}")


def remove_leftover(path: Path) -> bool:
    """Removes `path`, which has a name of `owned_name`; False if another process has taken it over or removed it."""
    parsed = owner_of(path.name)
    assert parsed is not None, f"{path} has a name of owned_name"
    # Removing takes time, in which another process could take the folder over and build in it.
    aside = path.with_name(removal_name(parsed[0]))
    try:
        path.rename(aside)
    except FileNotFoundError:
        return False
    if aside.is_dir():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.unlink(missing_ok=True)
    return True


@contextmanager
def heartbeat(path: Path) -> Iterator[None]:
    """Touches `path` every `HEARTBEAT_S` in the `with` block, until it is renamed or removed."""
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(HEARTBEAT_S):
            try:
                os.utime(path)
            except FileNotFoundError:
                return
            except OSError as error:
                # A file server may be away for a while. An owner that stops beating counts as dead.
                logger.warning("%s cannot be touched: %s", path, error)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(HEARTBEAT_S)


def time_of_folder(folder: Path) -> float:
    """Current time by the clock that stamps the files of `folder`: a file server's clock may differ from ours."""
    probe = folder / owned_name("clock")
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink()


def release_canary(root: Path) -> Path:
    """Creates a file below `root` for other processes to find and answer; its path."""
    folder = root / CANARIES
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / owned_name("canary")
    path.write_text(path.name, encoding="utf-8")
    return path


def answer_canary(canary: Path, answer: str, *, patience_s: float = PATIENCE_S) -> bool:
    """True if this process finds the canary and can write an empty file named `answer` next to it."""
    if not _appears(canary, patience_s) or canary.read_text(encoding="utf-8") != canary.name:
        return False
    try:
        canary.with_name(f"{canary.name}-{answer}").touch()
    except OSError:
        return False
    return True


def is_answered(canary: Path, answer: str, *, patience_s: float = PATIENCE_S) -> bool:
    """True if another process's answer is visible here."""
    return _appears(canary.with_name(f"{canary.name}-{answer}"), patience_s)


def retire_canary(canary: Path) -> None:
    """Removes the canary and its answers."""
    for path in [*canary.parent.glob(f"{canary.name}-*"), canary]:
        path.unlink(missing_ok=True)


def _appears(path: Path, patience_s: float) -> bool:
    end = time.monotonic() + patience_s
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(POLL_S)
    return True
