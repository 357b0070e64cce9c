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
        ("subset", "split", "input_key", "output_key", "system_key", "system_prompt", "prompt_file", "system_prompt_file")
    )
    texts = {"prompt_key": "prompt", "chosen_key": "chosen", "rejected_key": "rejected", "chat_key": "messages", "tool_key": "tools"}
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
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("fields", "question", "answer"),
    [
        ({"question": "1+1=", "answer": "2"}, "1+1=", "2"),
        ({"problem": "1+1=", "expected_answer": "2"}, "1+1=", "2"),
        ({"prompt": "1+1=", "answer": "2"}, "1+1=", "2"),
        ({"input": "1+1=", "output": "2"}, "1+1=", "2"),
        ({"input": "1+1=", "expected_answer": "2", "output": "because 2"}, "1+1=", "2"),
        ({"question": " 1+1= ", "answer": "one and one\n#### 2\n"}, " 1+1= ", "2"),
        ({"instruction": "Translate to French", "input": "two", "output": "deux"}, "Translate to French\n\ntwo", "deux"),
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
    assert rows[0].reply is not None and str(rows[0].reply["content"]).startswith("Natalia sold 48/2 = <<48/2=24>>24 clips in May.")


# One row of each data set as it is published, shortened.
PUBLISHED: dict[str, tuple[Fields, list[Fields], str]] = {
    "OpenMathInstruct-2": (
        {"problem": "What is 2+3?", "generated_solution": "So \\boxed{5}", "expected_answer": "5", "problem_source": "augmented_math"},
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
    "AIME2024": ({"id": 60, "problem": "Every morning", "solution": "s", "answer": "204", "url": "u"}, [user("Every morning")], "204"),
    "AIME2025": ({"question": "Find the sum", "answer": "70"}, [user("Find the sum")], "70"),
    "OpenR1-Math-220k": ({"problem": "What is 2+3?", "solution": "s", "answer": "5", "uuid": "u"}, [user("What is 2+3?")], "5"),
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
    assert parse({"messages": [user("q"), assistant("a")]}, system_prompt="Be brief.").messages[0]["content"] == "Be brief."


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
        ({"answer": "a"}, "no key question or problem or prompt or input (the row has 'answer'); data.default.input_key names another"),
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
        ({"messages": [{"role": "bot", "content": "q"}]}, "messages[0].role is 'bot'; use one of system, developer, user, assistant, tool"),
        ({"messages": [{"role": "user"}]}, "messages[0] has no content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "[0].content[0] is image_url; only text is supported"),
        ({"messages": [assistant("a")]}, "messages has no message of the user before the reply"),
        ({"messages": [user("q")], "tools": "{"}, "tools is a text that is not JSON"),
        ({"messages": [user("q")], "tools": ["add"]}, "tools must be a list of objects"),
        ({"messages": [user("q")], "tools": 3}, "tools must be a list of objects"),
        ({"messages": [{"role": "assistant", "tool_calls": ["add"]}]}, "messages[0].tool_calls must be a list of objects"),
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
    pair = parse_pair({"context": "q", "response1": "4", "response2": "5", "overall_preference": 0}, dataset("HelpSteer3"))
    assert pair.chosen == pair.rejected == [assistant("4")]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": "q", "chosen": "4", "rejected": "4"}, "chosen and rejected do not differ"),
        ({"prompt": "q", "chosen": "4"}, "no key rejected"),
        ({"chosen": "4", "rejected": "5"}, "no key prompt"),
        ({"context": "q", "completions": [{"rank": 0, "completion": "a"}]}, "completions must be a list of two"),
        ({"context": "q", "completions": [{"rank": 1, "completion": "a"}, {"rank": 1, "completion": "b"}]}, "the completions are 1 and 1"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_pair(fields: Fields, reason: str):
    with pytest.raises(RowError, match=reason):
        parse_pair(fields, dataset())


def row(agent: str, asked: str, **fields: object) -> Fields:
    """A row of the blend."""
    request: Fields = {"input": [{"role": "user", "content": asked}]}
    return {"responses_create_params": request, "agent_ref": {"type": "responses_api_agents", "name": agent}, **fields}


BLEND: dict[str, Fields] = {
    "math_with_judge_simple_agent": row("math_with_judge_simple_agent", "1+1?", expected_answer="2", question="1+1?", uuid="a"),
    "mcqa_simple_agent": row(
        "mcqa_simple_agent",
        "A or B?",
        expected_answer="B",
        options=[{"A": "x", "B": None}, {"A": None, "B": "y"}],
        template_metadata={"output_regex": "Answer: ([A-D])"},
        grading_mode="strict_single_letter_boxed",
    ),
    "code_gen_simple_agent": row(
        "code_gen_simple_agent", "Double it.", verifier_metadata={"unit_tests": {"inputs": ["1\n"], "outputs": ["2\n"], "fn_name": None}}
    ),
    "instruction_following_simple_agent": row(
        "instruction_following_simple_agent", "Be brief.", id=3, instruction_id_list=["length_constraints:number_words"], kwargs=[{"n": 3}]
    ),
    "structured_outputs_simple_agent": row("structured_outputs_simple_agent", "JSON!", schema_str="{}", schema_type="json"),
    "workplace_assistant_simple_agent": row(
        "workplace_assistant_simple_agent", "Mail Bob.", ground_truth=[{"name": "send", "arguments": '{"to": "Bob"}'}], category="email"
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
            {"role": "user", "content": [{"type": "input_text", "text": "Mail "}, {"type": "input_text", "text": "Bob."}]},
            {"type": "function_call", "name": "find", "arguments": '{"name": "Bob"}', "call_id": "c1"},
            {"type": "function_call_output", "call_id": "c1", "output": "bob@example.com"},
        ],
        "tools": [{"type": "function", "name": "find", "description": "Finds.", "parameters": {"type": "object"}, "strict": None}],
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
    assert parsed.tools == [{"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": {"type": "object"}}}]
    assert parsed.question == "Mail Bob."
    assert parse_row({"responses_create_params": {"input": "Hi"}}, dataset()).messages == [{"role": "user", "content": "Hi"}]


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
    tool: Fields = {"type": "function", "parameters": {"type": "object", "properties": {}}, "name": "a", "strict": False}
    parsed = parse_row({"responses_create_params": {"input": entries, "tools": [tool]}}, dataset())
    assert parsed.messages == [
        user("A and B?"),
        {"role": "assistant", "content": "<think>hm</think>I ask both.", "tool_calls": [called("a", "1"), called("b", "2")]},
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
        ({"responses_create_params": {"input": [{"type": "web_search_call"}]}}, r"input\[0\] is a web_search_call of role None"),
        ({"responses_create_params": {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}}, "is input_image; only text"),
        ({"responses_create_params": {"input": "q", "tools": [{"type": "web_search"}]}}, r"tools\[0\] must be an object of type function"),
        ({"responses_create_params": {"input": "q"}, "agent_ref": {"name": 3}}, "agent_ref.name must be a string"),
    ],
)
def test_what_is_wrong_with_a_row_of_the_blend(fields: Fields, reason: str):
    with pytest.raises(RowError, match=reason):
        parse_row(fields, dataset())
