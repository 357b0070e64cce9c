# SPDX-License-Identifier: Apache-2.0
"""The byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from mrl.recipes.tokenizer import SPECIAL_TOKENS, VOCAB_SIZE, byte_tokenizer, save

TOKENIZER = byte_tokenizer(4096)


@given(st.text())
def test_any_text_is_its_bytes_and_comes_back(text: str):
    if any(token in text for token in SPECIAL_TOKENS):
        return
    token_ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert token_ids == list(text.encode())
    assert TOKENIZER.decode(token_ids) == text


def test_special_tokens_follow_the_bytes():
    assert TOKENIZER.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(256, VOCAB_SIZE))
    assert (TOKENIZER.pad_token_id, TOKENIZER.bos_token_id, TOKENIZER.eos_token_id, len(TOKENIZER)) == (
        256,
        257,
        258,
        VOCAB_SIZE,
    )


def test_transformers_loads_what_was_saved(tmp_path: Path):
    save(tmp_path, model_max_length=4096)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    conversation = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1+é="},
        {"role": "assistant", "content": "2"},
    ]
    rendered = loaded.apply_chat_template(conversation[:2], add_generation_prompt=True, tokenize=False)
    assert rendered == "<|system|>Add.<|user|>1+é=<|assistant|>"
    assert loaded.apply_chat_template(conversation, tokenize=False) == rendered + "2<|end|>"
    assert loaded(rendered, add_special_tokens=False)["input_ids"] == [259, *b"Add.", 260, *"1+é=".encode(), 261]
    assert loaded.eos_token_id == 258


def test_an_unknown_role_is_refused():
    with pytest.raises(Exception, match="unknown role tool"):
        TOKENIZER.apply_chat_template([{"role": "tool", "content": "1"}])
