# SPDX-License-Identifier: Apache-2.0
"""Errors that say that a process finds no memory or may start no thread, and an end for processes that hide one."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from types import FrameType

logger = logging.getLogger(__name__)

# The texts of Python, the C library, its loader, C++ and torch.
_SHORTAGE = re.compile(
    r"\bMemoryError|can't start new thread|[Cc]annot allocate memory|can't allocate memory|failed to map segment|"
    r"std::bad_alloc|\[Errno 12\]"
)
WAY_OUT = (
    "no memory is left, or no thread may start: raise ulimit -v and -u or the memory of the job, or end what else runs "
    "here"
)
_SIGNAL = signal.SIGRTMIN + 6
ANSWER_S = 5.0
"""For the main thread's error to reach whoever waits for it."""


def is_shortage(error: BaseException | str) -> bool:
    """True for an error, of Python or of a library, that says that no memory is left or no thread can start."""
    return _SHORTAGE.search(f"{type(error).__name__}: {error}") is not None


def end_on_shortage(end: Callable[[str], object]) -> None:
    """Calls `end` with the reason, in a thread made now, once an error that nobody takes says that memory is short.

    Such errors end threads in silence. CPython's `Thread.start` waits for its thread's first line, and for ever if
    that finds no memory (https://github.com/python/cpython/issues/140746). Other errors are printed as before.
    """
    unheard: SimpleQueue[sys.UnraisableHookArgs | threading.ExceptHookArgs] = SimpleQueue()
    # A function of C, as a thread without memory for a Python frame can call no other.
    sys.unraisablehook = threading.excepthook = unheard.put

    def listen() -> None:
        # No deadline: an idle daemon thread.
        for found in iter(unheard.get, None):
            error = found.exc_value or found.exc_type()
            if is_shortage(error):
                end(f"{type(error).__name__} in a thread: {WAY_OUT}")
            elif isinstance(found, threading.ExceptHookArgs):
                threading.__excepthook__(found)
            else:
                sys.__unraisablehook__(found)

    threading.Thread(target=listen, name="memory", daemon=True).start()


def end_process_on_shortage() -> None:
    """Ends this process once a thread finds no memory, with a MemoryError in the main thread, which made it or waits.

    Call in the main thread.
    """

    reasons = list[str]()
    main = threading.main_thread().ident or 0

    def raise_it(_: int, __: FrameType | None) -> None:
        raise MemoryError(*reasons)

    def end(reason: str) -> None:
        reasons.append(reason)
        signal.pthread_kill(main, _SIGNAL)
        try:
            logger.error("This process ends: %s", reason)
            time.sleep(ANSWER_S)
        finally:
            os._exit(1)

    signal.signal(_SIGNAL, raise_it)
    end_on_shortage(end)
