# SPDX-License-Identifier: Apache-2.0
"""An event loop like a driver's, in a thread, where tasks go on while a test, which is no coroutine, waits."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import cache
from typing import Any, TypeVar, TypeVarTuple

from mrl import train
from mrl.loop.run import Run, Supplier
from mrl.types import RunState

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="driver of tests", daemon=True).start()
    return loop


def do(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine in the loop."""
    return asyncio.run_coroutine_threadsafe(work, _loop()).result()


def call(function: Callable[[*Ts], T], *arguments: *Ts) -> T:
    """The result of a function that only the loop's thread may call."""

    async def made() -> T:
        return function(*arguments)

    return do(made())


@contextmanager
def opened(manager: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """The value of an `async with` block, inside a `with` block."""
    value = do(manager.__aenter__())
    try:
        yield value
    except BaseException:
        if not do(manager.__aexit__(*sys.exc_info())):
            raise
    else:
        do(manager.__aexit__(None, None, None))


def train_step(run: Run[Supplier], state: RunState) -> None:
    """Makes a step of `mrl.train`."""
    do(train.train_step(run, state))
