# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path

import pytest

from conversion.files import durable, reading
from conversion.files.limits import LimitedThread, deferred, is_waiting, within
from tests.waiting import HANG_S

TIMEOUT_S = HANG_S


def test_a_call_gives_its_answer_and_its_error():
    assert within(TIMEOUT_S, "sum", sum, [1, 2]) == 3
    with pytest.raises(ZeroDivisionError):
        within(TIMEOUT_S, "division", lambda: 1 // 0)
    with pytest.raises(TimeoutError, match="its own"):
        within(TIMEOUT_S, "wait", _raise, TimeoutError("its own"))


def _raise(error: Exception) -> None:
    raise error


def test_who_waits_for_what_does_not_answer_is_told_and_goes_on():
    answers = threading.Event()
    thread = LimitedThread("test")
    with pytest.raises(TimeoutError, match=r"the disk: no answer within 0\.01 s"):
        thread.within(0.01, "the disk", answers.wait, TIMEOUT_S)
    # One after the other: it is still busy.
    with pytest.raises(TimeoutError, match="the next one"):
        thread.within(0.01, "the next one", list)
    assert is_waiting() and thread.is_held
    answers.set()
    assert thread.within(TIMEOUT_S, "after it", list) == []
    assert not is_waiting() and not thread.is_held
    thread.end()


def test_reads_and_syncs_of_a_disk_that_hangs_end_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "file"
    file.write_text("text")
    assert durable.read_whole(file) == reading.read_file(file) == b"text"
    hangs = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda _: hangs.wait(TIMEOUT_S))
    # A descriptor of its own: the late reader closes it.
    monkeypatch.setattr(
        reading, "open_file", lambda path: os.open(path if hangs.wait(TIMEOUT_S) else path, os.O_RDONLY)
    )
    monkeypatch.setattr(durable, "IO_TIMEOUT_S", 0.01)
    for name in ("IO_TIMEOUT_S", "READ_TIMEOUT_S"):
        monkeypatch.setattr(reading, name, 0.01)
    for call in (durable.sync_file, reading.read_file, reading.sha256_file):
        with pytest.raises(OSError, match=rf"{file}: no answer within 0\.01 s"):
            call(file)
    hangs.set()


def test_a_call_that_failed_keeps_nothing():
    class Large: ...

    made = list[weakref.ref[Large]]()

    def fail() -> None:
        large = Large()
        made.append(weakref.ref(large))
        raise OSError("no room")

    gc.disable()  # what is in no circle goes at once
    try:
        answer, make_call = deferred(fail)
        make_call()
        with pytest.raises(OSError, match="no room"):
            answer.result(0)
        del answer, make_call
        assert made[0]() is None
    finally:
        gc.enable()
