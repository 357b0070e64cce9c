# SPDX-License-Identifier: Apache-2.0
"""Hand-written rows in the published form of each data set, and what they must come to."""

import json
from pathlib import Path

import pytest

from mrl.config.schema.data import DATASETS, DatasetConfig
from mrl.data.fields import Fields, RowError
from mrl.data.rows import ParsedRow, gold_of, parse_pair, parse_row

GSM8K = Path(__file__).parent / "gsm8k" / "rows.jsonl"


def dataset(name: str | None = None, **keys: str | None) -> DatasetConfig:
    """A data set whose keys have their defaults, as no config has resolved them."""
    unset = dict.fromkeys(
        (
            "subset",
            "split",
            "input_key",
            "output_key",
            "system_key",
            "system_prompt",
            "prompt_file",
            "system_prompt_file",
        )
    )
    texts = {
        "prompt_key": "prompt",
        "chosen_key": "chosen",
        "rejected_key": "rejected",
        "chat_key": "messages",
        "tool_key": "tools",
    }
    texts |= {"processor": "math_data_processor", "env_name": "math"}
    found = DatasetConfig(dataset_name=name)
    for key, value in ({"data_path": "rows.jsonl"} | unset | texts | keys).items():
        setattr(found, key, value)
    return found


def parse(fields: Fields, name: str | None = None, **keys: str | None) -> ParsedRow:
    return parse_row(fields, dataset(name, **keys))


def user(text: str) -> Fields:
    return {"role": "user", "content": text}


def assistant(text: str) -> Fields:
    return {"role": "assistant", "content": text}


def calls(arguments: object) -> Fields:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": arguments}}],
    }


@pytest.mark.parametrize(
    ("fields", "question", "answer"),
    [
        ({"question": "1+1=", "answer": "2"}, "1+1=", "2"),
        ({"problem": "1+1=", "expected_answer": "2"}, "1+1=", "2"),
        ({"prompt": "1+1=", "answer": "2"}, "1+1=", "2"),
        ({"input": "1+1=", "output": "2"}, "1+1=", "2"),
        ({"input": "1+1=", "expected_answer": "2", "output": "because 2"}, "1+1=", "2"),
        ({"question": " 1+1= ", "answer": "one and one\n#### 2\n"}, " 1+1= ", "2"),
        (
            {"instruction": "Translate to French", "input": "two", "output": "deux"},
            "Translate to French\n\ntwo",
            "deux",
        ),
        ({"instruction": "Name a colour.", "input": "", "output": "red"}, "Name a colour.", "red"),
        ({"instruction": "Name a colour.", "output": "red"}, "Name a colour.", "red"),
        ({"instruction": "Add.", "prompt": "Add. 1+1", "output": "2"}, "Add. 1+1", "2"),
        ({"instruction": "Edit", "input": "Edition one", "output": "a"}, "Edit\n\nEdition one", "a"),
        ({"question": "q", "answer": "a #### 1 #### 1,234,567"}, "q", "1234567"),
        ({"question": "q", "answer": "(1, 2)"}, "q", "(1, 2)"),
        ({"question": "q", "answer": 46}, "q", "46"),
        ({"question": "q", "answer": 0.5}, "q", "0.5"),
        ({"question": "q", "answer": 1e16}, "q", "10000000000000000"),
        ({"question": "q", "answer": 1e-05}, "q", "0.00001"),
        ({"question": "ä\u2028€", "answer": "2"}, "ä\u2028€", "2"),
        ({"question": "judged otherwise", "answer": None}, "judged otherwise", ""),
    ],
)
def test_questions_and_answers(fields: Fields, question: str, answer: str):
    row = parse(fields)
    assert (row.messages, row.question, row.answer) == ([user(question)], question, answer)
    assert (row.row_id, row.env_name, row.agent, row.tools) == (None, None, None, [])


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("Add.\n#### 42", "42"),
        ("Add.\n#### 18\nThe answer is: 18", "18"),
        ("Add.\n#### $1,234.50\n", "$1234.50"),
        ("Solve.\n#### (1, 2)", "(1, 2)"),
        ("Solve.\n#### [1,234]", "[1,234]"),
        ("Solve.\n#### 1, 2, 3", "1, 2, 3"),
        ("#### Note\nthe unit is cm", "#### Note\nthe unit is cm"),
        ("#### 18\nThe answer is: 180", "#### 18\nThe answer is: 180"),
        ("work ####  ", "work ####"),
    ],
)
def test_what_follows_the_mark_is_the_answer_if_it_is_one_thing(answer: str, gold: str):
    assert gold_of(answer) == gold
    assert parse({"question": "q", "answer": answer}).answer == gold


def test_white_space_of_texts_is_kept():
    code: Fields = {"question": "def f(x):\n", "answer": "    return x\n"}
    row = parse(code)
    assert [row.messages[0], row.reply] == [user("def f(x):\n"), assistant("    return x\n")]
    pair = parse_pair({"prompt": "def f(x):\n", "chosen": "    return x\n", "rejected": "\treturn\n"}, dataset())
    assert (pair.messages, pair.chosen, pair.rejected) == (
        [user("def f(x):\n")], [assistant("    return x\n")], [assistant("\treturn\n")],
    )  # fmt: skip


SYSTEM: Fields = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    "fields",
    [
        {"question": "q", "answer": "a"},
        {"messages": [user("q"), assistant("a")]},
        {"prompt": [user("q")], "reward_model": {"ground_truth": "a"}},
        {"prompt": [user("q")], "answer": "a"},
        {"prompt": [user("q")], "completion": [assistant("a")]},
        {"responses_create_params": {"input": "q"}},
    ],
)
def test_system_messages_stand_before_rows_of_all_kinds(fields: Fields):
    assert parse(fields, system_prompt="Be brief.").messages == [SYSTEM, user("q")]
    beside = parse(fields | {"system": "Be brief."}, system_key="system", system_prompt="Be long.")
    assert beside.messages == [SYSTEM, user("q")]
    if "responses_create_params" not in fields:
        assert "system" not in beside.rest
    assert parse(fields | {"system": ""}, system_key="system").messages == [user("q")]


def test_pairs_have_system_messages_and_tools():
    tool: Fields = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "strict": None}}
    fields: Fields = {"prompt": "q", "chosen": "a", "rejected": "b", "system": "Be brief.", "tools": [tool]}
    pair = parse_pair(fields, dataset(system_key="system"))
    assert pair.messages == [SYSTEM, user("q")]
    assert pair.tools == [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def test_a_developers_message_that_comes_first_is_the_system_message():
    messages: list[Fields] = [{"role": "developer", "content": "Be long."}, user("q")]
    assert parse({"messages": messages}, system_prompt="Be brief.").messages == messages
    with pytest.raises(RowError, match="two different system messages"):
        parse({"messages": messages, "system": "Be brief."}, system_key="system")


def test_two_different_system_messages_are_refused():
    own: Fields = {"messages": [{"role": "system", "content": "Be long."}, user("q")], "system": "Be brief."}
    with pytest.raises(RowError, match="system and the first message are two different system messages"):
        parse(own, system_key="system")
    assert parse(own | {"system": "Be long."}, system_key="system").messages == own["messages"]


def test_replies_of_several_turns_that_begin_alike_keep_their_prompt():
    chosen, rejected = ([assistant("Which?"), user("the first"), assistant(text)] for text in ("1", "2"))
    pair = parse_pair({"prompt": "Choose.", "chosen": chosen, "rejected": rejected}, dataset())
    assert pair.messages == [user("Choose."), assistant("Which?"), user("the first")]


def test_calls_as_openai_had_them_before_tools():
    older: Fields = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": "{}"}}
    assert parse({"messages": [user("q"), older, assistant("a")]}).messages[1] == calls("{}")


def test_keys_of_a_response_dataset():
    fields: Fields = {"q": "1+1=", "a": "2", "input": "not this", "output": "nor this"}
    row = parse(fields, "ResponseDataset", input_key="q", output_key="a")
    assert (row.question, row.answer) == ("1+1=", "2")
    with pytest.raises(RowError, match="no key q"):
        parse({"input": "1+1=", "output": "2"}, "ResponseDataset", input_key="q")


def test_a_row_may_name_itself_and_its_environment_and_keeps_the_rest():
    row = parse({"question": "q", "answer": "a", "id": 7, "env_name": "mine", "level": {"min": 3}})
    assert (row.row_id, row.env_name, row.rest) == ("7", "mine", {"level": {"min": 3}})


def test_the_reply_of_gsm8k_is_the_whole_solution():
    rows = [parse(json.loads(line), "gsm8k") for line in GSM8K.read_text().splitlines()]
    assert [row.answer for row in rows[:4]] == ["72", "10", "5", "42"]
    assert rows[0].question.startswith("Natalia sold clips to 48 of her friends")
    assert rows[0].reply is not None and str(rows[0].reply["content"]).startswith(
        "Natalia sold 48/2 = <<48/2=24>>24 clips in May."
    )


# One row of each data set as it is published, shortened.
PUBLISHED: dict[str, tuple[Fields, list[Fields], str]] = {
    "OpenMathInstruct-2": (
        {"problem": "What is 2+3?", "generated_solution": "So \\boxed{5}", "expected_answer": "5",
         "problem_source": "augmented_math"},
        [user("What is 2+3?")],
        "5",
    ),
    "DAPOMath17K": (
        {
            "data_source": "math_dapo",
            "prompt": [{"content": "Solve the following math problem step by step.\n\nWhat is 2+3?", "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
        },
        [user("Solve the following math problem step by step.\n\nWhat is 2+3?")],
        "34",
    ),
    "DeepScaler": ({"problem": "What is 2+3?", "answer": "5", "solution": "Add them."}, [user("What is 2+3?")], "5"),
    "AIME2024": ({"id": 60, "problem": "Every morning", "solution": "s", "answer": "204", "url": "u"},
                 [user("Every morning")], "204"),
    "math500": (
        {"problem": "Convert (0,3)", "solution": "s", "answer": "(3, \\pi/2)", "subject": "Precalculus", "level": 2,
         "unique_id": "test/precalculus/807.json"},
        [user("Convert (0,3)")],
        "(3, \\pi/2)",
    ),
    "math": ({"problem": "Convert (0,3)", "expected_answer": "(3, \\pi/2)"}, [user("Convert (0,3)")], "(3, \\pi/2)"),
    "AIME2025": ({"question": "Find the sum", "answer": "70"}, [user("Find the sum")], "70"),
    "OpenR1-Math-220k": ({"problem": "What is 2+3?", "solution": "s", "answer": "5", "uuid": "u"},
                         [user("What is 2+3?")], "5"),
    "squad": (
        {
            "id": "5733be284776f41900661182",
            "title": "University_of_Notre_Dame",
            "context": "The school has a Catholic character.",
            "question": "What character has the school?",
            "answers": {"text": ["a Catholic character"], "answer_start": [15]},
        },
        [{"role": "system", "content": "The school has a Catholic character."}, user("What character has the school?")],
        "a Catholic character",
    ),
    "openai_format": (
        {"messages": [user("Capital of France?"), assistant("Paris.")], "source": "s"},
        [user("Capital of France?")],
        "Paris.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_rows(name: str):
    fields, messages, answer = PUBLISHED[name]
    row = parse(fields, name)
    assert (row.messages, row.answer) == (messages, answer)
    assert row.reply == assistant(answer)
    # Keys of these data sets are known without their names, but for SQuAD's.
    if name != "squad":
        assert parse(fields).messages == messages


def test_every_known_data_set_has_a_test_or_the_keys_of_any_row():
    by_keys = {"ResponseDataset", "PreferenceDataset", "BinaryPreferenceDataset", "HelpSteer3", "NemoGymDataset"}
    like = {
        "AIME2026": "AIME2024",
        "DAPOMathAIME2024": "DAPOMath17K",
        "GSM8K": "gsm8k",
        "gsm8k": "gsm8k",
        "Nemotron-Cascade-2-SFT-Math": "openai_format",
        "tulu3_sft_mixture": "openai_format",
    }
    assert DATASETS.keys() == PUBLISHED.keys() | by_keys | like.keys()


def test_a_conversation_of_several_turns_ends_before_the_last_reply():
    turns = [user("1+1?"), assistant("2"), user("And 1 more?"), assistant("3")]
    row = parse({"messages": turns})
    assert (row.messages, row.reply, row.answer, row.question) == (turns[:3], turns[3], "3", "And 1 more?")
    row = parse({"messages": turns[:3], "answer": "three"})
    assert (row.messages, row.reply, row.answer) == (turns[:3], None, "three")


def test_system_messages_and_tools_beside_a_conversation():
    tool: Fields = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    fields: Fields = {"turns": [user("q"), assistant("a")], "persona": "Be brief.", "functions": [tool]}
    row = parse(fields, chat_key="turns", system_key="persona", tool_key="functions")
    assert row.messages == [{"role": "system", "content": "Be brief."}, user("q")]
    assert row.tools == [tool]
    assert parse(fields | {"functions": json.dumps([tool])}, chat_key="turns", tool_key="functions").tools == [tool]
    own: Fields = {"role": "system", "content": "Be long."}
    assert parse({"messages": [own, user("q"), assistant("a")]}, system_prompt="Be brief.").messages == [own, user("q")]
    assert (
        parse({"messages": [user("q"), assistant("a")]}, system_prompt="Be brief.").messages[0]["content"]
        == "Be brief."
    )


def test_contents_in_parts_and_calls_without_content():
    calls = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
    turns: list[Fields] = [
        {"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
        assistant("2"),
    ]
    row = parse({"messages": turns})
    assert row.messages[0] == user("1+1?")
    assert row.messages[1] == {"role": "assistant", "content": None, "tool_calls": calls}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"answer": "a"},
         "no key question or problem or prompt or input (the row has 'answer'); data.default.input_key names another"),
        ({}, "(the row has none)"),
        ({"question": "", "answer": "a"}, "question is empty"),
        ({"question": " \n", "answer": "a"}, "question is empty"),
        ({"question": "q\0", "answer": "a"}, "question contains a NUL"),
        ({"question": "\ud800", "answer": "a"}, "half of a surrogate pair"),
        ({"question": "q", "answer": ""}, "answer is empty"),
        ({"question": "q", "answer": float("nan")}, "answer is nan"),
        ({"question": "q", "answer": float("inf")}, "answer is inf"),
        ({"question": ["q"], "answer": "a"}, "question[0] must be an object with role and content, not str"),
        ({"question": "q", "answer": True}, "answer must be a string, not bool"),
        ({"question": "q", "answer": "a", "id": {}}, "id must be a string, not dict"),
        ({"messages": []}, "messages must be a list of messages, not empty"),
        ({"messages": "hello"}, "messages must be a list of messages, not str"),
        ({"messages": ["hello"]}, "messages[0] must be an object with role and content, not str"),
        ({"messages": [{"content": "q"}]}, "messages[0].role is None"),
        ({"messages": [{"role": "bot", "content": "q"}]},
         "messages[0].role is 'bot'; use one of system, developer, user, assistant, tool"),
        ({"messages": [{"role": "user"}]}, "messages[0] has no content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "[0].content[0] is image_url; only text is supported"),
        ({"messages": [assistant("a")]}, "messages has no message of the user before the reply"),
        ({"messages": [user("q")], "tools": "{"}, "tools is a text that is not JSON"),
        ({"messages": [user("q")], "tools": ["add"]}, "tools must be a list of objects"),
        ({"messages": [user("q")], "tools": 3}, "tools must be a list of objects"),
        ({"messages": [{"role": "assistant", "tool_calls": ["add"]}]},
         "messages[0].tool_calls must be a list of objects"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "a call has no function.name"),
        ({"messages": [calls("{")]}, "the arguments of add are no JSON object"),
        ({"messages": [calls('"{}"')]}, "the arguments of add are no JSON object (not an object)"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_row(fields: Fields, reason: str):
    with pytest.raises(RowError) as caught:
        parse(fields)
    assert reason in str(caught.value)


def test_rows_of_squad_and_dapo_that_lack_their_keys():
    with pytest.raises(RowError, match="answers.text must be a list of answers, not empty"):
        parse({"context": "c", "question": "q", "answers": {"text": []}}, "squad")
    with pytest.raises(RowError, match="reward_model must be an object with ground_truth"):
        parse({"prompt": [user("q")]}, "DAPOMath17K")


PAIRS: dict[str, tuple[Fields, list[Fields]]] = {
    "ranked completions": (
        {
            "context": [user("2+2?")],
            "completions": [{"rank": 1, "completion": [assistant("5")]}, {"rank": 0, "completion": [assistant("4")]}],
        },
        [user("2+2?")],
    ),
    "chosen and rejected": ({"prompt": "2+2?", "chosen": "4", "rejected": "5"}, [user("2+2?")]),
    "a conversation before them": (
        {"prompt": [user("Hi"), assistant("Hi"), user("2+2?")], "chosen": "4", "rejected": "5"},
        [user("Hi"), assistant("Hi"), user("2+2?")],
    ),
    "whole conversations": (
        {"prompt": "2+2?", "chosen": [user("2+2?"), assistant("4")], "rejected": [user("2+2?"), assistant("5")]},
        [user("2+2?")],
    ),
    "HelpSteer3, the second is better": (
        {"context": [user("2+2?")], "response1": "5", "response2": "4", "overall_preference": 2},
        [user("2+2?")],
    ),
    "HelpSteer3, the first is better": (
        {"context": "2+2?", "response1": "4", "response2": "5", "overall_preference": -1},
        [user("2+2?")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_replies(name: str):
    fields, messages = PAIRS[name]
    pair = parse_pair(fields, dataset())
    assert (pair.messages, pair.chosen, pair.rejected) == (messages, [assistant("4")], [assistant("5")])


def test_a_tie_of_helpsteer3_is_no_preference():
    pair = parse_pair(
        {"context": "q", "response1": "4", "response2": "5", "overall_preference": 0}, dataset("HelpSteer3")
    )
    assert pair.chosen == pair.rejected == [assistant("4")]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": "q", "chosen": "4", "rejected": "4"}, "chosen and rejected do not differ"),
        ({"prompt": "q", "chosen": "4"}, "no key rejected"),
        ({"chosen": "4", "rejected": "5"}, "no key prompt"),
        ({"context": "q", "completions": [{"rank": 0, "completion": "a"}]}, "completions must be a list of two"),
        ({"context": "q", "completions": [{"rank": 1, "completion": "a"}, {"rank": 1, "completion": "b"}]},
         "the completions are 1 and 1"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_pair(fields: Fields, reason: str):
    with pytest.raises(RowError, match=reason):
        parse_pair(fields, dataset())
