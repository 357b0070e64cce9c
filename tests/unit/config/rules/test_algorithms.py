# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from mrl.config.errors import Unchecked
from tests.unit.config.problems import problems_of

TIS = "loss_fn.truncated_importance_sampling"
GSPO = ["loss_fn.sequence_level_importance_ratios=true", "loss_fn.token_level_loss=false"]
CISPO = "loss_fn.use_cispo=true"
REINFORCE_PLUS_PLUS = ["grpo.adv_estimator.name=reinforce_plus_plus", "loss_fn.use_kl_in_reward=true"]
KL = "loss_fn.reference_policy_kl_penalty=0.1"

GOOD = [
    GSPO,
    [*GSPO, f"{TIS}_type=icepop", f"{TIS}_ratio=5", f"{TIS}_ratio_min=0.5"],
    [CISPO, "loss_fn.ratio_clip_max=5"],
    ["loss_fn.disable_ppo_ratio=true", "grpo.normalize_rewards=false"],
    ["loss_fn.token_level_loss=false", "loss_fn.constant_length_normalizer=1024", "grpo.normalize_rewards=false"],
    ["loss_fn.force_on_policy_ratio=true"],
    ["loss_fn.force_on_policy_ratio=true", "grpo.seq_logprob_error_threshold=2", *REINFORCE_PLUS_PLUS, KL],
    ["loss_fn.ratio_clip_c=3", f"{TIS}_ratio=2"],
    [f"{TIS}_type=seq-mask-tis", f"{TIS}_ratio=1.002", f"{TIS}_ratio_min=0.999"],
    ["grpo.adv_estimator={name: gdpo, reward_weights: [1.0, 0.5]}"],
    ["grpo.reward_shaping={enabled: true, overlong_buffer_length: 4, overlong_buffer_penalty: 1, max_response_length: 16}"],
    ["grpo.reward_shaping={enabled: true, stop_properly_penalty_coef: 0.0}", "grpo.overlong_filtering=true"],
    ["reward_penalties={penalize_unwanted_tokens: true, penalize_empty_final_answer: true, token_ids: {unwanted: [2]}}"],
    ["grpo.advantage_clip_low=-2", "grpo.advantage_clip_high=2", "grpo.invalid_tool_call_advantage=-5.0"],
]


@pytest.mark.parametrize("overrides", GOOD)
def test_what_goes_together(workplace: Path, overrides: list[str]):
    assert problems_of(*overrides) == []


BAD = [
    # overrides, key=value, part of the rule or of the way out
    (GSPO[:1], "loss_fn.sequence_level_importance_ratios=true", "set the latter to false"),
    (["loss_fn.constant_length_normalizer=9"], "loss_fn.constant_length_normalizer=9", "set the latter to false"),
    ([CISPO, "loss_fn.disable_ppo_ratio=true"], "loss_fn.use_cispo=true", "leaves out the ratio"),
    ([CISPO, "loss_fn.force_on_policy_ratio=true"], "loss_fn.use_cispo=true", "leaves out the ratio"),
    ([CISPO, "loss_fn.ratio_clip_c=3"], "loss_fn.use_cispo=true", "ratio_clip_c=3.0"),
    ([CISPO, "loss_fn.token_level_loss=false"], "loss_fn.use_cispo=true", "averages over tokens"),
    (["loss_fn.ratio_clip_c=3", "loss_fn.disable_ppo_ratio=true"], "loss_fn.ratio_clip_c=3.0", "no ratio to clip"),
    ([CISPO, "loss_fn.token_loss=mrl.algo.losses:cispo"], "loss_fn.use_cispo=true", "token_loss=mrl.algo.losses:cispo takes its place"),
    (["loss_fn.disable_ppo_ratio=true", "loss_fn.token_loss=mrl.algo.losses:cispo"], "loss_fn.disable_ppo_ratio=true", "takes its place"),
    (["loss_fn.ratio_clip_c=1"], "loss_fn.ratio_clip_c=1", "above 1"),
    ([f"{TIS}_type=tis", "loss_fn.use_importance_sampling_correction=false"], f"{TIS}_type=tis", "set it to null"),
    ([f"{TIS}_type=tis"], f"{TIS}_type=tis", "needs"),
    ([f"{TIS}_ratio_min=0.5"], f"{TIS}_ratio_min=0.5", "needs"),
    ([f"{TIS}_ratio=2", f"{TIS}_ratio_min=3"], f"{TIS}_ratio_min=3.0", "lower it"),
    ([f"{TIS}_type=icepop", f"{TIS}_ratio=2"], f"{TIS}_type=icepop", "two bounds"),
    ([f"{TIS}_type=seq-mask-tis", f"{TIS}_ratio=2"], f"{TIS}_type=seq-mask-tis", "two bounds"),
    ([*GSPO, f"{TIS}_type=seq-mask-tis", f"{TIS}_ratio=2", f"{TIS}_ratio_min=0"], f"{TIS}_type=seq-mask-tis", "use tis or icepop"),
    ([REINFORCE_PLUS_PLUS[1], KL], "loss_fn.use_kl_in_reward=true", "only ppo and reinforce_plus_plus"),
    (REINFORCE_PLUS_PLUS, "loss_fn.use_kl_in_reward=true", "nothing to subtract"),
    ([*REINFORCE_PLUS_PLUS, KL, "loss_fn.force_on_policy_ratio=true"], "loss_fn.use_kl_in_reward=true", "needs old logprobs"),
    ([*REINFORCE_PLUS_PLUS, KL, "policy.generation.top_p=0.9"], "loss_fn.use_kl_in_reward=true", "not truncated"),
    (["grpo.advantage_clip_low=2", "grpo.advantage_clip_high=1"], "grpo.advantage_clip_low=2.0", "lower it"),
    (["grpo.adv_estimator.reward_weights=[1.0]"], "grpo.adv_estimator.reward_weights=[1.0]", "use gdpo"),
    (["grpo.reward_scaling={enabled: true, source_min: 1.0}"], "grpo.reward_scaling.source_min=1.0", "lower it"),
    (["grpo.reward_shaping={enabled: true, max_response_length: 9}"], "grpo.reward_shaping.enabled=true", "overlong_buffer_penalty"),
    (["reward_penalties.penalize_unwanted_tokens=true"], "reward_penalties.penalize_unwanted_tokens=true", "list the tokens"),
    (["reward_penalties.token_ids.think_close=3"], "reward_penalties.token_ids.think_close=3", "give both tokens"),
    (["grpo.seq_logprob_error_threshold=0.5"], "grpo.seq_logprob_error_threshold=0.5", "at least 1"),
]


@pytest.mark.parametrize(("overrides", "start", "part"), BAD)
def test_what_does_not_go_together(workplace: Path, overrides: list[str], start: str, part: str):
    problem, *others = problems_of(*overrides)
    assert problem.startswith(f"{start}: ") and part in problem
    assert all(isinstance(other, Unchecked) for other in others)


def test_one_update_per_rollout(workplace: Path):
    problems = problems_of("loss_fn.force_on_policy_ratio=true", "policy.train_global_batch_size=256")
    assert any(problem.startswith("loss_fn.force_on_policy_ratio=true: ") for problem in problems)
