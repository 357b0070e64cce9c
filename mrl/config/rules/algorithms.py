# SPDX-License-Identifier: Apache-2.0
"""Rules between the algorithms' keys: parts of the GRPO family, the user's own functions, training without rollouts."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterator
from typing import get_args

from mrl.config.errors import Problems, spell
from mrl.config.own import (
    AGENT,
    ESTIMATOR,
    LOGGER,
    LOSS,
    PROCESSOR,
    REWARD,
    Kind,
    find_fitting,
    is_path,
    misspelt,
    returns_lone_value,
)
from mrl.config.rules.data import key_of
from mrl.config.rules.layout import DENSE_SIZES
from mrl.config.schema.algo import Estimator
from mrl.config.schema.data import PROCESSORS
from mrl.config.schema.env import EnvConfig
from mrl.config.schema.run import RunConfig

_PAIRS = ("loss", "accuracy", "rewards_chosen_mean", "rewards_rejected_mean", "rewards_margin_mean")
METRICS = {"sft": ("loss", "perplexity"), "dpo": (*_PAIRS, "preference_loss", "sft_loss"), "rm": _PAIRS}
"""Training metrics of each algorithm, besides those of all."""
VALIDATION_METRICS = {
    "sft": ("val_loss", "perplexity"),
    **{name: tuple(f"validation-default_{metric}" for metric in METRICS[name]) for name in ("dpo", "rm")},
}
"""Validation metrics of each algorithm, under NeMo RL's names."""


def check_algorithm(config: RunConfig, problems: Problems) -> None:
    """Checks that the keys of the loss, the advantages and the rewards of GRPO and PPO fit together."""
    if config.algorithm not in ("grpo", "ppo"):
        return
    loss = config.loss_fn
    if loss.sequence_level_importance_ratios and loss.token_level_loss:
        rule = "a ratio of the sequence (GSPO) goes with a mean over sequences, and loss_fn.token_level_loss=true"
        problems.add("loss_fn.sequence_level_importance_ratios", rule, "set the latter to false")
    if loss.constant_length_normalizer is not None and loss.token_level_loss:
        rule = "a mean over all tokens (loss_fn.token_level_loss=true) has no lengths of sequences to replace"
        problems.add("loss_fn.constant_length_normalizer", rule, "set the latter to false")
    if loss.use_cispo:
        others = {
            "loss_fn.disable_ppo_ratio=true leaves out the ratio that CISPO weights with": loss.disable_ppo_ratio,
            "loss_fn.force_on_policy_ratio=true leaves out the ratio that CISPO weights with": (
                loss.force_on_policy_ratio
            ),
            "CISPO weights tokens, and loss_fn.sequence_level_importance_ratios=true": (
                loss.sequence_level_importance_ratios
            ),
            "CISPO averages over tokens, and loss_fn.token_level_loss=false": not loss.token_level_loss,
            f"CISPO has no loss for loss_fn.ratio_clip_c={spell(loss.ratio_clip_c)} to bound": loss.ratio_clip_c
            is not None,
        }
        for rule in (rule for rule, is_so in others.items() if is_so):
            problems.add("loss_fn.use_cispo", rule, "set one of them back")
    for name, is_on in {"use_cispo": loss.use_cispo, "disable_ppo_ratio": loss.disable_ppo_ratio}.items():
        if is_on and loss.token_loss is not None:
            problems.add(
                f"loss_fn.{name}", f"loss_fn.token_loss={loss.token_loss} takes its place", "leave one of them out"
            )
    if loss.ratio_clip_c is not None and loss.disable_ppo_ratio:
        rule = "loss_fn.disable_ppo_ratio=true leaves no ratio to clip"
        problems.add("loss_fn.ratio_clip_c", rule, "set it to null, or the other to false")
    _check_importance(config, problems)
    if loss.use_kl_in_reward:
        estimator, generation = config.grpo.adv_estimator.name, config.policy.generation
        truncates = generation.top_p < 1.0 or generation.top_k is not None
        others = {
            f"only ppo and reinforce_plus_plus have rewards of tokens, and grpo.adv_estimator.name={estimator}": not (
                config.has_critic or estimator == "reinforce_plus_plus"
            ),
            "loss_fn.reference_policy_kl_penalty=0 leaves nothing to subtract": loss.reference_policy_kl_penalty == 0,
            "it needs old logprobs, which loss_fn.force_on_policy_ratio=true does not compute": (
                not config.needs_old_logprobs
            ),
            "the reference is not truncated, but policy.generation.top_p or top_k truncates the policy": truncates,
        }
        for rule in (rule for rule, is_so in others.items() if is_so):
            problems.add("loss_fn.use_kl_in_reward", rule, "set it to false, or change the other")
    batch, rollouts = config.policy.train_global_batch_size, config.grpo.num_rollouts_per_step
    if loss.force_on_policy_ratio and batch != rollouts:
        rule = (
            f"it is right for one update per step, and policy.train_global_batch_size={batch} makes several of "
            f"{rollouts} rollouts"
        )
        problems.add("loss_fn.force_on_policy_ratio", rule, "leave the latter out, or set this to false")
    _check_rewards(config, problems)


def _check_importance(config: RunConfig, problems: Problems) -> None:
    loss, prefix = config.loss_fn, "loss_fn.truncated_importance_sampling"
    kind, high = loss.truncated_importance_sampling_type, loss.truncated_importance_sampling_ratio
    low = loss.truncated_importance_sampling_ratio_min
    given = [
        f"{prefix}_{name}"
        for name, value in {"type": kind, "ratio": high, "ratio_min": low}.items()
        if value is not None
    ]
    if not loss.use_importance_sampling_correction:
        for key in given:
            rule = "it bounds a weight that loss_fn.use_importance_sampling_correction=false leaves out"
            problems.add(key, rule, "set it to null, or the other to true")
        return
    if high is None:
        for key in given:
            problems.add(key, f"it needs {prefix}_ratio, the upper bound of the weights", "set that")
    elif low is not None and low > high:
        problems.add(f"{prefix}_ratio_min", f"must be at most {prefix}_ratio={high:g}", "lower it")
    if kind in ("icepop", "seq-mask-tis") and high is not None and low is None:
        rule = f"it leaves out what is outside two bounds, and {prefix}_ratio_min=null"
        problems.add(f"{prefix}_type", rule, "set the latter, to 0.5 for example")
    if kind == "seq-mask-tis" and loss.sequence_level_importance_ratios:
        rule = (
            "it keeps weights of tokens, and loss_fn.sequence_level_importance_ratios=true has only weights of "
            "sequences"
        )
        problems.add(f"{prefix}_type", rule, "use tis or icepop")


def _check_rewards(config: RunConfig, problems: Problems) -> None:
    grpo, penalties, ids = config.grpo, config.reward_penalties, config.reward_penalties.token_ids
    low = grpo.advantage_clip_low
    high = grpo.advantage_clip_high
    scaling = grpo.reward_scaling
    shaping = grpo.reward_shaping
    if low is not None and high is not None and low > high:
        problems.add("grpo.advantage_clip_low", f"must be at most grpo.advantage_clip_high={high:g}", "lower it")
    if grpo.adv_estimator.reward_weights is not None and grpo.adv_estimator.name != "gdpo":
        rule = f"it weights components that grpo.adv_estimator.name={grpo.adv_estimator.name} does not look at"
        problems.add("grpo.adv_estimator.reward_weights", rule, "use gdpo, or null")
    if scaling.enabled and scaling.source_min >= scaling.source_max:
        problems.add(
            "grpo.reward_scaling.source_min",
            f"must be below grpo.reward_scaling.source_max={scaling.source_max:g}",
            "lower it",
        )
    needed = ("overlong_buffer_length", "overlong_buffer_penalty", "max_response_length")
    missing = [f"grpo.reward_shaping.{name}" for name in needed if getattr(shaping, name) is None]
    if shaping.enabled and shaping.stop_properly_penalty_coef is None and missing:
        problems.add(
            "grpo.reward_shaping.enabled", f"it needs {', '.join(missing)}", "set them, or stop_properly_penalty_coef"
        )
    if penalties.penalize_unwanted_tokens and not (ids and ids.unwanted):
        rule = "it needs reward_penalties.token_ids.unwanted"
        problems.add("reward_penalties.penalize_unwanted_tokens", rule, "list the tokens that no rollout may hold")
    if ids is not None and (ids.think_open is None) != (ids.think_close is None):
        name = "think_open" if ids.think_close is None else "think_close"
        problems.add(f"reward_penalties.token_ids.{name}", "tags come in pairs", "give both tokens, or none")


def check_batch(config: RunConfig, problems: Problems) -> None:
    """Checks that groups compare, and a step's rollouts divide into global batches, these into data-parallel ranks."""
    at = problems.at
    section = "distillation" if config.algorithm == "distillation" else "grpo"
    if config.rollouts.num_generations_per_prompt < 2 and (
        config.algorithm == "grpo" and config.compares_rollouts or config.rollouts.use_dynamic_sampling
    ):
        needs = "a baseline" if config.algorithm == "grpo" else f"{section}.use_dynamic_sampling=true"
        problems.add(
            f"{section}.num_generations_per_prompt", f"{needs} compares the rollouts of a prompt", "use at least 2"
        )
    rollouts = config.rollouts.num_rollouts_per_step
    batch = problems.section.train_global_batch_size
    dp = config.replicas_of(problems.model)
    key = f"{at}train_global_batch_size"
    sources = [f"{section}.num_prompts_per_step", f"{section}.num_generations_per_prompt"]
    if rollouts % batch:
        rule = f"the {rollouts:,} rollouts of a step ({' x '.join(sources)}) are no multiple of {key}={batch}"
        problems.add(key, rule, "leave the latter out, and there is one update a step", others=sources)
    elif batch % max(1, dp) and config.num_policy_ranks % problems.section.megatron_cfg.model_parallel_size == 0:
        rule = f"an update of {key}={batch} sequences does not divide among the {dp:,} data-parallel ranks"
        sizes = [f"{at}megatron_cfg.{name}" for name in DENSE_SIZES]
        slots = ["cluster.num_nodes", "cluster.gpus_per_node", "cluster.cpu_units_per_node"]
        problems.add(key, rule, f"change {sources[0]} or the layout", others=[*sources, *sizes, *slots])


def check_rollout_queue(config: RunConfig, problems: Problems) -> None:
    """Checks the needs of sampling ahead, dynamic sampling and validation."""
    grpo = config.rollouts
    lag = grpo.max_lag_steps
    if grpo.async_grpo.max_lag_steps > 0 and config.policy.generation.colocated.enabled:
        rule = (
            "engines that share their GPUs with the policy cannot sample while it trains "
            "(policy.generation.colocated.enabled=true)"
        )
        way_out = (
            "set it to false, or policy.generation.colocated.enabled=false (with colocated.resources where "
            "there are GPUs)"
        )
        problems.add("grpo.async_grpo.enabled", rule, way_out)
    # One step old they are trained after a warning, as by NeMo RL's single controller.
    if lag > 1 and not config.loss_fn.use_importance_sampling_correction:
        rule = (
            f"rollouts up to grpo.async_grpo.max_trajectory_age_steps={lag} steps old are trained with weights "
            "that did not draw them"
        )
        problems.add("loss_fn.use_importance_sampling_correction", rule, "set it to true")
    if grpo.takes_first:
        _check_oversample(config, problems)
    elif grpo.min_taken_length_ratio is not None:
        rule = "without grpo.oversample above 1 a step waits for all its prompts"
        problems.add("grpo.min_taken_length_ratio", rule, "set it to null, or raise the other")
    if grpo.batch_multiplier != 1 and not grpo.use_dynamic_sampling:
        rule = "without grpo.use_dynamic_sampling=true a step asks for as many prompts as it trains on"
        problems.add("grpo.batch_multiplier", rule, "set it to 1, or the other to true")
    if grpo.stop_at_validation_metric == "pass_k" and grpo.val_num_generations_per_prompt < 2:
        rule = "grpo.val_num_generations_per_prompt=1 measures nothing but the accuracy"
        problems.add("grpo.stop_at_validation_metric", rule, "raise the latter to 2 or more, or use accuracy")


def check_elastic(config: RunConfig, problems: Problems) -> None:
    """Checks that engines may come and go: each alone, with its slots, and with nobody who asks it by name."""
    generation, key = config.policy.generation, "policy.generation.min_num_engines"
    if generation.min_num_engines is None:
        return
    if generation.colocated.enabled:
        rule = (
            "engines that share slots with the policy cannot go without it (policy.generation.colocated.enabled=true)"
        )
        problems.add(key, rule, "set it to null, or policy.generation.colocated.enabled=false")
    elif generation.min_num_engines > config.num_engines:
        problems.add(key, f"the run has {config.num_engines} engines", f"use 1 to {config.num_engines}")
    elif config.nodes_of_engine > 1:
        rule = f"an engine has {config.nodes_of_engine} nodes, and its parts stay where they were placed"
        problems.add(key, rule, "set it to null, or let an engine fit a node")
    elif generation.vllm_cfg.expose_http_server or config.judges:
        rule = "agents, judges and who asks over HTTP name the engines that they ask, and these must stay"
        problems.add(key, rule, "set it to null: an engine that dies is then waited for")


def _check_oversample(config: RunConfig, problems: Problems) -> None:
    asked = config.grpo.num_prompts_per_batch
    if config.grpo.num_prompts_under_way == asked:
        least = math.ceil((asked + 1) / asked * 1000) / 1000
        problems.add("grpo.oversample", f"of {asked} prompts it adds none", f"use {least:g} or more, or 1")
    for key, is_right, why, way_out in (
        ("algorithm", config.algorithm == "grpo", "other algorithms wait for all their prompts", "use grpo"),
        (
            "grpo.async_grpo.enabled",
            not config.grpo.async_grpo.enabled,
            "with engines that sample ahead a step finds its rollouts ready",
            "set grpo.async_grpo.sample_freshest_first=true there",
        ),
        (
            "policy.generation.colocated.enabled",
            config.policy.generation.colocated.enabled or config.grpo.async_grpo.enabled,
            "engines with GPUs of their own do not wait for the policy",
            "set grpo.async_grpo.enabled=true there",
        ),
        (
            "grpo.async_grpo.max_trajectory_age_steps",
            config.grpo.async_grpo.max_trajectory_age_steps > 0,
            "rollouts that go on are older than the weights that they train",
            "use 1 or more",
        ),
        (
            "env",
            not config.env.has_agents,
            "an agent would wait for its answer while the policy is trained",
            "train agents with grpo.async_grpo.enabled=true",
        ),
    ):
        if not is_right:
            rule = f"it does not go with grpo.oversample={config.grpo.oversample:g}: {why}"
            problems.add(key, rule, f"{way_out}, or set grpo.oversample=1", others=["grpo.oversample"])


OF_ALL = ("accuracy", "reward", "pass_k", "mean_length", "failed", "num_judged", "num_samples")
"""Metrics of a validation over all environments, beside `pass_at_K`."""


def nearest_metric(metric: str, env: EnvConfig) -> str:
    """The names like that of a metric no validation with rollouts has; "" for one that a validation may have."""
    if "/" in metric or metric in OF_ALL or re.fullmatch(r"pass_at_\d+", metric):
        return ""
    near = (difflib.get_close_matches(metric, OF_ALL, n=1) or OF_ALL)[0]
    name = next(iter({**env.own.functions, **env.agents}), "ENVIRONMENT")
    others = [one for one in OF_ALL if one != near]
    return f"{near}, another of {', '.join(others)}, or {name}/reward, and of a component {name}/reward_COMPONENT"


def check_early_stop(config: RunConfig, problems: Problems) -> None:
    """Checks that the metric which stops the run is measured, and has a threshold."""
    metric, threshold = config.grpo.stop_at_validation_metric, config.grpo.stop_at_validation_threshold
    if (metric is None) != (threshold is None):
        given, missing = ("metric", "threshold") if threshold is None else ("threshold", "metric")
        rule = f"it needs grpo.stop_at_validation_{missing}, which is null"
        problems.add(f"grpo.stop_at_validation_{given}", rule, "set both, or none of them")
    elif metric is not None and not config.data.has_validation:
        rule = "there is no validation, because data.validation=null and no training rows are held out"
        problems.add(
            "grpo.stop_at_validation_metric", rule, "set it and the threshold to null, or give data.validation"
        )
    elif metric is not None and (near := nearest_metric(metric, config.env)):
        rule = "validations have no such metric, and the run would never end by it"
        problems.add("grpo.stop_at_validation_metric", rule, f"use {near}")


def check_supervised(config: RunConfig, problems: Problems) -> None:
    """Checks that a run without engines trains something, and can rank its checkpoints."""
    algorithm, (stage, _, metric) = config.algorithm, (config.checkpointing.metric_name or "").partition(":")
    known = {"train": METRICS[algorithm], "val": VALIDATION_METRICS[algorithm]}
    if config.checkpointing.enabled and stage in known and metric not in known[stage]:
        rule = f"algorithm={algorithm} has no such metric, and checkpoints could not be ranked"
        problems.add("checkpointing.metric_name", rule, f"use val:{known['val'][0]}, or null")
    if config.training.max_num_steps == 0:
        problems.add(
            f"{algorithm}.max_num_steps", "the run would train nothing", "use 1 or more, or -1 for whole epochs"
        )
    if algorithm == "dpo" and config.dpo.preference_loss_weight == config.dpo.sft_loss_weight == 0:
        problems.add(
            "dpo.preference_loss_weight", "with dpo.sft_loss_weight=0 the run would train nothing", "raise one of them"
        )
    if "data" in config.checkpointing.allow_changes:
        rule = (
            f"algorithm={algorithm} takes rows by their place in the data: of others, some would come twice and "
            "some never"
        )
        problems.add(
            "checkpointing.allow_changes", rule, "leave data out, and choose another checkpointing.checkpoint_dir"
        )
    if config.policy.router_replay.enabled:
        rule = f"algorithm={algorithm} has no engines whose routes it could follow"
        problems.add("policy.router_replay.enabled", rule, "set it to false")


def check_reward_model(config: RunConfig, problems: Problems) -> None:
    """Checks that the model has a reward head exactly if the algorithm trains one, and that it can be trained."""
    is_trained = config.algorithm == "rm"
    if config.policy.reward_model_cfg.enabled not in (None, is_trained):
        problems.add("policy.reward_model_cfg.enabled", f"it follows from algorithm={config.algorithm}", "leave it out")
    if is_trained:
        check_head(config, problems)


def check_head(config: RunConfig, problems: Problems) -> None:
    """Checks that a model with a head in place of its output layer can be trained."""
    at = problems.at
    if problems.section.megatron_cfg.peft.enabled:
        rule = "adapters freeze all that is not a linear layer of the model, its reward head included"
        problems.add(f"{at}megatron_cfg.peft.enabled", rule, "set it to false")
    megatron = problems.section.megatron_cfg
    is_overlapped = (
        megatron.distributed_data_parallel_config.overlap_grad_reduce
        and not megatron.optimizer.use_distributed_optimizer
    )
    if megatron.pipeline_model_parallel_size > 1 and is_overlapped:
        rule = "the last stage's copy of tied embeddings has no gradient, for which Megatron would wait"
        problems.add(f"{at}megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce", rule, "set it to false")


def check_evaluation(config: RunConfig, problems: Problems) -> None:
    """Checks that an evaluation has prompts, and enough answers for the score."""
    if not config.data.has_validation:
        problems.add("data.validation", "there is nothing to ask", "give data.validation.data_path")
    if config.eval.k_value > config.eval.num_tests_per_prompt:
        rule = f"a score of k answers needs k of them, and eval.num_tests_per_prompt={config.eval.num_tests_per_prompt}"
        problems.add("eval.k_value", rule, "raise eval.num_tests_per_prompt, or lower it")


def check_own(config: RunConfig, problems: Problems) -> None:
    """Checks that each object named by a path exists and fits."""
    own: dict[str, tuple[Collection[str], str]] = {
        "adv_estimator": (get_args(Estimator), "estimator"),
        "processor": (PROCESSORS, "processor"),
    }
    for key, path, kind in hooks_of(config):
        names, what = next((found for part, found in own.items() if part in key.split(".")), ((), ""))
        _check(problems, key, path, kind, names, what)


def hooks_of(config: RunConfig) -> Iterator[tuple[str, str, Kind]]:
    """Key, path and kind of every hook of a config; a name of mrl's stands in place of a path."""
    if config.has_engines:
        yield "grpo.adv_estimator.name", config.grpo.adv_estimator.name, ESTIMATOR
        if config.loss_fn.token_loss is not None:
            yield "loss_fn.token_loss", config.loss_fn.token_loss, LOSS
        yield from ((f"env.own.functions.{name}", path, REWARD) for name, path in config.env.own.functions.items())
        yield from ((f"env.own.agents.{name}", path, AGENT) for name, path in config.env.own.agents.items())
    for key, dataset in config.data.sets.items():
        yield key_of("processor", config.data.default, dataset, key), dataset.processor, PROCESSOR
    yield from (("logger.own", path, LOGGER) for path in config.logger.own)


def doubt_hooks(config: RunConfig, problems: Problems) -> None:
    """Warns of parameters that keep their defaults, and may be meant for mrl's; those of rewards may be columns."""
    for key, path, kind in hooks_of(config):
        if is_path(path) and kind is not REWARD:
            for text in misspelt(path, kind):
                problems.add(key, text, "rename it, unless its default is meant")


def _check(problems: Problems, key: str, path: str, kind: Kind, names: Collection[str] = (), what: str = "") -> None:
    if path in names:
        return
    if names and not is_path(path):
        problems.add(key, f"no such {what}", f"use one of {', '.join(names)}, or package.module:name of your own")
    else:
        try:
            find_fitting(path, kind)
        except ValueError as error:
            problems.tell(key, path, error)
            return
        if kind is LOSS and returns_lone_value(path):
            rule = "it returns one value, and a loss two tensors: each token's loss, and whether it is clipped"
            problems.add(key, rule, "return both; `torch.zeros_like(loss_T, dtype=torch.bool)` if nothing is clipped")
