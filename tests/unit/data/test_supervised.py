# SPDX-License-Identifier: Apache-2.0
"""Examples from files to packed rows."""

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from mrl.config.load import load_config
from mrl.config.schema.run import RunConfig
from mrl.data.batch import batch_examples
from mrl.data.fields import RowError
from mrl.data.packing import pack_row
from mrl.data.planning import SequenceCost
from mrl.data.rendering import Conversation
from mrl.data.supervised import ConversationFormat, load_examples, tokenize
from mrl.recipes.tokenizer import byte_tokenizer

QUESTION = {"role": "user", "content": "1+1="}
ROWS = [
    {"messages": [QUESTION, {"role": "assistant", "content": "2"}]},
    {"id": "mine", "question": "10+20=", "answer": "30"},
    {"messages": [QUESTION, {"role": "assistant", "content": "2"}, QUESTION, {"role": "assistant", "content": "two"}]},
]


def config_of(folder: Path, rows: Sequence[object], *overrides: str) -> RunConfig:
    byte_tokenizer(4096).save_pretrained(folder)
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_config(
        "sft_tiny.yaml",
        [
            f"policy.model_name={folder}",
            f"data.train.data_path={path}",
            f"data.validation.data_path={path}",
            *overrides,
        ],
    )


def test_files_become_packed_rows(tmp_path: Path):
    config = config_of(tmp_path, ROWS)
    data = load_examples(config)
    assert [example.example_id for example in data.train] == ["train:1", "mine", "train:3"]
    batch = batch_examples(data.train, config.policy, dp_size=2, cost=SequenceCost(1.0, 0.0))
    tokenizer, seen = byte_tokenizer(4096), {}
    for rows in batch.rows:
        for row in rows:
            packed = pack_row({index: batch.sequences[index] for index in row}, divisible_by=2, pad_token_id=256)
            bounds = packed.cu_seqlens.tolist()
            for index, start, stop in zip(packed.sequence_indices, bounds, bounds[1:], strict=False):
                is_learned = packed.loss_mask_T[start:stop] > 0
                seen[index] = tokenizer.decode(packed.labels_T[start:stop][is_learned].tolist())
    assert seen == {0: "2<|end|>", 1: "30<|end|>", 2: "2<|end|>two<|end|>"}


def test_rows_that_are_too_long_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    config = config_of(tmp_path, ROWS, "policy.max_total_sequence_length=12")
    with caplog.at_level(logging.WARNING):
        data = load_examples(config)
    assert [example.example_id for example in data.train] == ["train:1", "mine"]
    assert "1 of 3 rows are too long and left out: " in caplog.text and "train.jsonl:3 (18 tokens)" in caplog.text


def test_a_file_of_rows_that_are_all_too_long_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="every row is too long: .*train.jsonl:1 .8 tokens."):
        load_examples(config_of(tmp_path, ROWS, "policy.max_total_sequence_length=4"))


def test_bad_rows_are_named(tmp_path: Path):
    rows = [*ROWS, {"messages": [QUESTION]}, {"id": "mine", "question": "q", "answer": "a"}]
    with pytest.raises(ValueError, match=r"train.jsonl:5: id 'mine' was used in .*train.jsonl:2 already"):
        load_examples(config_of(tmp_path, rows))
    with pytest.raises(ValueError, match=r"train.jsonl:4: no message has the role assistant"):
        load_examples(config_of(tmp_path, rows[:4]))


def test_pairs_stay_together_in_rows_of_twice_the_tokens(tmp_path: Path):
    rows = [{"prompt": f"{left}+1=", "chosen": str(left + 1), "rejected": "9" * (1 + left % 5)} for left in range(20)]
    limits = [
        "policy.max_total_sequence_length=16",
        "policy.sequence_packing.train_mb_tokens=16",
        "policy.sequence_packing.logprob_mb_tokens=32",
    ]
    config = config_of(tmp_path, rows, "algorithm=dpo", *limits)
    data = load_examples(config)
    batch = batch_examples(data.train, config.policy, dp_size=2, cost=SequenceCost(1.0, 0.0))
    for plan, row_tokens in ((batch.rows, 32), (batch.logprob_rows, 64)):
        for row in (row for rows_of_rank in plan for row in rows_of_rank):
            assert list(row[1::2]) == [index + 1 for index in row[0::2]] and all(index % 2 == 0 for index in row[0::2])
            assert sum(batch.sequences[index].rollout.num_tokens for index in row) <= row_tokens
        assert sorted(index for rows_of_rank in plan for row in rows_of_rank for index in row) == list(range(40))
    answers = [byte_tokenizer(64).decode(one.rollout.pulled.token_ids.tolist()) for one in batch.sequences]
    assert answers[:4] == ["1<|end|>", "9<|end|>", "2<|end|>", "99<|end|>"]


CHATML = (
    "{% for message in messages %}{{ '<|user|>' + message.role + '\n' + message.content + '<|end|>' + '\n' }}{% "
    "endfor %}{% if add_generation_prompt %}{{ '<|user|>assistant\n' }}{% endif %}"
)
# NeMo RL's sft.yaml has one like this: no special token, nothing before an answer.
BARE = (
    "{% for message in messages %}{% if message.role == 'user' %}{{ 'Q: ' + message.content + ' A:' }}"
    "{% else %}{{ ' ' + message.content }}{% endif %}{% endfor %}"
)
# As Qwen3's, which drops the reasoning of earlier turns.
REWRITING = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' }}"
    "{% if message.role == 'assistant' and loop.last %}{{ '[thought]' }}{% endif %}{{ message.content }}{% endfor %}"
)
TURNS = (("user", "2+2="), ("assistant", "4"), ("user", "and 3+3="), ("assistant", "six"))


def of_turns(*turns: tuple[str, str]) -> Conversation:
    return Conversation([{"role": role, "content": content} for role, content in turns])


def learned(*turns: tuple[str, str], template: str | None = None, **settings: object) -> tuple[str, list[str]]:
    """The text of a conversation's tokens, and of each part that is learned."""
    tokenizer = byte_tokenizer(4096)
    tokenizer.chat_template = template or tokenizer.chat_template
    how = (
        dict(add_bos=False, add_eos=True, add_generation_prompt=True, only_unmask_final=False, template_kwargs={})
        | settings
    )
    found = tokenize(of_turns(*turns), tokenizer, ConversationFormat(**how))  # type: ignore[arg-type]  # fields by name
    ids = found.token_ids.tolist()
    return str(tokenizer.decode(ids)), [str(tokenizer.decode(ids[start:stop])) for start, stop in found.targets]


def test_every_answer_is_learned_with_its_end():
    text, parts = learned(*TURNS)
    assert text == "<|user|>2+2=<|assistant|>4<|end|><|user|>and 3+3=<|assistant|>six<|end|>"
    assert parts == ["4<|end|>", "six<|end|>"]


def test_the_last_answer_alone():
    text, parts = learned(*TURNS, only_unmask_final=True)
    assert text == "<|user|>2+2=<|assistant|>4<|end|><|user|>and 3+3=<|assistant|>six<|end|>"
    assert parts == ["six<|end|>"]


def test_what_asks_for_an_answer_is_learned_unless_it_belongs_to_the_question():
    assert learned(*TURNS, add_generation_prompt=False)[1] == ["<|assistant|>4<|end|>", "<|assistant|>six<|end|>"]
    assert learned(*TURNS, template=CHATML, add_generation_prompt=False)[1] == [
        "<|user|>assistant\n4<|end|>\n",
        "<|user|>assistant\nsix<|end|>\n",
    ]


def test_a_template_with_a_line_break_behind_the_end_gets_no_second_end():
    assert learned(*TURNS, template=CHATML)[1] == ["4<|end|>\n", "six<|end|>\n"]


def test_a_template_without_special_tokens_gets_an_end_and_a_beginning():
    text, parts = learned(*TURNS[:2], template=BARE, add_bos=True)
    assert (text, parts) == ("<|begin|>Q: 2+2= A: 4<|end|>", [" 4<|end|>"])
    assert learned(*TURNS[:2], template=BARE, add_eos=False) == ("Q: 2+2= A: 4", [" 4"])
    assert learned(*TURNS[:2], template="<|begin|>" + BARE, add_bos=True)[0] == "<|begin|>Q: 2+2= A: 4<|end|>"


def test_what_follows_the_last_answer_is_left_out():
    assert learned(*TURNS[:3]) == ("<|user|>2+2=<|assistant|>4<|end|>", ["4<|end|>"])


def test_nothing_predicts_the_first_token():
    text, parts = learned(("assistant", "hello"), add_generation_prompt=False)
    assert (text, parts) == ("<|assistant|>hello<|end|>", ["hello<|end|>"])


def test_a_template_that_rewrites_earlier_turns_can_only_teach_the_last():
    tokenizer = byte_tokenizer(4096)
    tokenizer.chat_template = REWRITING
    with pytest.raises(RowError, match="only_unmask_final"):
        tokenize(of_turns(*TURNS), tokenizer, ConversationFormat(False, True, True, False, {}))
    assert learned(*TURNS, template=REWRITING, only_unmask_final=True, add_eos=False)[1] == [
        "<|assistant|>[thought]six"
    ]


def test_a_template_that_raises_is_told_with_its_words():
    with pytest.raises(RowError, match="unknown role tool"):
        tokenize(
            of_turns(("tool", "x"), ("assistant", "y")),
            byte_tokenizer(4096),
            ConversationFormat(False, True, True, False, {}),
        )


# As GLM's: a turn ends where the next role's mark stands. TRL's training template of it learns that mark
# (glm4moe_training.jinja).
UNENDED = "{% for m in messages %}{{ '<|' + m.role + '|>' + '\n' + m.content }}{% endfor %}"
VICUNA = (
    "{% for m in messages %}{{ {'user': 'USER: ', 'assistant': 'ASSISTANT: '}[m.role] + m.content + ' ' }}{% endfor %}"
)
BETWEEN = (
    "{% for m in messages %}{{ m.role + ': ' + m.content }}"
    "{% if m.role == 'assistant' and not loop.last %}<|end|><|reserved_0|>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "first", "last"),
    [
        (UNENDED, "\n4<|user|>", "\nsix<|end|>"),
        (UNENDED.replace("<|' + m.role + '|>", "[' + m.role + ']"), "[assistant]\n4[user]", "[assistant]\nsix<|end|>"),
        (VICUNA, "ASSISTANT: 4 USER:", "ASSISTANT: six <|end|>"),
        (BETWEEN, "assistant: 4<|end|>", "assistant: six<|end|>"),
        (CHATML, "<|user|>assistant\n4<|end|>\n", "<|user|>assistant\nsix<|end|>\n"),
        (
            "{% for m in messages %}{{ m.role + ': ' + m.content + '###' }}{% endfor %}",
            "assistant: 4###",
            "assistant: six###<|end|>",
        ),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "4", "six<|end|>"),
    ],
)
def test_a_turn_without_an_end_of_its_own_ends_with_the_mark_of_the_next(template: str, first: str, last: str):
    parts = learned(*TURNS, template=template, add_generation_prompt=False)[1]
    assert [part.removeprefix("<|assistant|>") for part in parts] == [first, last]


ANSWER = {"role": "assistant", "content": "a"}


def marked(**marks: object) -> dict[str, object]:
    return {
        "messages": [
            QUESTION,
            {"role": "assistant", "content": "BAD", **marks},
            QUESTION,
            {"role": "assistant", "content": "good"},
        ]
    }


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (marked(weight=0), ["good<|end|>"]),
        (marked(train=False), ["good<|end|>"]),
        (marked(loss=0.0), ["good<|end|>"]),
        (marked(trainable=True), ["BAD<|end|>", "good<|end|>"]),
        (marked(weight=None), ["BAD<|end|>", "good<|end|>"]),
        ({"messages": [QUESTION, ANSWER, QUESTION, ANSWER | {"weight": 0}]}, ["a<|end|>"]),
        ({"prompt": "q", "completion": "a", "label": True}, ["a<|end|>"]),
        ({"question": "q", "answer": "a", "label": 0, "mask": "User", "train_loss": 0.0}, ["a<|end|>"]),
        (marked(weight=0.5), "messages[1].weight is 0.5; messages are learned (true or 1) or not"),
        (marked(weight=0, train=True), "messages[1] has marks that contradict each other (weight, train)"),
        (marked(is_masked=True), "messages[1].is_masked is no mark that mrl knows"),
        (marked(lossScale=0.1), "messages[1].lossScale is no mark"),
        (marked(train_detail=[{"begin_offset": 0}]), "messages[1].train_detail is no mark"),
        (marked(reasoning_details=[{"text": "x"}]), "messages[1].reasoning_details would not be learned"),
        (marked(images=["a.png"]), "messages[1] has images; only text is supported"),
        ({"messages": [QUESTION | {"train": True}, ANSWER]}, "messages[0] is of role user and marked as learned"),
        ({"messages": [QUESTION, ANSWER | {"weight": 0}]}, "the row's marks exclude every message"),
        ({"prompt": "q", "completion": "a", "label": False},
         "label is False: the row shows a reply that is not to be learned"),
        ({"question": "q", "answer": "a", "kto_tag": False}, "kto_tag is False"),
        ({"prompt": "q", "completion": "a", "kto_tag": "false"}, "kto_tag is false"),
        ({"prompt": "q", "completion": "a", "is_desirable": False}, "is_desirable is False"),
        ({"prompt": "q", "completion": "a", "sample_weight": 0.0},
         "sample_weight is 0.0, which leaves out all of the row"),
        (marked(label=False), "messages[1].label is no mark that mrl knows"),
        ({"question": "q", "answer": "a", "train": False}, "train is False, which leaves out all of the row"),
        ({"question": "q", "answer": "a", "skip": True}, "skip is True"),
        ({"question": "q", "answer": "a", "mask": "Assistant"}, "mask is Assistant"),
        (marked() | {"loss_mask": [0, 1]}, "loss_mask is [0, 1]"),
    ],
)  # fmt: skip
def test_marks_of_what_is_learned(tmp_path: Path, row: dict[str, object], expected: list[str] | str):
    config = config_of(tmp_path, [row])
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=re.escape(expected)):
            load_examples(config)
        return
    (example,) = load_examples(config).train
    ids = example.sequences[0].token_ids.tolist()
    assert [
        str(byte_tokenizer(64).decode(ids[a:b])).removeprefix("<|assistant|>") for a, b in example.sequences[0].targets
    ] == expected


def test_marks_in_pairs(tmp_path: Path):
    chosen = [{"role": "assistant", "content": "a", "weight": 0}]
    with pytest.raises(ValueError, match="the row's marks exclude every message"):
        load_examples(config_of(tmp_path, [{"prompt": [QUESTION], "chosen": chosen, "rejected": "b"}], "algorithm=dpo"))
    with pytest.raises(ValueError, match="margin has no effect on the loss here"):
        load_examples(
            config_of(tmp_path, [{"prompt": "q", "chosen": "a", "rejected": "b", "margin": 0.5}], "algorithm=rm")
        )


def test_a_rows_own_values_for_the_template(tmp_path: Path):
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{{ '!' if enable_thinking else '' }}{% endfor %}")
    rows = [
        ROWS[0] | own for own in ({}, {"chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True})
    ]
    config = config_of(tmp_path, rows, f"policy.tokenizer.chat_template={template}", "data.add_bos=false")
    texts = [
        byte_tokenizer(64).decode(example.sequences[0].token_ids.tolist()) for example in load_examples(config).train
    ]
    assert texts == ["1+1=2<|end|>", "1+1=!2!<|end|>", "1+1=!2!<|end|>"]
