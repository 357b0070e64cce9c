# SPDX-License-Identifier: Apache-2.0
"""The process in which a reward function runs.

`python -m mrl.envs.child MODULE:FACTORY OPTIONS SOCKET_FD PARENT_PID MEMORY_BYTES ALLOWANCES`.

It imports no torch, ray or vllm, so that it starts in about a second and its death costs one verdict.
Once the function is loaded, the process may only do what ALLOWANCES (comma-separated) names and what `confine_worker`
leaves to everybody.
"""

from __future__ import annotations

import importlib
import json
import logging
import resource
import socket
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import cast

from mrl.envs.confine import Allowance, Unconfined, confine_worker
from mrl.envs.sandbox import keep_modes
from mrl.envs.task import LENGTH_BYTES, RowFault, Score, Task, encode
from mrl.signals import die_with_parent, shield_process

MAX_FRAMES = 8
MAX_TRACE_CHARACTERS = 4000


def main() -> None:
    """Limits this process, loads the reward function, and answers tasks until the parent closes the socket."""
    entry_point, options, socket_fd, parent_pid, memory_bytes, allowances = sys.argv[1:]
    die_with_parent(int(parent_pid))
    shield_process(passes_on=False)
    resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), int(memory_bytes)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The parent reports what it cannot score; libraries that log each bad answer would drown that.
    logging.disable(logging.CRITICAL)
    module_name, _, factory_name = entry_point.partition(":")
    score: Score = getattr(importlib.import_module(module_name), factory_name)(**json.loads(options))
    # After the function is loaded: imports probe their host, and models write caches. The parent has warned if the host
    # cannot confine.
    allowed = cast(list[Allowance], allowances.split(","))
    with suppress(Unconfined):
        confine_worker(tempfile.gettempdir(), allowed)
    if not {"files", "processes"} & set(allowed):
        keep_modes(tempfile.gettempdir())
    with socket.socket(fileno=int(socket_fd)) as connection:
        connection.sendall(encode({"is_ready": True}))
        serve(connection, score)


def serve(connection: socket.socket, score: Score) -> None:
    """Scores one request after another: the fields of a `Task`, in order. Returns when the other side closes.

    An answer is the fields of the `Outcome`; or `{"error", "culprit", "trace"}` if the function raises, whatever it
    raises: a grader blames the row by `RowFault` and the machine by `OSError` or `RuntimeError`, and every other error
    is the text's.
    """
    # No deadline: an idle child waits for work as long as its parent lives, and the kernel ends it with the parent.
    with connection.makefile("rb") as requests:
        while length := requests.read(LENGTH_BYTES):
            turns, *others = json.loads(requests.read(int.from_bytes(length)))
            try:
                answer = encode(asdict(score(Task(tuple(turns), *others))))
            except MemoryError:
                answer = encode({"error": "out of memory", "culprit": "text"})
            except (Exception, SystemExit) as error:
                # Not RecursionError, which is a RuntimeError too.
                is_machine = isinstance(error, OSError) or type(error) is RuntimeError
                culprit = "row" if isinstance(error, RowFault) else "machine" if is_machine else "text"
                said, (place, trace) = f"{type(error).__name__}: {error}"[:500], traced(error)
                answer = encode({"error": f"{said}{place}", "culprit": culprit, "trace": trace})
            connection.sendall(answer)


def traced(error: BaseException) -> tuple[str, str]:
    """The innermost line of a foreign function at which it raised, as ` (FILE:LINE)`, and its frames; "" without any.

    Frames of libraries count only where there are no others: the line in one may differ from text to text.
    """
    mrl = str(Path(__file__).parents[1])
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith((mrl, "<frozen"))
    ]
    if not frames:
        return traced(error.__cause__) if error.__cause__ is not None else ("", "")
    own = own_frames(frames) or frames
    message = "".join(traceback.format_exception_only(error))[: MAX_TRACE_CHARACTERS // 2]
    shown = "".join(["Traceback:\n", *traceback.format_list(own[-MAX_FRAMES:])])[: MAX_TRACE_CHARACTERS // 2]
    return f" ({own[-1].filename}:{own[-1].lineno})", f"{shown}{message}".rstrip()


def own_frames(frames: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Frames in files that are neither Python's nor an installed library's."""
    libraries = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
    return [frame for frame in frames if not frame.filename.startswith((*libraries, "<"))]


if __name__ == "__main__":
    main()
