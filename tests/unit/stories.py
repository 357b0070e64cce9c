# SPDX-License-Identifier: Apache-2.0
"""Tests that are coroutines."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import ParamSpec

from tests.waiting import HANG_S

P = ParamSpec("P")


def as_story(test: Callable[P, Coroutine[None, None, None]]) -> Callable[P, None]:
    """A test that runs the coroutine in a loop of its own."""

    @functools.wraps(test)
    def run(*arguments: P.args, **options: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **options), HANG_S))

    return run


async def settled() -> None:
    """Lets the loop do what it can do at once."""
    for _ in range(20):
        await asyncio.sleep(0)
