"""The process in which a reward function runs: `python -m mrl.envs.child MODULE:FUNCTION SOCKET_FD PARENT_PID MEMORY_BYTES`.

Small on purpose: no torch, ray or vllm, so that it starts in about a second and its death costs one verdict.
This contains faults (hangs, crashes, memory), it is no security boundary: files and network stay reachable.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable

from mrl.envs.messages import encode, take_message

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Answers `{"text", "expected"}` with `{"reward", "extracted"}` or `{"error"}` until the parent hangs up."""
    entry_point, socket_fd, parent_pid, memory_bytes = sys.argv[1:]
    contain(int(parent_pid), int(memory_bytes))
    # The parent reports what it cannot score; libraries that log each bad answer would drown that.
    logging.disable(logging.CRITICAL)
    module_name, _, function_name = entry_point.partition(":")
    score = getattr(importlib.import_module(module_name), function_name)
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


def serve(connection: socket.socket, score: Callable[[str, str], tuple[float, str]]) -> None:
    """Scores one request after another; returns when the other side closes."""
    buffer = bytearray()
    # No deadline: an idle child waits for work as long as its parent lives, and the kernel ends it with the parent.
    while data := connection.recv(1 << 16):
        buffer += data
        request = take_message(buffer)
        if request is not None:
            connection.sendall(answer(score, str(request["text"]), str(request["expected"])))


def answer(score: Callable[[str, str], tuple[float, str]], text: str, expected: str) -> bytes:
    """The encoded verdict, or the encoded reason why there is none: whatever the reward function raises ends here."""
    try:
        reward, extracted = score(text, expected)
        return encode({"reward": reward, "extracted": extracted})
    except MemoryError:
        return encode({"error": "out of memory"})
    except (Exception, SystemExit) as error:
        return encode({"error": f"{type(error).__name__}: {error}"[:500]})


if __name__ == "__main__":
    main()
