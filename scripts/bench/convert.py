# SPDX-License-Identifier: Apache-2.0
"""Conversion speed against cp and fsync of the same bytes, and memory: a JSON line per run and docs/data/convert.json.

Usage: python -m scripts.bench.convert [--gb 1] [--repeats 5] [--folder DIR] [--no-record]

Both directions and their copies take turns, each from sources in the page cache to a file that is not there, after
everything before is on disk; conversions run in processes of their own, and their time is without the imports.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from conversion.convert import convert_hf_to_mcore, convert_mcore_to_hf
from scripts.bench.turns import alone, bench_parser, count_memory, lowest_to_highest, median, report
from tests.long.record import Row
from tests.stack.conversion.children import memory
from tests.unit.conversion.hf_folders import large_config, write_large_folder

TARGET_RATIO = 0.5
TIMEOUT_S = 900.0
CONVERSIONS: dict[str, Callable[[Path, Path], None]] = {
    "hf-to-mcore": convert_hf_to_mcore,
    "mcore-to-hf": convert_mcore_to_hf,
}


def main() -> None:
    """Measures, prints and records."""
    parser = bench_parser(__doc__, repeats=5)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the model (default: 1)")
    parser.add_argument("--folder", type=Path, help="where to write; by default where temporary files go")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        report("convert", measure(Path(folder), options.gb, options.repeats), options)


def measure(folder: Path, gb: float, num_repeats: int) -> list[Row]:
    """A row for each direction: seconds of copy and conversion (medians and spread), their ratio, memory."""
    num_bytes = write_large_folder(folder / "hf", large_config(round(gb * 1e9)))
    convert_hf_to_mcore(folder / "hf", folder / "mcore")
    sources = {"hf-to-mcore": folder / "hf", "mcore-to-hf": folder / "mcore"}
    runs: dict[str, list[dict[str, float]]] = {direction: [] for direction in sources}
    for _ in range(num_repeats):
        for direction, source in sources.items():
            run = {"copy_s": timed_copy(source, folder / "out")} | timed_conversion(direction, source, folder / "out")
            runs[direction].append(run)
            print(json.dumps({"direction": direction} | run), flush=True)
    return [summary(direction, num_bytes, runs[direction]) for direction in sources]


def prepare(source: Path) -> None:
    """Puts the source into the page cache, and everything else to disk."""
    for path in source.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(16 << 20):
                    pass
    os.sync()


def timed_copy(source: Path, out: Path) -> float:
    """Seconds of `cp -r` and an fsync of every file."""
    prepare(source)
    started = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(out)], check=True, timeout=TIMEOUT_S)
    subprocess.run(["sync", *(str(path) for path in out.rglob("*") if path.is_file())], check=True, timeout=TIMEOUT_S)
    seconds = time.perf_counter() - started
    shutil.rmtree(out)
    return seconds


def timed_conversion(direction: str, source: Path, out: Path) -> dict[str, float]:
    """Seconds of a conversion in its own process, on the clock and of all cores, and its memory growth in bytes."""
    prepare(source)
    measured = alone(convert_once, direction, source, out)
    shutil.rmtree(out)
    return measured


def convert_once(direction: str, source: Path, out: Path) -> dict[str, float]:
    """Converts, and says what it took."""
    base, started, cpu = count_memory(), time.perf_counter(), time.process_time()
    CONVERSIONS[direction](source, out)
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    return {
        "convert_s": seconds,
        "cpu_s": cpu_s,
        "memory_rise_mb": (memory("VmHWM") - base) / 1e6,
        "base_mb": base / 1e6,
    }


def summary(direction: str, num_bytes: int, runs: list[dict[str, float]]) -> Row:
    """Medians, and of the ratio the smallest and the largest."""
    ratios = [run["copy_s"] / run["convert_s"] for run in runs]
    medians = {key: median(run[key] for run in runs) for key in runs[0]}
    return {
        "direction": direction,
        "gb": round(num_bytes / 1e9, 2),
        "repeats": len(runs),
        **{key: medians[key] for key in ("copy_s", "convert_s", "cpu_s")},
        "copy / convert": median(ratios),
        "at least": TARGET_RATIO,
        "lowest to highest": lowest_to_highest(ratios),
        "memory_rise_mb": round(medians["memory_rise_mb"]),
        "peak_rss_mb": round(medians["memory_rise_mb"] + medians["base_mb"]),
    }


if __name__ == "__main__":
    main()
