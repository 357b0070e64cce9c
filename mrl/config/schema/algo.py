# SPDX-License-Identifier: Apache-2.0
"""Algorithm sections, from `grpo` to `rm`, and `loss_fn`, `reward_penalties`, `eval`. See `mrl.config.schema.run`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from mrl.config.fields import AboveZero, AllOrCount, Count, Finite, NotNegative, Positive, Range, Share, follows

Estimator = Literal["grpo", "gdpo", "reinforce_plus_plus", "opd"]
Truncation = Literal["tis", "icepop", "seq-mask-tis"]


@dataclass
class AsyncGrpoConfig:
    """Samples later rollouts while a step trains. `enabled` needs dedicated engines and importance sampling correction.

    Prompts are asked for up to `max_trajectory_age_steps` steps ahead, and a step waits only for its own. What was
    generated and not trained is kept for a resumed run (`checkpointing.keep_rollouts_gb`), or generated again. Without
    `in_flight_weight_updates` and `sample_freshest_first`, a run is a function of config, seed and the steps at which
    it was resumed, where the engines' arithmetic is batch-invariant (hosts without GPUs); with either, it depends on
    how fast the machines are.
    """

    enabled: bool = False
    """Generate rollouts while the policy is trained, with weights that are up to `max_trajectory_age_steps` steps
    older.
    """
    max_trajectory_age_steps: Count = 1
    """Largest age of a rollout in steps when it is trained on, counted from the weights that drew its first token; 0 is
    synchronous.
    """
    max_generation_failures: Count = 0
    """Consecutive deaths of a restarted engine before it has finished a rollout; at one more the run ends with exit
    code 1.
    """
    in_flight_weight_updates: bool = False
    """Unfinished rollouts go on with new weights; each token keeps the logprob of its own weights. false: wait for them
    before a refit.
    """
    recompute_kv_cache_after_weight_updates: bool = False
    """Unfinished rollouts compute their KV cache anew with new weights. false: they keep the old one. New rollouts
    never share it.
    """
    sample_freshest_first: bool = False
    """A step takes the freshest groups that are ready, and older ones may be generated again. false: it takes its
    prompts in order.
    """

    @property
    def keeps_kv_cache(self) -> bool:
        """Tells whether rollouts that go on with new weights keep their cache."""
        return (
            self.max_lag_steps > 0
            and self.in_flight_weight_updates
            and not self.recompute_kv_cache_after_weight_updates
        )

    @property
    def max_lag_steps(self) -> int:
        """Steps by which generation may run ahead; 0 is synchronous."""
        return self.max_trajectory_age_steps if self.enabled else 0


@dataclass
class AdvantageEstimatorConfig:
    name: str = "grpo"
    """`grpo` compares with the prompt's other rollouts, `gdpo` does so for each reward component, `reinforce_plus_plus`
    for the whole step.

    `opd` compares each token's logprob with a teacher's: see `on_policy_distillation`.
    `package.module:name` is a function of yours (docs/extend/estimator.md).
    """
    normalize_rewards: bool = follows("grpo.normalize_rewards")
    """Divide advantages by the standard deviation of rewards of the group. Not for reinforce_plus_plus."""
    use_leave_one_out_baseline: bool = follows("grpo.use_leave_one_out_baseline")
    """Baseline of a rollout: mean reward of the others of its group; false: of the whole group. Not for
    reinforce_plus_plus.
    """
    normalize_by_whole_group: bool = False
    """normalize_rewards takes the deviation of the whole group. false, as in NeMo RL: of the rollouts that make the
    baseline.
    """
    minus_baseline: bool = True
    """Subtract the mean reward of the group before the batch is normalised; for reinforce_plus_plus."""
    reward_weights: list[Finite] | None = None
    """Weight of each component of the reward, in the alphabetical order of their names, for gdpo; null = 1 each."""


@dataclass
class RewardScalingConfig:
    enabled: bool = False
    """Map rewards linearly from the source range to the target range; those outside the source range are clamped to it,
    and counted.
    """
    source_min: Finite = 0.0
    """Reward that becomes target_min."""
    source_max: Finite = 1.0
    """Reward that becomes target_max."""
    target_min: Finite = 0.0
    """See source_min."""
    target_max: Finite = 1.0
    """See source_max."""


@dataclass
class RewardShapingConfig:
    enabled: bool = False
    """Lower the rewards of rollouts that are too long, after reward_scaling."""
    overlong_buffer_length: Positive | None = None
    """Tokens over which the penalty of DAPO (arXiv:2503.14476) grows from 0, up to max_response_length."""
    overlong_buffer_penalty: NotNegative | None = None
    """Penalty of a rollout of max_response_length tokens; longer ones lose more, in proportion."""
    max_response_length: Positive | None = None
    """Length in tokens at which a rollout loses overlong_buffer_penalty."""
    stop_properly_penalty_coef: Share | None = None
    """Rewards of rollouts that were cut off are multiplied by this, 0 to 1, instead of the penalty above; null = that
    penalty.
    """


@dataclass
class GrpoConfig:
    num_prompts_per_step: Positive = 32
    """Prompts per step."""
    num_generations_per_prompt: Positive = 16
    """Rollouts of each prompt: the group whose members are compared with each other. At least 2, or 1 with
    `algorithm: ppo`.
    """
    max_num_steps: Positive = 1_000_000
    """The run ends after this many steps in all, those before a resume included."""
    max_num_epochs: Positive = 1
    """The run ends after this many passes over the training prompts, those that dynamic sampling leaves out
    included.
    """
    max_rollout_turns: Positive = 1
    """Most turns of a rollout, if its environment answers. With env.should_use_nemo_gym it is at least 6, as in NeMo
    Gym's agents.
    """
    normalize_rewards: bool = True
    """Divide advantages by the standard deviation of rewards of the group."""
    use_leave_one_out_baseline: bool = True
    """Baseline of a rollout: mean reward of the others of its group; false: of the whole group."""
    adv_estimator: AdvantageEstimatorConfig = field(default_factory=AdvantageEstimatorConfig)
    advantage_clip_low: Finite | None = None
    """Advantages below this become this; null = no bound."""
    advantage_clip_high: Finite | None = None
    """Advantages above this become this; null = no bound."""
    invalid_tool_call_advantage: Finite | None = None
    """Advantage of tokens of a turn with an unreadable tool call, such as -5.0, within the bounds above; null = that of
    the rollout.
    """
    malformed_thinking_advantage: Finite | None = None
    """Advantage of the tokens of a turn whose think tags do not pair, unless its tool call is invalid; null = that of
    the rollout.
    """
    overlong_filtering: bool = False
    """Leave rollouts that were cut off, or whose next turn did not fit, out of the loss; they count in the baseline of
    their group.
    """
    reward_scaling: RewardScalingConfig = field(default_factory=RewardScalingConfig)
    reward_shaping: RewardShapingConfig = field(default_factory=RewardShapingConfig)
    seq_logprob_error_threshold: Annotated[float, Range(1)] | None = None
    """Leave rollouts out of the loss whose mean over tokens of exp(|old - generator logprob|) is above this; null =
    only measure.
    """
    val_period: Count = 10
    """Validate every this many steps; 0 = never."""
    val_start_at: AllOrCount = -1
    """The first step after which `val_period` counts: steps before it are not validated. -1 = no such step."""
    val_at_start: bool = False
    """Validate before the first update (step 0)."""
    val_at_end: bool = False
    """Validate after the last step."""
    stop_at_validation_metric: str | None = None
    """The run saves and ends when this validation metric, such as `accuracy`, reaches `stop_at_validation_threshold`;
    null = never.
    """
    stop_at_validation_threshold: Finite | None = None
    """Value that `stop_at_validation_metric` has to reach."""
    max_val_samples: Positive | None = 256
    """Validation prompts used, the first ones of the file; null = all."""
    val_num_generations_per_prompt: Positive = 1
    """Rollouts of each validation prompt. From 2 on, validation also measures `val/pass_k` and `val/pass_at_1`,
    `val/pass_at_2` ...
    """
    use_dynamic_sampling: bool = False
    """Train only on groups whose rewards differ, and ask more prompts until a step has enough (arXiv:2503.14476)."""
    dynamic_sampling_max_gen_batches: Positive = 10
    """The run ends with exit code 1 if this many batches of prompts do not fill a step; used only with
    `use_dynamic_sampling`.
    """
    max_masked_steps: Positive | None = 3
    """The run saves and ends with exit code 1 after this many steps in a row in which no rollout counts, or all steps
    of a shorter run; null = it only warns."""
    max_steps_without_signal: Positive | None = None
    """The run saves and ends with exit code 1 after this many steps in a row whose rollouts are all masked, or all have
    the same reward; null = it only warns. Rewards of all groups are compared; rollout/groups_without_signal counts the
    groups that have one reward each."""
    batch_multiplier: Annotated[float, Range(1, 2**15)] = 1.0
    """Prompts asked for at a time, in multiples of `num_prompts_per_step`; 1 without `use_dynamic_sampling`."""
    oversample: Annotated[float, Range(1, 2)] = 1.0
    """Prompts under way, in multiples of those a step asks for: it trains the first groups that are whole.

    The others go on from their tokens with the next weights, up to `async_grpo.max_trajectory_age_steps` steps, so that
    none is thrown away; each token keeps the logprob of its own weights. 1 = a step waits for all its prompts. Above 1
    a run depends on how fast the machines are.
    """
    min_taken_length_ratio: Annotated[float, Range(0, 1, is_low_open=True)] | None = None
    """With `oversample` a step waits for all its prompts while the mean `rollout/taken_length_ratio` of 10 steps is
    below this, so that short rollouts are not preferred; null = never.
    """
    seed: Count = 42
    """Seed of the run: data order, sampling, dropout-free training. Config and seed fix the run bit for bit on CPU."""
    async_grpo: AsyncGrpoConfig = field(default_factory=AsyncGrpoConfig)

    @property
    def num_prompts_per_batch(self) -> int:
        return int(self.num_prompts_per_step * self.batch_multiplier)

    @property
    def takes_first(self) -> bool:
        """Tells whether a step takes the first groups that are whole of more than it needs."""
        return self.oversample > 1

    @property
    def max_lag_steps(self) -> int:
        """Steps by which the weights of a rollout may be older than those it trains."""
        return self.async_grpo.max_trajectory_age_steps if self.takes_first else self.async_grpo.max_lag_steps

    @property
    def num_prompts_under_way(self) -> int:
        """Most prompts whose rollouts are sampled at once."""
        return int(self.num_prompts_per_batch * (self.oversample * (1 + self.async_grpo.max_lag_steps)))

    @property
    def num_rollouts_per_step(self) -> int:
        return self.num_prompts_per_step * self.num_generations_per_prompt


@dataclass
class LossConfig:
    kl_type: Literal["forward", "reverse", "mixed"] = "mixed"
    """Divergence of distillation: forward = KL(teacher || student), reverse = KL(student || teacher), mixed = both,
    weighted.
    """
    mixed_kl_weight: Share = 0.5
    """Weight of the forward KL with kl_type=mixed; the reverse one has the rest."""
    zero_outside_topk: bool = False
    """Use the student's probabilities over the whole vocabulary, with a teacher logprob of -100 outside its top k.

    false: both are renormalised over the teacher's top k, and the student's other tokens do not count.
    """
    token_loss: str | None = None
    """Your own loss of a token, `package.module:name` (docs/extend/loss.md); null = PPO's, or the one that keys below
    switch on.
    """
    reference_policy_kl_penalty: NotNegative = 0.01
    """Weight of the KL term to the frozen starting model; 0 = no reference model is kept."""
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL (http://joschu.net/blog/kl-approx.html)."""
    kl_input_clamp_value: AboveZero | None = 20.0
    """Log-ratios of the KL term are clamped to +- this before exp; null = not clamped."""
    kl_output_clamp_value: AboveZero | None = 10.0
    """KL per token is clamped to +- this; null = not clamped."""
    ratio_clip_min: NotNegative = 0.2
    """The policy ratio is clipped below at 1 - this; 1 or more = not clipped below."""
    ratio_clip_max: AboveZero = 0.2
    """The policy ratio is clipped above at 1 + this."""
    ratio_clip_c: Annotated[float, Range(1, is_low_open=True)] | None = None
    """Dual clip (arXiv:1912.09729): a negative advantage gives a loss of at most -advantage times this, above 1; null =
    no bound.
    """
    max_log_ratio: AboveZero | None = None
    """Log-ratios stay within +- this, such as 10; tokens beyond it have no gradient. null = no bound, and an
    overflowing weight is 0.
    """
    disable_ppo_ratio: bool = False
    """REINFORCE: -advantage * logprob, without ratio and clip."""
    use_cispo: bool = False
    """CISPO (arXiv:2506.13585): -advantage * logprob times the clipped ratio, through which no gradient flows."""
    sequence_level_importance_ratios: bool = False
    """GSPO (arXiv:2507.18071): one ratio per sequence, the geometric mean over its tokens. Needs
    token_level_loss=false.
    """
    force_on_policy_ratio: bool = False
    """The ratio is 1 with the logprob's gradient, and no old logprobs are computed for it. Right only with one update
    per rollout.
    """
    use_importance_sampling_correction: bool = False
    """Weight tokens by exp(old_logprobs - generator_logprobs), or, with sequence_level_importance_ratios, by the
    sequence's product.
    """
    truncated_importance_sampling_type: Truncation | None = None
    """Outside the bounds: tis holds weights at them, icepop drops tokens, seq-mask-tis drops sequences by geometric
    mean; null = tis.
    """
    truncated_importance_sampling_ratio: AboveZero | None = None
    """Upper bound of these weights; null = no bound."""
    truncated_importance_sampling_ratio_min: NotNegative | None = None
    """Lower bound of these weights; null = 0."""
    use_on_policy_kl_approximation: bool = False
    """Weight the KL term by exp(logprobs - generator_logprobs), because the tokens were drawn from the generator."""
    use_kl_in_reward: bool = False
    """Subtract the KL penalty from the rewards of reinforce_plus_plus, token by token, instead of adding it to the
    loss.
    """
    positive_example_nll_weight: NotNegative = 0.0
    """Weight of the mean negative log-likelihood of tokens of rollouts with a reward above 0 (arXiv:2504.05118)."""
    token_level_loss: bool = True
    """Mean over the valid tokens of the global batch; false: mean over rollouts of each one's token mean, all its
    sequences together.
    """
    constant_length_normalizer: Positive | None = None
    """Divide each rollout's sum by this, not by its length (Dr. GRPO, arXiv:2503.20783). Needs
    token_level_loss=false.
    """

    @property
    def surrogate(self) -> Literal["cispo", "reinforce", "ppo"]:
        """The loss of a token that NeMo RL's keys choose, unless `token_loss` names one."""
        if self.use_cispo:
            return "cispo"
        return "reinforce" if self.disable_ppo_ratio and not self.force_on_policy_ratio else "ppo"

    @property
    def kl_in_loss(self) -> float:
        return 0.0 if self.use_kl_in_reward else self.reference_policy_kl_penalty

    @property
    def truncation(self) -> Truncation | None:
        """Returns the truncation of importance weights; None = none."""
        if self.truncated_importance_sampling_ratio is None:
            return None
        return self.truncated_importance_sampling_type or "tis"


@dataclass
class PenaltyTokenIdsConfig:
    unwanted: list[Count] | None = None
    """Tokens that no rollout may hold; needed by penalize_unwanted_tokens."""
    think_open: Count | None = None
    """Token that opens a thought; null = the text <think>, of whatever tokens."""
    think_close: Count | None = None
    """Token that closes a thought; null = the text </think>, of whatever tokens."""


@dataclass
class RewardPenaltiesConfig:
    penalize_duplicated_reasoning: bool = False
    """Reward 0 where the answer repeats the thought before it word by word."""
    penalize_empty_final_answer: bool = False
    """Reward 0 where nothing follows the thought, unless the rollout ends with a tool call."""
    penalize_unwanted_tokens: bool = False
    """Reward 0 where a rollout holds one of token_ids.unwanted."""
    penalize_malformed_think_tag: bool = False
    """Reward 0 where think tags do not pair: a thought that the prompt opened is closed once, and none is opened."""
    token_ids: PenaltyTokenIdsConfig | None = None

    @property
    def is_enabled(self) -> bool:
        by_thought = self.penalize_duplicated_reasoning or self.penalize_malformed_think_tag
        return by_thought or self.penalize_empty_final_answer or self.penalize_unwanted_tokens


@dataclass
class SupervisedConfig:
    """Keys shared by training without rollouts. A row is a conversation (sft) or a pair of answers (dpo, rm)."""

    max_num_epochs: Positive = 1
    """The run ends after this many passes over the training rows."""
    max_num_steps: AllOrCount = -1
    """The run ends after this many steps in all, those before a resume included; -1 = with the last epoch."""
    val_period: Count = 10
    """Validate every this many steps; 0 = never."""
    val_batches: AllOrCount = 8
    """Validate on the first this many batches of the file; 0 or -1 = on all."""
    val_global_batch_size: Positive = 32
    """Rows of a validation batch, which are pairs in dpo and rm."""
    val_micro_batch_size: Positive = 1
    """Validation's counterpart of `policy.train_micro_batch_size`: without packing, the sequences or pairs of a row."""
    val_at_start: bool = True
    """Validate before the first update (step 0)."""
    val_at_end: bool = False
    """Validate after the last step."""
    seed: Count = 42
    """Seed of the run: data order, and the first weights of a reward head. Config and seed fix the run bit for bit on
    CPU.
    """


@dataclass
class SftConfig(SupervisedConfig):
    max_num_steps: AllOrCount = 60
    only_unmask_final: bool = False
    """Learn the last assistant message of a conversation alone; false = all of them."""


@dataclass
class DpoConfig(SupervisedConfig):
    max_num_steps: AllOrCount = 150
    val_period: Count = 25
    val_global_batch_size: Positive = 8
    reference_policy_kl_penalty: NotNegative = 0.05
    """Beta of the preference loss (arXiv:2305.18290): how strongly the policy is held to the starting model."""
    preference_average_log_probs: bool = False
    """Compare means over tokens, not sums, of log-probabilities in the preference loss."""
    sft_average_log_probs: bool = follows("dpo.preference_average_log_probs")
    """Compare means over tokens, not sums, of log-probabilities in the SFT loss."""
    preference_loss_weight: NotNegative = 1.0
    """Weight of the preference loss."""
    sft_loss_weight: NotNegative = 0.0
    """Weight of the negative log-likelihood of the chosen answers, added to the preference loss."""


@dataclass
class RmConfig(SupervisedConfig):
    val_period: Count = 16
    val_batches: AllOrCount = -1
    val_at_start: bool = False


@dataclass
class EvalConfig:
    metric: Literal["pass@k", "cons@k"] = "pass@k"
    """Score that is reported first: one of k answers is right, or the most frequent one is."""
    num_tests_per_prompt: Positive = 1
    """Answers sampled for each held-out prompt, as `policy.generation.val_temperature` and its like say."""
    k_value: Positive = 1
    """k of these scores; at most num_tests_per_prompt."""
    seed: Count = 42
    """Seed of sampling."""
    save_path: str | None = None
    """Folder for the results; null = `evaluations` in checkpointing.checkpoint_dir."""
