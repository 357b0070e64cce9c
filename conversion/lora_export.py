# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of a Megatron checkpoint: merged into its weights, or exported alone in PEFT's format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from conversion.adapters import adapter_family, factor_names, layers_of_keys
from conversion.boxes import Box, Layout, lengths
from conversion.families.registry import family
from conversion.files.durable import built_aside
from conversion.files.hf_folder import read_config, write_json
from conversion.files.torch_dist import CanonicalTensors, CheckpointPaths, TorchDistFolder
from conversion.tensors import merge_lora, read_whole

RUN_CONFIG_FILE = "run_config.yaml"
_PEFT_WEIGHTS, _PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"


@dataclass(frozen=True)
class CheckpointAdapters:
    """The adapters that a checkpoint has beside its weights, with their size and scale."""

    layers: tuple[str, ...]
    dim: int
    alpha: float
    factors: Mapping[str, tuple[str, str]]
    """Canonical names of A and B, by that of their weight."""
    layout: Layout

    @property
    def scale(self) -> float:
        return self.alpha / self.dim


def find_adapters(paths: CheckpointPaths, folder: TorchDistFolder) -> CheckpointAdapters | None:
    """The adapters of a checkpoint, None if it has none."""
    layers = layers_of_keys(sorted(folder.keys))
    if not layers:
        return None
    path = paths.iteration / RUN_CONFIG_FILE
    # JSON is YAML, and what mrl writes.
    settings = read_config(path).get("peft")
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: no section peft, which gives dim and alpha of the adapters in this checkpoint")
    dim, alpha = int(settings["dim"]), float(settings["alpha"])
    base = family(paths.hf_config)
    layout = adapter_family(base, layers, dim).torch_dist_layout(paths.hf_config, "float32")
    return CheckpointAdapters(layers, dim, alpha, factor_names(base, paths.hf_config, layers), layout)


class MergedTensors:
    """The canonical tensors of a checkpoint with its adapters merged: what engines sampled from."""

    def __init__(self, tensors: CanonicalTensors, adapters: CheckpointAdapters) -> None:
        """`tensors` are weights and factors."""
        self._tensors, self._adapters = tensors, adapters
        factors = {name for pair in adapters.factors.values() for name in pair}
        self.names = [name for name in tensors.names if name not in factors]
        """Names of the weights, in the order of the layout."""
        self._current: tuple[str, Tensor, Tensor] | None = None

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors.dtype(name)

    def read_into(self, name: str, box: Box, target: Tensor) -> None:
        if name not in self._adapters.factors:
            self._tensors.read_into(name, box, target)
            return
        if self._current is None or self._current[0] != name:
            a, b = (read_whole(self._tensors, factor) for factor in self._adapters.factors[name])
            self._current = name, a, b
        _, a, b = self._current
        base = torch.empty(lengths(box), dtype=self.dtype(name))
        self._tensors.read_into(name, box, base)
        rows, columns = (slice(*bounds) for bounds in box)
        target.copy_(merge_lora(base, a[:, columns], b[rows], self._adapters.scale))


def write_peft(tensors: CanonicalTensors, adapters: CheckpointAdapters, hf_config: Mapping[str, object], out: Path) -> None:
    """Writes a folder as the library PEFT reads it: adapter_model.safetensors and adapter_config.json.

    Each weight of a fused layer gets its rows of B and a copy of the shared A.
    """
    content = {}
    for weight, pair in adapters.factors.items():
        for letter, factor in zip("AB", pair, strict=True):
            content[f"base_model.model.{weight.removesuffix('.weight')}.lora_{letter}.weight"] = read_whole(tensors, factor)
    adapted, weights, targets = set(adapters.factors), family(hf_config).canonical(hf_config), set()
    for weight in adapted:
        module = weight.removesuffix(".weight")
        last = module.rpartition(".")[2]
        # The last part of a name, where all modules that end so are adapted; else the full name.
        targets.add(last if all(name in adapted for name in weights if name.endswith(f".{last}.weight")) else module)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": hf_config.get("_name_or_path"),
        "r": adapters.dim,
        # PEFT and vLLM declare it an integer.
        "lora_alpha": int(adapters.alpha) if adapters.alpha.is_integer() else adapters.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with built_aside(out, {"adapters": adapters.layers}) as folder:
        save_file(content, folder / _PEFT_WEIGHTS, {"format": "pt"})
        write_json(folder / _PEFT_CONFIG, config)
