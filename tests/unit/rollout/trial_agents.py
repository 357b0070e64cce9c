# SPDX-License-Identifier: Apache-2.0
"""Agents in a process of their own."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from openai import AsyncOpenAI


async def echo(client: AsyncOpenAI, row: dict) -> float | dict:
    """Does what the row says; asks the model first."""
    messages = [{"role": "user", "content": row["prompt"]}]
    await client.chat.completions.create(model="any", messages=messages)  # pyright: ignore[reportArgumentType]
    match row["does"]:
        case "raise":
            raise KeyError("nothing there")
        case "raise in a group":
            async with asyncio.TaskGroup() as group:
                group.create_task(_fail())
        case "text":
            return {"reward": "much"}
        case "columns":
            return {"reward": 1.0, "tries": 2, "plan": "add \ud800", "extracted": "42"}
        case "nan":
            return {"reward": 1.0, "extra": float("nan")}
        case "surrogate":
            raise ValueError("half \ud800")
        case "leave":
            sys.exit(3)
        case "cancel":
            raise asyncio.CancelledError
        case "own timeout":
            await asyncio.wait_for(asyncio.Event().wait(), 0.01)
        case "two rewards":
            return {"reward": 1.0, "score": 0.0}
        case "wait":
            while not Path(row["marker"]).exists():
                await asyncio.sleep(0.02)
        case "close":
            await client.close()
        case "leave from a task" if not Path(row["marker"]).exists():
            Path(row["marker"]).touch()
            asyncio.get_running_loop().call_soon(sys.exit, 3)
            await asyncio.sleep(1000)
        case "mask":
            return {"reward": 1.0, "mask_sample": True}
        case "die" if not Path(row["marker"]).exists():
            Path(row["marker"]).touch()
            os._exit(1)
        case "die always":
            os._exit(1)
        case "sleep":
            await asyncio.sleep(1000)
        case "hang":
            time.sleep(1000)
        case "patient":
            await asyncio.sleep(0.2)
    return {"right": 0.5, "short": 0.25}


def no_agent(row: dict) -> float:
    return 0.0


async def _fail() -> None:
    raise KeyError("deep")
