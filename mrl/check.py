"""`python -m mrl.train CONFIG --check`: the resolved run, what became of NeMo RL's keys, and everything that is wrong, in seconds.

Nothing here imports torch, Ray, vLLM or Megatron.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from mrl.capacity.start_deadline import start_deadline
from mrl.config.errors import ConfigError, Unprovided
from mrl.config.files import find_config
from mrl.config.load import read_run
from mrl.config.model import read_model, use_cached_folders
from mrl.config.redact import start_logging
from mrl.config.rules.checks import find_problems
from mrl.config.rules.data import train_datasets, validation_datasets
from mrl.config.schema.run import RunConfig

logger = logging.getLogger(__name__)

OPTION = "--check"
WIDTH = 14


def train_arguments() -> argparse.ArgumentParser:
    """The command line of `python -m mrl.train`."""
    parser = argparse.ArgumentParser(prog="python -m mrl.train", description="Train a policy.")
    parser.add_argument("words", nargs="*", metavar="CONFIG|a.b=c", help="config file (a path, or a packaged name), then overrides")
    parser.add_argument("--config", metavar="CONFIG", help="the config file, as an option")
    parser.add_argument(OPTION, action="store_true", help="print the resolved run and what is wrong with it, and start nothing")
    return parser


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command line, with `name` of the config and `words` the overrides; log lines go to standard output from here on."""
    parser = train_arguments()
    options = parser.parse_intermixed_args(arguments)
    start_logging()
    options.name = options.config or (options.words.pop(0) if options.words else None)
    if options.name is None:
        parser.error("which config? e.g. python -m mrl.train grpo_tiny.yaml")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """`check_run` of a command line of `python -m mrl.train`."""
    options = parse_arguments(arguments)
    return check_run(options.name, options.words)


def check_run(name: str, overrides: Sequence[str]) -> int:
    """Prints what the config says and all that is wrong with it. Exit code 0; 2 if something is refused.

    Files, models and disks that this machine lacks are listed as to be provided, and are no reason to refuse.
    """
    try:
        path = find_config(name)
        config, migration, problems = read_run(path, overrides)
    except ConfigError as error:
        logger.error("%s", error)
        return 2
    if config is not None:
        use_cached_folders(config)
        problems = [*problems, *find_problems(config)]
    missing = [problem for problem in problems if isinstance(problem, Unprovided)]
    refused = [problem for problem in problems if not isinstance(problem, Unprovided)]
    _log_group(f"Config: {path}", [] if config is None else describe_run(config))
    for title, lines in migration.sections().items():
        _log_group(f"NeMo RL's keys, {title}: {len(lines)}", lines)
    _log_group(f"To be provided: {len(missing)}", missing)
    _log_group(f"Refused: {len(refused)}", refused)
    return 2 if refused else 0


def _log_group(title: str, lines: Sequence[str]) -> None:
    logger.info("%s", title)
    for line in lines:
        logger.info("  %s", line)


def describe_run(config: RunConfig) -> list[str]:
    """The run in a dozen lines: model, layout, batch, lengths, data, optimizer, checkpoints."""
    policy, training, optimizer = config.policy, config.training, config.policy.megatron_cfg.optimizer
    scheduler, checkpointing = policy.megatron_cfg.scheduler, config.checkpointing
    rows = {
        "algorithm": config.algorithm,
        "model": _model(config),
        "units": _units(config),
        "trainer": _trainer(config),
        "engines": _engines(config),
        "batch": _batch(config),
        "tokens": f"{policy.max_total_sequence_length:,} a sequence{_sampled(config)}; {_rows(config)}",
        "steps": f"at most {training.max_num_steps:,} (-1 = all), and {training.max_num_epochs:,} epochs;"
        f" validation every {training.val_period} (0 = never)",
        "data": _data(config),
        "optimizer": f"{optimizer.optimizer}, lr {optimizer.lr:g} {scheduler.lr_decay_style} to {optimizer.min_lr:g}"
        f" after {scheduler.lr_warmup_iters} steps of warmup",
        "checkpoints": f"{checkpointing.checkpoint_dir}, every {checkpointing.save_period} steps, best {checkpointing.keep_top_k}"
        f" by {checkpointing.metric_name}"
        if checkpointing.enabled
        else "none",
        "logs": config.logger.log_dir,
        "deadlines": str(start_deadline(config)),
    }
    return [f"{name:<{WIDTH}}{text}" for name, text in rows.items()]


def _model(config: RunConfig) -> str:
    policy = config.policy
    try:
        sizes = read_model(Path(policy.model_name))
    except ValueError:
        return f"{policy.model_name}, {policy.precision}"
    experts = f", {sizes.num_experts} experts" if sizes.num_experts else ""
    return (
        f"{policy.model_name}, {policy.precision}: {sizes.num_parameters / 1e9:.3g} billion parameters, {sizes.num_layers} layers{experts}"
    )


def _batch(config: RunConfig) -> str:
    grpo, batch_size = config.grpo, config.policy.train_global_batch_size
    if not config.has_engines:
        return f"{batch_size:,} rows a step"
    rollouts = f"{grpo.num_prompts_per_step:,} prompts x {grpo.num_generations_per_prompt} rollouts = {grpo.num_rollouts_per_step:,}"
    return f"{rollouts} a step, {batch_size:,} an update"


def _sampled(config: RunConfig) -> str:
    return f", of which at most {config.policy.generation.max_new_tokens:,} are sampled" if config.has_engines else ""


def _units(config: RunConfig) -> str:
    cluster = config.cluster
    what = "GPUs" if cluster.gpus_per_node else "policy ranks without GPUs"
    return f"{cluster.num_nodes} nodes x {cluster.units_per_node} = {cluster.num_units} {what}"


def _trainer(config: RunConfig) -> str:
    megatron, dp = config.policy.megatron_cfg, config.data_parallel_size
    sizes = f"tensor {megatron.tensor_model_parallel_size} x pipeline {megatron.pipeline_model_parallel_size}"
    experts = f"expert {megatron.expert_model_parallel_size} x expert tensor {megatron.expert_tensor_parallel_size}"
    lora = f"; LoRA of rank {megatron.peft.dim}" if megatron.peft.enabled else ""
    return f"{sizes} x context {megatron.context_parallel_size} x data {dp}; {experts}{lora}"


def _engines(config: RunConfig) -> str:
    if not config.has_engines:
        return "none"
    generation = config.policy.generation
    where = "on the trainer's units" if generation.colocated.enabled else f"on {config.num_dedicated_units} units of their own"
    return f"{config.num_engines} of tensor {generation.vllm_cfg.tensor_parallel_size}, {where}"


def _rows(config: RunConfig) -> str:
    policy = config.policy
    if policy.sequence_packing.enabled:
        return f"packed into rows of {policy.sequence_packing.train_mb_tokens:,}"
    if policy.dynamic_batching.enabled:
        return f"rows of {policy.dynamic_batching.train_mb_tokens:,}"
    return f"{policy.train_micro_batch_size} sequences a row"


def _data(config: RunConfig) -> str:
    data = config.data
    train = ", ".join(dataset.source for _, dataset in train_datasets(data))
    validation = [f"{dataset.held_out:g} of {key}" for key, dataset in train_datasets(data) if dataset.held_out]
    validation += [dataset.source for _, dataset in validation_datasets(data)]
    scored = f"; scored by {data.default.env_name}" if config.has_engines else ""
    return f"{train}; held out: {', '.join(validation) or 'none'}{scored}"
