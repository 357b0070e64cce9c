# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of a Megatron checkpoint: merged into its weights, or exported alone in PEFT's format."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
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
from conversion.files.manifest import RUN_CONFIG_FILE
from conversion.files.torch_dist import CanonicalTensors, CheckpointPaths, TorchDistFolder
from conversion.tensors import BoxSource, merge_lora, read_whole

_PEFT_WEIGHTS, _PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(\w+)")
_UNGATED = ("up_proj", "down_proj")


@dataclass(frozen=True)
class CheckpointAdapters:
    """The adapters of a checkpoint, with their size and scale."""

    layers: tuple[str, ...]
    dim: int
    alpha: float
    factors: Mapping[str, tuple[str, str]]
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
    settings = read_config(path).get("peft")
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: no section peft, which gives dim and alpha of the adapters in this checkpoint")
    dim, alpha = int(settings["dim"]), float(settings["alpha"])
    base = family(paths.hf_config)
    layout = adapter_family(base, layers, dim).torch_dist_layout(paths.hf_config, "float32")
    return CheckpointAdapters(layers, dim, alpha, factor_names(base, paths.hf_config, layers), layout)


class MergedTensors:
    """The canonical tensors of a checkpoint with merged adapters: engines sampled from these."""

    def __init__(self, tensors: CanonicalTensors, adapters: CheckpointAdapters) -> None:
        """Merges lazily; `tensors` are weights and factors."""
        self._tensors, self._adapters = tensors, adapters
        factors = {name for pair in adapters.factors.values() for name in pair}
        self.names = [name for name in tensors.names if name not in factors]
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


def write_peft(tensors: BoxSource, adapters: CheckpointAdapters, hf_config: Mapping[str, object], out: Path) -> None:
    """Writes a folder as the library PEFT reads it: adapter_model.safetensors and adapter_config.json.

    Each weight of a fused layer gets its rows of B and a copy of the shared A. Experts without a gate get one A and one
    B for all of a layer, as PEFT has it for what transformers holds in one parameter; it makes that of gated ones
    itself.

    Raises:
        ValueError: PEFT, which is asked, refuses adapters of these layers or ignores them silently; or it is not
            installed.
    """
    try:
        from conversion.peft_check import check_applied
    except ImportError as error:
        raise ValueError(
            f"{error}: only PEFT itself says whether it applies adapters; pip install 'mrl[adapters]'"
        ) from error
    canonical = family(hf_config).canonical(hf_config)
    content, targets, parameters = dict[str, Tensor](), set[str](), set[str]()
    stacked: dict[tuple[str, str], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for weight, pair in adapters.factors.items():
        module, (a, b) = weight.removesuffix(".weight"), (read_whole(tensors, factor) for factor in pair)
        expert = _EXPERT.fullmatch(module)
        if expert is not None and expert[2] in _UNGATED and f"{expert[1]}.0.gate_proj.weight" not in canonical:
            stacked[expert[1], expert[2]].append((a, b))
            continue
        content |= {f"{_PREFIX}{module}.lora_A.weight": a, f"{_PREFIX}{module}.lora_B.weight": b}
        last = module.rpartition(".")[2]
        alike = [name for name in canonical if name.endswith(f".{last}.weight")]
        targets.add(
            last if all(name in adapters.factors for name in alike) else module[max(module.find("layers."), 0) :]
        )
    for (experts, name), factors in stacked.items():
        # PEFT wraps the wrapper of the first parameter, where both are adapted.
        inner = ".base_layer" if name == _UNGATED[0] and (experts, _UNGATED[1]) in stacked else ""
        content[f"{_PREFIX}{experts}{inner}.lora_A.weight"] = torch.cat([a for a, _ in factors])
        content[f"{_PREFIX}{experts}{inner}.lora_B.weight"] = torch.stack([b for _, b in factors], dim=-1).flatten(1)
        parameters.add(f"{experts[experts.index('layers.') :]}.{name}")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": hf_config.get("_name_or_path"),
        "r": adapters.dim,
        "lora_alpha": int(adapters.alpha) if adapters.alpha.is_integer() else adapters.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    if parameters:
        config["target_parameters"] = sorted(parameters)
    with built_aside(out, {"adapters": adapters.layers}) as folder:
        save_file(content, folder / _PEFT_WEIGHTS, {"format": "pt"})
        write_json(folder / _PEFT_CONFIG, config)
        check_applied(folder, hf_config, _changes(tensors, adapters))


def _changes(tensors: BoxSource, adapters: CheckpointAdapters) -> Iterator[tuple[str, Tensor]]:
    for weight, (a, b) in adapters.factors.items():
        yield weight, adapters.scale * read_whole(tensors, b).float() @ read_whole(tensors, a).float()
