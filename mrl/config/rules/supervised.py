"""Whether the keys of training without rollouts agree with each other."""

from __future__ import annotations

import json
from pathlib import Path

from mrl.config.rules.ranges import spell
from mrl.config.schema.run import RunConfig

_PAIRS = ("loss", "accuracy", "rewards_chosen_mean", "rewards_rejected_mean", "rewards_margin_mean")
METRICS = {"sft": ("loss", "perplexity"), "dpo": (*_PAIRS, "preference_loss", "sft_loss"), "rm": _PAIRS}
"""What a training step of each algorithm measures, besides what all measure."""
VALIDATION_METRICS = {
    "sft": ("val_loss", "perplexity"),
    **{name: tuple(f"validation-default_{metric}" for metric in METRICS[name]) for name in ("dpo", "rm")},
}
"""What a validation of each algorithm measures, under NeMo RL's names."""


def find_supervised_problems(config: RunConfig) -> list[str]:
    """A problem for every rule that a run without engines cannot follow."""
    problems = []
    algorithm, training, stage = config.algorithm, config.training, (config.checkpointing.metric_name or "").partition(":")
    known = {"train": METRICS[algorithm], "val": VALIDATION_METRICS[algorithm]}
    if config.checkpointing.enabled and stage[0] in known and stage[2] not in known[stage[0]]:
        rule = f"algorithm={algorithm} has no such metric, and checkpoints could not be ranked"
        way_out = f"use val:{known['val'][0]}, or null"
        problems.append(f"checkpointing.metric_name={config.checkpointing.metric_name}: {rule}; {way_out}")
    if training.max_num_steps == 0:
        problems.append(f"{algorithm}.max_num_steps=0: nothing would be trained; use 1 or more, or -1 for whole epochs")
    if algorithm == "dpo" and config.dpo.preference_loss_weight == config.dpo.sft_loss_weight == 0:
        problems.append("dpo.preference_loss_weight=0: with dpo.sft_loss_weight=0 nothing would be trained; raise one of them")
    if config.policy.router_replay.enabled:
        rule = f"algorithm={algorithm} has no engines whose routes could be followed"
        problems.append(f"policy.router_replay.enabled={spell(True)}: {rule}; set it to false")
    return problems


def find_reward_model_problems(config: RunConfig) -> list[str]:
    """A problem if the model should have a reward head that its algorithm does not train, or the other way round, or cannot."""
    enabled, is_trained = config.policy.reward_model_cfg.enabled, config.algorithm == "rm"
    problems = []
    if enabled not in (None, is_trained):
        rule = f"it follows from algorithm={config.algorithm}"
        problems.append(f"policy.reward_model_cfg.enabled={spell(enabled)}: {rule}; leave it out")
    if is_trained and config.policy.megatron_cfg.peft.enabled:
        rule = "adapters freeze all that is not a linear layer of the model, its reward head included"
        problems.append(f"policy.megatron_cfg.peft.enabled=true: {rule}; set it to false")
    stages = config.policy.megatron_cfg.pipeline_model_parallel_size
    if is_trained and stages > 1 and _ties_embeddings(Path(config.policy.model_name)):
        rule = "the model's output layer is its embedding, whose copy on the last stage a reward model gives no gradient"
        problems.append(f"policy.megatron_cfg.pipeline_model_parallel_size={stages}: {rule}; set it to 1")
    return problems


def _ties_embeddings(model: Path) -> bool:
    file = model / "config.json"
    return file.is_file() and bool(json.loads(file.read_text(encoding="utf-8")).get("tie_word_embeddings", False))
