# SPDX-License-Identifier: Apache-2.0
"""Spans of chosen steps, from the files that the processes of a run write; see `mrl.spans`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from conversion.files.reading import read_file
from mrl.spans import MAIN, SUFFIX

EVENT = re.compile(rb'^\{"ts":(\d+),"dur":(\d+),"ph":"X","name":"([^"]*)".*\},$', re.MULTILINE)
STEP = re.compile(rb'^\{"ts":(\d+),"dur":(\d+),"ph":"X","name":"step",.*"args":\{"step":(\d+)\}\},$', re.MULTILINE)
NAME = re.compile(rf"([a-z-]+?)(?:-(\d+))?{re.escape(SUFFIX)}")
KINDS = ("driver", "policy-rank", "teacher-rank", "reference-rank", "engine", "rewards")
START = 0
MAX_LANES = 32
MAX_SPANS = 400
MAX_FILE_BYTES = 2**34
MEMORY = ("host_bytes", "engine_host_bytes", "gpu_used_bytes", "gpu_peak_bytes")
"""Facts of spans; see `mrl.spans.memory_facts` and `Engine.memory_facts`."""
AHEAD_BYTES = 2**15
NUM_SLOWEST, NUM_NEWEST = 2, 3


@dataclass(frozen=True)
class Window:
    """A step of an attempt: from its start to the next one's, or its end if the newest; in microseconds since 1970."""

    step: int
    begin: int
    end: int
    folder: Path


def list_windows(run: Path) -> dict[int, Window]:
    """The steps that were recorded, each in its last attempt, by number. `START` is the newest start of processes.

    An attempt that has only found the run complete starts none.
    """
    found: dict[int, Window] = {}
    for driver in sorted((run / "logs").glob(f"exp_*/actors/driver{SUFFIX}")):
        data = _read(driver)
        ended = list(STEP.finditer(data))
        steps = [(int(event[1]), int(event[3])) for event in ended]
        begin = min((int(event[1]) for event in EVENT.finditer(data[:AHEAD_BYTES])), default=0)
        # The newest step ends with its own lines: what follows belongs to one that has not ended.
        last = [
            event for event in EVENT.finditer(data[-AHEAD_BYTES:]) if not steps or event[3] in (b"step", b"logging")
        ]
        end = max(map(_end, (*ended[-1:], *last)), default=0)
        ends = [*(begin for begin, _ in steps[1:]), end]
        has_started = steps or any(paths for kind, paths in _files(driver.parent).items() if kind != KINDS[0])
        if (has_started or START not in found) and begin < (first := steps[0][0] if steps else end):
            found[START] = Window(START, begin, first, driver.parent)
        found |= {
            step: Window(step, begin, end, driver.parent) for (begin, step), end in zip(steps, ends, strict=False)
        }
    return dict(sorted(found.items()))


def chosen(windows: Mapping[int, Window]) -> list[Window]:
    """Steps on the page of a finished run: the start, the first, the slowest and the newest ones."""
    steps = [window for step, window in windows.items() if step != START]
    slowest = sorted(steps[1:], key=lambda window: window.begin - window.end)[:NUM_SLOWEST]
    wanted = {window.step for window in (*steps[:1], *slowest, *steps[-NUM_NEWEST:])} | {START}
    return [window for step, window in windows.items() if step in wanted]


def read_timelines(windows: Sequence[Window]) -> dict[str, dict]:
    """Reads steps: begin, length, omitted lane count, lanes with spans [name, begin, length, facts]; microseconds."""
    found = {
        str(window.step): {"begin": window.begin, "length": window.end - window.begin, "left_out": 0, "lanes": []}
        for window in windows
    }
    for folder in sorted({window.folder for window in windows}):
        mine = [window for window in windows if window.folder == folder]
        files = _files(folder)
        for path in (path for paths in files.values() for path in paths[:MAX_LANES]):
            data = _read(path)
            for window in mine:
                lanes = _lanes(path.name.removesuffix(SUFFIX).replace("-", " "), data, window)
                found[str(window.step)]["lanes"] += lanes[:MAX_LANES]
                found[str(window.step)]["left_out"] += len(lanes[MAX_LANES:])
        for window in mine:
            found[str(window.step)]["left_out"] += sum(max(0, len(paths) - MAX_LANES) for paths in files.values())
    return found


def _files(folder: Path) -> dict[str, list[Path]]:
    found: dict[str, list[tuple[int, Path]]] = {kind: [] for kind in KINDS}
    for path in folder.glob(f"*{SUFFIX}"):
        if (matched := NAME.fullmatch(path.name)) and matched[1] in found:
            found[matched[1]].append((int(matched[2] or 0), path))
    return {kind: [path for _, path in sorted(files)] for kind, files in found.items()}


def _lanes(name: str, data: bytes, window: Window) -> list[dict]:
    spans: dict[str, list[list]] = {}
    for event in EVENT.finditer(data[_offset(data, window.begin) : _offset(data, window.end) + AHEAD_BYTES]):
        begin, length = int(event[1]), int(event[2])
        if begin < window.end and begin + length > window.begin:
            try:
                content = json.loads(event[0][:-1])
            except ValueError:  # a full disk has torn it
                continue
            lane = str(content.get("cat", MAIN))
            spans.setdefault(lane, []).append(
                [str(content["name"]), begin - window.begin, length, content.get("args", {})]
            )
    kept = {
        lane: sorted(sorted(mine, key=lambda one: -one[2])[:MAX_SPANS], key=lambda one: (one[1], -one[2]))
        for lane, mine in spans.items()
    }
    return [
        {"name": name if lane == MAIN else f"{name}: {lane}", "spans": mine}
        for lane, mine in sorted(
            kept.items(), key=lambda item: (item[0] != MAIN, [part.zfill(6) for part in item[0].split()])
        )
    ]


def _offset(data: bytes, time: int) -> int:
    """Finds a line's start close before the first span that ends after `time`. Processes write spans as they end."""
    low, high = 0, len(data)
    while high - low > AHEAD_BYTES:
        middle = (low + high) // 2
        event = EVENT.search(data, middle)
        low, high = (event.start(), high) if event is not None and _end(event) <= time else (low, middle)
    return low


def _end(event: re.Match[bytes]) -> int:
    return int(event[1]) + int(event[2])


def memory_by_phase(timelines: Mapping[str, dict]) -> dict[str, dict[str, int]]:
    """Most memory of a policy rank or an engine in each phase of these steps, in bytes, by phase and kind of memory."""
    found: dict[str, dict[str, int]] = {}
    for step, timeline in timelines.items():
        for lane in timeline["lanes"] if step != str(START) else ():
            for _, _, _, facts in lane["spans"]:
                for name in (name for name in MEMORY if name in facts):
                    most = found.setdefault(str(facts.get("phase")), {})
                    most[name] = max(most.get(name, 0), int(facts[name]))
    return found


def _read(path: Path) -> bytes:
    try:
        return read_file(path, MAX_FILE_BYTES)
    except (OSError, ValueError):  # a disk may lose what a page still lists
        return b""
