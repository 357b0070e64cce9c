# SPDX-License-Identifier: Apache-2.0
"""Output streams without terminal controls."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from mrl.config.texts import safe_text, spelled

_BAR = re.compile(r"\r|\n*(?:\x1b\[A)+\Z")
_UP = re.compile(r"(?:\x1b\[A)+")
BAR_INTERVAL_S = 15.0


def write_no_more(stream: TextIO) -> None:
    """Drops what is written into a stream from here on: its reader has enough, as `head` after its lines."""
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())


class SafeConsole:
    """An output stream without terminal controls, for all writers: argparse, print, loggers, libraries.

    A terminal may get what progress bars consist of: a carriage return at the start of a text, moves by a line. A log
    gets a bar's last line, and of a slow one a line each `BAR_INTERVAL_S`.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._drawn, self._is_bar, self._due = "", False, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes a text with harmless characters in place of those that control a terminal; returns its length."""
        match = _BAR.match(text) if self._stream.isatty() else None
        kept = match[0] if match else ""
        shown = text[len(kept) :] if self._stream.isatty() else self._without_redraws(text)
        if kept or shown:
            try:
                self._stream.write(kept + spelled(safe_text(shown, len(text) + len(shown))))
            except BrokenPipeError:
                write_no_more(self._stream)
        return len(text)

    def flush(self) -> None:
        """Writes what waits in the stream."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            write_no_more(self._stream)

    def _without_redraws(self, text: str) -> str:
        """`text` as a log gets it: a bar's newest drawing waits until another text follows, or is due."""
        if not text:
            return ""
        if _UP.fullmatch(text):  # back from a bar below, whose last drawing is no news
            self._drawn = ""
            return ""
        if self._is_bar and not text.strip("\n"):  # its end, or a move to a bar below
            return self.take_drawn()
        now = time.monotonic()
        if text.startswith("\r") and not text.startswith("\r\n"):
            if not self._is_bar:
                self._is_bar, self._due = True, now + BAR_INTERVAL_S
            self._drawn = text.rpartition("\r")[2].rstrip()
            if now < self._due and not text.endswith("\n"):  # no later drawing replaces a whole line
                return ""
            self._due = now + BAR_INTERVAL_S
            return self.take_drawn()
        self._is_bar = False
        return self.take_drawn() + text

    def take_drawn(self) -> str:
        """The line of a bar that waits, if any, which is written then."""
        drawn, self._drawn = self._drawn, ""
        return drawn and f"{drawn}\n"

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


@contextmanager
def safe_console() -> Iterator[None]:
    """Makes both output streams of this process safe in the `with` block."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, SafeConsole(stream)) for stream in streams)
    try:
        yield
    finally:
        for console, stream in zip((sys.stdout, sys.stderr), streams, strict=True):
            if isinstance(console, SafeConsole) and (drawn := console.take_drawn()):
                with suppress(OSError, ValueError):  # a full disk, or closed
                    stream.write(spelled(safe_text(drawn)))
            with suppress(OSError, ValueError):
                console.flush()
        sys.stdout, sys.stderr = streams
