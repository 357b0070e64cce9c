# SPDX-License-Identifier: Apache-2.0
"""An agent with two tools: one checks the answer, the other says how far off it is, and the model may try again."""

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam


def check(said: str, expected: str) -> bool:
    return said.strip() == expected


def distance(said: str, expected: str) -> str:
    return f"off by {int(expected) - int(said):+d}, again: " if said.strip().isdecimal() else "no number, again: "


async def agent(client: AsyncOpenAI, row: dict[str, str]) -> float:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": row["prompt"]}]
    for reward in (1.0, 0.5):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        said = answer.choices[0].message.content or ""
        if check(said, row["expected_answer"]):
            return reward
        messages.append({"role": "assistant", "content": said})
        messages.append({"role": "user", "content": distance(said, row["expected_answer"])})
    return 0.1 if said.strip().isdecimal() else 0.0
