# SPDX-License-Identifier: Apache-2.0
"""PPO's sections: what they share with GRPO's, and a critic whose keys are those of the policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.config.load import load_config, load_run


def written(folder: Path, text: str) -> Path:
    """A config file."""
    path = folder / "ppo.yaml"
    path.write_text(text)
    return path


def test_keys_that_ppo_shares_with_grpo_may_stand_below_ppo(tmp_path: Path):
    file = written(
        tmp_path,
        "ppo:\n  num_prompts_per_step: 6\n  num_generations_per_prompt: 1\n  max_num_epochs: -1\n  ppo_epochs: 3\n"
        "  async_ppo: {enabled: true, warmup_generation_lead_steps: 4}\n"
        "policy:\n  model_name: m\n  train_global_batch_size: ${ppo.num_prompts_per_step}\n",
    )
    config, migration = load_run(file, ["ppo.seed=7"])
    assert config.algorithm == "ppo" and config.training is config.grpo
    assert (config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt, config.grpo.seed) == (6, 1, 7)
    assert config.grpo.max_num_epochs == 1_000_000 and config.grpo.async_grpo.enabled
    assert config.policy.train_global_batch_size == config.value.train_global_batch_size == 6
    assert (config.num_passes, config.num_scheduled_steps_of("policy")) == (3, 3 * config.grpo.max_num_steps)
    assert any(line.startswith("ppo.num_prompts_per_step=6") for line in migration.renamed)


@pytest.mark.parametrize(
    "sections", ["ppo: {seed: 1}", "ppo: {ppo_epochs: 2}", "ppo: {ppo_epochs: 2}\ngrpo: {seed: 1}"]
)
def test_a_section_ppo_is_ppo(tmp_path: Path, sections: str):
    assert load_config(written(tmp_path, f"{sections}\npolicy: {{model_name: m}}\n")).algorithm == "ppo"


def test_the_critic_follows_the_policy_in_what_it_shares_and_itself_in_the_rest(tmp_path: Path):
    file = written(
        tmp_path,
        "ppo: {ppo_epochs: 2}\npolicy:\n  model_name: m\n  precision: bfloat16\n  train_micro_batch_size: 2\n  "
        "megatron_cfg:\n    tensor_model_parallel_size: 4\n    optimizer: {weight_decay: 0.3}\n"
        "value:\n  train_micro_batch_size: 8\n  megatron_cfg:\n    tensor_model_parallel_size: 2\n    optimizer: "
        "{weight_decay: 0.5}\n",
    )
    config = load_config(file)
    critic = config.model("critic")
    assert (critic.model_name, critic.precision, critic.megatron_cfg.optimizer.bf16) == ("m", "bfloat16", True)
    assert critic.sequence_packing.train_mb_tokens == 8 * config.policy.max_total_sequence_length
    assert critic.make_sequence_length_divisible_by == critic.megatron_cfg.tensor_model_parallel_size == 2
    assert critic.megatron_cfg.scheduler.start_weight_decay == 0.5
    assert config.policy.megatron_cfg.scheduler.start_weight_decay == 0.3
    assert critic.tokenizer is config.policy.tokenizer and not critic.router_replay.enabled
    assert config.models_beside == ("critic",)


def test_a_critic_of_another_backend_is_translated_as_a_policy_is(tmp_path: Path):
    file = written(
        tmp_path,
        "ppo: {ppo_epochs: 1}\npolicy: {model_name: m}\nvalue:\n  dtensor_cfg: {enabled: true, "
        "tensor_parallel_size: 2}\n  megatron_cfg: {enabled: false, tensor_model_parallel_size: 7}\n  optimizer:\n "
        "   name: torch.optim.AdamW\n    kwargs: {lr: 0.25, betas: [0.5, 0.75]}\n  scheduler:\n  - name: "
        "torch.optim.lr_scheduler.ConstantLR\n    kwargs: {factor: 1.0}\n  - milestones: []\n",
    )
    config, migration = load_run(file)
    megatron = config.value.megatron_cfg
    assert (megatron.tensor_model_parallel_size, megatron.optimizer.lr, megatron.optimizer.adam_beta2) == (
        2,
        0.25,
        0.75,
    )
    assert config.policy.megatron_cfg.tensor_model_parallel_size == 1
    assert any(
        "value.optimizer.kwargs.lr=0.25" in line and "value.megatron_cfg.optimizer.lr" in line
        for line in migration.translated
    )
    assert not any("policy." in line for line in migration.translated)
