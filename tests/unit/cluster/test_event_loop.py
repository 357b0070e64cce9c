# SPDX-License-Identifier: Apache-2.0
"""The main thread waits for what happens in the event loop, and is told why nothing does."""

from __future__ import annotations

import asyncio

import pytest

from mrl.cluster import hangs
from mrl.cluster.event_loop import News, Silence, event_loop, in_loop, tasks_ended
from tests.waiting import HANG_S


def test_a_thread_waits_until_news_make_it_enough_and_the_watchdog_knows_for_whom():
    news, come, seen = News(), [], []

    def watch() -> None:
        seen.append([(wait.what, wait.who()) for wait in hangs.waits])
        if len(come) < 3:
            in_loop(come.append, len(seen))
            in_loop(news.tell, "generation")

    with news.watched_by(watch):
        news.wait(lambda: len(come) >= 3, what="generation", who=lambda: ["engine 0"], limit_s=HANG_S)
    num_seen = len(seen)
    news.wait(lambda: True, what="generation", who=list, limit_s=HANG_S)
    assert len(come) == 3 and len(seen) == num_seen and seen[0] == [("generation", ["engine 0"])] and hangs.waits == []


def test_silence_ends_a_wait_unless_something_is_expected_later():
    news = News()
    with pytest.raises(Silence):
        news.wait(lambda: False, what="rewards", who=list, limit_s=0.0)
    assert hangs.waits == []
    # An actor that is started again has the time that this takes.
    news.heard_at["rewards"] += HANG_S
    event_loop().call_later(0.05, news.fail, ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        news.wait(lambda: False, what="rewards", who=list, limit_s=0.0)


def test_whoever_waits_raises_the_first_error_of_the_loop():
    news = News()
    in_loop(news.fail, ValueError("first"))
    in_loop(news.fail, ValueError("second"))
    for _ in range(2):
        with pytest.raises(ValueError, match="first"):
            news.wait(lambda: False, what="generation", who=list, limit_s=HANG_S)


def test_nothing_goes_on_in_the_loop_after_a_run():
    with tasks_ended():
        task = in_loop(lambda: asyncio.ensure_future(asyncio.sleep(HANG_S)))
    assert task.cancelled(), "else Python complains of a pending task at its end"
