# SPDX-License-Identifier: Apache-2.0
"""Rewards of NeMo Gym's own verifiers and of mrl's. Writes docs/data/gym_rewards.json.

The answers are those of tests/unit/nemo/gym/graders/gym_answers.json, and of Gym's own example rows, each with all that
Gym's example rollouts said.

Gym runs in an environment of its own: that of `--gym-python`, else one that is made, which takes a network, uv and 2
GB.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from mrl.config.schema.env import SERVERS, CodeEnvConfig
from mrl.envs import code, math
from mrl.envs.task import Score, Task
from mrl.nemo.gym.graders import instruction_following, mcqa, structured_outputs, workplace_assistant
from tests.long.record import Row, record

ANSWERS = Path("tests/unit/nemo/gym/graders/gym_answers.json")
VERIFIERS = Path(__file__).with_name("gym_verifiers.py")
LIMIT_S = 3600.0
Group = dict[str, Any]
"""`server`, `row` and `answers`, each a reply and Gym's reward of it."""
PARSER = "hermes"
"""The format in which the tool calls of answers are written for mrl."""
GYM = (
    *(
        "nemo-gym==0.5.0",
        "openapi-schema-validator==0.6.3",
        "tomli-w==1.2.0",
        "xmltodict==1.0.2",
        "tiktoken",
        "pandas",
        "numpy==2.2.6",
    ),
    "git+https://github.com/abukharin-nv/verifiable-instructions.git@f46a5ac87b1400a4f8973039844b6be9b56e3faf",
)
"""Requirements of Gym's resource servers. The version's verifiers are those that NeMo RL 7ea279a pins, but for
`for line in sys.stdin`.
"""


@dataclass(frozen=True)
class Answer:
    """A reply to a row, and Gym's reward of it."""

    server: str
    row: str
    reply: str
    gym: float


def recorded_groups() -> list[Group]:
    """The recorded answers, by row."""
    return json.loads(ANSWERS.read_text(encoding="utf-8"))


def answers() -> list[Answer]:
    """The recorded answers."""
    return list(answers_of(recorded_groups()))


def answers_of(groups: Sequence[Group]) -> Iterator[Answer]:
    """The answers in groups of one row each; calls of tools are written into the text."""
    for group in groups:
        for reply, reward in group["answers"]:
            yield Answer(group["server"], json.dumps(group["row"]), text_of(reply), reward)


def example_groups(servers: Path) -> list[Group]:
    """Gym's example rows of all servers mrl stands in for, each with all example rollouts' replies, and simple ones."""
    found = list[Group]()
    for server in SERVERS:
        files = sorted(servers.glob(f"{server}/data/*example*.jsonl"))
        rollouts, examples = (
            [file for file in files if ("rollouts" in file.name) is is_rollout] for is_rollout in (True, False)
        )
        said = [reply_of(rollout["response"]["output"]) for rollout in _rows(rollouts)]
        for row in _rows(examples):
            expected = row.get("expected_answer", "{}")
            simple = ["", expected, f"\\boxed{{{expected}}}", f"Answer: {expected}", "\\boxed{-1}", *wanted_calls(row)]
            found.append({"server": server, "row": row, "answers": [[reply, 0.0] for reply in (*said, *simple)]})
    return found


def wanted_calls(row: Mapping[str, Any]) -> list[dict[str, object]]:
    """The reply that makes the calls of tools that a row wants, if it says any."""
    truth = row.get("ground_truth")
    calls = (
        [{"name": call["name"], "arguments": call["arguments"]} for call in truth] if isinstance(truth, list) else []
    )
    return [{"calls": calls}] if calls else []


def reply_of(output: Sequence[Mapping[str, Any]]) -> str | dict[str, object]:
    """Text of the model in a recorded output, with the calls of tools if there are any."""
    texts = [part["text"] for item in output if item["type"] == "message" for part in item["content"]]
    calls = [
        {"name": item["name"], "arguments": item["arguments"]} for item in output if item["type"] == "function_call"
    ]
    return {"text": "".join(texts), "calls": calls} if calls else "".join(texts)


def _rows(files: Sequence[Path]) -> list[dict[str, Any]]:
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def text_of(reply: str | Mapping[str, object]) -> str:
    """The text of a model that says this and calls these tools."""
    if isinstance(reply, str):
        return reply
    calls = reply.get("calls")
    texts = [str(reply.get("text") or "")]
    for call in calls if isinstance(calls, list) else []:
        arguments = json.loads(call["arguments"]) if isinstance(call["arguments"], str) else call["arguments"]
        texts.append(f"<tool_call>{json.dumps({'name': call['name'], 'arguments': arguments})}</tool_call>")
    return "".join(texts)


@cache
def grader(server: str, tables: str | None) -> Score:
    """The reward function of mrl that does what a server of Gym does."""
    if server == "workplace_assistant":
        return workplace_assistant.make(tables)
    if server == "code_gen":
        limits = CodeEnvConfig()
        return code.make(limits.unit_test_timeout_s, limits.timeout_s, may_escape=False)
    if server == "math_with_judge":
        return math.make("hf_math_verify", is_strict=False)
    return {"mcqa": mcqa, "structured_outputs": structured_outputs, "instruction_following": instruction_following}[
        server
    ].make()


def reward(answer: Answer, tables: str | None = None) -> float | None:
    """Mrl's reward; None for a row that it masks."""
    try:
        expected = str(json.loads(answer.row).get("expected_answer", ""))
        return grader(answer.server, tables)(Task((answer.reply,), expected, row=answer.row, tool_parser=PARSER)).reward
    except ValueError:
        return None


def gym_python(folder: Path) -> str:
    """Makes Gym's environment."""
    subprocess.run(["uv", "venv", "--python", "3.13", str(folder)], check=True, timeout=LIMIT_S)
    python = str(folder / "bin/python")
    subprocess.run(["uv", "pip", "install", "--python", python, *GYM], check=True, timeout=LIMIT_S)
    return python


def main(python: str | None) -> None:
    """Asks both about each answer, prints the differences, and records the counts."""
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        python = python or gym_python(Path(folder))
        servers = Path(
            output_of(python, "-c", "import resources_servers as r; print(*r.__path__, sep='\\n')").split("\n")[0]
        )
        groups = [*recorded_groups(), *example_groups(servers)]
        rewards = chain.from_iterable(json.loads(output_of(python, str(VERIFIERS), given=json.dumps(groups))))
        source = servers / "workplace_assistant/csv_data"
        tables = Path(folder, "tables")
        tables.mkdir()
        for file in (*source.glob("processed/*.csv"), source / "raw/email_addresses.csv"):
            os.symlink(file, tables / file.name)
        counts = defaultdict[str, Counter[str]](Counter)
        for answer, theirs in zip(answers_of(groups), rewards, strict=True):
            ours = reward(answer, str(tables))
            what = {
                "right in Gym": theirs > 0,
                "other reward here": ours not in (None, theirs),
                "masked here": ours is None,
            }
            counts[answer.server].update({"answers": 1, **what})
            if ours != theirs:
                print(f"{answer.server}: Gym {theirs}, here {ours}: {answer.reply!r:.150} for {answer.row:.150}")
    rows: list[Row] = [{"environment": SERVERS[server], **counted} for server, counted in counts.items()]
    record("gym_rewards", rows, command="python -m scripts.bench.gym_rewards")


def output_of(*command: str, given: str | None = None) -> str:
    """Standard output of a command that gets `given` on its standard input."""
    return subprocess.run(command, input=given, stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT_S).stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.gym_rewards")
    parser.add_argument("--gym-python", help="Python of an environment with NeMo Gym and what its servers need")
    main(parser.parse_args().gym_python)
