# SPDX-License-Identifier: Apache-2.0
"""How large a run's checkpoints are, for all that reserve disk, memory or time for them."""

from __future__ import annotations

from collections.abc import Mapping

from mrl.config.schema.run import RunConfig
from mrl.phases import ModelName

# An optimizer's main parameter and two moments, in float32.
_OPTIMIZER_BYTES = 12


def checkpoint_bytes(config: RunConfig, num_parameters: Mapping[ModelName, int]) -> dict[ModelName, int]:
    """Bytes of each of these models in a checkpoint: its weights, and with `save_optimizer` the states of its optimizer.

    `num_parameters` has those of `RunConfig.trained_models`, or of some of them. All count as trained, but with adapters (LoRA) none: the
    adapters' own states are next to nothing.
    """
    found: dict[ModelName, int] = {}
    for model, number in num_parameters.items():
        policy = config.of_model(model).policy
        has_states = config.checkpointing.save_optimizer and not policy.megatron_cfg.peft.enabled
        found[model] = number * ((2 if policy.precision == "bfloat16" else 4) + (_OPTIMIZER_BYTES if has_states else 0))
    return found
