# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest

from mrl.config.load import load_config
from mrl.config.rules.tokens import num_tokens
from mrl.data.prompts import load_prompts
from mrl.data.supervised import load_examples
from mrl.recipes.tokenizer import VOCAB_SIZE, byte_tokenizer
from tests.unit.config.problems import problems_of


def write_model(folder: Path, *, vocab_size: int, further: list[str]) -> Path:
    tokenizer = byte_tokenizer(4096)
    tokenizer.add_tokens(further)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) if (folder / "config.json").is_file() else {}
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": vocab_size}))
    return folder


def test_tokens_without_an_embedding_are_refused(workplace: Path):
    model = workplace / "prepared/tiny/model"
    write_model(model, vocab_size=VOCAB_SIZE, further=[])
    assert problems_of("grpo.seed=1") == []
    write_model(model, vocab_size=VOCAB_SIZE, further=["<think>"])
    problem = (
        f"policy.tokenizer.name=prepared/tiny/model: it has {VOCAB_SIZE + 1} tokens, and vocab_size of "
        "policy.model_name="
    )
    assert [text.startswith(problem) for text in problems_of("grpo.seed=1")] == [True]


@pytest.mark.parametrize("name", ["grpo_tiny.yaml", "sft_tiny.yaml"])
def test_a_tokenizer_whose_files_do_not_tell_is_refused_when_it_is_read(tmp_path: Path, name: str):
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    files = [f"data.{key}.data_path={tmp_path / 'rows.jsonl'}" for key in ("train", "validation")]
    config = load_config(
        name, [f"policy.model_name={write_model(tmp_path, vocab_size=VOCAB_SIZE, further=['<think>'])}", *files]
    )
    with pytest.raises(
        ValueError,
        match="tokenizer.name=.*: it has 265 tokens, and vocab_size of policy.model_name=.* is 264: the others",
    ):
        load_prompts(config) if config.has_engines else load_examples(config)


def test_tokens_that_older_files_add_count(tmp_path: Path):
    write_model(tmp_path, vocab_size=VOCAB_SIZE, further=[])
    assert num_tokens(tmp_path) == VOCAB_SIZE
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<think>": VOCAB_SIZE}))
    assert num_tokens(tmp_path) == VOCAB_SIZE + 1
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": {str(VOCAB_SIZE + 1): {"content": "</think>"}}})
    )
    assert num_tokens(tmp_path) == VOCAB_SIZE + 2
