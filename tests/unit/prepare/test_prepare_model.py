"""The tiny model and its warm start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from mrl import prepare_model
from mrl.prepare_arithmetic import Addition
from mrl.prepare_model import build_model, encode, sampled_accuracy, save_warm_started_model, smoothed_loss
from mrl.prepare_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer(4096)
ADDITIONS = [Addition(10, 20), Addition(31, 42), Addition(11, 11), Addition(50, 49)]


def test_answers_stand_at_the_end():
    tokens_BT, num_answer_tokens = encode(TOKENIZER, ADDITIONS)
    assert tokens_BT[0].tolist() == [260, *b"10+20=", 261, *b"30", 258]
    assert num_answer_tokens == 3


def test_sampled_accuracy_is_the_share_of_right_samples():
    model = build_model(seed=0)
    tokens_BT, num_answer_tokens = encode(TOKENIZER, ADDITIONS)
    logits_BTV = model(tokens_BT).logits
    expected = 0.0
    for row, logits_TV in zip(tokens_BT.tolist(), logits_BTV, strict=True):
        probability = 1.0
        for position in range(len(row) - num_answer_tokens, len(row)):
            probability *= logits_TV[position - 1].softmax(-1)[row[position]].item()
        expected += probability / len(ADDITIONS)
    assert sampled_accuracy(model, tokens_BT, num_answer_tokens) == pytest.approx(expected, rel=1e-4)


def test_the_warm_start_cannot_make_the_model_sure_of_an_answer():
    targets_BT = torch.tensor([[*b"37", 258]])
    logits_BTV = torch.zeros(1, 3, 264, requires_grad=True)
    optimizer = torch.optim.Adam([logits_BTV], lr=0.1)
    for _ in range(500):
        optimizer.zero_grad()
        smoothed_loss(logits_BTV, targets_BT).backward()
        optimizer.step()
    probabilities_TV = logits_BTV.detach().softmax(-1)[0]
    assert probabilities_TV[0, ord("3")].item() == pytest.approx(0.505, abs=0.01)
    assert probabilities_TV[0, ord("4")].item() == pytest.approx(0.055, abs=0.01)
    assert probabilities_TV[2, 258].item() > 0.98


def test_the_saved_folder_is_an_ordinary_checkpoint_and_repeats_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Four additions are learned by heart within a few steps: the same code path as the real warm start.
    monkeypatch.setattr(prepare_model, "BATCH_SIZE", 16)
    for name in ("one", "two"):
        save_warm_started_model(tmp_path / name, TOKENIZER, ADDITIONS, ADDITIONS, seed=5)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert type(loaded).__name__ == "NemotronHForCausalLM"
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    biases = [buffer for name, buffer in loaded.named_buffers() if name.endswith("e_score_correction_bias")]
    assert len(biases) == 3 and all(bias.abs().max() > 0 for bias in biases)
    assert GenerationConfig.from_pretrained(tmp_path / "one").eos_token_id == [258]
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (tmp_path / "two" / "model.safetensors").read_bytes()


def test_a_warm_start_that_fails_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prepare_model, "MAX_STEPS", 1)
    with pytest.raises(RuntimeError, match="did not reach accuracy"):
        prepare_model.train_until_probe(build_model(seed=0), TOKENIZER, ADDITIONS, ADDITIONS, seed=0)
