# SPDX-License-Identifier: Apache-2.0
"""Formats of tool calls; tests/stack/rollout/test_tool_calls.py compares with vLLM's parsers."""

import json

import pytest

from mrl.config.schema.env import TOOL_PARSERS
from mrl.data.turns import MARKUP
from mrl.envs.task import RowFault, Task
from mrl.envs.tool_calls import READERS, tool_calls
from mrl.nemo.gym.graders.workplace_assistant import make

SEND = {"recipient": "ann@x.com", "subject": "Plan", "body": "Yes {really}"}
FIND = {"name": "ann"}
CALL, OTHER = (
    {"name": "email_send_email", "arguments": SEND},
    {"name": "company_directory_find_email_address", "arguments": FIND},
)
ONE, TWO = json.dumps(CALL), json.dumps(OTHER)
XML = "".join(f"<parameter={key}>\n{value}\n</parameter>" for key, value in SEND.items())
TEXTS = {
    "qwen3_coder": f"<tool_call><function=email_send_email>{XML}</function></tool_call>",
    "hermes": f"I look.\n<tool_call>\n{TWO}\n</tool_call>\n<tool_call>\n{ONE}\n</tool_call>",
    "nemotron_json": f"<TOOLCALL>[{TWO}, {ONE}]</TOOLCALL>",
    "llama3_json": f"{TWO}; {ONE.replace('arguments', 'parameters')}",
    "mistral": f"[TOOL_CALLS]{OTHER['name']}[ARGS]{json.dumps(FIND)}[TOOL_CALLS]{CALL['name']}{json.dumps(SEND)}",
}
BROKEN = {
    "hermes": [
        f"<tool_call>{ONE}</tool_call><tool_call>{{]</tool_call>",
        f"<tool_call>[{ONE}]</tool_call>",
        "<tool_call>",
    ],
    "nemotron_json": [f"<TOOLCALL>[{ONE}", "<TOOLCALL>[{]</TOOLCALL>", ONE],
    "llama3_json": [f"{{so}} {ONE}", '{"name": "email_send_email"}', "no brace"],
    "mistral": [f"{CALL['name']}{json.dumps(SEND)}", f"[TOOL_CALLS]{CALL['name']}[ARGS]{{", "[TOOL_CALLS][{]"],
    "qwen3_coder": [ONE, "<tool_call><function=email_send_email></tool_call>"],
}
"""In these formats no call at all, as vLLM reads them."""


def judge(text: str, parser: str) -> float:
    row = {"ground_truth": [CALL], "tables": {"directory": [{"email_address": "ann@x.com"}]}}
    return make(None)(Task((text,), row=json.dumps(row), tool_parser=parser)).reward


@pytest.mark.parametrize("parser", TEXTS)
def test_calls_in_the_run_s_own_format_and_in_no_other(parser: str):
    # Llama's objects may stand anywhere in a text, as in vLLM.
    readers = {parser, "llama3_json"} if parser in ("hermes", "nemotron_json") else {parser}
    assert {other for other in TEXTS if judge(TEXTS[parser], other)} == readers


@pytest.mark.parametrize(("parser", "text"), [(parser, text) for parser, texts in BROKEN.items() for text in texts])
def test_a_broken_call_carries_out_nothing(parser: str, text: str):
    assert judge(text, parser) == 0.0


def test_older_forms_and_other_names():
    assert judge(f"[TOOL_CALLS] [{TWO}, {ONE}]", "mistral") == judge(TEXTS["hermes"], "qwen3_json") == 1.0
    as_text = json.dumps({**CALL, "arguments": json.dumps(SEND)})
    assert judge(f"<TOOLCALL>{as_text}</TOOLCALL>", "nemotron_json") == 1.0
    assert judge(f"<TOOLCALL>[7, {ONE}]</TOOLCALL>", "nemotron_json") == 1.0


def test_arguments_that_are_no_object_undo_one_call():
    text = f'<tool_call>{{"name": "email_send_email", "arguments": "x"}}</tool_call><tool_call>{ONE}</tool_call>'
    assert judge(text, "hermes") == 1.0


def test_a_format_that_nobody_reads_is_no_silent_zero():
    assert tuple(READERS) == TOOL_PARSERS
    with pytest.raises(RowFault, match="tool_parser=deepseek_v3 cannot be read; use one of qwen3_coder"):
        tool_calls("", (), "deepseek_v3")


def test_marks_that_are_special_tokens_stay_in_the_text():
    assert {"<tool_call>", "<TOOLCALL>", "</TOOLCALL>", "[TOOL_CALLS]", "[ARGS]"} < {*MARKUP}
