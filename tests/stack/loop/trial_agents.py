# SPDX-License-Identifier: Apache-2.0
"""Agents of a run of tests, which do all that makes several sequences of a rollout, and all that makes it fail."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}}}}


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
