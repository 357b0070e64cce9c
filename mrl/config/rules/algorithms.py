"""Rules between the keys of the algorithm: which parts of the GRPO family go together."""

from __future__ import annotations

from mrl.config.rules.ranges import spell
from mrl.config.schema.algo import GrpoConfig, LossConfig, RewardPenaltiesConfig
from mrl.config.schema.run import RunConfig


def find_algorithm_problems(config: RunConfig) -> list[str]:
    """A problem for every key that another one contradicts, or leaves without effect."""
    loss, penalties = config.loss_fn, config.reward_penalties
    return [
        *_objective(loss),
        *_importance(loss),
        *_kl_in_reward(config),
        *_updates(config),
        *_rewards(config.grpo),
        *_penalties(penalties),
    ]


def _problem(key: str, value: object, rule: str, way_out: str) -> str:
    return f"{key}={spell(value)}: {rule}; {way_out}"


def _objective(loss: LossConfig) -> list[str]:
    problems = []
    if loss.sequence_level_importance_ratios and loss.token_level_loss:
        rule = "a ratio of the sequence (GSPO) goes with a mean over sequences, and loss_fn.token_level_loss=true"
        problems.append(_problem("loss_fn.sequence_level_importance_ratios", True, rule, "set the latter to false"))
    if loss.constant_length_normalizer is not None and loss.token_level_loss:
        rule = "a mean over all tokens (loss_fn.token_level_loss=true) has no lengths of sequences to replace"
        problems.append(_problem("loss_fn.constant_length_normalizer", loss.constant_length_normalizer, rule, "set the latter to false"))
    others = {
        "loss_fn.disable_ppo_ratio=true leaves out the ratio that CISPO weights with": loss.disable_ppo_ratio,
        "loss_fn.force_on_policy_ratio=true leaves out the ratio that CISPO weights with": loss.force_on_policy_ratio,
        "CISPO weights tokens, and loss_fn.sequence_level_importance_ratios=true": loss.sequence_level_importance_ratios,
        "CISPO averages over tokens, and loss_fn.token_level_loss=false": not loss.token_level_loss,
        f"CISPO has no loss for loss_fn.ratio_clip_c={spell(loss.ratio_clip_c)} to bound": loss.ratio_clip_c is not None,
    }
    problems += [
        _problem("loss_fn.use_cispo", True, rule, "set one of them back") for rule, is_so in others.items() if is_so and loss.use_cispo
    ]
    if loss.ratio_clip_c is not None and loss.disable_ppo_ratio:
        rule = "loss_fn.disable_ppo_ratio=true leaves no ratio to clip"
        problems.append(_problem("loss_fn.ratio_clip_c", loss.ratio_clip_c, rule, "set it to null, or the other to false"))
    return problems


def _importance(loss: LossConfig) -> list[str]:
    prefix = "loss_fn.truncated_importance_sampling"
    kind, high, low = (
        loss.truncated_importance_sampling_type,
        loss.truncated_importance_sampling_ratio,
        loss.truncated_importance_sampling_ratio_min,
    )
    given = {f"{prefix}_type": kind, f"{prefix}_ratio": high, f"{prefix}_ratio_min": low}
    if not loss.use_importance_sampling_correction:
        rule = "bounds a weight that loss_fn.use_importance_sampling_correction=false leaves out"
        way_out = "set it to null, or the other to true"
        return [_problem(key, value, rule, way_out) for key, value in given.items() if value is not None]
    problems = []
    if high is None:
        rule = f"needs {prefix}_ratio, the upper bound of the weights"
        problems += [_problem(key, value, rule, "set it") for key, value in given.items() if value is not None]
    elif low is not None and low > high:
        problems.append(_problem(f"{prefix}_ratio_min", low, f"must be at most {prefix}_ratio={high:g}", "lower it"))
    if kind in ("icepop", "seq-mask-tis") and high is not None and low is None:
        rule = f"leaves out what is outside two bounds, and {prefix}_ratio_min=null"
        problems.append(_problem(f"{prefix}_type", kind, rule, "set the latter, to 0.5 for example"))
    if kind == "seq-mask-tis" and loss.sequence_level_importance_ratios:
        rule = "keeps weights of tokens, and loss_fn.sequence_level_importance_ratios=true has only weights of sequences"
        problems.append(_problem(f"{prefix}_type", kind, rule, "use tis or icepop"))
    return problems


def _kl_in_reward(config: RunConfig) -> list[str]:
    loss, estimator, generation = config.loss_fn, config.grpo.adv_estimator.name, config.policy.generation
    if not loss.use_kl_in_reward:
        return []
    rules = {
        f"only reinforce_plus_plus has rewards of tokens, and grpo.adv_estimator.name={estimator}": estimator != "reinforce_plus_plus",
        "loss_fn.reference_policy_kl_penalty=0 leaves nothing to subtract": loss.reference_policy_kl_penalty == 0,
        "needs old logprobs, which loss_fn.force_on_policy_ratio=true does not compute": not config.needs_old_logprobs,
        "the reference is not truncated, but policy.generation.top_p or top_k truncates the policy": generation.top_p < 1.0
        or generation.top_k is not None,
    }
    return [
        _problem("loss_fn.use_kl_in_reward", True, rule, "set it to false, or change the other") for rule, is_so in rules.items() if is_so
    ]


def _updates(config: RunConfig) -> list[str]:
    batch, rollouts = config.policy.train_global_batch_size, config.grpo.num_rollouts_per_step
    if not config.loss_fn.force_on_policy_ratio or batch == rollouts:
        return []
    rule = f"is true of one update per step, and policy.train_global_batch_size={batch} makes several of {rollouts} rollouts"
    return [_problem("loss_fn.force_on_policy_ratio", True, rule, "leave the latter out, or set this to false")]


def _rewards(grpo: GrpoConfig) -> list[str]:
    problems = []
    low, high, scaling, shaping = grpo.advantage_clip_low, grpo.advantage_clip_high, grpo.reward_scaling, grpo.reward_shaping
    if low is not None and high is not None and low > high:
        problems.append(_problem("grpo.advantage_clip_low", low, f"must be at most grpo.advantage_clip_high={high:g}", "lower it"))
    if grpo.adv_estimator.reward_weights is not None and grpo.adv_estimator.name != "gdpo":
        rule = f"weights components that grpo.adv_estimator.name={grpo.adv_estimator.name} does not look at"
        problems.append(_problem("grpo.adv_estimator.reward_weights", grpo.adv_estimator.reward_weights, rule, "use gdpo, or null"))
    if scaling.enabled and scaling.source_min >= scaling.source_max:
        rule = f"must be below grpo.reward_scaling.source_max={scaling.source_max:g}"
        problems.append(_problem("grpo.reward_scaling.source_min", scaling.source_min, rule, "lower it"))
    needed = {
        "overlong_buffer_length": shaping.overlong_buffer_length,
        "overlong_buffer_penalty": shaping.overlong_buffer_penalty,
        "max_response_length": shaping.max_response_length,
    }
    missing = [f"grpo.reward_shaping.{name}" for name, value in needed.items() if value is None]
    if shaping.enabled and shaping.stop_properly_penalty_coef is None and missing:
        rule = f"needs {', '.join(missing)}"
        problems.append(_problem("grpo.reward_shaping.enabled", True, rule, "set them, or stop_properly_penalty_coef"))
    return problems


def _penalties(penalties: RewardPenaltiesConfig) -> list[str]:
    problems = []
    ids = penalties.token_ids
    if penalties.penalize_unwanted_tokens and not (ids and ids.unwanted):
        rule = "needs reward_penalties.token_ids.unwanted"
        problems.append(_problem("reward_penalties.penalize_unwanted_tokens", True, rule, "list the tokens that no rollout may hold"))
    if ids is not None and (ids.think_open is None) != (ids.think_close is None):
        name, value = ("think_open", ids.think_open) if ids.think_close is None else ("think_close", ids.think_close)
        problems.append(_problem(f"reward_penalties.token_ids.{name}", value, "tags come in pairs", "give both tokens, or none"))
    return problems
