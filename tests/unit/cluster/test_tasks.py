# SPDX-License-Identifier: Apache-2.0
"""The training waits for what tasks beside it do, is told why nothing happens, and leaves what blocks to a thread."""

from __future__ import annotations

import asyncio
import faulthandler
import tempfile
import threading
from concurrent import futures

import pytest

from mrl.cluster import hangs
from mrl.cluster.tasks import BackgroundTasks, Silence, in_worker, started_tasks
from mrl.cluster.watchdog import innermost
from tests.unit.stories import as_story, settled
from tests.waiting import HANG_S


@as_story
async def test_a_wait_ends_when_news_make_it_enough_and_the_watchdog_knows_for_whom():
    async with started_tasks() as tasks:
        come, seen, looks = list[int](), [], list[int]()

        async def work() -> None:
            for number in range(3):
                await asyncio.sleep(0)
                seen.append([(wait.what, wait.who()) for wait in hangs.waits])
                come.append(number)
                tasks.tell("generation")

        tasks.begin(work())
        limits = {"what": "generation", "who": lambda: ["engine 0"], "limit_s": HANG_S}
        await tasks.wait(lambda: len(come) >= 3, look=lambda: looks.append(len(come)), **limits)
        num_seen = len(seen)
        await tasks.wait(lambda: True, **limits)
        assert len(come) == 3 and len(seen) == num_seen and seen[-1] == [("generation", ["engine 0"])]
        assert hangs.waits == [] and looks[0] == 0 and looks[-1] == 3


@as_story
async def test_silence_ends_a_wait_unless_something_is_expected_later():
    tasks = BackgroundTasks()
    with pytest.raises(Silence):
        await tasks.wait(lambda: False, what="rewards", who=list, limit_s=0.0)
    assert hangs.waits == []

    async def fail() -> None:
        raise ValueError("no")

    # An actor that is started again has the time that this takes.
    tasks.heard_at["rewards"] += HANG_S
    tasks.begin(fail())
    with pytest.raises(ValueError, match="no"):
        await tasks.wait(lambda: False, what="rewards", who=list, limit_s=0.0)


@as_story
async def test_whoever_waits_raises_the_first_error_of_the_tasks():
    tasks = BackgroundTasks()

    async def fail(name: str) -> None:
        raise ValueError(name)

    for name in ("first", "second"):
        tasks.begin(fail(name))
    await settled()
    for _ in range(2):
        with pytest.raises(ValueError, match="first"):
            await tasks.wait(lambda: False, what="generation", who=list, limit_s=HANG_S)


@as_story
async def test_a_signal_ends_a_wait_without_news():
    tasks, is_asked = BackgroundTasks(), False

    def check() -> None:
        if is_asked:
            raise EOFError

    tasks.checks.append(check)
    waiting = asyncio.ensure_future(tasks.wait(lambda: False, what="generation", who=list, limit_s=HANG_S))
    await settled()
    assert not waiting.done()
    is_asked = True
    with pytest.raises(EOFError):
        await waiting


@as_story
async def test_no_task_goes_on_after_a_run_and_those_of_others_do():
    other = asyncio.ensure_future(asyncio.sleep(HANG_S))
    async with started_tasks() as tasks:
        task = tasks.begin(asyncio.sleep(HANG_S))
        await settled()
    assert task.cancelled() and not other.done()
    other.cancel()


@as_story
async def test_the_loop_goes_on_while_the_worker_is_blocked_and_the_watchdog_names_where():
    blocked, held = threading.Event(), threading.Lock()

    def call_of_all_ranks() -> str:
        blocked.set()
        with held:
            return threading.current_thread().name

    held.acquire()
    working = asyncio.ensure_future(in_worker(call_of_all_ranks))
    while not blocked.is_set():
        await asyncio.sleep(0)
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        assert innermost(file.read().decode()).startswith("call_of_all_ranks (test_tasks.py:")
    held.release()
    name = await working
    assert name == await in_worker(lambda: threading.current_thread().name), "one thread"
    assert name != threading.current_thread().name


@as_story
async def test_an_error_that_a_loop_takes_for_its_own_arrives():
    for error in (StopIteration(), futures.CancelledError()):

        def fail(error: Exception = error) -> None:
            raise error

        with pytest.raises(RuntimeError, match=type(error).__name__):
            await in_worker(fail)


@as_story
async def test_cancelling_waits_for_what_the_worker_does():
    begun, may_end, ended = threading.Event(), threading.Event(), list[int]()

    def work() -> None:
        begun.set()
        may_end.wait(HANG_S)
        ended.append(1)

    task = asyncio.create_task(in_worker(work))
    while not begun.is_set():
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [1]
