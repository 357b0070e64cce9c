# SPDX-License-Identifier: Apache-2.0
"""Folders of transformers whose tensors are not those of a language model."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedModel

from conversion.convert import convert_hf_to_mcore, convert_mcore_to_hf

IDS = torch.arange(1, 15).view(2, 7)


def saved(kind: type[PreTrainedModel], folder: Path) -> PreTrainedModel:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(vocab_size=128, pad_token_id=0, **sizes)
    config.num_labels = 1
    model = kind(config).eval()
    model.save_pretrained(folder)
    return model


def round_trip(folder: Path) -> Path:
    convert_hf_to_mcore(folder, folder.parent / "mcore")
    convert_mcore_to_hf(folder.parent / "mcore", folder.parent / "back")
    return folder.parent / "back"


def test_a_reward_model_of_transformers_has_no_output_layer(tmp_path: Path):
    model = saved(LlamaForSequenceClassification, tmp_path / "hf")
    back = LlamaForSequenceClassification.from_pretrained(round_trip(tmp_path / "hf")).eval()
    assert torch.equal(model(IDS).logits, back(IDS).logits)


def test_frequencies_that_old_folders_store_follow_from_the_config(tmp_path: Path):
    model, file = saved(LlamaForCausalLM, tmp_path / "hf"), tmp_path / "hf/model.safetensors"
    save_file(load_file(file) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, file, {"format": "pt"})
    back = LlamaForCausalLM.from_pretrained(round_trip(tmp_path / "hf")).eval()
    assert torch.equal(model(IDS).logits, back(IDS).logits)
