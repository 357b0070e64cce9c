# SPDX-License-Identifier: Apache-2.0
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from mrl.config.load import load_config
from mrl.data.packing import pack_row, split_teacher, with_prompt
from mrl.data.prompts import load_prompts
from mrl.recipes.tokenizer import byte_tokenizer
from mrl.types import Prompt, Rollout
from tests.rollouts import pulled, request

HINT = "It is 2."


def prompts(folder: Path, rows: list[dict[str, object]], *overrides: str) -> list[Prompt]:
    """The training prompts of a distillation on these rows, whose prompts are joined as they are; context 64."""
    byte_tokenizer(4096).save_pretrained(folder / "model")
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [
        f"policy.model_name={folder / 'model'}",
        f"teacher.model_name={folder / 'model'}",
        "policy.tokenizer.chat_template=null",
        "policy.max_total_sequence_length=64",
        "policy.generation.max_new_tokens=16",
        f"data.train.datasets=[{{data_path: {folder / 'train.jsonl'}}}]",
        "data.validation=null",
        "data.default.teacher_key=hint",
        "distillation.val_period=0",
        "distillation.val_at_start=false",
        "distillation.val_at_end=false",
    ]
    return list(load_prompts(load_config("distillation_tiny.yaml", [*given, *overrides])).train)


def text(token_ids: tuple[int, ...]) -> str:
    return bytes(token for token in token_ids if token < 256).decode()


def row(**fields: object) -> dict[str, object]:
    return {"question": "1+1=", "answer": "2", **fields}


def test_a_text_or_a_conversation_takes_the_place_of_the_question(tmp_path: Path):
    (tmp_path / "prompt.txt").write_text("Q: {}")
    own = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "?"}, {"role": "user", "content": "2"}]
    given = [f"data.default.prompt_file={tmp_path / 'prompt.txt'}", "data.default.system_prompt=Add."]
    first, second = prompts(tmp_path, [row(hint=HINT), row(hint=own)], *given)
    assert text(first.token_ids) == text(second.token_ids) == "Add.Q: 1+1="
    assert text(first.teacher_token_ids) == "Add.Q: It is 2."
    assert text(second.teacher_token_ids) == "Add.1+1=?Q: 2"
    # Environments and people see the row as it is.
    assert (first.text, first.expected_answer, json.loads(first.row)) == ("1+1=", "2", {"hint": HINT})


def test_a_prompt_file_puts_question_and_hint_together(tmp_path: Path):
    for name, form in (("prompt", "Q: {}"), ("teacher", "{}{hint} {{say}} ")):
        (tmp_path / f"{name}.txt").write_text(form)
    files = [
        f"data.default.prompt_file={tmp_path / 'prompt.txt'}",
        f"data.default.teacher_prompt_file={tmp_path / 'teacher.txt'}",
    ]
    (prompt,) = prompts(tmp_path, [row(hint="{2}")], *files)
    assert (text(prompt.token_ids), text(prompt.teacher_token_ids)) == ("Q: 1+1=", "1+1={2} {say} ")
    with pytest.raises(ValueError, match="train.jsonl:1: hint is a conversation, and teacher_prompt_file takes a text"):
        prompts(tmp_path, [row(hint=[{"role": "user", "content": "2"}])], *files)
    for form, said in (("{}", "has no place for the text under teacher_key"), ("{x}{hint}", "is not a format string")):
        (tmp_path / "teacher.txt").write_text(form)
        with pytest.raises(ValueError, match=rf"data\.default\.teacher_prompt_file=\S+teacher.txt {said}"):
            prompts(tmp_path, [row(hint=HINT)], *files)


def test_rows_that_no_teacher_can_be_asked_are_named(tmp_path: Path):
    rows = [row(), row(hint=" "), row(hint="h" * 48), row(hint="h" * 49), row(hint=None)]
    with pytest.raises(ValueError) as caught:
        prompts(tmp_path, rows)
    said = str(caught.value)
    assert "has 4 bad rows" in said and "train.jsonl:3" not in said
    assert re.search(
        r"train.jsonl:1: no key hint \(the row has 'answer', 'question'\); \S+teacher_key names another", said
    )
    assert "train.jsonl:2: hint is empty" in said
    assert re.search(r"train.jsonl:5: hint: null, so there is none; \S+teacher_key names another", said)
    assert "train.jsonl:4: the teacher's prompt has 49 tokens, and a rollout up to 16: together more than" in said
    assert "max_total_sequence_length=64; raise that, lower policy.generation.max_new_tokens, shorten hint" in said
    # A longer teacher takes them; over several turns a rollout has what the prompt leaves: 64 less 4.
    longer = "teacher.max_total_sequence_length"
    (prompt,) = prompts(tmp_path, [row(hint="h" * 49)], f"{longer}=65")
    assert len(prompt.teacher_token_ids) == 49
    with pytest.raises(ValueError, match="the teacher's prompt has 49 tokens, and a rollout up to 60: "):
        prompts(tmp_path, [row(hint="h" * 49)], f"{longer}=108", "distillation.max_rollout_turns=2")
    prompts(tmp_path, [row(hint="h" * 49)], f"{longer}=109", "distillation.max_rollout_turns=2")


def test_packed_outputs_belong_to_the_same_tokens_behind_another_prompt():
    drawn = [([1, 2, 3], [7, 8]), ([4], [9]), ([5, 6], [10, 11, 12, 13])]
    chosen = [
        Rollout(request(prompt), 1, np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), "stop")
        for prompt, tokens in drawn
    ]
    shown = [
        with_prompt(rollout, tuple(range(100, 100 + length)))
        for rollout, length in zip(chosen, (1, 9, 30), strict=True)
    ]
    packed = pack_row(
        {index: pulled(rollout, 0.0, True) for index, rollout in enumerate(shown)},
        divisible_by=16,
        sequence_multiple=4,
        pad_token_id=256,
    )
    # A teacher that says of each position which token comes next.
    taught = split_teacher(packed, packed.labels_T[:, None].float(), packed.labels_T[:, None])
    for index, rollout in enumerate(chosen):
        assert taught[index].token_ids[:, 0].tolist() == rollout.token_ids.tolist()
        own = pack_row({0: pulled(rollout, 0.0, True, teacher=taught[index])}, divisible_by=1, pad_token_id=256)
        assert own.teacher is not None
        assert torch.equal(own.teacher.token_ids_TK[:, 0], own.labels_T * own.generated_mask_T.long())
