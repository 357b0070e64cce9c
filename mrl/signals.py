# SPDX-License-Identifier: Apache-2.0
"""Signals that ask a run to end. Every process of a run blocks them, and one thread of the driver takes them.

So a signal to a terminal's process group, or to every process of a job, ends none of them, and no library's handler
ever runs. The driver takes its signals whatever its main thread waits for. Standard library only, so that this comes
before all other imports.

`python -I signals.py REAPER CODE` is what is left of a driver that ends at once: it waits for the reaper of its
processes.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals of schedulers before a time limit or a preemption, and of terminals at Ctrl-C and when they close."""
ENDED_EARLY = 75
"""Exit code: EX_TEMPFAIL of sysexits.h, by which launchers know that the job is to be queued again."""
ENDED_AT_ONCE = 128 + signal.SIGINT
"""Exit code after a second Ctrl-C, as shells have it."""
MARK = "MRL_RUN_FOLDER"
"""Environment variable that all processes of a run inherit from its driver; the reaper kills whoever has it."""
# `timeout` sends its signal twice, to the process and to its group.
BURST_S = 0.1
# A file system that hangs must not keep a process that is to end at once.
CLEANUP_S = 10.0
REAPER_TIMEOUT_S = 30.0
PR_SET_PDEATHSIG = 1


class Listener:
    """Takes the stop signals of this process.

    Until `hold`, and at a second Ctrl-C, the process ends at once, as nothing would be lost: `cleanups` run, and its
    children are killed.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        """The signal that asked the run to save a checkpoint and end; None: none has."""
        self.is_listening = False
        self.cleanups: list[Callable[[], object]] = []
        self.left = (ENDED_EARLY, "")
        """Exit code and reason while `cleanups` run."""
        self.reaper_pid: int | None = None
        """The child that kills this process's other children once it has closed its pipe."""
        self._ending = ""
        # A handler may come while the main thread holds it.
        self._lock = threading.RLock()
        self._taken: tuple[float, int] = (0.0, 0)
        self._handlers: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}
        self._mask: set[int] = set()
        self._has_thread = False

    def listen(self) -> None:
        """Takes signals from now on, in a thread. Call it in the main thread, best before any other starts.

        Ctrl-C or a hang-up that is ignored stays so.
        """
        ignored = {number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_IGN}
        self._handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        self._mask = set(signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS))
        awaited = set(STOP_SIGNALS) - ignored
        self.is_listening = True
        for number in awaited:
            # Threads of libraries that were there before do not block it. What the kernel gives to one of them comes
            # here.
            signal.signal(number, lambda found, _: self.take(signal.Signals(found), 0))
        if not self._has_thread:
            self._has_thread = True
            threading.Thread(target=self._listen, args=(awaited,), name="signals", daemon=True).start()

    def stop(self) -> None:
        """Gives signals back to whoever had them before `listen`: a notebook goes on after its run. In the main thread.

        The thread of `listen` stays; the kernel prefers the main thread, which blocks them no more.
        """
        self.is_listening = False
        for number, handler in self._handlers.items():
            if handler is not None:  # one that Python has not set
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def hold(self, ending: str) -> None:
        """Leaves the next signal to the run, which sees it in `first`; `ending` describes its reaction."""
        with self._lock:
            self._ending = ending

    def let_go(self) -> None:
        """Lets a signal end the process again, as the run has ended."""
        with self._lock:
            self._ending, self.first = "", None

    def take(self, number: signal.Signals, sender: int) -> None:
        """Acts on a signal from process `sender`; 0: from the kernel, as at Ctrl-C."""
        with self._lock:
            last, self._taken = self._taken, (time.monotonic(), sender)
            if not self._ending:
                self._leave(f"{number.name}: ended at once, as there is nothing to save", ENDED_EARLY)
            if self.first is None:
                self.first = number
                again = "; a second Ctrl-C ends it at once" if number is signal.SIGINT else ""
                logger.info("%s: %s%s", number.name, self._ending, again)
            elif number is signal.SIGINT and not (
                sender and sender == last[1] and time.monotonic() - last[0] < BURST_S
            ):
                self._leave(
                    "a second Ctrl-C: the run ends at once, without the steps since its newest checkpoint",
                    ENDED_AT_ONCE,
                )

    def _listen(self, awaited: set[signal.Signals]) -> None:
        # No deadline: a daemon thread, and the kernel ends the wait with the process.
        while True:
            found = signal.sigwaitinfo(awaited)
            self.take(signal.Signals(found.si_signo), found.si_pid)

    def _leave(self, reason: str, code: int) -> NoReturn:
        self.left = code, reason

        def clean_up() -> None:
            logger.warning("%s; the same command goes on", reason)
            for cleanup in reversed(self.cleanups):
                cleanup()

        thread = threading.Thread(target=clean_up, daemon=True)
        thread.start()
        thread.join(CLEANUP_S)
        if self.reaper_pid is None:
            os._exit(code)
        # Another program in this process: no thread of the run has a last word, and the shell waits until nothing is
        # left.
        environment = {name: value for name, value in os.environ.items() if name != MARK}
        os.execve(sys.executable, [sys.executable, "-I", __file__, str(self.reaper_pid), str(code)], environment)


LISTENER = Listener()
"""The listener of this process. It listens only where an entry has called `listen`."""


def take_over() -> None:
    """Takes this program's signals, and limits its prints. Call it first: threads inherit what this one blocks."""
    from conversion.files.limits import flush_console, limit_console

    LISTENER.listen()
    limit_console()
    LISTENER.cleanups.append(flush_console)


@contextmanager
def shielded() -> Iterator[None]:
    """Blocks the stop signals for every process and thread started in the `with` block. Restores replaced handlers."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def die_with_parent(parent_pid: int | None = None) -> None:
    """Asks the kernel to kill this process when its parent dies; ends it if `parent_pid` died before. Linux only."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent_pid is not None and os.getppid() != parent_pid:
        sys.exit("the parent is gone")


def shield_process(*, passes_on: bool) -> None:
    """Keeps stop signals from ending this process, even if older threads do not block them. Call in the main thread."""
    own = os.getpid()

    def ignore(number: int, _: FrameType | None) -> None:
        # Not SIG_IGN, which programs inherit: those of users, and multiprocessing, end their children by SIGTERM.
        if os.getpid() != own:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in STOP_SIGNALS:
        signal.signal(number, ignore)
    signal.pthread_sigmask(signal.SIG_BLOCK if passes_on else signal.SIG_UNBLOCK, STOP_SIGNALS)


def wait_for_reaper(pid: int) -> None:
    """Waits for the child `pid` to end, up to a limit."""
    end = time.monotonic() + REAPER_TIMEOUT_S
    while time.monotonic() < end and os.waitpid(pid, os.WNOHANG) == (0, 0):
        time.sleep(0.02)


if __name__ == "__main__":
    wait_for_reaper(int(sys.argv[1]))
    sys.exit(int(sys.argv[2]))
