# SPDX-License-Identifier: Apache-2.0
"""Agents of a run of tests, which do all that makes several sequences of a rollout, and all that makes it fail."""

from __future__ import annotations

import asyncio
import os
import zlib
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}}},
}


async def said(client: AsyncOpenAI, messages: list, **body: Any) -> str:
    answer = await client.chat.completions.create(model="gpt-4o", messages=messages, max_tokens=6, **body)
    return answer.choices[0].message.content or ""


async def busy(client: AsyncOpenAI, row: dict) -> dict:
    """A conversation of two turns, the second tried twice, a sub-agent, and an answer that a schema forces."""
    messages: list = [{"role": "user", "content": row["prompt"]}]
    first = await said(client, messages, temperature=0.3)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "and?"}]
    texts = [first, await said(client, messages), await said(client, messages)]
    texts.append(await said(client, [{"role": "user", "content": f"sub {row['prompt']}"}]))
    await said(client, messages, response_format=SCHEMA)
    reward = zlib.crc32("".join(texts).encode()) % 2
    return {"reward": float(reward), "components_are_counted": 1.0}


async def failing(client: AsyncOpenAI, row: dict) -> float:
    """Raises for every second answer, and once, for the first of all rows, takes its process along."""
    text = await said(client, [{"role": "user", "content": row["prompt"]}])
    marker = Path(os.environ["TRIAL_FOLDER"]) / "died"
    if not marker.exists():
        marker.touch()
        os._exit(3)
    if zlib.crc32(text.encode()) % 2:
        raise RuntimeError("no idea")
    return len(text) / 10


async def lonely(client: AsyncOpenAI, row: dict) -> float:
    """Never gives a reward."""
    await said(client, [{"role": "user", "content": row["prompt"]}])
    raise RuntimeError("never")


async def silent(client: AsyncOpenAI, row: dict) -> float:
    """Asks the model for nothing."""
    return 1.0


async def patient(client: AsyncOpenAI, row: dict) -> float:
    """Asks for two branches, then a second turn once its question is in the file `free`. Each text has its own reward.

    Questions in the file `lonely` get none. The file `waiting` says which process has come so far with which question.
    """
    folder = Path(os.environ["TRIAL_FOLDER"])
    messages: list = [{"role": "user", "content": row["prompt"]}]
    answer = await client.chat.completions.create(model="m", messages=messages, max_tokens=6, n=2)
    texts = [choice.message.content or "" for choice in answer.choices]
    with (folder / "waiting").open("a") as file:
        file.write(f"{os.getpid()} {row['prompt']}\n")
    while not {row["prompt"], "*"} & set((folder / "free").read_text().splitlines()):
        await asyncio.sleep(0.02)
    messages += [{"role": "assistant", "content": texts[0]}, {"role": "user", "content": "and?"}]
    texts.append(await said(client, messages))
    if row["prompt"] in (folder / "lonely").read_text().splitlines():
        raise RuntimeError("never")
    return 1 + zlib.crc32("".join(texts).encode()) / 2**32
