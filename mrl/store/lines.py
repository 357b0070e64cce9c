# SPDX-License-Identifier: Apache-2.0
"""Files of a run folder with one JSON object a line and step: written line by line, and cut at a resume."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path

from conversion.files.durable import WRITE_TIMEOUT_S, put_aside, read_whole, write_atomic
from conversion.files.limits import within
from mrl.config.texts import counted
from mrl.store.checkpoints import DAMAGED
from mrl.store.run_files import parse_row

logger = logging.getLogger(__name__)


class JsonlLogger:
    """`metrics.jsonl`: a JSON object a step, written at once. Lines that find no room wait in memory for the next."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # A buffer of Python's would forget lines beyond its 8 KiB.
        self._file = within(WRITE_TIMEOUT_S, f"open of {path}", lambda: path.open("ab", buffering=0))
        self._waiting = b""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Writes `{"step": step, ...}`; a value that is not finite becomes null. TimeoutError: no answer."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        had_room = not self._waiting
        self._waiting += (json.dumps({"step": step, **finite}) + "\n").encode()
        try:
            within(WRITE_TIMEOUT_S, f"write of {self._path}", self._write)
        except TimeoutError:
            raise
        except OSError as error:
            if had_room:
                logger.warning(
                    "%s cannot be written: %s. The run goes on; the lines wait in memory until it can",
                    self._path,
                    error,
                )

    def close(self) -> None:
        """Writes the lines that wait. OSError: there is no room yet, and they are lost. TimeoutError: no answer."""
        try:
            within(WRITE_TIMEOUT_S, f"write of {self._path}", self._write)
        except TimeoutError:
            raise
        except OSError as error:
            num_lines = self._waiting.count(b"\n")
            raise OSError(error.errno, f"{error.strerror}; its last {counted(num_lines, 'line')} are lost") from error
        finally:
            self._file.close()

    def _write(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[os.write(self._file.fileno(), self._waiting) :]


def drop_later_steps(path: Path, step: int) -> set[int]:
    """Drops lines of steps after `step`, which run again, and torn lines. Returns the steps that have a line.

    The next line begins a line of its own, whatever the file ended with.
    """
    content = read_or_set_aside(path)
    lines = _lines(content)
    kept = {number: found for number, (found, _) in enumerate(lines) if found is not None and found <= step}
    if len(kept) < len(lines) or (content and not content.endswith(b"\n")):
        write_atomic(path, "".join(lines[number][1] + "\n" for number in kept))
    return set(kept.values())


def last_step_in(path: Path) -> int:
    """The last step with a whole line; -1 if there is none."""
    return max((step for step, _ in _lines(read_or_set_aside(path)) if step is not None), default=-1)


def read_or_set_aside(path: Path) -> bytes:
    """Reads a file; one that is unreadable or no regular file is renamed out of the way, and counts as empty."""
    if not os.path.lexists(path):
        return b""
    try:
        return read_whole(path)
    except TimeoutError:
        raise
    except OSError as error:
        aside = put_aside(path, DAMAGED)
        logger.warning("%s cannot be read: %s. It is set aside as %s", path, error, aside.name)
        return b""


def _lines(content: bytes) -> list[tuple[int | None, str]]:
    """Step and text of each line of a file; None: it is torn, or no line of ours."""
    lines = content.decode("ascii", errors="replace").splitlines()
    return [(row["step"] if (row := parse_row(line)) is not None else None, line) for line in lines]
