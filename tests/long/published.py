# SPDX-License-Identifier: Apache-2.0
"""Fourteen tiny model folders, each with what somebody's published folders have that an ordinary one has not."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from conversion.files.hf_folder import INDEX_FILE, SINGLE_FILE
from mrl.recipes import tokenizer
from tests import models

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
YARN = dict(rope_type="yarn", factor=4.0, rope_theta=1e6, original_max_position_embeddings=1024)
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)


def configure(folder: Path, **changes: object) -> None:
    """Changes keys of config.json; None removes one."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not None}, indent=2)
    )


def rewrite(folder: Path, change: Callable[[str, Tensor], Tensor], **more: Tensor) -> None:
    tensors = {name: change(name, tensor) for name, tensor in load_file(folder / SINGLE_FILE).items()}
    save_file(tensors | more, folder / SINGLE_FILE, {"format": "pt"})


def shard(folder: Path) -> None:
    """Two files and an index in place of the single file."""
    tensors = load_file(folder / SINGLE_FILE)
    files = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file, {"format": "pt"})
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / SINGLE_FILE).unlink()


def tied_copy(folder: Path) -> None:
    rewrite(folder, lambda name, tensor: tensor, **{OUTPUT: load_file(folder / SINGLE_FILE)[EMBEDDING].clone()})


def tied_in_name_only(folder: Path) -> None:
    rewrite(folder, lambda name, tensor: tensor, **{OUTPUT: load_file(folder / SINGLE_FILE)[EMBEDDING].flip(0)})


def left_index(folder: Path) -> None:
    tensors, left = load_file(folder / SINGLE_FILE), "model-00001-of-00001.safetensors"
    save_file({name: tensor * 0.5 for name, tensor in tensors.items()}, folder / left, {"format": "pt"})
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, left)}))


def rope_twice(folder: Path) -> None:
    configure(folder, rope_scaling=YARN)


def older_rope(folder: Path) -> None:
    configure(folder, rope_parameters=None, rope_theta=500000.0, rope_scaling=LLAMA3, dtype=None, torch_dtype="float16")
    rewrite(folder, lambda name, tensor: tensor.half())


def wide_mamba(folder: Path) -> None:
    wide = ("A_log", "mixer.D", "dt_bias", "gate.weight", "e_score_correction_bias")
    rewrite(folder, lambda name, tensor: tensor if name.endswith(wide) else tensor.bfloat16())
    configure(folder, dtype="bfloat16")


def with_code(folder: Path) -> None:
    configure(folder, auto_map={"AutoConfig": "configuration_x.NemotronHConfig"})
    (folder / "configuration_x.py").write_text("from transformers import NemotronHConfig\n")


def mixed(folder: Path) -> None:
    rewrite(folder, lambda name, tensor: tensor if "q_proj" in name else tensor.bfloat16())
    configure(folder, dtype="bfloat16", torch_dtype="bfloat16")


def predicting_layer(folder: Path) -> None:
    """The layer of multi-token prediction behind the last, which GLM-4.5 and its like are published with."""
    tensors, last = load_file(folder / SINGLE_FILE), "model.layers.1."
    extra = {name.replace(last, "model.layers.2."): tensor for name, tensor in tensors.items() if name.startswith(last)}
    extra |= {
        f"model.layers.2.{name}.weight": tensors["model.norm.weight"] for name in ("enorm", "hnorm", "shared_head.norm")
    }
    extra |= {
        "model.layers.2.eh_proj.weight": torch.zeros(64, 128),
        "model.layers.2.shared_head.head.weight": tensors[OUTPUT],
    }
    rewrite(folder, lambda name, tensor: tensor, **{name: tensor.clone() for name, tensor in extra.items()})
    configure(folder, num_nextn_predict_layers=1)


def older_window(folder: Path) -> None:
    """A window switched off, and rotary positions as transformers 4 wrote them, in shards: Qwen1.5-MoE-A2.7B."""
    window = dict(sliding_window=32768, max_window_layers=1, use_sliding_window=False)
    configure(
        folder, **window, layer_types=None, rope_parameters=None, rope_theta=1e6, dtype=None, torch_dtype="float32"
    )
    shard(folder)


def consolidated(folder: Path) -> None:
    save_file({"tok_embeddings.weight": torch.zeros(4, 4)}, folder / "consolidated.safetensors")
    shard(folder)


def beside_the_single_file(folder: Path) -> None:
    save_file({"tok_embeddings.weight": torch.zeros(4, 4)}, folder / "consolidated.safetensors")


def many_templates(folder: Path) -> None:
    shard(folder)
    loaded = AutoTokenizer.from_pretrained(folder)
    loaded.chat_template = {"default": loaded.chat_template, "tool_use": "TOOLS {{ messages[0]['content'] }}"}
    loaded.save_pretrained(folder)


def sampling_of_its_own(folder: Path) -> None:
    settings = {
        "do_sample": True,
        "temperature": 0.3,
        "top_k": 3,
        "top_p": 0.5,
        "repetition_penalty": 1.5,
        "eos_token_id": [258, 7],
    }
    (folder / "generation_config.json").write_text(json.dumps(settings))


FOLDERS: dict[str, tuple[str, Callable[[Path], None], Mapping[str, Any]]] = {
    "tied with a copy": ("qwen3", tied_copy, {}),
    "tied in name only": ("qwen3", tied_in_name_only, {}),
    "old index left": ("llama", left_index, {}),
    "rope twice": ("qwen3", rope_twice, {"rope_parameters": dict(rope_type="default", rope_theta=1e6)}),
    "older rope, float16": ("llama", older_rope, {}),
    "wide Mamba": ("nemotron_h", wide_mamba, {}),
    "auto_map with code": ("nemotron_h", with_code, {}),
    "mixed dtypes": ("qwen2", mixed, {"vocab_size": 272}),  # transformers gives its tokenizer another token
    "consolidated beside shards": ("mixtral", consolidated, {}),
    "consolidated beside one file": ("llama", beside_the_single_file, {}),
    "many templates": ("qwen3_moe", many_templates, {}),
    "a layer that predicts further": ("glm4_moe", predicting_layer, {}),
    "a window switched off": ("qwen2_moe", older_window, {"mlp_only_layers": []}),
    "sampling of its own": ("qwen3", sampling_of_its_own, {}),
}
"""Name -> the family, what is done to an ordinary folder, and settings of it."""


def publish(name: str, root: Path) -> Path:
    """Makes the folder."""
    model_type, spoil, settings = FOLDERS[name]
    layers = {} if model_type == "nemotron_h" else {"num_hidden_layers": 2}
    folder = models.save_model(root / "published", model_type, **layers, **settings)
    tokenizer.save(folder, model_max_length=4096)
    spoil(folder)
    return folder
