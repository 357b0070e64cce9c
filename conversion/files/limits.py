# SPDX-License-Identifier: Apache-2.0
"""Limits for calls that have none of their own: of a file system, or of a library that waits for another process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_late: set[Future] = set()
"""Answers of abandoned calls."""


def is_waiting() -> bool:
    """Tells whether an abandoned call is still running, perhaps for ever: the process should then end without it."""
    return not all(answer.done() for answer in _late)


class LimitedThread:
    """A thread that makes calls, one after another. After one that does not return, all others run into their limits."""

    def __init__(self, name: str) -> None:
        self._calls = SimpleQueue[Callable[[], None] | None]()
        threading.Thread(target=self._work, name=f"within {name}", daemon=True).start()

    def within(self, limit_s: float, what: str, call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Returns `call(*arguments, **options)`, or raises what it raises; TimeoutError: no answer within `limit_s`."""
        answer: Future[T] = Future()

        def make_call() -> None:
            try:
                answer.set_result(call(*arguments, **options))
            except BaseException as error:  # noqa: BLE001  whoever waits raises it
                answer.set_exception(error)

        self._calls.put(make_call)
        try:
            return answer.result(limit_s)
        except TimeoutError:
            if answer.done():
                raise
            _late.add(answer)
            raise TimeoutError(f"{what}: no answer within {limit_s:g} s") from None

    def end(self) -> None:
        """Ends the thread after the calls so far."""
        self._calls.put(None)

    def _work(self) -> None:
        # No deadline: an idle thread costs nothing, and ends with the process.
        for make_call in iter(self._calls.get, None):
            make_call()


def within(limit_s: float, what: str, call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Does the same as `LimitedThread.within`, in a thread for this call alone."""
    thread = LimitedThread(what)
    try:
        return thread.within(limit_s, what, call, *arguments, **options)
    finally:
        thread.end()
