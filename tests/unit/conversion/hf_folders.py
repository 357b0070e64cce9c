# SPDX-License-Identifier: Apache-2.0
"""Small Hugging Face folders with random values by a family's names and shapes. For conversions, not computing."""

from __future__ import annotations

import json
import math
import os
import random
import struct
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from conversion.families.registry import family
from conversion.tensors import torch_dtype
from tests import models

COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def tiny_config(model_type: str, **overrides: object) -> dict[str, object]:
    """config.json of a tiny model whose layers two stages can share."""
    even = {"hybrid_override_pattern": "MEM*EM-E", "num_hidden_layers": 8} if model_type == "nemotron_h" else {}
    config = AutoConfig.for_model(model_type, **{**models.TINY[model_type], **even, **overrides})
    return json.loads(config.to_json_string(use_diff=False))


def large_config(num_bytes: int, *, vocabulary: int = 32_000) -> dict[str, object]:
    """config.json of a qwen3 of about `num_bytes` in bfloat16: layers of 101 MB, embeddings of 131 MB."""
    sizes = dict(hidden_size=2048, intermediate_size=6144, num_attention_heads=16, num_key_value_heads=8, head_dim=128)
    sizes["vocab_size"] = vocabulary
    num_layers = round((num_bytes - 2 * vocabulary * 4096) / 101e6)
    config = AutoConfig.for_model("qwen3", num_hidden_layers=num_layers, tie_word_embeddings=False, **sizes)
    return json.loads(config.to_json_string(use_diff=False))


def write_large_folder(folder: Path, config: dict[str, object]) -> int:
    """Random bits as bfloat16 weights, written as fast as the disk allows; their size in bytes."""
    folder.mkdir(parents=True)
    shapes = family(config).canonical(config)
    entries, num_bytes = {}, 0
    for name, shape in shapes.items():
        entries[name] = {
            "dtype": "BF16",
            "shape": shape,
            "data_offsets": [num_bytes, num_bytes := num_bytes + 2 * math.prod(shape)],
        }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    block, random_starts = os.urandom(32 << 20), random.Random(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        left = num_bytes
        while left:
            # Another part of the same random bytes each time: no two tensors are equal.
            start = random_starts.randrange(16 << 20)
            file.write(memoryview(block)[start : start + min(left, 16 << 20)])
            left -= min(left, 16 << 20)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return num_bytes


def write_folder(folder: Path, config: dict[str, object], *, seed: int = 0) -> Path:
    """Random bfloat16 weights with float32 router biases, by safetensors, and files of a tokenizer; the folder."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in family(config).canonical(config).items():
        tensors[name] = torch.randn(shape, generator=generator).to(
            torch_dtype("float32" if "correction_bias" in name else "bfloat16")
        )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    for name in COMPANIONS:
        (folder / name).write_text(json.dumps({"file": name}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder
