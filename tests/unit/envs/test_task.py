# SPDX-License-Identifier: Apache-2.0
"""Texts of a row are compared with the model's, which mrl makes safe: both go through one function."""

import json

import pytest

from mrl.config.texts import safe_text
from mrl.envs.own import make
from mrl.envs.task import Task
from mrl.nemo.gym.graders import instruction_following, mcqa, structured_outputs, workplace_assistant

TEXTS = (
    "Line one.\r\nLine two.",
    "Page one\x0cPage two",
    "\u2066abc\u2069 is a name.",
    "an escape \x1b[0m",
    "old Mac\rlines",
)


def task(reply: str, **fields: object) -> Task:
    return Task((safe_text(reply),), row=json.dumps(fields))


def is_my_text(response: str, row: dict[str, str]) -> float:
    return float(response == row["text"])


@pytest.mark.parametrize("text", TEXTS)
def test_a_copy_of_a_row_s_text_is_a_copy(text: str):
    repeated = {"instruction_id_list": ["combination:repeat_prompt"], "kwargs": [{"prompt_to_repeat": text}]}
    assert instruction_following.score(task(f"{text}\n\nHere is my answer.", **repeated)).reward == 1.0
    options = [{"A": text}, {"B": "another"}]
    assert (
        mcqa.score(
            task(f"\\boxed{{{text}}}", options=options, expected_answer="A", grading_mode="lenient_boxed")
        ).reward
        == 1.0
    )
    schema = json.dumps({"type": "object", "properties": {"said": {"const": text}}})
    for ascii_only in (True, False):
        reply = json.dumps({"said": text}, ensure_ascii=ascii_only)
        assert structured_outputs.score(task(reply, schema_str=schema)).reward == 1.0
    assert make(f"{__name__}:is_my_text")(task(text, text=text)).reward == 1.0


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("is_escaped", [True, False])
def test_a_call_says_what_the_ground_truth_says(text: str, is_escaped: bool):
    arguments = {"recipient": "ann@x.com", "subject": "Plan", "body": text}
    truth = [{"name": "email_send_email", "arguments": json.dumps(arguments)}]
    call = json.dumps({"name": "email_send_email", "arguments": arguments})
    parameters = "".join(f"<parameter={key}>{value}</parameter>" for key, value in arguments.items())
    reply = f"<tool_call>{call if is_escaped else f'<function=email_send_email>{parameters}</function>'}</tool_call>"
    row = json.dumps({"ground_truth": truth, "tables": {"emails": []}})
    judged = Task((safe_text(reply),), row=row, tool_parser="hermes" if is_escaped else "qwen3_coder")
    assert workplace_assistant.make(None)(judged).extracted == "the right state"
