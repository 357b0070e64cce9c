# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from transformers import PreTrainedTokenizerFast

from mrl.config.schema.data import DataDefaultConfig
from mrl.config.schema.policy import TokenizerConfig
from mrl.data.chat import (
    NO_OWN_TOKENIZER,
    PLAIN_TOKENIZERS,
    ChatFormat,
    load_chat_format,
    load_tokenizer,
    render,
    template_text,
    tokenize,
    use_chat_template,
    with_prompts,
)
from mrl.data.fields import Message
from mrl.recipes.tokenizer import byte_tokenizer
from tests.unit.data.test_rows import dataset
from tests.waiting import HANG_S


def ask(
    question: str, tokenizer: PreTrainedTokenizerFast, chat: ChatFormat, tools: list[Message] | None = None
) -> tuple[int, ...]:
    """Token ids of one question."""
    text = render(
        with_prompts([{"role": "user", "content": question}], chat, around="last"), tools or [], tokenizer, chat
    )
    return tokenize([text], tokenizer)[0]


def test_a_question_becomes_a_conversation():
    tokenizer = byte_tokenizer(4096)
    assert tokenizer.decode(list(ask("12+34=", tokenizer, ChatFormat()))) == "<|user|>12+34=<|assistant|>"
    ids = ask("12+34=", tokenizer, ChatFormat(prompt="Add: {}!", system_prompt="Be brief."))
    assert tokenizer.decode(list(ids)) == "<|system|>Be brief.<|user|>Add: 12+34=!<|assistant|>"


def test_questions_keep_their_bytes_and_braces():
    tokenizer = byte_tokenizer(4096)
    for question in ("ä€🙂", "{} {0} {x}", "a\nb", "%s"):
        assert tokenizer.decode(list(ask(question, tokenizer, ChatFormat()))) == f"<|user|>{question}<|assistant|>"


def test_the_last_question_is_formatted_and_a_system_message_of_the_row_stays():
    chat = ChatFormat(prompt="Add: {}", system_prompt="Be brief.")
    turns: list[Message] = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "and 1"},
    ]

    def contents(*messages: Message, around: Literal["first", "last"]) -> list[object]:
        return [message["content"] for message in with_prompts(messages, chat, around=around)]

    assert contents(*turns, around="last") == ["Be brief.", "1+1", "2", "Add: and 1"]
    assert contents(*turns, around="first") == ["Be brief.", "Add: 1+1", "2", "and 1"]
    system: Message = {"role": "system", "content": "Be long."}
    assert contents(system, *turns, around="last") == ["Be long.", "1+1", "2", "Add: and 1"]


def test_template_arguments_and_tools_reach_the_template():
    tokenizer = byte_tokenizer(4096)
    tokenizer.chat_template = (
        "{{ messages[0].content }}{% if enable_thinking %}?{% endif %}{% if tools %}{{ tools[0].name }}{% endif %}"
    )
    assert ask("q", tokenizer, ChatFormat()) == tuple(b"q")
    assert ask("q", tokenizer, ChatFormat(template_kwargs={"enable_thinking": True}), [{"name": "add"}]) == tuple(
        b"q?add"
    )


def test_no_special_token_is_added_to_the_template(tmp_path: Path):
    byte_tokenizer(4096).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenize(["<|user|>q<|assistant|>"], tokenizer) == [(260, ord("q"), 261)]


def test_a_tokenizer_without_template_is_refused():
    tokenizer = byte_tokenizer(4096)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="policy.tokenizer.name=.*no chat template"):
        use_chat_template(tokenizer, TokenizerConfig(name="t"))


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("default", "<|user|>1+1<|assistant|>"),
        (None, "1+1"),
        ("Q: {{ messages[0].content }}", "Q: 1+1"),
        ("ask.jinja", "A: 1+1"),
    ],
)
def test_the_template_is_the_configs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None, expected: str
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ask.jinja").write_text("A: {{ messages[0].content }}")
    tokenizer = byte_tokenizer(4096)
    use_chat_template(tokenizer, TokenizerConfig(name="t", chat_template=chosen))
    assert render([{"role": "user", "content": "1+1"}], [], tokenizer, ChatFormat()) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chat_template": "none.jinja"}, r"policy.tokenizer.chat_template=none.jinja cannot be read"),
        (
            {"chat_template_kwargs": {"enable_thinkin": True}},
            r"kwargs.enable_thinkin: .*the nearest word is 'enable_thinking'",
        ),
    ],
)
def test_templates_that_cannot_be_used(settings: dict[str, Any], message: str):
    tokenizer = byte_tokenizer(4096)
    tokenizer.chat_template = "{{ messages[0].content }}{% if enable_thinking %}?{% endif %}"
    with pytest.raises(ValueError, match=message):
        use_chat_template(tokenizer, TokenizerConfig(name="t", **settings))
    use_chat_template(tokenizer, TokenizerConfig(name="t", chat_template_kwargs={"enable_thinking": True}))


def chat_format(**files: str | None) -> ChatFormat:
    """The format of a data set that takes these files from data.default."""
    found = dataset(**files)
    default = DataDefaultConfig(prompt_file=found.prompt_file, system_prompt_file=found.system_prompt_file)
    return load_chat_format(found, default, "data.train", template_kwargs=None)


def test_format_from_files(tmp_path: Path):
    (tmp_path / "cot.txt").write_text("Answer in \\boxed{{}}:\n{}")
    (tmp_path / "system.txt").write_text("Be brief.")
    chat = chat_format(prompt_file=str(tmp_path / "cot.txt"), system_prompt_file=str(tmp_path / "system.txt"))
    assert chat.prompt.format("1+1") == "Answer in \\boxed{}:\n1+1"
    assert chat.system_prompt == "Be brief."
    assert chat_format() == ChatFormat()


@pytest.mark.parametrize("text", ["no place", "\\boxed{{}} only", "{name}", "{", "{} {}"])
def test_a_prompt_file_must_have_one_place_for_the_question(tmp_path: Path, text: str):
    (tmp_path / "prompt.txt").write_text(text)
    with pytest.raises(ValueError, match="data.default.prompt_file=.*prompt.txt"):
        chat_format(prompt_file=str(tmp_path / "prompt.txt"))


@pytest.mark.parametrize("key", ["prompt_file", "system_prompt_file"])
def test_a_missing_file_names_its_key(tmp_path: Path, key: str):
    missing = str(tmp_path / "missing.txt")
    with pytest.raises(ValueError, match=f"data.default.{key}=.* cannot be read"):
        chat_format(**{key: missing})
    with pytest.raises(ValueError, match=rf"data.train.{key}=.* cannot be read"):
        load_chat_format(dataset(**{key: missing}), DataDefaultConfig(), "data.train", template_kwargs=None)


def test_what_a_checkpoint_keeps_of_a_template_is_what_transformers_reads(tmp_path: Path):
    byte_tokenizer(4096).save_pretrained(tmp_path)
    file = tmp_path / "mine.jinja"
    file.write_text("[{{ messages[0]['content'] }}]")
    (tmp_path / "chat_template.jinja").write_text(template_text(str(file)))
    assert (
        load_tokenizer(str(tmp_path)).apply_chat_template([{"role": "user", "content": "q"}], tokenize=False) == "[q]"
    )


@pytest.mark.parametrize("name", PLAIN_TOKENIZERS)
def test_a_plain_tokenizer_is_the_one_that_transformers_chooses_and_needs_no_torch(tmp_path: Path, name: str):
    from transformers import AutoTokenizer
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    assert not TOKENIZER_MAPPING_NAMES.keys() & set(NO_OWN_TOKENIZER)
    byte_tokenizer(4096).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] in PLAIN_TOKENIZERS
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": name}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": NO_OWN_TOKENIZER[0]}))
    ours, theirs = load_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(str(tmp_path))
    assert type(ours) is type(theirs) and ours.get_vocab() == theirs.get_vocab()
    messages = [{"role": "user", "content": "ä€🙂 12+34="}]
    for tokenizer in (ours, theirs):
        assert (
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            == "<|user|>ä€🙂 12+34=<|assistant|>"
        )
    assert ours("<|user|>ä€🙂<|assistant|>") == theirs("<|user|>ä€🙂<|assistant|>")
    # All settings but where they were read, and how.
    kept = [
        {key: value for key, value in tokenizer.init_kwargs.items() if key != "_from_auto"}
        for tokenizer in (ours, theirs)
    ]
    assert kept[0] == kept[1] and ours.special_tokens_map == theirs.special_tokens_map
    script = (
        "import sys; from mrl.data.chat import load_tokenizer; load_tokenizer(sys.argv[1]); print('torch' in "
        "sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=HANG_S, check=True
    )
    assert found.stdout == "False\n"
