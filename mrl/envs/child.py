"""The process in which a reward function runs.

`python -m mrl.envs.child MODULE:FACTORY OPTIONS SOCKET_FD PARENT_PID MEMORY_BYTES ALLOWANCES`.

Small on purpose: no torch, ray or vllm, so that it starts in about a second and its death costs one verdict.
Once the function is loaded, the process keeps what ALLOWANCES (with commas between) names and what `confine_worker` leaves everybody.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import logging
import os
import resource
import signal
import socket
import sys
import tempfile
from contextlib import suppress
from typing import cast

from mrl.envs.confine import Allowance, Unconfined, confine_worker
from mrl.envs.messages import encode, take_message
from mrl.envs.task import RowFault, Score, Task

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Answers the fields of a `Task` with those of an `Outcome`, or with `{"error", "culprit"}`, until the parent hangs up."""
    entry_point, options, socket_fd, parent_pid, memory_bytes, allowances = sys.argv[1:]
    contain(int(parent_pid), int(memory_bytes))
    # The parent reports what it cannot score; libraries that log each bad answer would drown that.
    logging.disable(logging.CRITICAL)
    module_name, _, factory_name = entry_point.partition(":")
    score: Score = getattr(importlib.import_module(module_name), factory_name)(**json.loads(options))
    # After the function is loaded: imports probe their host, and models write caches. What the host cannot enforce the pool has told.
    with suppress(Unconfined):
        confine_worker(tempfile.gettempdir(), cast(list[Allowance], allowances.split(",")))
    with socket.socket(fileno=int(socket_fd)) as connection:
        connection.sendall(encode({"is_ready": True}))
        serve(connection, score)


def contain(parent_pid: int, memory_bytes: int) -> None:
    """Limits this process, and binds its life to the parent's."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the line above
        sys.exit("the parent is gone")
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def serve(connection: socket.socket, score: Score) -> None:
    """Scores one request after another; returns when the other side closes."""
    buffer = bytearray()
    # No deadline: an idle child waits for work as long as its parent lives, and the kernel ends it with the parent.
    while data := connection.recv(1 << 16):
        buffer += data
        request = take_message(buffer)
        if request is not None:
            connection.sendall(answer(score, request))


def answer(score: Score, request: dict[str, object]) -> bytes:
    """The encoded outcome, or the encoded reason why there is none: whatever the reward function raises ends here.

    Graders say that a row is at fault by `RowFault`, that the machine is by `OSError` or `RuntimeError`; all else came of the text.
    """
    try:
        turns = request["turns"]
        assert isinstance(turns, list)
        task = Task(tuple(turns), str(request["expected"]), str(request["prompt"]), str(request["row"]))
        return encode(score(task).as_message())
    except MemoryError:
        return encode({"error": "out of memory", "culprit": "text"})
    except (Exception, SystemExit) as error:
        # Not RecursionError, which is a RuntimeError too.
        is_machine = isinstance(error, OSError) or type(error) is RuntimeError
        culprit = "row" if isinstance(error, RowFault) else "machine" if is_machine else "text"
        return encode({"error": f"{type(error).__name__}: {error}"[:500], "culprit": culprit})


if __name__ == "__main__":
    main()
