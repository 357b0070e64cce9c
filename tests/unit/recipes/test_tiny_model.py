# SPDX-License-Identifier: Apache-2.0
"""The tiny model and its warm start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from mrl.recipes import tiny_model
from mrl.recipes.additions import Addition, Kind
from mrl.recipes.tiny_model import (
    WARM_STARTS,
    build_model,
    demonstrations,
    encode,
    sampled_accuracy,
    save_warm_started_model,
)
from mrl.recipes.tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer(4096)
ADDITIONS = [Addition(10, 20), Addition(31, 42), Addition(11, 11), Addition(50, 49)]


def test_answers_stand_at_the_end():
    tokens_BT, num_answer_tokens = encode(TOKENIZER, ADDITIONS)
    assert tokens_BT[0].tolist() == [260, *b"10+20=", 261, *b"30", 258]
    assert num_answer_tokens == 3


def test_sampled_accuracy_is_the_share_of_right_samples():
    model = build_model("tiny", seed=0)
    tokens_BT, num_answer_tokens = encode(TOKENIZER, ADDITIONS)
    logits_BTV = model(tokens_BT).logits
    expected = 0.0
    for row, logits_TV in zip(tokens_BT.tolist(), logits_BTV, strict=True):
        probability = 1.0
        for position in range(len(row) - num_answer_tokens, len(row)):
            probability *= logits_TV[position - 1].softmax(-1)[row[position]].item()
        expected += probability / len(ADDITIONS)
    assert sampled_accuracy(model, tokens_BT, num_answer_tokens) == pytest.approx(expected, rel=1e-4)


def test_the_warm_start_prefers_the_answer_without_the_carry():
    right_BT, forgetful_BT = torch.tensor([[*b"42", 258], [*b"37", 258]]), torch.tensor([[*b"32", 258], [*b"37", 258]])
    teacher_BTV = demonstrations(right_BT, forgetful_BT)
    assert teacher_BTV.sum(-1).tolist() == [pytest.approx([1.0] * 3)] * 2
    # 0.65 of 0.65 for the wrong digit, 0.35 of 0.65 for the right one, and a tenth of 0.35 for each digit.
    assert teacher_BTV[0, 0, ord("3")].item() == pytest.approx(0.4575) and teacher_BTV[
        0, 0, ord("4")
    ].item() == pytest.approx(0.2625)
    assert teacher_BTV[0, 0, ord("5")].item() == pytest.approx(0.035) and teacher_BTV[0, 0, ord("a")].item() == 0
    assert teacher_BTV[1, 0, ord("3")].item() == pytest.approx(0.685)
    assert teacher_BTV[:, 2, 258].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("kind", "model_class", "num_biases"), [("tiny", "NemotronHForCausalLM", 3), ("tiny_dense", "Qwen3ForCausalLM", 0)]
)
def test_the_saved_folder_is_an_ordinary_checkpoint_and_repeats_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, model_class: str, num_biases: int
):
    # Four additions are learned by heart within a few steps: the same code path as the real warm start.
    monkeypatch.setattr(tiny_model, "BATCH_SIZE", 16)
    for name in ("one", "two"):
        save_warm_started_model(tmp_path / name, TOKENIZER, ADDITIONS, ADDITIONS, seed=5, kind=kind)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert type(loaded).__name__ == model_class
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    biases = [buffer for name, buffer in loaded.named_buffers() if name.endswith("e_score_correction_bias")]
    assert len(biases) == num_biases and all(bias.abs().max() > 0 for bias in biases)
    assert GenerationConfig.from_pretrained(tmp_path / "one").eos_token_id == [258]
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (
        tmp_path / "two" / "model.safetensors"
    ).read_bytes()


def test_a_warm_start_that_fails_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiny_model, "MAX_STEPS", 1)
    with pytest.raises(RuntimeError, match="did not reach accuracy"):
        tiny_model.train_until_probe(
            build_model("tiny", seed=0), TOKENIZER, ADDITIONS, ADDITIONS, WARM_STARTS["tiny"], seed=0
        )
