# SPDX-License-Identifier: Apache-2.0
"""A grader that fails on command, in every way a text, a row or a machine can make it. Runs in a child process."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import time
from pathlib import Path

from mrl.envs.task import Outcome, RowFault, Score, Task

_turn = itertools.count(1)


def make() -> Score:
    """The grader."""
    return score


def score(task: Task) -> Outcome:
    """1, and the number of the task among those of this child; or the fault that the first word of the text names."""
    fault, _, argument = task.text.partition(" ")
    match fault:
        case "spin":
            while True:
                pass
        case "hang":
            time.sleep(6000)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(7)
        case "exit-once" if not Path(argument).exists():
            Path(argument).touch()
            os._exit(7)
        case "recursion":
            return score(task)
        case "overflow":
            return Outcome(float(10**400))
        case "memory":
            return Outcome(float(len(bytearray(64 << 30))))
        case "value":
            return Outcome(float(int("9" * 5000)))
        case "row":
            raise RowFault("no text is right")
        case "disk":
            raise OSError(errno.ENOSPC, "no space left")
        case "host":
            raise RuntimeError("this host cannot confine a program")
    return Outcome(1.0, extracted=str(next(_turn)))
