# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from mrl.recipes.tokenizer import byte_tokenizer
from mrl.rollout.agent_session import (
    continued,
    droppable,
    num_messages_to_answer,
    said,
    take_prefix,
)

HELLO = {"role": "user", "content": "hello"}
CALLS = [{"id": "x1", "function": {"name": "f", "arguments": "{}"}}]
ANSWER = {"role": "assistant", "content": None, "tool_calls": CALLS, "reasoning": "hm"}
RESULT = {"role": "tool", "content": "42", "tool_call_id": "x1"}


def test_messages_are_compared_by_what_they_say():
    parts = {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}
    assert said(parts) == said(HELLO)
    assert said({"role": "assistant", "content": None}) == said({"role": "assistant", "content": "", "tool_calls": []})


def test_the_prefix_stands_in_the_request_or_with_the_last_message_that_has_one():
    messages = [
        {"role": "assistant", "content": "a", "prompt_token_ids": [1], "generation_token_ids": [2]},
        {
            "role": "assistant",
            "content": "b",
            "prompt_token_ids": [1, 2, 3],
            "generation_token_ids": [4],
            "generation_log_probs": [0.0],
        },
        {"role": "user", "content": "c"},
    ]
    plain = [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert take_prefix({"messages": messages, "n": 1}) == ({"messages": plain, "n": 1}, [1, 2, 3, 4])
    assert take_prefix({"messages": messages, "required_prefix_token_ids": [9]}) == ({"messages": plain}, [9])
    assert take_prefix({"messages": plain}) == ({"messages": plain}, None)


@pytest.mark.parametrize("given", [[], [1, "2"], [-1], [True], "1", {}])
def test_a_prefix_that_is_no_token_ids_is_refused(given: object):
    with pytest.raises(ValueError, match="must be a list of token ids"):
        take_prefix({"messages": [], "required_prefix_token_ids": given})
    with pytest.raises(ValueError, match="must be a list of token ids"):  # half a prefix
        take_prefix({"messages": [{"role": "assistant", "prompt_token_ids": [1]}]})


def test_messages_up_to_the_answer():
    roles = ["user", "assistant", "tool", "assistant", "user"]
    assert num_messages_to_answer([{"role": role} for role in roles]) == 4
    assert num_messages_to_answer([{"role": "user"}]) == 0


# Prompt 11 12, answer " 4" in one token (220 17) or another (1001), end mark 2, newline 10, then a user's message 21
# and the head 40.
def test_the_sampled_tokens_stay_and_the_template_goes_on_behind_its_end_mark():
    assert continued([11, 12, 220, 17, 2], [11, 12, 1001, 2, 10], [11, 12, 1001, 2, 10, 21, 2, 10, 40], {2}) == [
        *(11, 12, 220, 17, 2),
        *(10, 21, 2, 10, 40),
    ]


def test_an_answer_that_was_cut_off_gets_the_end_mark_of_the_template():
    assert continued([11, 220, 17], [11, 1001, 2], [11, 1001, 2, 21, 40], {2}) == [11, 220, 17, 2, 21, 40]


def test_another_end_mark_than_the_templates_stays_alone():
    assert continued([11, 220, 3], [11, 1001, 2], [11, 1001, 2, 21, 40], {2, 3}) == [11, 220, 3, 21, 40]


def test_thoughts_that_the_template_drops_from_earlier_turns_stay():
    # 70 71 are thoughts: written while the answer is the last message, left out behind it, so that positions shift.
    assert continued([11, 2, 70, 71, 5, 2], [11, 2, 70, 71, 5, 2], [11, 2, 5, 2, 21, 2, 40], {2}) == [
        11,
        2,
        70,
        71,
        5,
        2,
        21,
        2,
        40,
    ]


def test_a_template_without_end_marks_cannot_go_on():
    with pytest.raises(ValueError, match="without one of the tokens \\[2\\] behind each answer"):
        continued([11, 12], [11, 12], [11, 12, 13], {2})


@pytest.mark.parametrize(
    "other", ['{"n":3,"city":"Zürich"}', '{"city": "Z\\u00fcrich", "n": 3}', {"city": "Zürich", "n": 3}]
)
def test_arguments_are_the_same_however_a_client_writes_them(other: object):
    def calling(arguments: object) -> dict[str, object]:
        return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}

    assert said(calling('{"city": "Zürich", "n": 3}')) == said(calling(other)) != said(calling("{"))


TOOLS = [{"type": "function", "function": {"name": "f", "description": "x", "parameters": {"type": "object"}}}]
PLAIN = "{% for m in messages %}{% if m.role != 'developer' %}{{ m.role }}{{ m.content }}{% endif %}{% endfor %}"
CALLING = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "lost"), [(PLAIN, {"tools", "documents", "role_developer", "tool_calls"}), (CALLING, {"documents"})]
)
def test_parts_that_a_template_drops_change_nothing(template: str, lost: set[str]):
    """Against transformers' rendering of templates that drop what their text shows."""
    tokenizer = byte_tokenizer(1024)
    messages = [{"role": "developer", "content": "be brief"}, HELLO, ANSWER | {"content": ""}, RESULT]
    request = {"messages": messages, "tools": TOOLS, "documents": [{"title": "t", "text": "x"}]}

    def text(changes: dict) -> object:
        fields = request | changes
        return tokenizer.apply_chat_template(
            fields["messages"],
            tools=fields["tools"],
            documents=fields["documents"],
            chat_template=template,
            tokenize=False,
        )

    found = droppable(messages, has_tools=True, has_documents=True)
    assert {name for name, changes in found if text(changes) == text({})} == lost
