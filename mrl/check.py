# SPDX-License-Identifier: Apache-2.0
"""`python -m mrl.check CONFIG [a.b=c ...]`: prints the resolved run, what became of NeMo RL's keys, and all that is wrong, in seconds.

Also `--check` of `python -m mrl.train` and `mrl.evaluate`.

Nothing here imports torch, Ray, vLLM or Megatron.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from conversion.files.hf_weights import describe_dtypes
from mrl.config.dialect.translate import Migration
from mrl.config.errors import ConfigError, NotKnown, Unchecked, Unprovided
from mrl.config.files import find_config
from mrl.config.load import changes_since, read_run
from mrl.config.model import find_missing_weights, find_wrong_weights, read_model, with_cached_folders
from mrl.config.rules.checks import find_problems
from mrl.config.rules.gym_servers import describe_routes
from mrl.config.rules.plausible import find_doubts
from mrl.config.schema.run import CheckpointingConfig, RunConfig
from mrl.config.secrets import run_entry, start_logging
from mrl.data.order import count_steps, find_few_rows
from mrl.envs.workers import describe_workers, usable_cores
from mrl.gpus import find_fault, host_gpus
from mrl.inputs import Look, look_at_inputs
from mrl.kernels import describe_missing, missing_kernels
from mrl.plan.deadlines import all_deadlines
from mrl.plan.hardware import GPUS, Gpu, local_gpu, local_memory
from mrl.plan.memory import describe_limits
from mrl.plan.plan import prediction
from mrl.store.checkpoints import RUN_CONFIG, CheckpointStore, find_lost_run, newest_step

logger = logging.getLogger(__name__)
Found = TypeVar("Found")

OPTION, STRICT, GPU = "--check", "--strict", "--gpu"
NEVER_SEEN = (
    "values of weights, of which only the files' headers are read; what own functions do; ports, other hosts and the network",
    "GPUs and drivers, which `python -m mrl.doctor` looks at",
)
MODEL_KEY = re.compile(r"[\w., ]*\bmodel_name=")
"""Beginning of the problem of a model that is not known."""
WIDTH = 14
COUNTED_ROWS = 20_000
"""Rows that a check counts to say how many steps they make: under a second of reading."""


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line of `python -m mrl.train`, with `name` of the config and `words` the overrides."""
    parser = argparse.ArgumentParser(prog="python -m mrl.train", description="Train a policy.")
    parser.add_argument("words", nargs="*", metavar="CONFIG|a.b=c", help="config file (a path, or a packaged name), then overrides")
    parser.add_argument("--config", metavar="CONFIG", help="the config file, as an option")
    parser.add_argument("--log-format", choices=("text", "json"), default="text", help="of the run's log: lines, or JSON objects")
    options = _parse(parser, arguments)
    options.secrets = start_logging("plain" if options.check else options.log_format)
    options.name = options.config or (options.words.pop(0) if options.words else None)
    if options.name is None:
        parser.error("which config? e.g. python -m mrl.train grpo_tiny.yaml")
    return options


def parse_evaluation(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line of `python -m mrl.evaluate`. Log lines as `parse_arguments` says."""
    parser = argparse.ArgumentParser(prog="python -m mrl.evaluate", description="Ask a model held-out prompts and judge its answers.")
    words = "a config, a run folder, a step_N folder or a model, then overrides"
    parser.add_argument("words", nargs="+", metavar="CONFIG|DIR|a.b=c", help=words)
    parser.add_argument("--config", help="for a folder: the config that says how it is asked (default: that of the run)")
    options = _parse(parser, arguments)
    options.secrets = start_logging("plain" if options.check else "text")
    return options


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser.add_argument(OPTION, action="store_true", help="print what the config means and what is wrong with it, and start nothing")
    parser.add_argument(STRICT, action="store_true", help=f"with {OPTION}: a file, model or disk that this machine lacks is wrong, too")
    parser.add_argument(GPU, choices=GPUS, help=f"with {OPTION}: compares the plan with this GPU of the nodes (default: this host's)")
    options = parser.parse_intermixed_args(arguments)
    for name, given in ((STRICT, options.strict), (GPU, options.gpu)):
        if given and not options.check:
            parser.error(f"{name} goes with {OPTION}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m mrl.train --check`."""
    options = parse_arguments(arguments)
    return check_run(options.name, options.words, strict=options.strict, secrets=options.secrets, gpu=GPUS.get(options.gpu))


def check_evaluation(options: argparse.Namespace) -> int:
    """`check_run` of a parsed command line of `python -m mrl.evaluate`. No checkpoint is exported: the config's model stands for it."""
    name, *overrides = options.words
    try:
        target = find_target(name, options.config)
    except ValueError as error:
        logger.error("%s", error)
        return 2
    overrides = [*target.model_overrides(), *overrides]
    return check_run(target.config, overrides, to_evaluate=True, strict=options.strict, secrets=options.secrets)


@dataclass(frozen=True)
class Checked:
    """Findings of a check."""

    config: RunConfig | None
    """None if not even the algorithm is known. Reading a value that is not known raises NotKnown."""
    migration: Migration
    problems: list[str]
    path: Path | None = None
    doubts: Sequence[str] = ()
    """Values that are probably slips."""
    prediction: str = ""
    """The memory that a run on GPUs is predicted to need, if nothing is wrong."""
    unseen: Sequence[str] = ()
    """Parts of data, model and run folder that nobody looked at."""

    @property
    def refused(self) -> list[str]:
        """Faults of the config itself."""
        return [problem for problem in self.problems if not isinstance(problem, Unprovided)]

    @property
    def unchecked(self) -> list[str]:
        """Rules that could not be applied, and what they lack."""
        return [problem for problem in self.problems if isinstance(problem, Unchecked)]

    @property
    def unknown_models(self) -> list[str]:
        """A line that names the models without a config.json here, if there are any."""
        lacking = [str(problem).partition(": ")[0] for problem in self.unchecked if MODEL_KEY.match(problem)]
        return [f"the model: no config.json of {', '.join(lacking)} is here, which says what it can run"] if lacking else []

    @property
    def provided(self) -> list[str]:
        """Files and disks that this machine lacks, though no rule needs them."""
        return [problem for problem in self.problems if isinstance(problem, Unprovided) and not isinstance(problem, Unchecked)]


def examine(
    name: str | Path,
    overrides: Sequence[str] = (),
    *,
    to_evaluate: bool = False,
    is_strict: bool = False,
    secrets: set[str] | None = None,
    gpu: Gpu | None = None,
) -> Checked:
    """Checks a config file as far as possible without starting anything; `is_strict` reads all rows.

    `gpu` is that of the nodes; None stands for this host's, and then its memory is a node's, too.
    """
    try:
        path = find_config(name)
        config, migration, problems = read_run(path, overrides, to_evaluate=to_evaluate, secrets=secrets)
    except ConfigError as error:
        return Checked(None, Migration(), list(error.problems))
    checked = Checked(config, migration, problems, path)
    return checked if config is None else examine_config(config, checked, to_evaluate=to_evaluate, is_strict=is_strict, gpu=gpu)


def examine_config(
    config: RunConfig, loaded: Checked, *, to_evaluate: bool = False, is_strict: bool = False, gpu: Gpu | None = None
) -> Checked:
    """Adds all that rules, files and data say of `config` to `loaded`, the findings of its reading."""
    problems = [*loaded.problems, *_known(lambda: find_missing_weights(config), [])]
    config = with_cached_folders(config)
    problems += find_problems(config, to_evaluate=to_evaluate)
    problems += _known(lambda: find_wrong_weights(config), [])
    if not to_evaluate:
        lost = _known(lambda: find_lost_run(Path(config.checkpointing.checkpoint_dir)), None)
        problems += [*find_few_rows(config), *([lost] if lost else [])]
    look = _known(lambda: look_at_inputs(config, is_strict=is_strict, to_evaluate=to_evaluate), Look())
    lacks, slower = _known(lambda: look_at_environment(config), ([], []))
    problems = list(dict.fromkeys([*problems, *lacks, *look.problems]))
    doubts = [*find_doubts(config), *slower, *look.doubts]
    checked = replace(loaded, config=config, problems=problems, doubts=doubts, unseen=look.unseen)
    if not (to_evaluate or checked.refused or checked.unchecked) and config.cluster.gpus_per_node:
        try:
            here = local_gpu() if gpu is None else None
            return replace(checked, prediction=prediction(config, gpu or here, local_memory() if here else None))
        except ValueError as error:
            problems.append(str(error))
    return checked


def _known(step: Callable[[], Found], default: Found) -> Found:
    """The findings of a step, or `default` if it reads a value that is not known: that has a problem already."""
    try:
        return step()
    except NotKnown:
        return default


def look_at_environment(config: RunConfig) -> tuple[list[str], list[str]]:
    """Reasons why this host's installation would be refused at a start, and the kernels that it lacks.

    A host without GPUs says nothing of a run on GPUs: it is a login node.
    """
    gpus, num_nodes, has_engines = config.cluster.gpus_per_node, config.cluster.num_nodes, config.has_engines
    try:
        if gpus and host_gpus() == 0:
            return [], []
        fault = find_fault(gpus, num_nodes=num_nodes, has_engines=has_engines)
    except ValueError as error:
        fault = str(error)
    if fault is not None:
        return [Unprovided(fault)], []
    return [], [text] if gpus and (text := describe_missing(missing_kernels())) else []


def check_run(
    name: str,
    overrides: Sequence[str],
    *,
    to_evaluate: bool = False,
    strict: bool = False,
    secrets: set[str] | None = None,
    gpu: Gpu | None = None,
) -> int:
    """Prints the resolved run and every fault of its config. Exit code 0; 2 if something is refused.

    Files, models and disks that this machine lacks are listed as to be provided, and are a reason to refuse only if `strict`.
    """
    checked = examine(name, overrides, to_evaluate=to_evaluate, is_strict=strict, secrets=secrets, gpu=gpu)
    return tell(checked, to_evaluate=to_evaluate, strict=strict)


def tell(checked: Checked, *, to_evaluate: bool = False, strict: bool = False) -> int:
    """Logs the findings of a check, and returns the exit code."""
    groups: dict[str, Sequence[str]] = {}
    if checked.path is not None:
        described = [] if checked.config is None else describe_run(checked.config)
        groups[f"Config: {checked.path}"] = [*described, *([checked.prediction] if checked.prediction else [])]
    groups |= {f"NeMo RL's keys, {title}: {len(lines)}": lines for title, lines in checked.migration.sections().items()}
    config = checked.config
    if config is not None and not to_evaluate and (changes := _known(lambda: _changes(config), [])):
        groups[f"Changed since the last attempt: {len(changes)}"] = changes
    if checked.doubts:
        groups[f"Warnings: {len(checked.doubts)}"] = checked.doubts
    groups[f"To be provided: {len(checked.provided)}"] = checked.provided
    groups[f"Not checked: {len(checked.unchecked)}"] = checked.unchecked
    limits = ", as far as it could be checked" if checked.unchecked else ""
    groups[f"Refused: {len(checked.refused)}{limits}"] = checked.refused
    if checked.config is not None:
        groups["Not looked at:"] = [*checked.unseen, *NEVER_SEEN, *checked.unknown_models]
    for title, lines in groups.items():
        logger.info("%s", title)
        for line in "\n".join(lines).splitlines():
            logger.info("  %s", line)
    return 2 if checked.refused or (strict and checked.problems) else 0


def _changes(config: RunConfig) -> list[str]:
    return changes_since(Path(config.checkpointing.checkpoint_dir) / RUN_CONFIG, config)


def describe_run(config: RunConfig) -> list[str]:
    """Describes the run in a dozen lines: model, layout, batch, lengths, data, optimizer, checkpoints."""
    lines = []
    for name, text in ROWS.items():
        try:
            found = text(config).splitlines()
            lines += [f"{label:<{WIDTH}}{line}" for label, line in zip((name, *[""] * len(found)), found, strict=False)]
        except NotKnown as error:
            lines.append(f"{name:<{WIDTH}}{error}")
        except OSError as error:
            lines.append(f"{name:<{WIDTH}}{error.filename}: {error.strerror}")
    return lines


def _model(config: RunConfig) -> str:
    policy = config.policy
    try:
        sizes = read_model(Path(policy.model_name))
    except ValueError:
        return f"{policy.model_name}, {policy.precision}"
    experts = f", {sizes.experts} experts" if sizes.experts else ""
    number = f"{sizes.num_parameters / 1e9:.3g} billion" if sizes.num_parameters >= 1e8 else f"{sizes.num_parameters:,}"
    return f"{policy.model_name}, {policy.precision}: {number} parameters, {len(sizes.layers)} layers{experts}"


def _weights(config: RunConfig) -> str:
    try:
        return describe_dtypes(Path(config.policy.model_name), config.policy.precision)
    except (OSError, ValueError):
        return "not here, or not readable"


def _batch(config: RunConfig) -> str:
    grpo, batch_size = config.rollouts, config.policy.train_global_batch_size
    if not config.has_engines:
        return f"{batch_size:,} rows a step"
    rollouts = f"{grpo.num_prompts_per_step:,} prompts x {grpo.num_generations_per_prompt} rollouts = {grpo.num_rollouts_per_step:,}"
    return f"{rollouts} a step, {batch_size:,} an update"


def _slots(config: RunConfig) -> str:
    cluster = config.cluster
    what = "GPUs" if cluster.gpus_per_node else "policy ranks without GPUs"
    return f"{cluster.num_nodes} node{'s' * (cluster.num_nodes != 1)} x {cluster.slots_per_node} = {cluster.num_slots} {what}"


def _trainer(config: RunConfig) -> str:
    megatron, dp = config.policy.megatron_cfg, config.data_parallel_size
    sizes = f"tensor {megatron.tensor_model_parallel_size} x pipeline {megatron.pipeline_model_parallel_size}"
    experts = f"expert {megatron.expert_model_parallel_size} x expert tensor {megatron.expert_tensor_parallel_size}"
    lora = f"; LoRA of rank {megatron.peft.dim}" if megatron.peft.enabled else ""
    return f"{sizes} x context {megatron.context_parallel_size} x data {dp}; {experts}{lora}"


def _teachers(config: RunConfig) -> str:
    k, lines = config.num_taught_logits, []
    what = f"{config.loss_fn.kl_type} KL over its {k} likeliest tokens" if k else "logprobs of the tokens that the policy drew"
    for model in config.teachers:
        seen, name = config.of_model(model), model.partition(":")[2]
        lines.append(f"{name}{': ' if name else ''}{_model(seen)}; {_trainer(seen)}; {what}")
    return "\n".join(lines) or "none"


def _critic(config: RunConfig) -> str:
    seen, alone = config.of_model("critic"), config.ppo.policy_training_start_step
    first = f", alone in the first {alone} steps" if alone else ""
    return f"{_model(seen)}; {_trainer(seen)}; {config.num_passes} passes a step{first}"


def _engines(config: RunConfig) -> str:
    if not config.has_engines:
        return "none"
    generation = config.policy.generation
    where = "on the trainer's slots" if generation.colocated.enabled else f"on {config.num_dedicated_slots} slots of their own"
    nodes = f" over {config.nodes_of_engine} nodes" if config.nodes_of_engine > 1 else ""
    limits = describe_limits(config, None)
    vllm = generation.vllm_cfg
    stages = f" x pipeline {vllm.pipeline_parallel_size}" if vllm.pipeline_parallel_size > 1 else ""
    groups = f" x {vllm.num_groups} groups that share experts" if vllm.num_groups > 1 else ""
    return f"{config.num_engines} of tensor {vllm.tensor_parallel_size}{stages}{groups}{nodes}, {where}, {limits}"


def _rewards(config: RunConfig) -> str:
    if not config.has_engines:
        return "none"
    # A host from which jobs are submitted has other cores than their nodes.
    is_elsewhere = config.cluster.num_nodes > 1 or (config.cluster.gpus_per_node > 0 and local_gpu() is None)
    return describe_workers(config, num_cores=None if is_elsewhere else usable_cores())


def _data(config: RunConfig) -> str:
    data = config.data
    train = ", ".join(dataset.source for dataset in data.train_sets.values())
    validation = [f"{dataset.held_out:g} of {key}" for key, dataset in data.train_sets.items() if dataset.held_out]
    validation += [dataset.source for dataset in data.validation_sets.values()]
    scored = f"; scored by {data.default.env_name}" if config.has_engines else ""
    return f"{train}; held out: {', '.join(validation) or 'none'}{scored}"


def _tokens(config: RunConfig) -> str:
    policy, sampled, rows = config.policy, "", f"{config.policy.train_micro_batch_size} sequences a row"
    if policy.sequence_packing.enabled:
        rows = f"packed into rows of {policy.sequence_packing.train_mb_tokens:,}"
    elif policy.dynamic_batching.enabled:
        rows = f"rows of {policy.dynamic_batching.train_mb_tokens:,}"
    if config.has_engines:
        sampled = f", of which at most {policy.generation.max_new_tokens:,} are sampled"
    return f"{policy.max_total_sequence_length:,} a sequence{sampled}; {rows}"


def _steps(config: RunConfig) -> str:
    training = config.training
    limits = f"at most {training.max_num_steps:,} (-1 = all), and {training.max_num_epochs:,} epochs"
    num_steps = None
    with suppress(NotKnown, ValueError):  # of which the report has a line of its own
        num_steps = count_steps(config, most_rows=COUNTED_ROWS)
    if num_steps is not None and not 0 <= training.max_num_steps <= num_steps:
        limits += f" = {num_steps:,} step{'s' * (num_steps > 1)}, as the data have no more rows"
    return f"{limits}; validation every {training.val_period} (0 = never)"


def _optimizer(config: RunConfig) -> str:
    optimizer, scheduler = config.policy.megatron_cfg.optimizer, config.policy.megatron_cfg.scheduler
    rate = f"lr {optimizer.lr:g} {scheduler.lr_decay_style} to {optimizer.min_lr:g}"
    return f"{optimizer.optimizer}, {rate} after {scheduler.lr_warmup_iters} steps of warmup"


def _start(config: RunConfig) -> str:
    section, num_steps = config.checkpointing, config.training.max_num_steps
    step = newest_step(Path(section.checkpoint_dir))
    of = f" of {num_steps}" if num_steps > 0 else ""
    return f"{section.checkpoint_dir}: {f'resumes at step {step}{of}' if step else 'starts at step 0'}"


def _checkpoints(config: RunConfig) -> str:
    section = config.checkpointing
    if not section.enabled:
        return "none"
    return f"every {section.save_period} steps, best {section.keep_top_k} by {section.metric_name}"


ROWS: dict[str, Callable[[RunConfig], str]] = {
    "algorithm": lambda config: config.algorithm,
    "model": _model,
    "weights": _weights,
    "slots": _slots,
    "trainer": _trainer,
    "teacher": _teachers,
    "critic": lambda config: _critic(config) if config.has_critic else "none",
    "engines": _engines,
    "batch": _batch,
    "tokens": _tokens,
    "steps": _steps,
    "data": _data,
    "rewards": _rewards,
    "agents": lambda config: (config.has_engines and describe_routes(config)) or "none of NeMo Gym's",
    "optimizer": _optimizer,
    "run folder": _start,
    "checkpoints": _checkpoints,
    "logs": lambda config: config.logger.log_dir,
    "deadlines": lambda config: "\n".join(map(str, all_deadlines(config))),
}
"""Line of the report -> what it says of a run."""


@dataclass(frozen=True)
class Target:
    """The checkpoint or model that is evaluated."""

    config: str
    name: str
    model: Path | None = None
    checkpoint: Path | None = None
    """Checkpoint of a run, to be exported first."""

    def model_overrides(self) -> list[str]:
        """The overrides that point the config at `model`."""
        if self.model is None:
            return []
        from mrl.config.overrides import quoted  # imports Hydra

        return [f"{key}={quoted(self.model)}" for key in ("policy.model_name", "policy.tokenizer.name")]


def find_target(name: str, config: str | None) -> Target:
    """Resolves `name`, a config or a folder.

    Raises:
        ValueError: it is a folder of neither kind, or has no checkpoint.
    """
    folder = Path(name)
    if not folder.is_dir():
        return Target(name, Path(name).stem)
    if (folder / "config.json").is_file():
        if config is None:
            raise ValueError(f"{name} is a model; name with --config the config whose data, environments and sampling to use")
        return Target(config, folder.resolve().name, model=folder.resolve())
    run = folder if (folder / RUN_CONFIG).is_file() else folder.resolve().parent
    if not (run / RUN_CONFIG).is_file():
        raise ValueError(f"{name} is no run folder ({RUN_CONFIG}), none of its checkpoints, and no Hugging Face folder (config.json)")
    checkpoint = folder
    if run == folder:
        newest = CheckpointStore(run, CheckpointingConfig()).newest(with_shards=True)
        if newest is None:
            raise ValueError(f"{name} has no complete checkpoint yet; give the model's folder instead")
        checkpoint = newest.folder
    return Target(config or str(run / RUN_CONFIG), f"{run.resolve().name}-{checkpoint.name}", checkpoint=checkpoint)


if __name__ == "__main__":
    sys.exit(run_entry(lambda: main([OPTION, *sys.argv[1:]])))
