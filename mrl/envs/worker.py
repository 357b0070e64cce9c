"""The parent's end of one reward child: starting, asking, reading and killing it. Which task it gets is the pool's business."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import mrl
from mrl.envs.confine import Allowance
from mrl.envs.messages import encode, take_message
from mrl.envs.scratch import Scratch
from mrl.envs.task import Task

logger = logging.getLogger(__name__)

KILL_TIMEOUT_S = 10.0
"""A killed process is gone at once, unless the kernel holds it (a dead network file system)."""


@dataclass(frozen=True)
class RewardFunction:
    """Where a child finds its reward function."""

    factory: str
    """`MODULE:NAME` of what gives back a `Score`."""
    options: Mapping[str, object] = field(default_factory=dict)
    """The factory's arguments, as JSON knows them."""
    search_path: tuple[str, ...] = ()
    """Folders from which a user's own modules may be imported."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the child beside those that every child has."""
    allowances: tuple[Allowance, ...] = ()
    """What the child may do beyond computing and reading."""
    blames_text: bool = False
    """Whether it is written to judge any text at all, so that the text is at fault where it fails: reward 0, no mask. Users' own functions
    may fail by a mistake of theirs, or because a server that they ask does not answer."""

    def __str__(self) -> str:
        return str(self.options.get("function", self.factory))


class WorkerDied(Exception):
    """The child closed its end or speaks no sense; it can only be replaced."""


class Worker:
    """One child process."""

    def __init__(self, function: RewardFunction, *, memory_bytes: int, start_timeout_s: float) -> None:
        """Starts the child and returns at once; its first message says that it is ready."""
        self.task: Task | None = None
        self.is_ready = False
        self.deadline = time.monotonic() + start_timeout_s
        self._buffer = bytearray()
        self._scratch = Scratch()
        self._cpu_s_before = 0.0
        self._socket, child_socket = socket.socketpair()
        # A new interpreter, never a fork: the parent holds torch, Ray and threads. -P: no module of the working directory is picked up.
        # An environment of our own: no secret of the parent reaches code that judges model output.
        with child_socket:
            options = json.dumps(dict(function.options))
            numbers = [str(child_socket.fileno()), str(os.getpid()), str(memory_bytes)]
            arguments = [function.factory, options, *numbers, ",".join(function.allowances)]
            search_path = os.pathsep.join([str(Path(mrl.__file__).parents[1]), *function.search_path])
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "mrl.envs.child", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[child_socket.fileno()],
                start_new_session=True,
                cwd="/",
                env={
                    "PYTHONPATH": search_path,
                    "PYTHONHASHSEED": "0",
                    "PYTHONUTF8": "1",
                    "TMPDIR": str(self._scratch.path),
                    **function.variables,
                },
            )

    def fileno(self) -> int:
        """File descriptor that becomes readable when the child answers or dies."""
        return self._socket.fileno()

    @property
    def is_idle(self) -> bool:
        """Ready, and without a task."""
        return self.is_ready and self.task is None

    def ask(self, task: Task, timeout_s: float) -> None:
        """Gives the child a task to score within `timeout_s`.

        Raises:
            WorkerDied: the child does not take it.
            ValueError: the task is too long to be sent.
        """
        message = encode(dataclasses.asdict(task))
        self.task = task
        self._cpu_s_before = self._total_cpu_s()
        self.deadline = time.monotonic() + timeout_s
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(message)
        except OSError as error:
            raise WorkerDied(f"it does not read: {error}") from error

    def cpu_s(self) -> float:
        """CPU seconds that the child itself has spent since it was asked."""
        return self._total_cpu_s() - self._cpu_s_before

    def _total_cpu_s(self) -> float:
        # Of a child that ended the kernel keeps the line until it is waited for, in `kill`.
        fields = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def read(self) -> dict[str, object] | None:
        """The child's next message, or None while it is incomplete. Call when readable.

        Raises:
            WorkerDied: end of file, or bytes that are no message.
        """
        try:
            data = self._socket.recv(1 << 16)
            self._buffer += data
            message = take_message(self._buffer)
        except (OSError, ValueError, RecursionError) as error:
            raise WorkerDied(str(error)) from error
        if not data:
            raise WorkerDied("it ended")
        return message

    def kill(self) -> int | None:
        """Kills the child and what it started in its session, and returns the exit code (negative: a signal)."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            logger.debug("reward child %d was gone already", self._process.pid)
        self._socket.close()
        try:
            return self._process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning("reward child %d does not die within %.0f s; it is left behind", self._process.pid, KILL_TIMEOUT_S)
            return None
        finally:
            self._scratch.remove()
