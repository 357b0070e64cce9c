# SPDX-License-Identifier: Apache-2.0
"""Limits for calls that have none: of a file system, of a library that waits for another process, or of a console."""

from __future__ import annotations

import io
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import ParamSpec, TextIO, TypeVar

# A console that is blocked for so long has no reader, or lies on a file system that hangs.
CONSOLE_TIMEOUT_S = 5.0
MAX_WAITING = 10_000

P = ParamSpec("P")
T = TypeVar("T")

_late: set[Future] = set()


def is_waiting() -> bool:
    """True if an abandoned call is still running, perhaps for ever: the process should then end without it."""
    return not all(answer.done() for answer in _late)


def deferred(call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> tuple[Future[T], Callable[[], None]]:
    """A call for another thread to make, by the function, and what it returns or raises, once it has."""
    answer: Future[T] = Future()
    # A frame of the traceback that held the answer would keep all that the call had until Python looks for garbage.
    unanswered = [answer]

    def make_call() -> None:
        try:
            result = call(*arguments, **options)
        except BaseException as error:  # noqa: BLE001  whoever waits raises it
            unanswered.pop().set_exception(error)
        else:
            unanswered.pop().set_result(result)

    return answer, make_call


class LimitedThread:
    """A thread that makes calls one by one. After one that does not return, all others run into their limits."""

    def __init__(self, name: str) -> None:
        self._calls = SimpleQueue[Callable[[], None] | None]()
        self._late: Future | None = None
        threading.Thread(target=self._work, name=f"within {name}", daemon=True).start()

    def begin(self, call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> Future[T]:
        """Makes a call after all earlier ones; what it returns, or raises, once it has."""
        answer, make_call = deferred(call, *arguments, **options)
        self._calls.put(make_call)
        return answer

    def within(self, limit_s: float, what: str, call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Returns `call(*arguments, **options)`, or raises what it raises; TimeoutError: no answer within `limit_s`."""
        return self.take(self.begin(call, *arguments, **options), limit_s, what)

    def take(self, answer: Future[T], limit_s: float, what: str) -> T:
        """Result of a call that `begin` has made, as `within` gives it."""
        try:
            return answer.result(limit_s)
        except TimeoutError:
            if answer.done():
                raise
            _late.add(answer)
            self._late = answer
            raise TimeoutError(f"{what}: no answer within {limit_s:g} s") from None

    @property
    def is_held(self) -> bool:
        """True while an abandoned call runs, or waits for one that does."""
        return self._late is not None and not self._late.done()

    def end(self) -> None:
        """Ends the thread after the calls so far."""
        self._calls.put(None)

    def _work(self) -> None:
        # No deadline: an idle thread costs nothing, and ends with the process.
        for make_call in iter(self._calls.get, None):
            make_call()
            del make_call  # with what it got and gave


def within(limit_s: float, what: str, call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Runs one call in a thread of its own under a limit; see `LimitedThread.within`."""
    thread = LimitedThread(what)
    try:
        return thread.within(limit_s, what, call, *arguments, **options)
    finally:
        thread.end()


class LimitedOutput(io.RawIOBase):
    """The writes to a console, made by a thread. One that takes nothing costs a writer `CONSOLE_TIMEOUT_S` once.

    What follows waits in order until it takes something again; what is too much then, or finds a full disk or no
    reader, is lost and counted.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._pid, self.name = descriptor, os.getpid(), "console"
        self._thread = LimitedThread("console")
        self._waiting = deque[bytes]()
        self._lock = threading.Lock()
        self._num_lost = 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        text = bytes(data)
        if os.getpid() != self._pid:  # a fork lacks the thread
            return os.write(self._descriptor, text)
        with self._lock:
            is_first, has_room = not self._waiting, len(self._waiting) < MAX_WAITING
            if has_room:
                self._waiting.append(text)
            self._num_lost += not has_room
        if is_first:
            self.settle()
        return len(text)

    def settle(self) -> bool:
        """Waits up to the limit until the console took all output; True if it has, and nothing is lost unreported."""
        try:
            self._thread.within(CONSOLE_TIMEOUT_S, "console", self._write_waiting)
        except TimeoutError:
            return False
        return not self._num_lost

    def _write_waiting(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    break
                text = self._waiting[0]
            is_taken = self._write_all(text)
            with self._lock:
                self._waiting.popleft()
                self._num_lost += not is_taken
        if self._num_lost and self._write_all(
            f"\n[{self._num_lost} lines of output are lost: nothing took them]\n".encode()
        ):
            self._num_lost = 0

    def _write_all(self, text: bytes) -> bool:
        """Waits, however long, until the console has taken the whole text, and tells whether it has."""
        while text:
            try:
                text = text[os.write(self._descriptor, text) :]
            except BlockingIOError:  # whoever shares it may have made it so
                select.select([], [self._descriptor], [], CONSOLE_TIMEOUT_S)
            except OSError:
                return False
        return True


_consoles: list[tuple[str, TextIO, LimitedOutput]] = []


def limit_console() -> None:
    """Limits how long a print may block this process, and keeps it from ending it. Call `settle_console` at the end."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except (
            OSError
        ):  # closed by who started this process: a file of the run would get the number, and what libraries print
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w", encoding="utf-8")
        output = LimitedOutput(stream.fileno())
        setattr(sys, name, io.TextIOWrapper(output, stream.encoding, stream.errors, line_buffering=True))
        _consoles.append((name, stream, output))


def flush_console() -> bool:
    """Waits, up to the limit, until the console has taken what all threads have printed; True if it has."""
    sys.stdout.flush()
    sys.stderr.flush()
    return all([output.settle() for _, _, output in _consoles])


def settle_console() -> bool:
    """Gives Python its streams back once the console has taken all output; False if it has not, and they would hang."""
    is_settled = flush_console()
    while is_settled and _consoles:
        name, stream, _ = _consoles.pop()
        setattr(sys, name, stream)
    return is_settled
