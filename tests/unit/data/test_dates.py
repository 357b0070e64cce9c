# SPDX-License-Identifier: Apache-2.0
"""Templates that write the date, against what transformers renders of them on that day."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from mrl.config.schema.policy import TokenizerConfig
from mrl.data.chat import dated, served_template, use_chat_template
from mrl.recipes.tokenizer import byte_tokenizer

# As Llama 3.2's and gpt-oss's.
LLAMA = (
    "{% if not date_string is defined %}{% if strftime_now is defined %}{% set date_string = strftime_now('%d %b "
    "%Y') %}{% else %}{% set date_string = '26 Jul 2024' %}{% endif %}{% endif %}Today Date: {{ date_string }}"
)
GPT_OSS = 'Current date: {{ strftime_now( "%Y-%m-%d" ) }} it\'s {{ strftime_now("%A") ~ "" }}'
ASKED = [{"role": "user", "content": "x"}]


class Then(datetime):
    @classmethod
    def now(cls, tz: object = None) -> datetime:
        return datetime(2024, 2, 29)


@pytest.mark.parametrize("template", [LLAMA, GPT_OSS])
def test_the_clock_of_a_template_stands_still(template: str, monkeypatch: pytest.MonkeyPatch):
    tokenizer = byte_tokenizer(64)
    use_chat_template(tokenizer, TokenizerConfig("x", chat_template=template, template_date="2024-02-29"))
    shown = tokenizer.apply_chat_template(ASKED, tokenize=False)
    tokenizer.chat_template = template
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Then)
    assert shown == tokenizer.apply_chat_template(ASKED, tokenize=False)
    assert "29 Feb 2024" in str(shown) or "2024-02-29 it's Thursday" in str(shown)


def test_dates_that_cannot_be_fixed_are_refused():
    assert dated("{{ now }}", "tomorrow") == "{{ now }}"
    with pytest.raises(
        ValueError, match="policy.tokenizer.template_date=tomorrow is no date .*; write it as 2026-01-31"
    ):
        dated(LLAMA, "tomorrow")
    with pytest.raises(ValueError, match="calls strftime_now with a format that it chooses as it renders"):
        dated("{% set f = '%Y' %}{{ strftime_now(f) }}", "2024-02-29")


def test_conversations_over_http_have_the_date_of_the_run(tmp_path: Path):
    byte_tokenizer(64).save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(LLAMA)
    config = TokenizerConfig(str(tmp_path), template_date="2024-02-29")
    assert served_template("default", config) == LLAMA.replace("strftime_now('%d %b %Y')", "'29 Feb 2024'")
    assert served_template("{{ strftime_now('%Y') }}", config) == "{{ '2024' }}"
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert served_template("default", config) is None and served_template("{{ x }}", config) == "{{ x }}"
