# SPDX-License-Identifier: Apache-2.0
"""Tiny random Hugging Face checkpoints for tests. Weights are sharper than at initialisation, so a wrong mapping shows.

Vocabularies are no multiple of what Megatron and vLLM pad to; key heads are fewer than query heads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, NemotronHConfig, NemotronHForCausalLM, PreTrainedModel

from conversion.families.registry import family
from tests.tiny import TINY, TINY_NEMOTRON_H

Model = TypeVar("Model", bound=PreTrainedModel)


def tiny_model(model_type: str, seed: int = 0, **overrides: object) -> PreTrainedModel:
    """A tiny random float32 model of any family; nemotron_h as `nemotron_h` makes it."""
    if model_type == "nemotron_h":
        return nemotron_h(seed, **overrides)
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**TINY[model_type], **overrides})
    return _sharpen(AutoModelForCausalLM.from_config(config).float().eval())


def save_model(folder: Path, model_type: str, seed: int = 0, **overrides: object) -> Path:
    """Writes `tiny_model` as an ordinary Hugging Face folder and returns the folder."""
    if model_type == "nemotron_h":
        return save_nemotron_h(folder, seed, **overrides)
    tiny_model(model_type, seed, **overrides).save_pretrained(folder)
    return folder


def nemotron_h(seed: int = 0, **overrides: object) -> NemotronHForCausalLM:
    """Tiny random float32 nemotron_h with Megatron's and vLLM's dt limits (transformers clamps dt at time_step_min)."""
    torch.manual_seed(seed)
    model = NemotronHForCausalLM(NemotronHConfig(**{**TINY_NEMOTRON_H, **overrides})).float().eval()
    return unclamp_dt(_sharpen(model))


def _sharpen(model: Model) -> Model:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # A layer's experts have their biases in one matrix.
            is_matrix = parameter.ndim >= 2 and not name.endswith("_bias")
            parameter.mul_(3.0) if is_matrix else parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    return model


def unclamp_dt(model: Model) -> Model:
    """Removes transformers' lower clamp of dt in Mamba layers, which no other implementation has."""
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            setattr(module, "time_step_limit", (0.0, float("inf")))  # noqa: B010  torch types attributes of modules as tensors
    return model


def save_nemotron_h(folder: Path, seed: int = 0, **overrides: object) -> Path:
    """Writes `nemotron_h(seed)` as an ordinary Hugging Face folder and returns the folder.

    With `num_nextn_predict_layers` it has random MTP layers too, which transformers builds no modules for.
    """
    nemotron_h(seed, **overrides).save_pretrained(folder)
    if overrides.get("num_nextn_predict_layers"):
        add_mtp(folder, seed, overrides["num_nextn_predict_layers"])
    return folder


def save_foreseeing(folder: Path, seed: int = 0, **overrides: object) -> Path:
    """Saves as `save_nemotron_h`, with one multi-token prediction step that often names the token the model draws next.

    Layers add little to the embedding of a token, so that the token after it mostly follows from it alone: for the
    model, and for its MTP layers.
    """
    save_nemotron_h(folder, seed, num_nextn_predict_layers=1, **overrides)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
            tensor *= 0.05 if name.startswith("mtp.") else 0.3
        if name in ("backbone.embeddings.weight", "lm_head.weight"):
            tensor *= 10
    hidden = tensors["mtp.layers.0.eh_proj.weight"].shape[0]
    tensors["mtp.layers.0.eh_proj.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    tensors["mtp.layers.0.enorm.weight"].fill_(1.0)
    tensors["mtp.layers.1.final_layernorm.weight"].copy_(tensors["backbone.norm_f.weight"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def add_mtp(folder: Path, seed: int, num_steps: object = 1) -> None:
    """Adds random MTP layers to a nemotron_h folder."""
    hf_config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": num_steps}
    (folder / "config.json").write_text(json.dumps(hf_config, indent=2))
    shapes = {name: shape for name, shape in family(hf_config).canonical(hf_config).items() if name.startswith("mtp.")}
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(folder / "model.safetensors")
    for name, shape in shapes.items():
        scale, shift = (0.1, 0.0) if len(shape) > 1 or name.endswith("bias") else (0.1, 1.0)
        tensors[name] = torch.randn(shape, generator=generator) * scale + shift
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
