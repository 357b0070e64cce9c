# SPDX-License-Identifier: Apache-2.0
"""Shared parts of benchmarks: options, turns, processes of their own, medians and ranges, rows printed and recorded."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

from tests.long.record import Row, record

P = ParamSpec("P")
T = TypeVar("T")
Name = TypeVar("Name")
TIMEOUT_S = 3600.0


def bench_parser(doc: str | None, *, repeats: int | None = None) -> argparse.ArgumentParser:
    """A parser of --no-record, and of --repeats where a benchmark has `repeats`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-record", action="store_true", help="leave docs/data as it is")
    if repeats is not None:
        parser.add_argument("--repeats", type=int, default=repeats, help="(default: %(default)s)")
    return parser


def report(part: str, rows: Iterable[Row], options: argparse.Namespace, *, module: str = "", words: str = "") -> None:
    """Prints a JSON line per row once measured and records all in docs/data/PART.json unless `options` has --no-record.

    The recorded command is that of `module`, by default the one named as the part, with `words` behind it.
    """
    found = list[Row]()
    for row in rows:
        print(json.dumps(row), flush=True)
        found.append(row)
    if not options.no_record:
        record(part, found, command=f"python -m scripts.bench.{module or part}{words}")


def take_turns(ways: Mapping[Name, Callable[[], T]], repeats: int) -> dict[Name, list[T]]:
    """Results of each way. The ways take turns; a pass before the first, which warms up, is left out."""
    passes = [[way() for way in ways.values()] for _ in range(repeats + 1)]
    return {name: [results[index] for results in passes[1:]] for index, name in enumerate(ways)}


def alone(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """The result of a function in a new process, whose memory nothing else has used."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments, **named).result(TIMEOUT_S)


def count_memory() -> int:
    """Resident bytes of this process now; the kernel counts the most, VmHWM, from here on."""
    # Imported here: GPU checks on a bare machine lack what it needs.
    from tests.stack.conversion.children import memory

    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def median(values: Iterable[float], digits: int = 2) -> float:
    """The median, rounded."""
    return round(statistics.median(values), digits)


def lowest_to_highest(values: Sequence[float], digits: int = 2) -> str:
    """The range, as tables show it."""
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"
