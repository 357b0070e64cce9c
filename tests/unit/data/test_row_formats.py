# SPDX-License-Identifier: Apache-2.0
"""Rows as other projects publish them, and what such rows hold that no message shows."""

from __future__ import annotations

import json

import pytest

from mrl.data.fields import Fields, RowError
from mrl.data.rows import parse_pair
from tests.unit.data.test_rows import SYSTEM, assistant, calls, dataset, parse, user


def test_rows_of_trl():
    """The prompt-only and prompt-completion types of TRL's dataset_formats page, plain and conversational."""
    plain = parse({"prompt": "The sky is", "completion": " blue."})
    assert (plain.messages, plain.reply, plain.answer) == ([user("The sky is")], assistant(" blue."), "blue.")
    asked, turn = [user("What color is the sky?")], assistant("It is blue.")
    assert parse({"prompt": asked}) == parse({"messages": asked})
    full = parse({"prompt": asked, "completion": [turn]})
    assert (full.messages, full.reply, full.answer) == (asked, turn, "It is blue.")
    assert parse({"prompt": asked, "solution": "42"}, output_key="solution").answer == "42"
    with pytest.raises(
        RowError, match="completion must be one message of the assistant; give a longer conversation as messages"
    ):
        parse({"prompt": asked, "completion": [turn, *asked]})


def test_conversations_as_others_write_them():
    turns = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    expected = parse({"messages": [SYSTEM, user("q"), assistant("a")]})
    assert parse({"conversations": turns}) == expected
    assert parse({"messages": json.dumps([SYSTEM, user("q"), assistant("a")])}) == expected
    assert parse({"prompt": json.dumps([user("q")]), "reward_model": {"ground_truth": "3"}}).messages == [user("q")]
    # Calls as an answer are no conversation.
    assert parse({"messages": [user("q")], "answer": '[{"name": "f"}]'}).answer == '[{"name": "f"}]'
    assert parse({"question": "[{a}] in LaTeX?", "answer": "x"}).messages == [user("[{a}] in LaTeX?")]


RANKED = [{"rank": 0, "completion": [assistant("a")]}, {"rank": 1, "completion": [assistant("b")]}]


@pytest.mark.parametrize(
    ("fields", "unshown"),
    [
        ({"question": "Who?", "context": "It was Ann.", "answer": "Ann"}, ("context",)),
        ({"question": "It was\nAnn. Who?", "context": "it was Ann.", "answer": "Ann"}, ()),
        ({"question": "Which?", "choices": ["red ant", "bee"], "answer": 1}, ("choices",)),
        ({"question": "Which? A: red ant B: bee", "options": {"A": "red ant", "B": "bee"}, "answer": "B"}, ()),
        ({"messages": [user("What is this?")], "images": [{"path": "a.png", "bytes": None}]}, ("images",)),
        ({"question": "q", "context": "", "images": [], "answer": "a"}, ()),
        ({"prompt": "Who?", "chosen": "a", "rejected": "b", "context": "It was Ann."}, ("context",)),
        ({"messages": [user("Who?")], "system": "In French."}, ("system",)),
        ({"instruction": "Who?", "history": [["Hi", "Hello"]], "output": "Ann"}, ("history",)),
        ({"context": [user("Who?")], "completions": RANKED}, ()),
        ({"context": [user("Who?"), calls({"a": 1})], "completions": RANKED}, ()),
        (
            {
                "context": [{"from": "human", "value": "Who?"}],
                "overall_preference": 1,
                "response1": "a",
                "response2": "b",
            },
            (),
        ),
        ({"prompt": "Who?", "chosen": "a", "rejected": "b", "context": [user("who?")]}, ()),
        (
            {"prompt": "Who?", "chosen": "a", "rejected": "b", "context": json.dumps([user("It was Ann.")])},
            ("context",),
        ),
        ({"context": [user("Who?")], "completions": RANKED, "system": "In French."}, ("system",)),
    ],
)
def test_what_a_reply_needs_and_the_model_never_sees(fields: Fields, unshown: tuple[str, ...]):
    is_pair = bool({"chosen", "completions", "overall_preference"} & fields.keys())
    assert (parse_pair(fields, dataset()) if is_pair else parse(fields)).unshown == unshown
