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
from mrl.store.checkpoints import DAMAGED
from mrl.store.run_files import parse_row

logger = logging.getLogger(__name__)


class JsonlLogger:
    """`metrics.jsonl`: a JSON object a step, flushed at once. After an error the next call also writes failed lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = within(WRITE_TIMEOUT_S, f"open of {path}", lambda: path.open("a", encoding="utf-8"))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Writes `{"step": step, ...}`; a value that is not finite becomes null. TimeoutError: no answer."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = json.dumps({"step": step, **finite}) + "\n"

        def write() -> None:
            self._file.write(line)
            self._file.flush()

        within(WRITE_TIMEOUT_S, f"write of {self._path}", write)

    def close(self) -> None:
        within(WRITE_TIMEOUT_S, f"write of {self._path}", self._file.close)


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
