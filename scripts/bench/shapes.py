# SPDX-License-Identifier: Apache-2.0
"""Nemotron-3-Nano-30B-A3B made narrower."""

from __future__ import annotations

import json
from pathlib import Path

from conversion.families.common import HfConfig

NANO = Path(__file__).parent / "models" / "nemotron3_nano_30b_a3b.config.json"


def narrowed(factor: int) -> HfConfig:
    """Its config with the hidden size divided by `factor`: as many tensors, each nearly `factor` times smaller.

    Every matrix has the hidden size as its height or its width. Those with the hidden size as their height (output projections, down
    projections of experts) are the ones that tensor parallelism cuts along the columns, so the rows of the parts stay as long as they are.

    Raises:
        ValueError: `factor` does not divide the hidden size.
    """
    config = json.loads(NANO.read_text(encoding="utf-8"))
    if config["hidden_size"] % factor:
        raise ValueError(f"--divide {factor} does not divide hidden_size={config['hidden_size']}; use 16, 32, 64, 96 or 128")
    config["hidden_size"] //= factor
    return config
