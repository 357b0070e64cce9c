# SPDX-License-Identifier: Apache-2.0
"""A process in which a thread finds no memory ends with the reason; another error of a thread is printed as before."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest
import torch

from mrl.shortage import is_shortage
from tests.waiting import HANG_S

# A limit below what the process has, as by `prlimit --as` in mid-run. The stack of a thread before is used again: the
# new thread starts, and finds no memory for its first Python frame.
PROGRAM = """
import os, resource, threading, time
from mrl.shortage import end_on_shortage, end_process_on_shortage

def end(reason):
    os.write(1, reason.encode())
    os._exit(3)

printed, show = threading.Event(), threading.__excepthook__
threading.__excepthook__ = lambda found: (show(found), printed.set())
{start}
threading.Thread(target=int).start()
{fault}
"""
LOWERED = """
resource.setrlimit(resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
while True:
    try:
        threading.Thread(target=int).start()
        break
    except RuntimeError:  # no stack: the thread before still has it
        time.sleep(0.01)
os.write(1, b"goes on")
"""
RAISED = """
thread = threading.Thread(target=lambda: {what})
thread.start()
thread.join()
printed.wait()
os.write(1, b"goes on")
"""


def run(start: str, fault: str) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(start=start, fault=fault)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S, check=False)


def test_a_thread_without_memory_for_its_first_line_is_heard():
    found = run("end_on_shortage(end)", LOWERED)
    assert (found.returncode, found.stderr) == (3, "")
    assert found.stdout.startswith("MemoryError in a thread: no memory is left")


def test_whoever_started_such_a_thread_gets_the_error():
    found = run("end_process_on_shortage()", LOWERED)
    assert found.returncode == 1 and found.stdout == ""
    assert "\nMemoryError: MemoryError in a thread: no memory is left" in found.stderr


@pytest.mark.parametrize(
    ("what", "code", "said"), [("bytearray(1 << 60)", 3, "MemoryError in a thread: "), ("1 / 0", 0, "goes on")]
)
def test_threads_end_with_errors(what: str, code: int, said: str):
    found = run("end_on_shortage(end)", RAISED.format(what=what))
    assert found.returncode == code and found.stdout.startswith(said)
    assert ("ZeroDivisionError" in found.stderr) == (code == 0)


def failure(call) -> BaseException:
    with pytest.raises(BaseException) as found:  # noqa: PT011 -- any of a library's
        call()
    return found.value


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (failure(lambda: bytearray(1 << 60)), True),
        (failure(lambda: torch.empty(1 << 60)), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (ImportError("libtorch.so: failed to map segment from shared object"), True),
        (RuntimeError("can't start new thread"), True),
        (RuntimeError("std::bad_alloc"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."), False),
        (ValueError("the memory of layer 3"), False),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_errors_that_say_that_memory_is_short(error: BaseException, expected: bool):
    assert is_shortage(error) is expected
