# SPDX-License-Identifier: Apache-2.0
"""The adapters that a run's engines hold beside the weights."""

from __future__ import annotations

from pathlib import Path

from conversion.adapters import HeldAdapters, adapted_layers
from conversion.families.registry import family
from conversion.files.hf_folder import read_config
from mrl.config.schema.policy import PolicyConfig


def held_adapters(policy: PolicyConfig) -> HeldAdapters | None:
    """Adapters that refits move alone; None where engines get whole weights, merged if there are adapters."""
    peft = policy.megatron_cfg.peft
    if not peft.enabled or peft.merge:
        return None
    hf_config = read_config(Path(policy.model_name) / "config.json")
    layers = adapted_layers(
        family(hf_config), hf_config, target_modules=peft.target_modules, exclude_modules=peft.exclude_modules
    )
    return HeldAdapters(layers, peft.dim)
