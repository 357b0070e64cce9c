"""NeMo RL's names of our metrics. Loggers get them, so that its dashboards go on working; other metrics keep our names."""

from __future__ import annotations

from collections.abc import Mapping

NEMO_RL_NAMES = {
    "time/total": "timing/train/total_step_time",
    "time/generation": "timing/train/generation",
    "time/reward": "timing/train/reward_calculation",
    "time/train": "timing/train/policy_training",
    "time/refit": "timing/train/prepare_for_generation/total",
    "time/checkpoint": "timing/train/checkpointing",
    "time/validation": "timing/validation/total_validation_time",
    "val/mean_length": "validation/avg_length",
    "rollout/mean_length": "train/mean_gen_tokens_per_sample",
    "rollout/max_length": "train/max_gen_tokens_per_sample",
    "rollout/mean_prompt_length": "train/mean_prompt_length",
    "rollout/truncated_fraction": "train/truncation_rate",
}
"""`time/train` holds the logprob passes too, which NeMo RL times apart."""

PREFIXES = {"time/": "timing/train/", "val/": "validation/"}
"""For metrics that the table above does not name."""


def nemo_rl_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics under NeMo RL's names."""
    return {nemo_rl_name(name): value for name, value in metrics.items()}


def nemo_rl_name(name: str) -> str:
    """NeMo RL's name for one of our metrics, or ours."""
    for ours, theirs in PREFIXES.items():
        if name.startswith(ours):
            return NEMO_RL_NAMES.get(name, theirs + name.removeprefix(ours))
    return NEMO_RL_NAMES.get(name, name)
