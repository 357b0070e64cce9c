"""The run's end of one logger process: starting it, handing it records without ever waiting, and hearing what became of them."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import mrl
from mrl.config.redact import redact_text
from mrl.store.loggers.child import MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)

# What loggers may take at the end of a run, together: long enough for one that is still waiting for its server to turn to files.
CLOSE_TIMEOUT_S = 60.0
KILL_TIMEOUT_S = 10.0


class LoggerProcess:
    """One logger. Whatever happens to it is a warning, once, and a number: `num_lost`."""

    def __init__(self, name: str, title: str, *, on_open: Callable[[str], None]) -> None:
        """Starts the process and returns at once. `on_open(run_id)` is called when the service has taken the run."""
        self.name, self.title = name, title
        self.num_lost = 0
        self._num_unanswered = 0
        self._on_open = on_open
        self._is_alive = True
        self._has_warned = False
        # The sampler of the hosts has a thread of its own.
        self._lock = threading.Lock()
        # Packets: a record goes whole or not at all, so a full socket costs a record and no time.
        self._socket, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_MESSAGE_BYTES)
        self._socket.setblocking(False)
        # -P: no module of the working directory is taken for a library. A session of its own: Ctrl-C ends the run, then the run ends this.
        sources = str(Path(mrl.__file__).parents[1])
        with child_socket:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "mrl.store.loggers.child", name, str(child_socket.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[child_socket.fileno()],
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [sources, os.environ.get("PYTHONPATH")]))},
            )

    def send(self, record: Mapping[str, object]) -> None:
        """Hands over one record, or counts it as lost."""
        with self._lock:
            self._read_replies()
            if not self._is_alive:
                self._lose("its process has ended")
                return
            try:
                self._socket.send(json.dumps(record, ensure_ascii=False).encode(errors="replace"))
                self._num_unanswered += 1
            except BlockingIOError:
                self._lose("it does not keep up")
            except OSError as error:
                self._lose(f"a record could not be handed over ({error})")

    def hang_up(self) -> None:
        """Says that nothing more comes; the process then sends what it has, and ends."""
        with self._lock:
            if self._is_alive:
                self._socket.shutdown(socket.SHUT_WR)

    def wait(self, deadline: float) -> None:
        """Waits until the process has ended, and ends it at `deadline` (monotonic). Says what was lost."""
        try:
            code = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = -signal.SIGALRM
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(KILL_TIMEOUT_S)
        self._read_replies()
        self.num_lost += self._num_unanswered
        self._socket.close()
        if code == -signal.SIGALRM:
            self._warn("a call of its library took too long")
        elif code:
            self._warn(f"its process ended with code {code}")
        if self.num_lost:
            logger.warning("%s lacks %d records; metrics.jsonl has every step", self.title, self.num_lost)

    def _read_replies(self) -> None:
        while self._is_alive:
            try:
                data = self._socket.recv(MAX_MESSAGE_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data = b""
            if not data:
                self._is_alive = False
                return
            self._take_reply(json.loads(data))

    def _take_reply(self, reply: Mapping[str, object]) -> None:
        self._num_unanswered -= "is_last" not in reply
        if "run_id" in reply:
            self._on_open(str(reply["run_id"]))
            logger.info("%s: %s", self.title, redact_text(str(reply["place"])))
        if "is_lost" in reply:
            self.num_lost += 1
        if "error" in reply:
            self._warn(str(reply["error"]))

    def _lose(self, reason: str) -> None:
        self.num_lost += 1
        self._warn(reason)

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s fails, and the run goes on without it: %s. Said once; what is lost is counted.", self.title, redact_text(reason)
            )


def close_all(processes: Sequence[LoggerProcess]) -> None:
    """Ends all loggers, together within the time that one may take."""
    for process in processes:
        process.hang_up()
    deadline = time.monotonic() + CLOSE_TIMEOUT_S
    for process in processes:
        process.wait(deadline)
