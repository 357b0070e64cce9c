"""Nemotron-3-Nano-30B-A3B made narrower."""

from __future__ import annotations

import json
from pathlib import Path

from conversion.families.common import HfConfig

NANO = Path(__file__).parent / "models" / "nemotron3_nano_30b_a3b.config.json"

# What a matrix is wide and high; how many there are of each (layers, experts, heads) stays.
_WIDTHS = (
    "vocab_size",
    "hidden_size",
    "head_dim",
    "mamba_head_dim",
    "ssm_state_size",
    "intermediate_size",
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
)


def narrowed(factor: int) -> HfConfig:
    """Its config with every width divided by `factor`: as many tensors, about `factor` squared times fewer bytes.

    Raises:
        ValueError: `factor` does not divide a width.
    """
    config = json.loads(NANO.read_text(encoding="utf-8"))
    for key in _WIDTHS:
        if config[key] % factor:
            raise ValueError(f"--divide {factor} does not divide {key}={config[key]}; use a power of two up to 64")
        config[key] //= factor
    return config
