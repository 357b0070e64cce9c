# SPDX-License-Identifier: Apache-2.0
"""Chat templates of a model's folder that never end, or fill the memory, before the driver has to render with them."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from mrl.config.load import load_config
from mrl.config.schema.policy import PolicyConfig, TokenizerConfig
from mrl.config.schema.run import RunConfig
from mrl.data import trial
from mrl.data.chat import load_tokenizer
from mrl.data.rendering import Conversation, write
from mrl.data.trial import try_template
from mrl.inputs import Look, look_at_data, tokenizer_of
from mrl.recipes import tokenizer as recipe

pytestmark = pytest.mark.attack("a chat template that never ends")

PLAIN = "{{ messages[0]['content'] }}"
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    recipe.save(folder, model_max_length=64)
    return folder


@pytest.fixture
def tokenizer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> PreTrainedTokenizerFast:
    monkeypatch.setattr(trial, "CPU_S", 1)
    loaded = load_tokenizer(str(folder))
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


@pytest.mark.parametrize(
    "template",
    [
        LOOP + PLAIN,
        "{{ 'a' * 9999999999 }}",
        "{% if messages[0]['role'] == 'system' %}" + LOOP + "{% endif %}" + PLAIN,
        "{% if messages|length > 2 %}" + LOOP + "{% endif %}" + PLAIN,
        "{% macro again() %}" + LOOP + "{{ again() }}{% endmacro %}{{ again() }}",
        "{% for i in range(60) %}{{ messages[0]['content'] * 99999999 }}{% endfor %}",
    ],
    ids=["loops", "memory", "loops for a system's message", "loops in a second turn", "recursion", "output"],
)
def test_a_template_that_never_ends_is_refused(tokenizer: PreTrainedTokenizerFast, template: str):
    tokenizer.chat_template = template
    with pytest.raises(
        ValueError, match=r"its chat template takes more than 1 s or 2 GiB .*policy\.tokenizer\.chat_template$"
    ):
        try_template(tokenizer, None)


@pytest.mark.parametrize(
    "template", [None, PLAIN, "{{ raise_exception('no') }}", "{{ messages[7].x.y }}", "{% if %}"], ids=range(5)
)
def test_others_go_on_to_the_rows(tokenizer: PreTrainedTokenizerFast, template: str | None):
    tokenizer.chat_template = template or tokenizer.chat_template
    try_template(tokenizer, {"enable_thinking": True})


def test_the_check_says_it(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trial, "CPU_S", 1)
    (tmp_path / "loop.jinja").write_text(LOOP)
    own = TokenizerConfig(name=str(folder))
    looping = TokenizerConfig(name=str(folder), chat_template=str(tmp_path / "loop.jinja"))
    configs = [RunConfig(policy=PolicyConfig(model_name=str(folder), tokenizer=one)) for one in (own, looping)]
    looks = [Look(), Look()]
    assert [tokenizer_of(config, look) is None for config, look in zip(configs, looks, strict=True)] == [False, True]
    assert [len(look.problems) for look in looks] == [0, 1]


@pytest.mark.parametrize("is_strict", [False, True], ids=["some rows", "all rows"])
def test_a_row_that_a_template_never_ends_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_strict: bool
):
    """The template loops for one row alone, in which the trial's conversations have no part."""
    monkeypatch.setattr(trial, "CPU_S", 1)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"question": text, "answer": "2"}) + "\n" for text in ("1+1=", "never?", "2+0=", "never?"))
    )
    (tmp_path / "loop.jinja").write_text("{% if 'never' in messages[0]['content'] %}" + LOOP + "{% endif %}" + PLAIN)
    words = [f"policy.model_name={folder}", f"policy.tokenizer.name={folder}",
             f"policy.tokenizer.chat_template={tmp_path}/loop.jinja",
             f"data.train.data_path={rows}", "data.validation=null", "grpo.val_period=0",
             "grpo.val_at_start=false"]  # fmt: skip
    look = look_at_data(load_config("grpo_tiny.yaml", words), is_strict=is_strict)
    assert [
        f"{rows}:2: the chat template takes more than 1 s to write this row" in str(problem)
        for problem in look.problems
    ] == [True]
    assert not look.unseen


def test_other_rows_take_nothing_from_the_limit_of_one(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
):
    """Each row has its own seconds, and other threads' do not count."""
    monkeypatch.setattr(trial, "CPU_S", 0.2)
    tokenizer.chat_template = "{% for i in range(9999) %}{% endfor %}" + PLAIN
    is_over = threading.Event()
    other = threading.Thread(target=lambda: [None for _ in iter(is_over.is_set, True)])
    other.start()
    try:
        conversation = Conversation([{"role": "user", "content": "a"}])
        for _ in range(600):
            assert write(conversation, tokenizer, None, add_generation_prompt=True) == "a"
    finally:
        is_over.set()
        other.join()
