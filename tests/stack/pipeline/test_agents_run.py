# SPDX-License-Identifier: Apache-2.0
"""Agents under the other algorithms that learn from rollouts: all sequences of a rollout are trained, and once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.stack.pipeline.test_pipeline_run import rows, train

BUSY = [
    "++env.own.agents.busy=tests.stack.loop.trial_agents:busy",
    "data.default.env_name=busy",
    "policy.generation.vllm_cfg.expose_http_server=true",
    "policy.generation.vllm_cfg.http_server_share=1.0",
    "cluster.cpu_units_per_node=2",
]
MODEL = ROOT / "prepared" / "tiny" / "model"
PPO = [
    "grpo.max_num_steps=2",
    "grpo.num_prompts_per_step=2",
    "ppo.val_at_start=false",
    "ppo.policy_training_start_step=0",
]
DISTILLATION = [f"teacher.model_name={MODEL}", "distillation.num_prompts_per_step=2", "distillation.max_num_steps=1"]
DISTILLATION += ["distillation.val_at_start=false", "distillation.val_at_end=true", "distillation.max_val_samples=2"]
MOPD = ["grpo.max_num_steps=1", "grpo.num_prompts_per_step=2", "grpo.val_at_start=false"]
MOPD += [f"on_policy_distillation.teacher_model_by_agent_name={{carrying: {MODEL}, plain: {MODEL}}}"]
# Names of one model share one teacher.
MOPD += ["~on_policy_distillation.non_colocated_teachers.teacher_overrides"]
GSPO = ["grpo.max_num_steps=1", "grpo.num_prompts_per_step=2", "grpo.val_at_start=false"]
GSPO += ["loss_fn.sequence_level_importance_ratios=true", "loss_fn.token_level_loss=false"]


@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        pytest.param("ppo_tiny.yaml", PPO, marks=pytest.mark.long("ppo")),
        pytest.param("distillation_tiny.yaml", DISTILLATION, marks=pytest.mark.long("distillation")),
        pytest.param("mopd_tiny.yaml", MOPD, marks=pytest.mark.long("distillation")),
        pytest.param("grpo_tiny.yaml", GSPO, marks=pytest.mark.long("async")),
    ],
)
def test_all_sequences_of_a_rollout_are_trained_once(tmp_path: Path, config: str, overrides: list[str]):
    text = train(tmp_path / "run", *BUSY, *overrides, config=config)
    for row in rows(tmp_path / "run"):
        # A teacher that is the policy has nothing to say against it.
        assert row["train/grad_norm"] > 0 or config == "mopd_tiny.yaml"
        assert row["rollout/busy/sequences"] == 3 and row["rollout/failed"] == 0
        # The mean is that of a rollout, with all its sequences, but for what a schema has forced.
        num_tokens = row["rollout/busy/num_rollouts"] * row["rollout/mean_length"]
        assert (
            row["train/num_valid_tokens"] == pytest.approx(num_tokens)
            and row["rollout/busy/untrained_tokens_forced"] > 0
        )
    assert "val_at_end" not in " ".join(overrides) or "[Validate] step 1: accuracy" in text
