import time
from pathlib import Path

import pytest

from mrl.config.schema_data import DataDefaultConfig
from mrl.data.chat import ChatFormat, load_chat_format, load_tokenizer, render_prompts
from mrl.prepare_tokenizer import byte_tokenizer


def test_a_question_becomes_a_conversation():
    tokenizer = byte_tokenizer(4096)
    (ids,) = render_prompts(["12+34="], tokenizer, ChatFormat())
    assert tokenizer.decode(list(ids)) == "<|user|>12+34=<|assistant|>"
    (ids,) = render_prompts(["12+34="], tokenizer, ChatFormat(prompt="Add: {}!", system_prompt="Be brief."))
    assert tokenizer.decode(list(ids)) == "<|system|>Be brief.<|user|>Add: 12+34=!<|assistant|>"


def test_questions_keep_their_bytes_and_braces():
    tokenizer = byte_tokenizer(4096)
    questions = ["ä€🙂", "{} {0} {x}", "a\nb", "%s"]
    assert [tokenizer.decode(list(ids)) for ids in render_prompts(questions, tokenizer, ChatFormat())] == [
        f"<|user|>{question}<|assistant|>" for question in questions
    ]


def test_template_arguments_reach_the_template():
    tokenizer = byte_tokenizer(4096)
    tokenizer.chat_template = "{{ messages[0].content }}{% if enable_thinking %}?{% endif %}"
    assert render_prompts(["q"], tokenizer, ChatFormat()) == [(113,)]
    assert render_prompts(["q"], tokenizer, ChatFormat(template_kwargs={"enable_thinking": True})) == [(113, 63)]


def test_no_special_token_is_added_to_the_template(tmp_path: Path):
    byte_tokenizer(4096).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert render_prompts(["q"], tokenizer, ChatFormat())[0] == render_prompts(["q"], byte_tokenizer(4096), ChatFormat())[0]


def test_a_tokenizer_without_template_is_refused():
    tokenizer = byte_tokenizer(4096)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="policy.tokenizer.name=.*no chat template"):
        render_prompts(["q"], tokenizer, ChatFormat())


def test_format_from_files(tmp_path: Path):
    (tmp_path / "cot.txt").write_text("Answer in \\boxed{{}}:\n{}")
    (tmp_path / "system.txt").write_text("Be brief.")
    config = DataDefaultConfig(prompt_file=str(tmp_path / "cot.txt"), system_prompt_file=str(tmp_path / "system.txt"))
    chat = load_chat_format(config, template_kwargs={"a": 1})
    assert chat.prompt.format("1+1") == "Answer in \\boxed{}:\n1+1"
    assert (chat.system_prompt, chat.template_kwargs) == ("Be brief.", {"a": 1})
    assert load_chat_format(DataDefaultConfig(), template_kwargs=None) == ChatFormat()


@pytest.mark.parametrize("text", ["no place", "\\boxed{{}} only", "{name}", "{", "{} {}"])
def test_a_prompt_file_must_have_one_place_for_the_question(tmp_path: Path, text: str):
    (tmp_path / "prompt.txt").write_text(text)
    with pytest.raises(ValueError, match="data.default.prompt_file=.*prompt.txt"):
        load_chat_format(DataDefaultConfig(prompt_file=str(tmp_path / "prompt.txt")), template_kwargs=None)


@pytest.mark.parametrize("key", ["prompt_file", "system_prompt_file"])
def test_a_missing_file_names_its_key(tmp_path: Path, key: str):
    with pytest.raises(ValueError, match=f"data.default.{key}=.* cannot be read"):
        load_chat_format(DataDefaultConfig(**{key: str(tmp_path / "missing.txt")}), template_kwargs=None)


def test_five_thousand_questions_take_seconds():
    start = time.monotonic()
    prompts = render_prompts(["What is one and one? " * 15] * 5000, byte_tokenizer(4096), ChatFormat())
    assert len(prompts) == 5000
    assert time.monotonic() - start < 30
