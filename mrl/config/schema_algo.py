"""Sections of the algorithm: `grpo`, `loss_fn`. See `mrl.config.schema`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mrl.config.trace import traced


@traced
@dataclass
class AsyncGrpoConfig:
    """Rollouts for later steps are generated while a step is trained. `enabled` needs dedicated engines and importance sampling correction.

    Prompts are asked for up to `max_trajectory_age_steps` steps ahead, and a step waits only for its own. A checkpoint holds no rollouts:
    what was generated and not trained is generated again after a resume. Without `in_flight_weight_updates` and
    `sample_freshest_first`, a run is a function of config, seed and the steps at which it was resumed, where the engines' arithmetic is
    batch-invariant (hosts without GPUs); with either, it depends on how fast the machines are.
    """

    enabled: bool = False
    """Generate rollouts while the policy is trained, with weights that are up to `max_trajectory_age_steps` steps older."""
    max_trajectory_age_steps: int = 1
    """How many steps old a rollout may be when it is trained on, counted from the weights that drew its first token; 0 is synchronous."""
    max_generation_failures: int = 0
    """How often in a row an engine that was started again may die before it has finished a rollout; then the run ends, to be resumed."""
    in_flight_weight_updates: bool = False
    """Give the engines new weights between two of their steps, and let unfinished rollouts go on with them; false: wait for those first.
    Each token keeps the logprob that its own weights gave it, so that the correction holds token by token."""
    recompute_kv_cache_after_weight_updates: bool = False
    """Rollouts that go on with new weights compute the keys, values and states of their tokens anew; false: they keep the old ones. Later
    rollouts never share them. Without `in_flight_weight_updates` nothing is unfinished, and all caches are empty after an update."""
    sample_freshest_first: bool = False
    """A step takes the groups that are ready and the freshest; what is older than the limit by then is generated again. false: a step
    takes its prompts in their order, and waits for the slowest of them."""

    @property
    def keeps_kv_cache(self) -> bool:
        """Whether rollouts that go on with new weights keep what they have cached."""
        return self.max_lag_steps > 0 and self.in_flight_weight_updates and not self.recompute_kv_cache_after_weight_updates

    @property
    def max_lag_steps(self) -> int:
        """Steps by which generation may run ahead; 0 is synchronous."""
        return self.max_trajectory_age_steps if self.enabled else 0


@traced
@dataclass
class GrpoConfig:
    num_prompts_per_step: int = 32
    """Prompts per step."""
    num_generations_per_prompt: int = 16
    """Rollouts of each prompt: the group whose members are compared with each other. At least 2."""
    max_num_steps: int = 1_000_000
    """The run ends after this many steps in all, those before a resume included."""
    max_num_epochs: int = 1
    """The run ends after this many passes over the training prompts."""
    max_rollout_turns: int = 1
    """Turns of a rollout. Only 1 is supported."""
    normalize_rewards: bool = True
    """Divide advantages by the standard deviation of the group's rewards."""
    use_leave_one_out_baseline: bool = True
    """Baseline of a rollout: mean reward of the others of its group; false: of the whole group."""
    val_period: int = 10
    """Validate every this many steps; 0 = never."""
    val_start_at: int = -1
    """The first step after which `val_period` counts: steps before it are not validated. -1 = no such step."""
    val_at_start: bool = False
    """Validate before the first update (step 0)."""
    val_at_end: bool = False
    """Validate after the last step."""
    stop_at_validation_metric: str | None = None
    """The run saves and ends once this metric of a validation, `accuracy` for example, is `stop_at_validation_threshold` or more; null =
    it goes on."""
    stop_at_validation_threshold: float | None = None
    """What `stop_at_validation_metric` has to reach."""
    max_val_samples: int | None = 256
    """Validation prompts used, the first ones of the file; null = all."""
    seed: int = 42
    """Seed of the run: data order, sampling, dropout-free training. Config and seed fix the run bit for bit on CPU."""
    async_grpo: AsyncGrpoConfig = field(default_factory=AsyncGrpoConfig)

    @property
    def num_rollouts_per_step(self) -> int:
        """Rollouts per step, all prompts together."""
        return self.num_prompts_per_step * self.num_generations_per_prompt


@traced
@dataclass
class LossConfig:
    reference_policy_kl_penalty: float = 0.01
    """Weight of the KL term to the frozen starting model; 0 = no reference model is kept."""
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL (http://joschu.net/blog/kl-approx.html)."""
    kl_input_clamp_value: float | None = 20.0
    """Log-ratios of the KL term are clamped to +- this before exp; null = not clamped."""
    kl_output_clamp_value: float | None = 10.0
    """KL per token is clamped to +- this; null = not clamped."""
    ratio_clip_min: float = 0.2
    """The policy ratio is clipped below at 1 - this."""
    ratio_clip_max: float = 0.2
    """The policy ratio is clipped above at 1 + this."""
    use_importance_sampling_correction: bool = False
    """Weight each token by exp(old_logprobs - generator_logprobs), to correct for differences between trainer and generator."""
    truncated_importance_sampling_ratio: float | None = None
    """Upper bound of that weight; null = no bound."""
    token_level_loss: bool = True
    """Mean over the valid tokens of the global batch; false: mean over sequences of each sequence's token mean."""
