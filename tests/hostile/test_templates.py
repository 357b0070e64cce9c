# SPDX-License-Identifier: Apache-2.0
"""Chat templates of a model's folder that never end, or fill the memory, before the driver has to render with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from mrl.config.schema.policy import PolicyConfig, TokenizerConfig
from mrl.config.schema.run import RunConfig
from mrl.data import trial
from mrl.data.chat import load_tokenizer
from mrl.data.trial import try_template
from mrl.inputs import Look, tokenizer_of
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
    with pytest.raises(ValueError, match=r"its chat template takes more than 1 s or 2 GiB .*policy\.tokenizer\.chat_template$"):
        try_template(tokenizer, None)


@pytest.mark.parametrize("template", [None, PLAIN, "{{ raise_exception('no') }}", "{{ messages[7].x.y }}", "{% if %}"], ids=range(5))
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
