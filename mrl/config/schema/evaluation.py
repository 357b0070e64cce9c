"""Section `eval`: how `python -m mrl.evaluate` asks. See `mrl.config.schema.run`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass
class EvalConfig:
    metric: Literal["pass@k", "cons@k"] = "pass@k"
    """The score that is reported first: whether one of k answers is right, or the most frequent of them."""
    num_tests_per_prompt: int = 1
    """Answers sampled for each held-out prompt, as `policy.generation.val_temperature` and its like say."""
    k_value: int = 1
    """k of these scores; at most num_tests_per_prompt."""
    seed: int = 42
    """Seed of sampling."""
    save_path: str | None = None
    """Folder for the results; null = `evaluations` in checkpointing.checkpoint_dir."""
