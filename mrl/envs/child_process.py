# SPDX-License-Identifier: Apache-2.0
"""A child process that judges rollouts for a pool, one after the other: asked, read and killed by its parent."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import mrl
from mrl.envs import spawn
from mrl.envs.scratch import Scratch
from mrl.envs.task import LENGTH_BYTES, MAX_MESSAGE_BYTES, Environment

logger = logging.getLogger(__name__)
# Parsing with sympy stays under 300 MiB; what needs more than this is a bomb.
MEMORY_BYTES = 2 << 30
START_TIMEOUT_S = 60.0
# A killed process is gone at once, unless the kernel holds it (a dead network file system).
KILL_TIMEOUT_S = 10.0


class ChildDied(Exception):
    """The child closed its end or sends no valid message; it can only be replaced."""


class Child:
    """A process that judges one task after another, and the parent's end of the socket to it."""

    def __init__(self, environment: Environment, memory_bytes: int) -> None:
        """Starts the process and returns at once; its first message says that it is ready."""
        self.is_ready = False
        self._scratch = Scratch()
        self._socket, child_socket = socket.socketpair()
        self._socket.setblocking(False)
        # A new interpreter, never a fork: the parent holds torch, Ray and threads. -P: no module of the working
        # directory is picked up. An environment of our own: no secret of the parent reaches code that judges model
        # output.
        with child_socket:
            numbers = [str(child_socket.fileno()), str(os.getpid()), str(memory_bytes)]
            arguments = [
                environment.factory,
                json.dumps(dict(environment.options)),
                *numbers,
                ",".join(environment.allowances),
            ]
            variables = {
                "PYTHONPATH": os.pathsep.join([str(Path(mrl.__file__).parents[1]), *environment.search_path]),
                "PYTHONHASHSEED": "0",
                "PYTHONUTF8": "1",
                "PYTHONUNBUFFERED": "1",
                "TMPDIR": str(self._scratch.path),
                **environment.variables,
            }
            self._process = spawn.start(
                lambda: subprocess.Popen(
                    [sys.executable, "-P", "-m", "mrl.envs.child", *arguments],
                    stdin=subprocess.DEVNULL,
                    # The user's own function prints into the log of this process.
                    stdout=subprocess.DEVNULL if environment.blames_text else 2,
                    pass_fds=[child_socket.fileno()],
                    start_new_session=True,
                    cwd="/",
                    env=variables,
                )
            )

    def is_silent(self) -> bool:
        """True if the child lives and has sent nothing since its last answer."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except OSError as error:
            return isinstance(error, BlockingIOError)
        return False

    async def ask(self, message: bytes) -> dict[str, object]:
        """The child's answer; ChildDied if it ended, or answers with something else than a message."""
        try:
            await asyncio.get_running_loop().sock_sendall(self._socket, message)
        except OSError as error:
            raise ChildDied(f"it does not read: {error}") from error
        return await self.read()

    async def read(self) -> dict[str, object]:
        """The child's next message; ChildDied if it ended, or what it sent is no message."""
        try:
            length = int.from_bytes(await self._receive(LENGTH_BYTES))
            if length > MAX_MESSAGE_BYTES:
                raise ChildDied(f"a message of {length} bytes is longer than {MAX_MESSAGE_BYTES}")
            message = json.loads(await self._receive(length))
        except (OSError, ValueError, RecursionError) as error:
            raise ChildDied(str(error)) from error
        if not isinstance(message, dict):
            raise ChildDied(f"its message is a {type(message).__name__}, not an object")
        return message

    async def _receive(self, num_bytes: int) -> bytearray:
        data = bytearray()
        while len(data) < num_bytes:
            part = await asyncio.get_running_loop().sock_recv(self._socket, min(num_bytes - len(data), 1 << 16))
            if not part:
                raise ChildDied("it ended")
            data += part
        return data

    def cpu_s(self) -> float:
        """CPU seconds of the child itself since its start. The kernel keeps a dead one's until `kill` waits for it."""
        fields = (
            Path(f"/proc/{self._process.pid}/stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()
        )
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> int | None:
        """Kills the child and its session, and returns the exit code (negative: a signal)."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            logger.debug("reward child %d was gone already", self._process.pid)
        self._socket.close()
        try:
            return self._process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning(
                "reward child %d does not die within %.0f s; it is left behind", self._process.pid, KILL_TIMEOUT_S
            )
            return None
        finally:
            self._scratch.remove()
