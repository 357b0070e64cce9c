# SPDX-License-Identifier: Apache-2.0
"""Signals of a run, in processes of their own: pytest's must stay as it is."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conversion.files.owners import start_of
from mrl.signals import ENDED_AT_ONCE, ENDED_EARLY, STOP_SIGNALS
from tests.sources import ROOT
from tests.waiting import HANG_S

TIMEOUT_S = HANG_S
BEGIN = """
import logging, os, signal, subprocess, sys, time
from pathlib import Path
from mrl import signals
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
own, listener = os.getpid(), signals.LISTENER
"""
SLEEP = "import time; print('ready', flush=True); time.sleep(60)"


def run(program: str, *arguments: str, ignored: signal.Signals | None = None) -> tuple[int, list[str]]:
    """Exit code and output of a program, whose parent ignores a signal as a shell does for its background jobs."""

    def prepare() -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        if ignored is not None:
            signal.signal(ignored, signal.SIG_IGN)

    command = [sys.executable, "-c", BEGIN + program, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, cwd=ROOT, preexec_fn=prepare)
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_before_the_first_step_a_signal_ends_the_process_at_once_and_cleanly(number: signal.Signals, tmp_path: Path):
    program = (
        "listener.listen(); listener.cleanups.append(Path(sys.argv[1]).touch); os.kill(own, "
        "int(sys.argv[2])); time.sleep(60)"
    )
    code, lines = run(program, str(tmp_path / "cleaned"), str(int(number)))
    assert (code, lines) == (
        ENDED_EARLY,
        [f"{number.name}: ended at once, as there is nothing to save; the same command goes on"],
    )
    assert (tmp_path / "cleaned").exists()


def test_later_the_run_ends_itself_and_only_a_second_ctrl_c_does_not_wait_for_it():
    program = """
listener.listen()
listener.hold("the run ends")
for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
    os.kill(own, number)
    while listener.first is None:
        time.sleep(0.01)
print(listener.first.name, flush=True)
time.sleep(2 * signals.BURST_S)
os.kill(own, signal.SIGINT)
time.sleep(60)
"""
    code, lines = run(program)
    assert code == ENDED_AT_ONCE
    assert lines[:2] == ["SIGTERM: the run ends", "SIGTERM"]
    assert [line.endswith("; the same command goes on") for line in lines[2:]] == [True]


def test_a_signal_that_timeout_sends_twice_is_one():
    program = """
listener.hold("the run ends")
for sender in (7, 7, 8):
    print(sender, flush=True)
    listener.take(signal.SIGINT, sender)
"""
    code, lines = run(program)
    assert code == ENDED_AT_ONCE
    assert [line for line in lines if line.isdigit()] == ["7", "7", "8"]


@pytest.mark.parametrize(("number", "stays"), [(signal.SIGINT, True), (signal.SIGHUP, True), (signal.SIGTERM, False)])
def test_what_a_shell_has_switched_off_stays_so(number: signal.Signals, stays: bool):
    # SIGTERM comes after it, and ends what is still there.
    code, lines = run(
        f"listener.listen(); os.kill(own, {int(number)}); os.kill(own, signal.SIGTERM); time.sleep(60)", ignored=number
    )
    assert code == ENDED_EARLY
    assert lines[0].startswith("SIGTERM" if stays else number.name)


def test_a_process_that_ends_at_once_waits_until_its_children_are_gone(tmp_path: Path):
    program = f"""
from mrl.cluster.lifetime import start_reaper
folder = Path(sys.argv[1])
folder.mkdir()
listener.listen()
reaper = start_reaper(folder)
listener.reaper_pid = reaper.pid
child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
Path(sys.argv[2]).write_text(str(child.pid))
os.kill(own, signal.SIGTERM)
time.sleep(60)
"""
    code, _ = run(program, str(tmp_path / "session"), str(tmp_path / "pid"))
    assert code == ENDED_EARLY
    assert start_of(int((tmp_path / "pid").read_text())) is None and not (tmp_path / "session").exists()


def test_shielded_processes_live_and_handlers_come_back():
    program = f"""
before = signal.getsignal(signal.SIGTERM)
with signals.shielded():
    signal.signal(signal.SIGTERM, print)
    child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], stdout=subprocess.PIPE)
child.stdout.readline()
for number in signals.STOP_SIGNALS:
    child.send_signal(number)
print(signal.getsignal(signal.SIGTERM) is before, signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set())
time.sleep(0.2)
print(child.poll())
child.kill()
child.wait(60)
"""
    assert run(program) == (0, ["True True", "None"])


@pytest.mark.parametrize("passes_on", [True, False])
def test_a_shielded_process_lives_and_may_end_its_own_children(passes_on: bool):
    program = f"""
import threading
# A thread from before, to which the kernel may give the signal.
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
signals.shield_process(passes_on={passes_on})
for number in signals.STOP_SIGNALS:
    os.kill(own, number)
forked = os.fork()
if forked == 0:
    time.sleep(60)
started = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], stdout=subprocess.PIPE)
started.stdout.readline()
os.kill(forked, signal.SIGTERM)
started.terminate()
time.sleep(0.2)
for pid in (forked, started.pid):
    lives = os.waitpid(pid, os.WNOHANG if {passes_on} else 0) == (0, 0)
    print(lives)
    if lives:
        os.kill(pid, signal.SIGKILL)
os._exit(sys.stdout.flush() or 0)
"""
    assert run(program) == (0, [str(passes_on)] * 2)


def test_a_notebook_has_its_signals_back_after_a_run():
    program = """
for _ in range(2):
    listener.listen(); listener.hold("the run ends")
    os.kill(own, signal.SIGINT)
    while listener.first is None:
        time.sleep(0.01)
    listener.let_go(); listener.stop()
    try:
        os.kill(own, signal.SIGINT); time.sleep(60)
    except KeyboardInterrupt:
        print("interrupted", listener.first)
signal.raise_signal(signal.SIGTERM)
"""
    code, lines = run(program)
    ends = "SIGINT: the run ends; a second Ctrl-C ends it at once"
    assert (code, lines) == (-signal.SIGTERM, [ends, "interrupted None"] * 2)
