# SPDX-License-Identifier: Apache-2.0
"""Rows through every algorithm's reader, compared with transformers' apply_chat_template on the same conversation."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import PreTrainedTokenizerFast

from mrl.config.load import load_config
from mrl.config.schema.run import RunConfig
from mrl.data.fields import RowError
from mrl.data.prompts import load_prompts
from mrl.data.rendering import Conversation, fit
from mrl.data.supervised import load_examples
from mrl.recipes.tokenizer import byte_tokenizer

# As templates of Hermes' kind: tools in front, calls with the arguments as JSON; roles that it does not know are
# dropped.
TOJSON = (
    "{% if tools %}<|system|>TOOLS {% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}{% for m in messages %}"
    "{% if m.role in ('system', 'user', 'tool') %}<|{{ 'user' if m.role == 'tool' else m.role }}|>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|assistant|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "CALL {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# As DeepSeek V3's: arguments are a text.
JOINS = TOJSON.replace("{{ c.function.arguments | tojson }}", "{{ '`' + c.function.arguments + '`' }}")
# As some of the first templates with tools: an object as Python writes it.
PRINTS = TOJSON.replace("c.function.arguments | tojson", "c.function.arguments")
ARGUMENTS = {"city": "Kyiv", "days": 2}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
Turn = dict[str, Any]

WEATHER: Turn = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
ASKED: Turn = {"role": "user", "content": "Weather in Kyiv?"}


def called(arguments: object) -> Turn:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer(4096)
    tokenizer.chat_template = template
    return tokenizer


def configured(
    folder: Path, algorithm: str, rows: list[Turn] | Path, *overrides: str, template: str = TOJSON
) -> RunConfig:
    tokenizer_of(template).save_pretrained(folder / "model")
    path = rows if isinstance(rows, Path) else folder / "rows.jsonl"
    if isinstance(rows, list):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [f"{key}={path}" for key in ("data.train.data_path", "data.validation.data_path")]
    lengths = ["policy.max_total_sequence_length=2048"]
    if algorithm == "grpo":
        lengths.append("policy.generation.vllm_cfg.max_model_len=2048")
    name = "grpo_tiny.yaml" if algorithm == "grpo" else "sft_tiny.yaml"
    return load_config(
        name, [f"algorithm={algorithm}", f"policy.model_name={folder / 'model'}", *lengths, *files, *overrides]
    )


def asked(folder: Path, rows: list[Turn] | Path, *overrides: str, template: str = TOJSON) -> list[str]:
    """The texts of a run's prompts."""
    tokenizer = tokenizer_of(template)
    return [
        str(tokenizer.decode(list(prompt.token_ids)))
        for prompt in load_prompts(configured(folder, "grpo", rows, *overrides, template=template)).train
    ]


def learned(
    folder: Path, algorithm: str, rows: list[Turn] | Path, *overrides: str, template: str = TOJSON
) -> list[list[str]]:
    """The texts of the sequences of a run's examples, of each up to the end of what is learned."""
    tokenizer = tokenizer_of(template)
    data = load_examples(configured(folder, algorithm, rows, "data.add_bos=false", *overrides, template=template))
    return [[str(tokenizer.decode(sequence.token_ids)) for sequence in example.sequences] for example in data.train]


def rendered(
    messages: list[Turn], tools: list[Turn] | None = None, *, template: str = TOJSON, waits: bool = False
) -> str:
    shown: list[dict[str, str]] = messages
    return str(
        tokenizer_of(template).apply_chat_template(
            shown, tools=[*tools] if tools else None, tokenize=False, add_generation_prompt=waits
        )
    )


@pytest.mark.parametrize("template", [TOJSON, JOINS, PRINTS])
@pytest.mark.parametrize("given", [ARGUMENTS, json.dumps(ARGUMENTS)])
def test_calls_and_tools_are_the_same_for_all_algorithms(tmp_path: Path, given: object, template: str):
    as_template_wants = ARGUMENTS if template == TOJSON else json.dumps(ARGUMENTS)
    end: list[Turn] = [
        {"role": "tool", "tool_call_id": "c1", "content": "12 C"},
        {"role": "assistant", "content": "It is 12 C."},
    ]
    wanted: list[Turn] = [ASKED, called(as_template_wants), *end]
    row: Turn = {"messages": [ASKED, called(given), *end], "tools": [WEATHER]}
    assert json.dumps(ARGUMENTS) in rendered(wanted, [WEATHER], template=template)
    assert learned(tmp_path, "sft", [row], template=template) == [[rendered(wanted, [WEATHER], template=template)]]
    assert asked(tmp_path, [row], template=template) == [
        rendered(wanted[:-1], [WEATHER], template=template, waits=True)
    ]
    pair: Turn = {"prompt": [ASKED], "chosen": [called(given)], "rejected": "No idea.", "tools": [WEATHER]}
    rejected: Turn = {"role": "assistant", "content": "No idea."}
    expected = [[rendered([ASKED, reply], [WEATHER], template=template) for reply in (wanted[1], rejected)]]
    assert (
        learned(tmp_path, "dpo", [pair], template=template)
        == learned(tmp_path, "rm", [pair], template=template)
        == expected
    )


@pytest.mark.parametrize("save", [datasets.Dataset.to_parquet, datasets.Dataset.to_json])
def test_rows_of_a_table_show_and_learn_their_own_tools_and_calls(
    tmp_path: Path, save: Callable[[datasets.Dataset, Path], int]
):
    def row(name: str, properties: Turn, arguments: Turn) -> Turn:
        tool: Turn = {
            "type": "function",
            "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
        }
        call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
        said: list[Turn] = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        return {
            "messages": [*said, {"role": "tool", "content": "r"}, {"role": "assistant", "content": "a"}],
            "tools": [tool],
        }

    rows = [
        row("look", {"city": {"type": "string"}}, {"city": "Kyiv"}),
        row("add", {"a": {"type": "integer"}}, {"a": 2}),
    ]
    path = tmp_path / ("rows.parquet" if save is datasets.Dataset.to_parquet else "rows.jsonl")
    save(datasets.Dataset.from_list(rows), path)
    assert learned(tmp_path, "sft", path) == [[rendered(row["messages"], row["tools"])] for row in rows]


@pytest.mark.parametrize(("role", "older"), [("developer", "system"), ("environment", "user"), ("function", "tool")])
def test_roles_that_the_template_drops_are_written_as_those_it_knows(tmp_path: Path, role: str, older: str):
    def row(name: str) -> Turn:
        turns = [
            {"role": name, "content": "In French."},
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "quatre"},
        ]
        return {"messages": turns, "answer": "4"}

    wanted: list[Turn] = row(older)["messages"]
    assert learned(tmp_path, "sft", [row(role)]) == [[rendered(wanted)]]
    assert asked(tmp_path, [row(role)]) == [rendered(wanted[:-1], waits=True)]
    knows = TOJSON.replace("('system', ", f"('{role}', 'system', ")
    as_given: list[Turn] = row(role)["messages"]
    tokenizer = tokenizer_of(knows)
    _, text = fit(Conversation(as_given), tokenizer, None, add_generation_prompt=False)
    assert text == rendered(as_given, template=knows)


SILENT = (
    "{% for m in messages %}{% if m.role == 'user' %}Q {{ m.content }}"
    "{% elif m.role == 'assistant' %}A {{ m.content }}{% endif %}{% endfor %}"
)
# As Llama 3.1's: what is said beside a call is dropped.
CALLS_ALONE = TOJSON.replace("{{ m.content or '' }}", "{% if not m.tool_calls %}{{ m.content }}{% endif %}")
FIRST_CALL = TOJSON.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")


@pytest.mark.parametrize(
    ("template", "messages", "lost"),
    [
        (SILENT, [{"role": "system", "content": "Be brief."}, ASKED], "message 1 of role system"),
        (SILENT, [{"role": "developer", "content": "Be brief."}, ASKED], "message 1 of role developer"),
        # The same words stand elsewhere: each message has a place of its own.
        (SILENT, [{"role": "system", "content": "Weather"}, {"role": "user", "content": "Weather"}],
         "message . of role"),
        (SILENT, [ASKED, called(ARGUMENTS) | {"content": ""}, ASKED], "the call of get_weather in message 2"),
        (CALLS_ALONE, [ASKED, called(ARGUMENTS) | {"content": "I look."}, ASKED], "message 2 of role assistant"),
        (FIRST_CALL, [ASKED, {**called(ARGUMENTS), "tool_calls": [*called(ARGUMENTS)["tool_calls"]] * 2}],
         "the call of get_weather"),
        (SILENT, [ASKED, {"role": "assistant", "content": "4", "reasoning_content": "add them"}],
         "the thoughts of message 2"),
        (SILENT.replace("m.content }}{% endif", "m.content.split('</think>')[-1] }}{% endif"),
         [ASKED, {"role": "assistant", "content": "<think>add them</think>4"}], "the thoughts of message 2"),
    ],
)  # fmt: skip
def test_what_the_template_drops_is_named(template: str, messages: list[Turn], lost: str):
    with pytest.raises(RowError, match=f"the chat template leaves {lost}.* out"):
        fit(Conversation(messages), tokenizer_of(template), None, add_generation_prompt=False)


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        # Thoughts of earlier turns, white space, escaped texts, and the switches of Nemotron and SmolLM.
        (SILENT.replace("A {{ m.content", "A {{ m.content.split('</think>')[-1].strip()"),
         [ASKED, {"role": "assistant", "content": "<think>hm</think>\n 4 \n"}, ASKED]),
        (SILENT.replace("Q {{ m.content", "Q {{ m.content | tojson"), [{"role": "user", "content": 'a "b"\n\u00e4'}]),
        (SILENT.replace("Q {{ m.content", "Q {{ m.content.replace('/no_think', '')"),
         [{"role": "user", "content": "a /no_think"}]),
        (SILENT, [{"role": "system", "content": ""}, {"role": "user", "content": " \n"}]),
    ],
)  # fmt: skip
def test_what_a_template_lays_out_anew_is_not_lost(template: str, messages: list[Turn]):
    _, text = fit(Conversation(messages), tokenizer_of(template), None, add_generation_prompt=False)
    assert text == rendered(messages, template=template)


# As GLM 4.5's: a content that is not there is written as Python does.
WRITES_NONE = TOJSON.replace("{{ m.content or '' }}", "{{ m.content }}")
# As Qwen 3's and as gpt-oss's: one name for thoughts.
THINKS = TOJSON.replace(
    "{{ m.content or '' }}", "{% if m.NAME %}<think>{{ m.NAME }}</think>{% endif %}{{ m.content or '' }}"
)
# As Llama 3.1's and gpt-oss's: tools and calls stand in `function`.
IN_FUNCTION = TOJSON.replace("{{ t | tojson }}", "{{ t.function.name + ' ' + t.function.description }}").replace(
    "{{ c.function.name }}", "{{ c.type + c.function.name }}"
)


def test_a_call_without_text_is_written_without_text():
    messages: list[Turn] = [ASKED, called(ARGUMENTS), ASKED]
    _, text = fit(Conversation(messages), tokenizer_of(WRITES_NONE), None, add_generation_prompt=False)
    assert (
        text == rendered([ASKED, called(ARGUMENTS) | {"content": ""}, ASKED], template=WRITES_NONE)
        and "None" not in text
    )
    said: list[Turn] = [{"role": "user", "content": "Is it None?"}, *messages]
    _, text = fit(Conversation(said), tokenizer_of(TOJSON), None, add_generation_prompt=False)
    assert text == rendered(said)


@pytest.mark.parametrize("given", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("known", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_are_written_under_the_name_that_the_template_reads(given: str, known: str):
    def turns(name: str) -> list[Turn]:
        return [
            ASKED,
            called(ARGUMENTS) | {name: "look first"},
            {"role": "tool", "content": "12 C"},
            {"role": "assistant", "content": "12"},
        ]

    template = THINKS.replace("NAME", known)
    _, text = fit(Conversation(turns(given)), tokenizer_of(template), None, add_generation_prompt=False)
    assert text == rendered(turns(known), template=template) and "<think>look first</think>" in text


def test_bare_tools_and_calls_are_written_as_templates_want_them():
    tool: Turn = {"name": "get_weather", "description": "Looks.", "parameters": SCHEMA}
    (call,) = called(ARGUMENTS)["tool_calls"]
    bare: Turn = called(ARGUMENTS) | {"tool_calls": [call["function"] | {"id": "c1"}]}
    _, text = fit(Conversation([ASKED, bare], [tool]), tokenizer_of(IN_FUNCTION), None, add_generation_prompt=False)
    assert text == rendered([ASKED, called(ARGUMENTS)], [{"type": "function", "function": tool}], template=IN_FUNCTION)


def test_a_refusal_says_what_the_template_refuses_in_each_form():
    refuses = TOJSON.replace(
        "{% if tools %}", "{% for m in messages %}{{ '' + m.content }}{% endfor %}{% if tools %}", 1
    )
    with pytest.raises(
        RowError, match="NoneType.* In another form: the chat template leaves the call of get_weather in message 2 out"
    ):
        fit(
            Conversation([ASKED, called(ARGUMENTS)]),
            tokenizer_of(refuses.replace("m.tool_calls or []", "[]")),
            None,
            add_generation_prompt=False,
        )


def test_a_template_that_knows_no_tools_is_told(caplog: pytest.LogCaptureFixture):
    tokenizer = tokenizer_of(SILENT)
    for _ in range(2):
        assert (
            fit(Conversation([ASKED], [WEATHER]), tokenizer, None, add_generation_prompt=False)[1]
            == "Q Weather in Kyiv?"
        )
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "The chat template ignores tools: the model does not see the tools of the rows"
    ]


def test_system_messages_reach_every_algorithm(tmp_path: Path):
    rows: list[Turn] = [{"system": "Be brief.", "question": "2+2?", "answer": "4"}]
    for override in ("data.default.system_key=system", "data.default.system_prompt=Be brief."):
        assert asked(tmp_path, rows, override) == ["<|system|>Be brief.<|user|>2+2?<|assistant|>"]
        assert learned(tmp_path, "sft", rows, override) == [["<|system|>Be brief.<|user|>2+2?<|assistant|>4<|end|>"]]
    pairs: list[Turn] = [{"system": "Be brief.", "prompt": "2+2?", "chosen": "4", "rejected": "5"}]
    expected = [[f"<|system|>Be brief.<|user|>2+2?<|assistant|>{reply}<|end|>" for reply in "45"]]
    assert learned(tmp_path, "dpo", pairs, "data.default.system_key=system") == expected
    assert learned(tmp_path, "rm", pairs, "data.default.system_prompt=Be brief.") == expected


def test_code_keeps_its_indentation(tmp_path: Path):
    row: Turn = {"question": "def f(x):\n", "answer": "    return x\n"}
    expected = [["<|user|>def f(x):\n<|assistant|>    return x\n<|end|>"]]
    assert learned(tmp_path, "sft", [row]) == expected
    turns = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
    assert learned(tmp_path, "sft", [{"messages": turns}]) == expected


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("nan", "the answer is nan"),
        ("proof", "the answer is proof, as NuminaMath writes"),
        ("NotFound", "the answer is NotFound, as NuminaMath writes"),
        ("#### Note\nthe unit is cm", "#### in the answer is followed by no line, or by different ones"),
        ("work ####", "#### in the answer is followed by no line, or by different ones"),
        (float("nan"), "answer is nan, as tables write"),
    ],
)
def test_answers_that_no_reply_can_match_are_refused_where_they_are_compared(
    tmp_path: Path, answer: object, reason: str
):
    rows: list[Turn] = [{"question": "q", "answer": answer}]
    with pytest.raises(ValueError, match=reason):
        asked(tmp_path, rows)
    if isinstance(answer, str):
        assert learned(tmp_path, "sft", rows) == [[f"<|user|>q<|assistant|>{answer}<|end|>"]]


def test_prompts_without_the_token_that_the_tokenizer_begins_texts_with_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    from tokenizers.processors import TemplateProcessing

    rows: list[Turn] = [{"question": "q", "answer": "4"}]
    config = configured(tmp_path, "grpo", rows)
    tokenizer = byte_tokenizer(4096)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 257)]
    )
    for template, is_told in (("{{ bos_token }}" + TOJSON, False), (TOJSON, True)):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / "model")
        load_prompts(config)
        assert ("Prompts do not begin with <|begin|>" in caplog.text) == is_told
