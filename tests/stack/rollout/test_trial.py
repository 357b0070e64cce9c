# SPDX-License-Identifier: Apache-2.0
"""`python -m mrl.reward` tries an agent without a model, through vLLM's handlers of OpenAI's protocol."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.sources import ROOT
from tests.stack.loop.conftest import write_inputs
from tests.stack.rollout.tool_tokenizer import save_tool_tokenizer
from tests.waiting import HANG_S

AGENT = """
import json

NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": NUMBERS}}}

async def agent(client, row):
    messages = [{"role": "user", "content": row["prompt"]}]
    answer = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL], temperature=0.0)
    said = answer.choices[0].message
    for call in said.tool_calls or []:
        found = str(sum(json.loads(call.function.arguments).values()))
        messages += [said.model_dump(exclude_none=True), {"role": "user", "content": found}]
        answer = await client.chat.completions.create(model="policy", messages=messages)
    text = answer.choices[0].message.content
    return {"right": float(text == row["expected_answer"]), "short": 1.0 / len(text)}
"""
NUMBER = "<parameter={}>\n{}\n</parameter>\n"
CALL = f"<tool_call>\n<function=add>\n{NUMBER.format('a', 2)}{NUMBER.format('b', 3)}</function>\n</tool_call>"
MORE = [
    "policy.generation.max_new_tokens=128",
    "policy.generation.vllm_cfg.http_server_serving_chat_kwargs={enable_auto_tools: true, tool_parser: qwen3_coder}",
]


def test_an_agent_is_tried_with_given_answers(tmp_path: Path):
    overrides = write_inputs(tmp_path, num_rows=4)
    save_tool_tokenizer(tmp_path / "model")
    (tmp_path / "tried_agent.py").write_text(AGENT)
    rows = [{"question": f"{a}+{5 - a}=", "answer": "5"} for a in (1, 2, 3)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    replies = [[CALL, "5"], "5", ""]
    (tmp_path / "replies.jsonl").write_text("".join(json.dumps(reply) + "\n" for reply in replies))
    own = [word for word in overrides if not word.startswith("data.")]
    words = ["tried_agent.py:agent", "sums.jsonl", "--replies", "replies.jsonl", *MORE, *own]
    command = [sys.executable, "-m", "mrl.reward", *words]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    head = next(index for index, line in enumerate(lines) if line.startswith("row "))
    table = [dict(zip(lines[head].split(), line.split(), strict=False)) for line in lines[head + 1 : head + 4]]
    assert [(row["reward"], row["requests"], row["verdict"]) for row in table] == [
        ("2", "2", "ok"),
        ("2", "1", "ok"),
        ("-", "1", "error"),
    ]
    assert {row["dropped_tools"] for row in table} == {row["overridden_temperature"] for row in table} == {"1"}
    assert "  user: 5" in lines[:head]
    assert any(
        "1 of 3 replies, first of sums:3: TypeError: object of type 'NoneType' has no len() (" in line for line in lines
    )
    assert done.stderr.count("An agent failed") == 1
