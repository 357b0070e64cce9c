# SPDX-License-Identifier: Apache-2.0
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrl import spans


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / f"actors/engine-0{spans.SUFFIX}"
    spans.record_in(path, by_thread=False)
    yield path
    spans.stop()


def read(path: Path) -> list[dict]:
    """The events of a file as a trace viewer reads it: a list whose end may be missing."""
    return json.loads(path.read_text().rstrip(",\n") + "]")


def drawn(path: Path) -> list[dict]:
    return [event for event in read(path) if event["ph"] == "X"]


def test_a_span_has_the_time_of_the_host_its_length_and_its_facts(file: Path):
    before = time.time()
    with spans.span("outer"), spans.span("inner", rows=3):
        time.sleep(0.02)
    inner, outer = drawn(file)
    assert (inner["name"], inner["args"], outer["name"], outer["args"]) == ("inner", {"rows": 3}, "outer", {})
    assert before * 1e6 - 1e3 <= outer["ts"] <= inner["ts"] and 20_000 <= inner["dur"] <= outer["dur"] <= (time.time() - before) * 1e6 + 1e3
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1


def test_processes_and_lanes_have_names(file: Path):
    spans.add("write", time.monotonic(), "checkpoint writer")
    spans.add("step", time.monotonic(), step=1)
    names = {(event["name"], event["args"]["name"]) for event in read(file) if event["ph"] == "M"}
    assert names == {("process_name", "engine-0"), ("thread_name", "checkpoint writer"), ("thread_name", "main")}
    assert len({event["tid"] for event in drawn(file)}) == 2


def test_stretches_that_follow_closely_are_one_span(file: Path):
    start = time.monotonic()
    for index in range(5):
        spans.stretch("generate", start - 1 if index == 0 else time.monotonic(), rows=index)
    spans.end_stretch()
    spans.stretch("generate", start - 2)
    spans.add("pull", time.monotonic())
    spans.stretch("generate", time.monotonic() - spans.MAX_STRETCH_S - 1)
    assert [event["name"] for event in drawn(file)] == ["generate", "generate", "pull", "generate"]
    assert 1e6 <= drawn(file)[0]["dur"] < 2e6 and drawn(file)[0]["args"] == {"rows": 4}


def test_stretches_of_several_lanes_do_not_end_each_other(file: Path):
    start = time.monotonic()
    for _ in range(3):
        for lane in ("worker 0", "worker 1"):
            spans.stretch("score", start, lane)
    spans.end_stretch("worker 0")
    assert [event["cat"] for event in drawn(file)] == ["worker 0"]
    spans.stop()
    assert [event["cat"] for event in drawn(file)] == ["worker 0", "worker 1"]


def test_an_attempt_continues_the_file_of_the_one_before(file: Path):
    spans.add("first", time.monotonic())
    spans.record_in(file, by_thread=False)
    spans.add("second", time.monotonic())
    assert [event["name"] for event in drawn(file)] == ["first", "second"]


def test_threads_write_whole_lines(file: Path):
    threads = [
        threading.Thread(target=lambda index=index: [spans.add("x", time.monotonic(), str(index)) for _ in range(200)])
        for index in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(drawn(file)) == 800


def test_without_a_file_nothing_is_recorded_and_a_full_disk_ends_the_recording(caplog: pytest.LogCaptureFixture):
    spans.stop()
    with spans.span("nobody listens"):
        pass
    spans.record_in(Path("/dev/full"))
    spans.add("lost", time.monotonic())
    spans.add("lost too", time.monotonic())
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
