# SPDX-License-Identifier: Apache-2.0
"""Deadlines of a reward pool that do not depend on the host: endless culprits miss theirs; honest texts make theirs."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager

import pytest

from mrl.envs import scorer
from tests.waiting import SOON_S


@contextmanager
def culprits_miss_theirs(*culprits: str, when: Callable[[], bool] = lambda: True) -> Iterator[list[float]]:
    """Sets deadlines: texts that begin with these words have `SOON_S` from `when`, others the pool's own `timeout_s`.

    Gives the deadlines that the pool asks for, in seconds, in the order in which children begin.
    """
    within, asked = scorer._within, list[float]()

    async def by_text(seconds: float, work: Coroutine[None, None, dict[str, object]]) -> dict[str, object]:
        message = inspect.getcoroutinelocals(work).get("message")
        if message is None:  # a child that starts
            return await within(seconds, work)
        asked.append(seconds)
        if not any(f'[["{word}'.encode() in message for word in culprits):
            return await within(seconds, work)
        task = asyncio.ensure_future(work)
        while not when():
            await asyncio.sleep(0.01)
        return await within(SOON_S, asyncio.wait_for(task, None))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scorer, "_within", by_text)
        yield asked
