# SPDX-License-Identifier: Apache-2.0
"""Watchdog on processes without Ray: it names, keeps stacks, ends what cannot end itself. No verdict needs a clock."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mrl import spans
from mrl.cluster import hangs, lifetime
from mrl.cluster import watchdog as watchdog_module
from mrl.cluster.hangs import ProcessReading, Wait
from mrl.cluster.lifetime import OUTBOX, Carrier, end_carrier, local_file, start_carrier
from mrl.cluster.watchdog import Watchdog, innermost, read_all, read_process, read_signs, read_stacks
from mrl.signals import LISTENER
from tests.sources import ROOT
from tests.waiting import HANG_S, wait_until

LIMIT_S = HANG_S

# A main thread in a call that no signal ends, as a call of Ray's without a raylet.
DRIVER = """
from mrl.signals import LISTENER
LISTENER.listen()
LISTENER.hold("the run saves a checkpoint and ends")
import ctypes, logging, os, subprocess, sys
from pathlib import Path
from mrl.cluster.lifetime import MARK
from mrl.cluster.watchdog import Watchdog
logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
folder, end_s = Path(sys.argv[1]), float(sys.argv[2])
os.environ[MARK] = str(folder)
child = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
Watchdog(folder, folder / "run", notice_s=2.0, end_s=end_s).start()
mutex = ctypes.create_string_buffer(64)
def hold_twice():
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
hold_twice()
"""


@pytest.mark.parametrize(
    ("end_s", "reason"), [(0.5, "nothing has finished for"), (1000, "SIGTERM asked the run to end")]
)
def test_a_driver_that_hangs_is_ended_with_its_reason(tmp_path: Path, end_s: float, reason: str):
    command = [sys.executable, "-c", DRIVER, str(tmp_path), str(end_s)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as driver:
        assert driver.stdout is not None
        child = int(driver.stdout.readline())
        # At first it may be at work, with its own start.
        while "The run hangs: " not in (hang := driver.stdout.readline()):
            assert hang
        os.kill(driver.pid, signal.SIGTERM)
        rest = driver.stdout.read()
        assert driver.wait(LIMIT_S) == 1
    assert f"The run hangs: driver (process {driver.pid} on " in hang and "in hold_twice (<string>:" in hang
    last = rest.rstrip().splitlines()[-1]
    assert last.startswith("The attempt ended: ") and reason in last and "uses no processor" in last
    wait_until(lambda: (left := read_process(child)) is None or left.state == "Z", "end of the child")
    # The same stands on the local disk, with the stacks.
    assert last in (tmp_path / OUTBOX / "watchdog.log").read_text()
    assert "hold_twice" in (tmp_path / OUTBOX / "stacks-1.txt").read_text()


def test_names_and_states_of_real_processes(tmp_path: Path):
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom mrl import spans\nspans.show_in(Path(sys.argv[1]), "
        "'policy-rank-1')\n"
    )
    code += "spans.begin('train_step', 'train')\nprint(flush=True)\ntime.sleep(1000)"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        os.kill(child.pid, signal.SIGSTOP)
        found: list[ProcessReading] = []

        def is_stopped() -> bool:
            found[:] = [one for one in read_all(os.getpid(), read_signs(tmp_path)) if one.pid == child.pid]
            return bool(found) and found[0].state == "T"

        try:
            wait_until(is_stopped, "stop")
        finally:
            child.kill()
    assert (found[0].name, found[0].doing, found[0].phase, found[0].num_done) == (
        "policy rank 1",
        "call train_step",
        "train",
        0,
    )


@pytest.fixture(autouse=True)
def no_patience_for_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog_module, "STACKS_S", 0.0)


def a_watchdog(folder: Path) -> Watchdog:
    return Watchdog(folder, folder / "run" / "actors", notice_s=50.0, end_s=1000.0)


def test_each_hang_is_told_once_and_so_is_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    watchdog, begin = a_watchdog(tmp_path), time.monotonic()
    monkeypatch.setattr(hangs, "waits", [Wait("train_step", lambda: ["policy rank 0", "policy rank 1"], begin)])
    with caplog.at_level(logging.INFO):
        for second in range(0, 90, 5):
            states = {0: "S", 1: "T" if second < 80 else "S"}
            ranks = [
                ProcessReading(f"policy rank {rank}", rank, "host", state, 0.0, 0, num_done=second)
                for rank, state in states.items()
            ]
            monkeypatch.setattr(watchdog, "_answered_at", begin + second)
            watchdog.look(begin + second, ranks)
    watchdog.stop()
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2 and texts[1] == "The run goes on"
    assert texts[0].startswith(
        "The run hangs: policy rank 1 (process 1 on host) is stopped (state T: SIGSTOP, or a debugger); the driver "
        "waits:"
    )


@pytest.mark.parametrize(
    ("state", "waits", "answers", "ends"),
    [("S", False, True, True), ("S", True, True, False), ("D", False, True, False), ("S", False, False, False)],
)
def test_after_a_signal_only_a_wait_without_a_limit_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, waits: bool, answers: bool, ends: bool
):
    watchdog, begin, ended = a_watchdog(tmp_path), time.monotonic(), list[str]()
    monkeypatch.setattr(LISTENER, "first", signal.SIGTERM)
    monkeypatch.setattr(hangs, "waits", [Wait("finish_save", lambda: ["driver"], begin)] if waits else [])
    monkeypatch.setattr(watchdog, "_end", ended.append)
    for second in range(0, 120, 5):
        if answers:  # the run folder
            monkeypatch.setattr(watchdog, "_answered_at", begin + second)
        watchdog.look(begin + second, [ProcessReading("driver", 1, "host", state, 0.0, 0)])
    watchdog.stop()
    assert bool(ended) == ends and all("SIGTERM asked the run to end" in reason for reason in ended)


@pytest.mark.parametrize("is_listening", [True, False])
def test_once_a_daemon_of_ray_has_died_the_run_is_asked_to_end_or_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_listening: bool
):
    watchdog, ended, sent = a_watchdog(tmp_path), list[str](), list[tuple[int, int]]()
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(LISTENER, "is_listening", is_listening)
    monkeypatch.setattr(watchdog, "_end", ended.append)
    monkeypatch.setattr(watchdog_module.os, "kill", lambda *arguments: sent.append(arguments))
    answers = iter(["", "Ray's gcs_server (process 7, exit code -9) has died", "asked again"])
    watchdog.look_after(lambda: next(answers))
    for _ in range(3):
        watchdog._look_at_ray()
    watchdog.stop()
    if is_listening:
        assert (
            "Ray's gcs_server (process 7, exit code -9) has died: the run ends." in caplog.text
            and "same command resumes" in caplog.text
        )
    assert (sent, ended) == (
        ([(os.getpid(), signal.SIGTERM)], [])
        if is_listening
        else ([], ["Ray's gcs_server (process 7, exit code -9) has died"])
    )


def test_a_run_folder_that_does_not_answer_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    watchdog = a_watchdog(tmp_path)
    with caplog.at_level(logging.INFO):
        watchdog.look(time.monotonic() + 49, [])
        watchdog.look(time.monotonic() + 55, [])
    watchdog.stop()
    (record,) = caplog.records
    assert f"{tmp_path}/run/actors has not answered a write for 55 s" in record.getMessage()


def test_only_processes_that_write_their_stacks_are_asked_for_them(tmp_path: Path):
    """Any other one, which may have got the id of one that has ended, would be ended by the signal."""
    for kind in (spans.SIGNS, spans.STACKS):
        (tmp_path / kind).mkdir()
    with subprocess.Popen(["sleep", "1000"]) as other:
        (tmp_path / spans.STACKS / "engine-0").touch()
        (tmp_path / spans.SIGNS / "engine-0").write_bytes(spans.SIGN.pack(other.pid, 0, 0.0, True, b"", b"build"))
        try:
            ((reading, text),) = read_stacks(tmp_path)
            assert (reading.pid, text, other.poll()) == (other.pid, "no answer\n", None)
        finally:
            other.kill()


BUSY = """
import threading
def deeper(n):
    return n and eval("deeper(n - 1)", {"deeper": deeper, "n": n})
def work():
    while True:
        exec(compile("[y for y in range(5)]", "a file", "exec"))
        deeper(30)
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
print(flush=True)
threading.Event().wait()
"""
# A PyDLL keeps the interpreter's lock during its calls.
LOCKED = """
import ctypes, os
print(flush=True)
def hold():
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
hold()
"""


@pytest.mark.parametrize(
    ("code", "num_questions", "function"), [(BUSY, 40, "deeper"), (LOCKED, 2, "hold")], ids=["at work", "locked"]
)
def test_a_process_answers_with_its_stacks_and_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, num_questions: int, function: str
):
    """Frames that change while they are read end a process: 400 of 3,300 signals to `BUSY` did in Python 3.11.7."""
    monkeypatch.setattr(watchdog_module, "STACKS_S", 0.1)
    show = "import sys\nfrom pathlib import Path\nfrom mrl import spans\nspans.show_in(Path(sys.argv[1]), 'engine-0')\n"
    command = [sys.executable, "-c", show + code, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        texts: list[str] = []

        def has_answered() -> bool:
            texts.extend(text for reading, text in read_stacks(tmp_path) if reading.pid == child.pid)
            assert child.poll() is None, f"ended with {child.returncode} after {len(texts)} questions"
            return sum(function in text for text in texts) >= num_questions // 2

        try:
            wait_until(has_answered, "answers")
        finally:
            child.kill()


def test_the_collective_of_a_rank_is_found_in_its_stacks():
    stacks = """Current thread 0x00007f (most recent call first):
  File "/opt/mrl/spans.py", line 92 in _answer

Thread 0x00007e (most recent call first):
  File "/lib/torch/distributed/distributed_c10d.py", line 3000 in all_reduce
  File "/lib/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/opt/mrl/policy/step.py", line 12 in train
"""
    assert innermost(stacks) == "all_reduce (distributed_c10d.py:3000)"
    assert innermost("no answer\n") == innermost(f"{stacks}\n...\n") == ""


def test_what_is_written_locally_arrives_also_after_a_failure(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    target = tmp_path / "run" / "actors" / "engine-0.log"
    local, carried = local_file(tmp_path, target), Carrier(tmp_path)
    local.write_text("one\n")
    (tmp_path / "run").write_text("in the way")
    for _ in range(2):
        carried.carry()
    assert capfd.readouterr().err.count("cannot be written, and waits on the local disk") == 1
    (tmp_path / "run").unlink()
    for text in ("two\n", "", "three\n"):
        with local_file(tmp_path, target).open("a") as file:
            file.write(text)
        carried.carry()
    assert target.read_text() == "one\ntwo\nthree\n"


def test_a_carrier_carries_the_last_words_and_removes_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lifetime, "CARRY_TIMEOUT_S", LIMIT_S)
    folder = tmp_path / "private"
    folder.mkdir()
    started = start_carrier(folder)
    local_file(folder, tmp_path / "rank.log").write_text("last words")
    end_carrier(*started)
    assert (tmp_path / "rank.log").read_text() == "last words" and not folder.exists()


def test_a_sign_of_life_says_what_a_process_is_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(spans, "_sign", None)
    spans.show_in(tmp_path, "engine-0")
    with spans.span("build"):
        inside = spans.read_sign(tmp_path / spans.SIGNS / "engine-0")
    spans.begin("generate", "generate")
    spans.stretch("generate", time.monotonic(), "another lane")
    after = spans.read_sign(tmp_path / spans.SIGNS / "engine-0")
    assert (inside.name, inside.pid, inside.doing, inside.is_open, inside.num_done) == (
        "engine 0",
        os.getpid(),
        "build",
        True,
        0,
    )
    assert (after.doing, after.is_open, after.phase, after.num_done) == ("generate", True, "generate", 2)
