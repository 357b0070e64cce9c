# SPDX-License-Identifier: Apache-2.0
"""A console that takes nothing, whatever is behind it: nobody waits beyond a limit and what it takes later is whole."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from conversion.files import limits
from conversion.files.limits import LimitedOutput
from tests.sources import ROOT
from tests.waiting import HANG_S, wait_until

NUM_LINES = 3000
NOTE = re.compile(rb"\n\[(\d+) lines of output are lost: nothing took them\]\n")
LINES = b"".join(b"line %d\n" % number for number in range(NUM_LINES))


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> tuple[int, LimitedOutput]:
    """The end of a pipe to read from, and the console at its other end."""
    monkeypatch.setattr(limits, "CONSOLE_TIMEOUT_S", 0.01)
    source, sink = os.pipe()
    monkeypatch.setattr(limits, "_late", set())
    return source, LimitedOutput(sink)


def write_lines(console: LimitedOutput, text: bytes = LINES * 10) -> None:
    for line in text.splitlines(keepends=True):
        console.write(line)


def read_until(source: int, end: bytes) -> bytes:
    found = b""
    while not found.endswith(end):
        found += os.read(source, 2**16)
    return found


def test_lines_that_nobody_reads_wait_in_order_and_none_is_written_after_the_ones_that_follow(
    pipe: tuple[int, LimitedOutput], monkeypatch: pytest.MonkeyPatch
):
    source, console = pipe
    monkeypatch.setattr(limits, "MAX_WAITING", 10 * NUM_LINES)
    write_lines(console)
    assert not console.settle()
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(read_until(source, b"the last line\n")))
    reader.start()
    console.write(b"the last line\n")
    reader.join(HANG_S)
    assert read == [LINES * 10 + b"the last line\n"]
    wait_until(console.settle, "an empty console")


def test_what_is_too_much_to_wait_is_lost_and_counted(pipe: tuple[int, LimitedOutput], monkeypatch: pytest.MonkeyPatch):
    source, console = pipe
    monkeypatch.setattr(limits, "MAX_WAITING", 100)
    write_lines(console)
    found, num_lost, kept = b"", 0, []
    while num_lost + len(kept) < 10 * NUM_LINES:
        found += os.read(source, 2**16)
        num_lost = sum(map(int, NOTE.findall(found)))
        kept = NOTE.sub(b"", found[: found.rfind(b"\n") + 1]).split()[1::2]
    assert num_lost > 0 and num_lost + len(kept) == 10 * NUM_LINES
    lines = iter((LINES * 10).split()[1::2])
    assert all(line in lines for line in kept), "another order"
    wait_until(console.settle, "a console that has told of all")


def test_who_shares_a_terminal_may_make_it_refuse_to_wait(pipe: tuple[int, LimitedOutput]):
    source, console = pipe
    os.set_blocking(console.fileno(), False)
    reader = threading.Thread(target=read_until, args=(source, b"line 2999\n"))
    write_lines(console, LINES)
    reader.start()
    reader.join(HANG_S)
    wait_until(console.settle, "an empty console")


def test_a_fork_writes_on_its_own(pipe: tuple[int, LimitedOutput]):
    source, console = pipe
    console.write(b"parent\n")
    if not (pid := os.fork()):
        console.write(b"child\n")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(source, 100) == b"parent\nchild\n"


DRIVER = """
import logging, os, sys
from conversion.files import limits
limits.CONSOLE_TIMEOUT_S = 0.1
limits.limit_console()
from mrl.config.secrets import start_logging
from mrl.store.loggers.thread import exit_with

def main():
    start_logging("text")
    with open(sys.argv[1], "w") as checkpoint:
        for number in range(3000):
            logging.info("line %d", number)
            print("printed", number)
            print("told", file=sys.stderr)
        if checkpoint.fileno() > 2:
            checkpoint.write("whole")
    limits.CONSOLE_TIMEOUT_S = float(sys.argv[2])
    return 75

exit_with(main)
"""


@pytest.mark.parametrize("console", ["nobody reads", "nobody reads any more", "closed", "full"])
def test_a_driver_ends_as_it_would_and_keeps_its_files(tmp_path: Path, console: str):
    source, sink = (
        os.pipe() if console != "full" else (os.open("/dev/null", os.O_RDONLY), os.open("/dev/full", os.O_WRONLY))
    )
    # A file must not get the number of a console that its process was started without.
    close = (lambda: [os.close(number) for number in range(3)]) if console == "closed" else None
    command = [sys.executable, "-c", DRIVER, str(tmp_path / "checkpoint"), "0.1"]
    with subprocess.Popen(command, cwd=ROOT, stdout=sink, stderr=sink, preexec_fn=close) as process:
        if console == "nobody reads any more":
            os.close(source)
        assert process.wait(HANG_S) == 75
    assert (tmp_path / "checkpoint").read_text() == "whole"


def test_the_last_lines_of_a_driver_reach_a_reader_that_is_late(tmp_path: Path):
    (checkpoint := tmp_path / "checkpoint").touch()
    command = [sys.executable, "-c", DRIVER, str(checkpoint), str(HANG_S)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        wait_until(lambda: checkpoint.read_text() == "whole", "the end of the run")
        lines = process.stdout.read().decode().splitlines()
        assert process.wait(HANG_S) == 75
    assert [line.rpartition(" ")[2] for line in lines] == [str(number) for number in range(3000) for _ in range(2)]
