# SPDX-License-Identifier: Apache-2.0
"""The event loop of an actor, in its own thread: Ray's threads call into it and wait. `tasks.py` has the driver's."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine
from functools import cache
from typing import Any, TypeVar, TypeVarTuple

from mrl.cluster.tasks import GC_THRESHOLD

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# What Ray's threads call in the loop waits for nobody.
CALL_TIMEOUT_S = 60.0


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """The loop, which lives as long as the process."""
    gc.set_threshold(GC_THRESHOLD)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="event loop", daemon=True).start()
    return loop


def wait_in_loop(work: Coroutine[Any, Any, T], limit_s: float) -> T:
    """Runs a coroutine in the loop and returns its result. TimeoutError: none within `limit_s`."""
    return asyncio.run_coroutine_threadsafe(work, event_loop()).result(limit_s)


def in_loop(function: Callable[[*Ts], T], *arguments: *Ts) -> T:
    """Runs a function on the loop's thread and returns its result."""

    async def call() -> T:
        return function(*arguments)

    return wait_in_loop(call(), CALL_TIMEOUT_S)
