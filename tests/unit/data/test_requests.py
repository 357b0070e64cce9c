# SPDX-License-Identifier: Apache-2.0
"""Rows of NeMo Gym: requests with what their environments need."""

import json

import pytest

from mrl.data.fields import Fields, RowError
from mrl.data.rows import parse_row
from tests.unit.data.test_rows import assistant, dataset, user


def row(agent: str, asked: str, **fields: object) -> Fields:
    """A row of the blend."""
    request: Fields = {"input": [{"role": "user", "content": asked}]}
    return {"responses_create_params": request, "agent_ref": {"type": "responses_api_agents", "name": agent}, **fields}


BLEND: dict[str, Fields] = {
    "math_with_judge_simple_agent": row(
        "math_with_judge_simple_agent", "1+1?", expected_answer="2", question="1+1?", uuid="a"
    ),
    "mcqa_simple_agent": row(
        "mcqa_simple_agent",
        "A or B?",
        expected_answer="B",
        options=[{"A": "x", "B": None}, {"A": None, "B": "y"}],
        template_metadata={"output_regex": "Answer: ([A-D])"},
        grading_mode="strict_single_letter_boxed",
    ),
    "code_gen_simple_agent": row(
        "code_gen_simple_agent",
        "Double it.",
        verifier_metadata={"unit_tests": {"inputs": ["1\n"], "outputs": ["2\n"], "fn_name": None}},
    ),
    "instruction_following_simple_agent": row(
        "instruction_following_simple_agent",
        "Be brief.",
        id=3,
        instruction_id_list=["length_constraints:number_words"],
        kwargs=[{"n": 3}],
    ),
    "structured_outputs_simple_agent": row(
        "structured_outputs_simple_agent", "JSON!", schema_str="{}", schema_type="json"
    ),
    "workplace_assistant_simple_agent": row(
        "workplace_assistant_simple_agent",
        "Mail Bob.",
        ground_truth=[{"name": "send", "arguments": '{"to": "Bob"}'}],
        category="email",
    ),
}


@pytest.mark.parametrize("agent", BLEND)
def test_rows_of_the_blend_keep_what_their_environment_needs(agent: str):
    fields = BLEND[agent]
    parsed = parse_row(fields, dataset("NemoGymDataset"))
    assert parsed == parse_row(fields, dataset())
    assert parsed.agent == agent
    assert len(parsed.messages) == 1 and parsed.reply is None
    assert parsed.answer == fields.get("expected_answer", "")
    # Ids of the blend's sources may repeat.
    assert (parsed.row_id, parsed.env_name) == (None, None)
    assert parsed.rest == {key: value for key, value in fields.items() if key != "responses_create_params"}


def test_requests_become_conversations():
    request: Fields = {
        "instructions": "Be brief.",
        "input": [
            {"role": "developer", "content": "Use tools."},
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "Mail "}, {"type": "input_text", "text": "Bob."}],
            },
            {"type": "function_call", "name": "find", "arguments": '{"name": "Bob"}', "call_id": "c1"},
            {"type": "function_call_output", "call_id": "c1", "output": "bob@example.com"},
        ],
        "tools": [
            {
                "type": "function",
                "name": "find",
                "description": "Finds.",
                "parameters": {"type": "object"},
                "strict": None,
            }
        ],
        "parallel_tool_calls": False,
    }
    parsed = parse_row({"responses_create_params": request}, dataset())
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"name": "Bob"}'}}
    assert parsed.messages == [
        {"role": "system", "content": "Be brief.\n\nUse tools."},
        {"role": "user", "content": "Mail Bob."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "bob@example.com"},
    ]
    assert parsed.tools == [
        {"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": {"type": "object"}}}
    ]
    assert parsed.question == "Mail Bob."
    assert parse_row({"responses_create_params": {"input": "Hi"}}, dataset()).messages == [
        {"role": "user", "content": "Hi"}
    ]


def test_one_turn_of_a_request_is_one_message():
    """Result of nemo_gym/responses_converter.py of NeMo Gym 07d6b0d makes of the same requests."""

    def call(name: str, call_id: str) -> Fields:
        return {"type": "function_call", "name": name, "arguments": "{}", "call_id": call_id}

    def called(name: str, call_id: str) -> Fields:
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}

    entries: list[Fields] = [
        user("A and B?"),
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I ask both."}]},
        call("a", "1"),
        call("b", "2"),
        {"type": "function_call_output", "call_id": "1", "output": "1"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "2"}]},
        assistant("x"),
        assistant("y"),
        {"role": "developer", "content": "Hurry."},
        user("Sum?"),
    ]
    tool: Fields = {
        "type": "function",
        "parameters": {"type": "object", "properties": {}},
        "name": "a",
        "strict": False,
    }
    parsed = parse_row({"responses_create_params": {"input": entries, "tools": [tool]}}, dataset())
    assert parsed.messages == [
        user("A and B?"),
        {
            "role": "assistant",
            "content": "<think>hm</think>I ask both.",
            "tool_calls": [called("a", "1"), called("b", "2")],
        },
        {"role": "tool", "tool_call_id": "1", "content": "1"},
        {"role": "tool", "tool_call_id": "2", "content": "2"},
        {"role": "assistant", "content": "xy"},
        {"role": "developer", "content": "Hurry."},
        user("Sum?"),
    ]
    assert json.dumps(parsed.tools) == json.dumps(
        [{"type": "function", "function": {"name": "a", "parameters": {"type": "object", "properties": {}}}}]
    )


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"responses_create_params": None}, "no object responses_create_params"),
        ({"responses_create_params": {"input": []}}, "input must be a text or a list of messages, not empty"),
        ({"responses_create_params": {"input": "q"}, "_hf_placeholder": {"row": 1}}, "python -m mrl.prepare nano3"),
        (
            {"responses_create_params": {"input": [{"type": "web_search_call"}]}},
            r"input\[0\] is a web_search_call of role None",
        ),
        (
            {"responses_create_params": {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}},
            "is input_image; only text",
        ),
        (
            {"responses_create_params": {"input": "q", "tools": [{"type": "web_search"}]}},
            r"tools\[0\] must be an object of type function",
        ),
        ({"responses_create_params": {"input": "q"}, "agent_ref": {"name": 3}}, "agent_ref.name must be a string"),
    ],
)
def test_what_is_wrong_with_a_row_of_the_blend(fields: Fields, reason: str):
    with pytest.raises(RowError, match=reason):
        parse_row(fields, dataset())
