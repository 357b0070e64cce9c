# SPDX-License-Identifier: Apache-2.0
"""Adapters with random factors, exported for PEFT, beside the weights that have them merged."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from conversion.adapters import adapted_layers, adapter_family, factor_names
from conversion.families.common import HfConfig
from conversion.families.registry import family
from conversion.lora_export import CheckpointAdapters, write_peft
from conversion.tensors import merge_lora
from tests.unit.conversion.memory import InMemory

DIM, ALPHA = 4, 6.0
Patterns = tuple[str, ...]


def export(
    hf_config: HfConfig, weights: dict[str, Tensor], out: Path, *, targets: Patterns = (), excludes: Patterns = ()
) -> dict[str, Tensor]:
    """Writes these layers' adapters as `mrl.convert adapters` does; returns the weights merged as mcore-to-hf does."""
    found = family(hf_config)
    layers = adapted_layers(found, hf_config, target_modules=targets, exclude_modules=excludes)
    factors, generator = factor_names(found, hf_config, layers), torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.2
        for name, shape in adapter_family(found, layers, DIM).canonical(hf_config).items()
    }
    adapters = CheckpointAdapters(layers, DIM, ALPHA, factors, {})
    write_peft(InMemory(tensors), adapters, hf_config, out)
    changed = {
        name: merge_lora(weights[name], tensors[a], tensors[b], adapters.scale) for name, (a, b) in factors.items()
    }
    return weights | changed
