# SPDX-License-Identifier: Apache-2.0
"""A run in words, line by line, as `--check` and the start print it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from conversion.files.hf_weights import describe_dtypes
from mrl import env, rooms
from mrl.config.errors import NotKnown
from mrl.config.fp8 import form_of
from mrl.config.model import read_model
from mrl.config.parsers import shows_tools
from mrl.config.schema.policy import PolicyConfig
from mrl.config.schema.run import RunConfig
from mrl.config.sharing import describe_sharing
from mrl.config.texts import counted
from mrl.data.columns import environments_asked
from mrl.data.order import count_steps
from mrl.envs.workers import describe_workers, usable_cores
from mrl.phases import REFERENCE, ModelName
from mrl.plan.deadlines import all_deadlines
from mrl.plan.hardware import local_gpu
from mrl.plan.memory import describe_limits
from mrl.store.checkpoints import newest_step
from mrl.store.loggers.group import switched_on

COUNTED_ROWS = 20_000
"""Rows that a check counts to say how many steps they make: under a second of reading."""


def _model(policy: PolicyConfig, precision: str | None = None) -> str:
    precision = precision or policy.precision
    try:
        sizes = read_model(Path(policy.model_name))
    except ValueError:
        return f"{policy.model_name}, {precision}"
    experts = f", {sizes.experts} experts" if sizes.experts else ""
    number = f"{sizes.num_parameters / 1e9:.3g} billion" if sizes.num_parameters >= 1e8 else f"{sizes.num_parameters:,}"
    return f"{policy.model_name}, {precision}: {number} parameters, {len(sizes.layers)} layers{experts}"


def _weights(config: RunConfig, precision: str | None = None) -> str:
    try:
        return describe_dtypes(Path(config.policy.model_name), precision or config.policy.precision)
    except (OSError, ValueError):
        return "not here, or not readable"


def _batch(config: RunConfig) -> str:
    grpo, batch_size = config.rollouts, config.policy.train_global_batch_size
    if not config.has_engines:
        return f"{batch_size:,} rows a step"
    rollouts = (
        f"{grpo.num_prompts_per_step:,} prompts x {grpo.num_generations_per_prompt} rollouts = "
        f"{grpo.num_rollouts_per_step:,}"
    )
    return f"{rollouts} a step, {batch_size:,} an update"


def _advantages(config: RunConfig) -> str:
    if config.algorithm != "grpo":
        return ""
    grpo, estimator = config.grpo, config.grpo.adv_estimator
    scaling, shaping = grpo.reward_scaling, grpo.reward_shaping
    parts = [estimator.name]
    if estimator.name in ("grpo", "gdpo"):
        parts.append(f"over the mean of {'the others' if estimator.use_leave_one_out_baseline else 'the group'}")
        parts += ["divided by the rewards' deviation"] * estimator.normalize_rewards
    if scaling.enabled:
        parts.append(
            f"rewards {scaling.source_min:g} to {scaling.source_max:g} become {scaling.target_min:g} to "
            f"{scaling.target_max:g}"
        )
    if shaping.enabled:
        coefficient = shaping.stop_properly_penalty_coef
        parts.append("long replies lose reward" if coefficient is None else f"rewards of cut replies x {coefficient:g}")
    parts += ["cut replies are not trained"] * grpo.overlong_filtering
    if grpo.use_dynamic_sampling:
        parts.append(f"only groups whose rewards differ, of up to {grpo.dynamic_sampling_max_gen_batches} batches")
    return "; ".join(parts)


def _loss(config: RunConfig) -> str:
    if config.algorithm not in ("grpo", "ppo"):
        return ""
    loss = config.loss_fn
    of_sequence = " of the sequence (GSPO)" * loss.sequence_level_importance_ratios
    clip = f"ratio{of_sequence} clipped at 1 - {loss.ratio_clip_min:g} and 1 + {loss.ratio_clip_max:g}"
    if loss.ratio_clip_c is not None:
        clip += f", dual clip {loss.ratio_clip_c:g}"
    surrogates = {"cispo": f"CISPO, {clip}", "reinforce": "REINFORCE, without a ratio", "ppo": f"PPO, {clip}"}
    parts = [loss.token_loss or surrogates[loss.surrogate]]
    parts.append("mean of tokens" if loss.token_level_loss else "mean of rollouts")
    kl, place = loss.reference_policy_kl_penalty, " in the rewards" * loss.use_kl_in_reward
    parts.append(f"KL {kl:g} ({loss.reference_policy_kl_type}){place}" if kl else "no KL")
    if loss.use_importance_sampling_correction:
        parts.append(f"weights of trainer over generator{f' ({loss.truncation})' if loss.truncation else ''}")
    return "; ".join(parts)


def _slots(config: RunConfig) -> str:
    cluster = config.cluster
    slots = (
        counted(cluster.num_slots, "GPU")
        if cluster.gpus_per_node
        else f"{counted(cluster.num_slots, 'policy rank')} without GPUs"
    )
    graders = f"; further nodes for rewards: {config.num_grader_nodes}" if config.num_grader_nodes else ""
    return f"{counted(cluster.num_nodes, 'node')} x {cluster.slots_per_node} = {slots}{graders}"


def _trainer(config: RunConfig, model: ModelName = "policy") -> str:
    megatron, dp = config.model(model).megatron_cfg, config.replicas_of(model)
    sizes = f"tensor {megatron.tensor_model_parallel_size} x pipeline {megatron.pipeline_model_parallel_size}"
    experts = f"expert {megatron.expert_model_parallel_size} x expert tensor {megatron.expert_tensor_parallel_size}"
    apart = "" if megatron.peft.merge else ", of which refits move the adapters alone"
    lora = f"; LoRA of rank {megatron.peft.dim}{apart}" if megatron.peft.enabled else ""
    fp8 = f"; products in FP8 ({megatron.fp8_cfg.fp8}, {megatron.fp8_cfg.fp8_recipe})" * megatron.fp8_cfg.enabled
    return f"{sizes} x context {megatron.context_parallel_size} x data {dp}; {experts}{lora}{fp8}"


def _teachers(config: RunConfig) -> str:
    k, lines = config.num_taught_logits, []
    what = (
        f"{config.loss_fn.kl_type} KL over its {k} likeliest tokens"
        if k
        else "logprobs of the tokens that the policy drew"
    )
    for model in config.teachers:
        name, nodes = model.partition(":")[2], config.own_nodes.get(model)
        where = f", on {nodes} node{'s' * (nodes != 1)} of its own" if nodes else ""
        of_model = f"{_model(config.model(model))}; {_trainer(config, model)}{where}"
        lines.append(f"{name}{': ' if name else ''}{of_model}; {what}")
    return "\n".join(lines) or "none"


def _reference(config: RunConfig) -> str:
    if not config.has_reference_apart:
        return ""
    nodes = config.reference.num_nodes
    return f"{_trainer(config, REFERENCE)}, on {nodes} node{'s' * (nodes != 1)} of its own"


def _judges(config: RunConfig) -> str:
    found = []
    for name, judge in config.judges.items():
        engines = judge.num_nodes * config.cluster.slots_per_node // judge.num_workers
        where = f"on {judge.num_nodes} node{'s' * (judge.num_nodes != 1)} of its own"
        found.append(f"{name}: {judge.model_name}; {engines} engines of {judge.num_workers} workers, {where}")
    return "\n".join(found) or "none"


def _critic(config: RunConfig) -> str:
    alone = config.ppo.policy_training_start_step
    first = f", alone in the first {alone} steps" if alone else ""
    return f"{_model(config.model('critic'))}; {_trainer(config, 'critic')}; {config.num_passes} passes a step{first}"


def _engines(config: RunConfig, *, has_trainer: bool = True) -> str:
    if not config.has_engines:
        return "none"
    generation = config.policy.generation
    where = "on the trainer's slots"
    if not has_trainer:
        where = "without a trainer"
    elif not generation.colocated.enabled:
        where = f"on {config.num_dedicated_slots} slots of their own"
    nodes = f" over {config.nodes_of_engine} nodes" if config.nodes_of_engine > 1 else ""
    limits = describe_limits(config, None)
    vllm = generation.vllm_cfg
    precision = _fp8(config) if vllm.is_fp8 else vllm.precision
    elastic = f", of which {least} must serve" if (least := generation.min_num_engines) is not None else ""
    stages = f" x pipeline {vllm.pipeline_parallel_size}" if vllm.pipeline_parallel_size > 1 else ""
    groups = f" x {vllm.num_groups} groups that share experts" if vllm.num_groups > 1 else ""
    sizes = f"tensor {vllm.tensor_parallel_size}{stages}{groups}"
    return f"{config.num_engines} of {sizes}{nodes}, {precision}, {where}{elastic}, {limits}"


def _fp8(config: RunConfig) -> str:
    form = config.policy.generation.vllm_kwargs.get("quantization")
    with suppress(ValueError):
        form = form_of(config.policy.generation, read_model(Path(config.policy.model_name)))
    return f"weights in FP8 ({form}, rounded after each refit)" if form else "weights in FP8"


def _rewards(config: RunConfig) -> str:
    if not config.has_engines:
        return "none"
    # A host from which jobs are submitted has other cores than their nodes.
    is_elsewhere = config.cluster.num_nodes > 1 or (config.cluster.gpus_per_node > 0 and local_gpu() is None)
    return describe_workers(config, num_cores=None if is_elsewhere else usable_cores(), asked=_asked(config))


def _agents(config: RunConfig) -> str:
    if not config.has_engines:
        return "none"
    chat = config.policy.generation.vllm_cfg.http_server_serving_chat_kwargs
    lines = [routes] if (routes := rooms.describe_routes(config)) else []
    lines += [f"{name}: {path}" for name, path in config.env.agents.items()]
    if config.env.has_agents and chat.enable_auto_tools:
        parser = chat.tool_parser
        lines.append(f"tool calls as vLLM's {parser} reads them" if parser else "tool calls by the model's template")
        if shows_tools(config) is False:
            lines.append(f"the chat template of {config.policy.tokenizer.name} shows no tools: name them in a message")
    return "\n".join(lines) or "none"


def _data(config: RunConfig) -> str:
    sets = config.data.train_sets.values()
    total = sum(dataset.weight or 0.0 for dataset in sets)
    shares = [f" ({dataset.weight / total:.1%} of each step)" if dataset.weight else "" for dataset in sets]
    train = ", ".join(dataset.source + share for dataset, share in zip(sets, shares, strict=True))
    return f"{train}; held out: {_held_out(config)}"


def _asked(config: RunConfig) -> list[str]:
    sets = config.data.sets
    try:
        return environments_asked(sets, config.env)
    except ValueError:  # of rows that cannot be read, which the look at them says
        return list(dict.fromkeys(dataset.env_name for dataset in sets.values()))


def _held_out(config: RunConfig) -> str:
    data = config.data
    validation = [f"{dataset.held_out:g} of {key}" for key, dataset in data.train_sets.items() if dataset.held_out]
    validation += [dataset.source for dataset in data.validation_sets.values()]
    scored = f"; scored by {', '.join(_asked(config))}" if config.has_engines else ""
    return f"{', '.join(validation) or 'none'}{scored}"


def _tokens(config: RunConfig) -> str:
    policy, sampled, rows = config.policy, "", f"{counted(config.policy.train_micro_batch_size, 'sequence')} a row"
    if policy.sequence_packing.enabled:
        rows = f"packed into rows of {policy.sequence_packing.train_mb_tokens:,}"
    elif policy.dynamic_batching.enabled:
        rows = f"rows of {policy.dynamic_batching.train_mb_tokens:,}"
    if config.has_engines:
        sampled = f", of which at most {policy.generation.max_new_tokens:,} are sampled"
    return f"{policy.max_total_sequence_length:,} a sequence{sampled}; {rows}"


def _steps(config: RunConfig) -> str:
    training = config.training
    most = "all" if training.max_num_steps == -1 else f"at most {training.max_num_steps:,}"
    limits = f"{most}, and {counted(training.max_num_epochs, 'epoch')}"
    num_steps = None
    with suppress(NotKnown, ValueError):  # of which the report has a line of its own
        num_steps = count_steps(config, most_rows=COUNTED_ROWS)
    if num_steps is not None and not 0 <= training.max_num_steps <= num_steps:
        limits += f" = {num_steps:,} step{'s' * (num_steps > 1)}, as the data have no more rows"
    if num_steps is not None and num_steps < training.max_num_epochs:
        limits += "; a step asks rows more than once, as it takes more than the data have"
    validation = f"validation every {training.val_period}" if training.val_period else "no periodic validation"
    return f"{limits}; {validation if config.data.has_validation else 'no validation, as no rows are held out'}"


def _optimizer(config: RunConfig) -> str:
    optimizer, scheduler = config.policy.megatron_cfg.optimizer, config.policy.megatron_cfg.scheduler
    # A constant rate never reaches min_lr.
    end = "" if scheduler.lr_decay_style == "constant" else f" to {optimizer.min_lr:g}"
    rate = f"lr {optimizer.lr:g} {scheduler.lr_decay_style}{end}"
    return f"{optimizer.optimizer}, {rate} after {scheduler.lr_warmup_iters} steps of warmup"


def _start(config: RunConfig) -> str:
    section, num_steps = config.checkpointing, config.training.max_num_steps
    step = newest_step(Path(section.checkpoint_dir))
    of = f" of {num_steps}" if num_steps > 0 else ""
    if step and 0 < num_steps <= step:
        return f"{section.checkpoint_dir}: has {step}{of} steps, and a start makes no more"
    return f"{section.checkpoint_dir}: {f'resumes at step {step}{of}' if step else 'starts at step 0'}"


def _checkpoints(config: RunConfig) -> str:
    section = config.checkpointing
    if not section.enabled:
        return "none"
    return f"every {section.save_period} steps, best {section.keep_top_k} by {section.metric_name}"


def _logs(config: RunConfig) -> str:
    homes = (Path("~").expanduser() / name for name in (".netrc", "_netrc"))
    has_key = env.WANDB_API_KEY.read() is not None or any(path.is_file() for path in homes)
    is_online = config.logger.wandb.mode in (None, "online", "shared")
    lacking = "" if has_key or not is_online else " (no key of it here: in files, which `wandb sync` uploads)"
    names = [f"{name}{lacking}" if name == "wandb" else name for name in switched_on(config.logger)]
    return ", ".join([config.logger.log_dir, *names])


ROWS: dict[str, Callable[[RunConfig], str]] = {
    "algorithm": lambda config: config.algorithm,
    "model": lambda config: _model(config.policy),
    "weights": _weights,
    "slots": _slots,
    "trainer": _trainer,
    "teacher": _teachers,
    "reference": _reference,
    "critic": lambda config: _critic(config) if config.has_critic else "none",
    "engines": _engines,
    "judges": _judges,
    "batch": _batch,
    "advantages": _advantages,
    "loss": _loss,
    "tokens": _tokens,
    "prefixes": lambda config: describe_sharing(config) if config.has_engines else "",
    "steps": _steps,
    "data": _data,
    "rewards": _rewards,
    "agents": _agents,
    "optimizer": _optimizer,
    "run folder": _start,
    "checkpoints": _checkpoints,
    "logs": _logs,
    "deadlines": lambda config: "\n".join(
        [
            "a run that misses one counts as hanging: mrl ends it, and the same command resumes",
            *map(str, all_deadlines(config)),
        ]
    ),
}
"""Line of the report -> what it says of a run."""
ROWS_OF_TRAINING = (
    *(
        "algorithm",
        "trainer",
        "teacher",
        "reference",
        "critic",
        "batch",
        "advantages",
        "loss",
        "prefixes",
        "steps",
        "optimizer",
        "run folder",
    ),
    *("checkpoints", "deadlines"),
)
"""Lines that say nothing of an evaluation."""
ROWS_OF_EVALUATION: dict[str, Callable[[RunConfig], str]] = {
    "model": lambda config: _model(config.policy, config.policy.generation.vllm_cfg.precision),
    "weights": lambda config: _weights(config, config.policy.generation.vllm_cfg.loaded_precision),
    "tokens": lambda config: (
        f"{config.policy.max_total_sequence_length:,} a sequence, of which at most "
        f"{config.policy.generation.max_new_tokens:,} are sampled"
    ),
    "engines": lambda config: _engines(config, has_trainer=False),
    "data": _held_out,
    "logs": lambda config: f"{config.evaluation_folder}/logs",
}
"""Lines that an evaluation has instead."""
