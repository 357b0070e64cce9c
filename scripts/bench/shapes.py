# SPDX-License-Identifier: Apache-2.0
"""Nemotron-3-Nano-30B-A3B made narrower, and the tiny models made wider."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conversion.families.common import HfConfig

NANO = Path(__file__).parent / "models" / "nemotron3_nano_30b_a3b.config.json"

# Of 20 to 30 million parameters: products of matrices take longer than what a request or a call costs.
WIDER: Mapping[str, Mapping[str, Any]] = {
    "nemotron_h": dict(
        hidden_size=512, num_attention_heads=8, head_dim=64, mamba_num_heads=16, mamba_head_dim=64, ssm_state_size=32
    )
    | dict(moe_intermediate_size=512, moe_shared_expert_intermediate_size=1024, chunk_size=64),
    "qwen3": dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8, head_dim=64),
}


def widen(prepared: Path, folder: Path, model_type: str) -> None:
    """Fills `folder` with what `python -m mrl.prepare tiny` put in `prepared`, and a wider model of random weights."""
    from tests.models import save_model

    shutil.copytree(prepared, folder, ignore=shutil.ignore_patterns("model.safetensors", "config.json", "recipe.json"))
    save_model(folder / "model", model_type, **WIDER[model_type])


def narrowed(factor: int) -> HfConfig:
    """Its config with the hidden size divided by `factor`: as many tensors, each nearly `factor` times smaller.

    Every matrix has the hidden size as its height or its width. Those with the hidden size as their height (output
    projections, down projections of experts) are the ones that tensor parallelism cuts along the columns, so the rows
    of the parts stay as long as they are.

    Raises:
        ValueError: `factor` does not divide the hidden size.
    """
    config = json.loads(NANO.read_text(encoding="utf-8"))
    if config["hidden_size"] % factor:
        raise ValueError(
            f"--divide {factor} does not divide hidden_size={config['hidden_size']}; use 16, 32, 64, 96 or 128"
        )
    config["hidden_size"] //= factor
    return config
