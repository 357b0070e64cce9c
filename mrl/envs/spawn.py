# SPDX-License-Identifier: Apache-2.0
"""Starts processes where hostile programs run beside each other."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

# A program's threads are counted every `code.LOOK_S`, and it dies when it has too many; a busy machine looks late.
MAX_WAIT_S = 5.0
RETRY_S = 0.02


def start(popen: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """`popen()`, again and again while the user's or the container's limit of processes is reached, for MAX_WAIT_S.

    The threads of one hostile program may fill that limit until the program is killed, and cost no other program its verdict.
    A BlockingIOError says that the limit stays reached.
    """
    end = time.monotonic() + MAX_WAIT_S
    while True:
        try:
            return popen()
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(RETRY_S)
