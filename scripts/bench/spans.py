# SPDX-License-Identifier: Apache-2.0
"""Cost of observing a run: spans, texts and tokens of rollouts, and its page; writes docs/data/spans.json.

Usage: python -m scripts.bench.spans RUN_FOLDER [--no-record]

All shares are of the run's own fastest step. Its processes wrote their spans while they worked, so that their cost is
counted: the number of spans of a step times what one costs here and now. The page is opened in a headless Chromium, if
there is one.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from mrl import spans
from mrl.ops.view.page import page
from mrl.ops.view.run_data import run_data
from mrl.ops.view.timeline import START, list_windows, read_timelines
from mrl.store.run_files import METRIC_KEYS, METRICS, read_rows
from scripts.bench.turns import bench_parser, report
from scripts.chromium import find_chromium, open_tab
from tests.long.record import Row
from tests.unit.ops.view.runs import make_long_run

NUM_CALLS = 5_000
LONG_STEPS = 1000


def seconds_of(call: Callable[[], object], *, count: int = 1) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - started) / count


def span_rows(run: Path, step_s: float) -> list[Row]:
    """Spans in a step of the busiest process of each kind, and their share of its time."""
    with tempfile.TemporaryDirectory() as folder:
        spans.record_in(Path(folder) / f"x{spans.SUFFIX}")
        span_s = seconds_of(
            lambda: spans.add("train_step", time.monotonic(), phase="train", host_bytes=1), count=NUM_CALLS
        )
        spans.stop()
    memory_s = seconds_of(spans.memory_facts, count=NUM_CALLS)
    windows = [window for step, window in list_windows(run).items() if step != START]
    counts, facts = defaultdict[str, int](int), defaultdict[str, int](int)
    for timeline in read_timelines(windows).values():
        for lane in timeline["lanes"]:
            process = lane["name"].split(":")[0]
            counts[process] += len(lane["spans"])
            facts[process] += sum("host_bytes" in one[3] for one in lane["spans"])
    most: list[tuple[str, float, Row]] = []
    for process, found in counts.items():
        spent_s = (found * span_s + facts[process] * memory_s) / len(windows)
        row: Row = {
            "what": f"spans of {process}",
            "milliseconds": 1e3 * spent_s,
            "percent_of_a_step": 100 * spent_s / step_s,
        }
        most.append((process.rstrip(" 0123456789"), spent_s, row | {"spans_a_step": round(found / len(windows), 1)}))
    # Of one kind the last one stays, which is the busiest.
    return list({kind: row for kind, _, row in sorted(most, key=lambda one: one[:2])}.values())


def sample_row(run: Path) -> Row:
    """Texts and tokens of a median step: what the driver waits for ranks that have the tokens, and what it writes."""
    windows = [window for step, window in list_windows(run).items() if step != START]
    spent, shares = [], []
    for timeline in read_timelines(windows).values():
        spans_of_driver = next(lane["spans"] for lane in timeline["lanes"] if lane["name"] == "driver")
        # Each beside its own step: other work on the host slows both.
        spent.append(
            sum(length for name, _, length, _ in spans_of_driver if name in ("wait: token_samples", "logging")) / 1e3
        )
        shares.append(1e5 * spent[-1] / timeline["length"])
    return {
        "what": "texts, tokens and metrics",
        "milliseconds": statistics.median(spent),
        "percent_of_a_step": statistics.median(shares),
    }


def page_row(run: Path, what: str) -> Row:
    """The page as a file: how long it takes to write and to open, and how large it is."""
    write_s = seconds_of(lambda: page([run_data(run)]))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.html"
        report.write_text(page([run_data(run)]), encoding="utf-8")
        row: Row = {"what": what, "megabytes": report.stat().st_size / 1e6, "seconds_to_write": write_s}
        if find_chromium() is not None:
            with open_tab() as tab:
                row["seconds_to_open"] = seconds_of(
                    lambda: (tab.open(f"file://{report}"), tab.wait("document.querySelector('.chart canvas')"))
                )
    return row


def rows(run: Path) -> Iterator[Row]:
    """The costs of a run, and those of a page of many steps."""
    metrics, _ = read_rows(run / METRICS, METRIC_KEYS)
    # Other work on the host would make a share of the mean look small.
    step_s = min(row["time/total"] for row in metrics if "time/total" in row)
    yield {"what": "the run's fastest step", "milliseconds": 1e3 * step_s}
    yield from span_rows(run, step_s)
    yield sample_row(run)
    yield page_row(run, f"page of its {metrics[-1]['step']} steps")
    with tempfile.TemporaryDirectory() as folder:
        long_run = make_long_run(Path(folder) / "run", num_steps=LONG_STEPS)
        yield page_row(long_run, f"page of {LONG_STEPS:,} steps with 110 metrics each")


if __name__ == "__main__":
    parser = bench_parser(__doc__)
    parser.add_argument("run", type=Path, help="a run folder, for example results/grpo_tiny")
    options = parser.parse_args()
    report("spans", rows(options.run), options, words=" RUN_FOLDER")
