# SPDX-License-Identifier: Apache-2.0
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrl import spans
from tests.waiting import HANG_S, Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(spans, "time", clock := Clock())
    return clock


@pytest.fixture
def file(clock: Clock, tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / f"actors/engine-0{spans.SUFFIX}"
    spans.record_in(path, by_thread=False)
    yield path
    spans.stop()


def read(path: Path) -> list[dict]:
    """The events of a file as a trace viewer reads it: a list whose end may be missing."""
    return json.loads(path.read_text().rstrip(",\n") + "]")


def drawn(path: Path) -> list[dict]:
    return [event for event in read(path) if event["ph"] == "X"]


def test_a_span_has_the_time_of_the_host_its_length_and_its_facts(file: Path, clock: Clock):
    began_s = clock.time()
    with spans.span("outer"):
        clock.sleep(0.5)
        with spans.span("inner", rows=3):
            clock.sleep(0.02)
        clock.sleep(1.0)
    inner, outer = drawn(file)
    assert (inner["name"], inner["args"], outer["name"], outer["args"]) == ("inner", {"rows": 3}, "outer", {})
    assert (outer["ts"], outer["dur"]) == (round(began_s * 1e6), 1_520_000)
    assert (inner["ts"], inner["dur"]) == (round(began_s * 1e6) + 500_000, 20_000)


def test_processes_and_lanes_have_names(file: Path, clock: Clock):
    spans.add("write", clock.monotonic(), "checkpoint writer")
    spans.add("step", clock.monotonic(), step=1)
    names = {(event["name"], event["args"]["name"]) for event in read(file) if event["ph"] == "M"}
    assert names == {("process_name", "engine-0"), ("thread_name", "checkpoint writer"), ("thread_name", "main")}
    assert len({event["tid"] for event in drawn(file)}) == 2


def test_stretches_that_follow_closely_are_one_span(file: Path, clock: Clock):
    for index in range(5):
        clock.sleep(spans.MAX_GAP_S / 2)
        start = clock.monotonic()
        clock.sleep(1.0)
        spans.stretch("generate", start, rows=index)
    clock.sleep(spans.MAX_GAP_S * 2)
    spans.stretch("generate", clock.monotonic())
    spans.add("pull", clock.monotonic())
    spans.stretch("generate", clock.monotonic() - spans.MAX_STRETCH_S - 1)
    assert [event["name"] for event in drawn(file)] == ["generate", "generate", "pull", "generate"]
    first, second, *_ = drawn(file)
    assert (first["dur"], first["args"], second["dur"]) == (5_100_000, {"rows": 4}, 0)


def test_stretches_of_several_lanes_do_not_end_each_other(file: Path, clock: Clock):
    start = clock.monotonic()
    for _ in range(3):
        for lane in ("worker 0", "worker 1"):
            spans.stretch("score", start, lane)
    spans.end_stretch("worker 0")
    assert [event["cat"] for event in drawn(file)] == ["worker 0"]
    spans.stop()
    assert [event["cat"] for event in drawn(file)] == ["worker 0", "worker 1"]


def test_an_attempt_continues_the_file_of_the_one_before(file: Path, clock: Clock):
    spans.add("first", clock.monotonic())
    spans.record_in(file, by_thread=False)
    spans.add("second", clock.monotonic())
    assert [event["name"] for event in drawn(file)] == ["first", "second"]


def test_threads_write_whole_lines(file: Path, clock: Clock):
    threads = [
        threading.Thread(target=lambda index=index: [spans.add("x", clock.monotonic(), str(index)) for _ in range(200)])
        for index in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert len(drawn(file)) == 800


def test_without_a_file_nothing_is_recorded_and_a_full_disk_ends_the_recording(
    clock: Clock, caplog: pytest.LogCaptureFixture
):
    spans.stop()
    with spans.span("nobody listens"):
        pass
    spans.record_in(Path("/dev/full"))
    spans.add("lost", clock.monotonic())
    spans.add("lost too", clock.monotonic())
    spans.stop()
    assert sum("records no more spans" in record.message for record in caplog.records) == 1


def test_a_thread_writes_all_spans_before_the_recording_ends(tmp_path: Path):
    path = tmp_path / f"driver{spans.SUFFIX}"
    spans.record_in(path)
    for index in range(100):
        spans.add(f"x{index}", time.monotonic())
    spans.stop()
    assert [event["name"] for event in drawn(path)] == [f"x{index}" for index in range(100)]


def test_no_caller_waits_for_a_file_system_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A pipe that is full and that nobody reads holds up whoever writes, as a frozen file system does."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    monkeypatch.setattr(spans, "CLOSE_TIMEOUT_S", 0.1)
    spans.record_in(pipe)
    for _ in range(3000):
        spans.add("x" * 100, time.monotonic())
    spans.stop()
    os.close(reader)
