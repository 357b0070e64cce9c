"""Training without rollouts (`algorithm: sft|dpo|rm`), on the same ranks, checkpoints and ledger as GRPO. This file is the loop.

examples -> packed batch -> reference logprobs (dpo) -> train step -> metrics, ledger, checkpoint
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from mrl.algo.sft import perplexity
from mrl.cluster.monitor import watch_hosts
from mrl.cluster.payload import put_batch
from mrl.cluster.policy_group import PolicyGroup
from mrl.cluster.session import start_policies
from mrl.config.schema.algo import GrpoConfig
from mrl.config.schema.policy import PolicyConfig
from mrl.config.schema.run import RunConfig
from mrl.data.cost import SequenceCost, sequence_cost
from mrl.data.example_batch import as_in_validation, batch_examples
from mrl.data.order import prompts_of_step
from mrl.data.reading import write_quarantine
from mrl.data.supervised import Example, SupervisedData, load_examples
from mrl.saving import CheckpointSaver, open_saver
from mrl.schedule import is_due, is_save_due
from mrl.start import check_start
from mrl.store.checkpoints import Checkpoint
from mrl.store.clock import Budget, Clock
from mrl.store.run_folder import RunFolder
from mrl.types import Batch, RunState

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """What one run works with."""

    config: RunConfig
    data: SupervisedData
    folder: RunFolder
    policies: PolicyGroup
    saver: CheckpointSaver
    budget: Budget
    cost: SequenceCost
    last_step: int
    is_over: bool = False
    """Whether no further step is made."""


def train(config: RunConfig, data: SupervisedData, folder: RunFolder, budget: Budget) -> bool:
    """Runs the configured steps from where the run folder stands. False if the budget was over first: the same command goes on."""
    write_quarantine(data.findings, folder.path / "quarantine")
    checkpoint, last_step = folder.newest_checkpoint(), config.training.max_num_steps
    if checkpoint is not None and checkpoint.step >= last_step:
        logger.info("All is done by step %d of %d: %s", checkpoint.step, last_step, checkpoint.folder)
        return True
    with (
        start_policies(config, pad_token_id=data.pad_token_id, log_folder=folder.log_folder / "actors") as policies,
        open_saver(config, folder, policies) as saver,
        folder.open_loggers() as loggers,
        watch_hosts(config, loggers),
    ):
        budget.begin()
        run = Run(config, data, folder, policies, saver, budget, sequence_cost(config.policy.model_name), last_step)
        state = resume(run, checkpoint)
        if state.step == 0 and config.training.val_at_start and data.validation:
            folder.log_metrics(0, validate(run, state))
        run.is_over = budget.is_over
        while state.step < last_step and not run.is_over:
            train_step(run, state)
    logger.info("Step %d of %d is done; report: %s", state.step, last_step, folder.path / "report.html")
    return state.step == last_step or not budget.is_over


def train_step(run: Run, state: RunState) -> None:
    """One step of the loop; `state` is advanced."""
    config, folder, training = run.config, run.folder, run.config.training
    step, clock = state.step + 1, Clock()

    taken = examples_of(run, step)
    keys = [(epoch, example.example_id) for epoch, example in taken]
    folder.ledger.take(step, keys)
    with clock.phase("train"):
        metrics = update_policy(run, [example for _, example in taken])
    folder.ledger.train(step, keys)
    state.step = step

    if is_due(step, training.val_period) or (training.val_at_end and step == run.last_step):
        with clock.phase("validation"):
            metrics |= validate(run, state)
    state.metrics = metrics
    folder.print_header(step, run.last_step)
    run.budget.count_step()
    run.is_over = step == run.last_step or run.budget.is_over
    if config.checkpointing.enabled and (run.is_over or is_save_due(step, config.checkpointing)):
        with clock.phase("checkpoint"):
            run.saver.begin(state)
            if run.is_over:
                run.saver.finish()
    metrics |= clock.metrics() | run.saver.take_metrics()
    folder.print_step(metrics)
    folder.log_metrics(step, metrics)


def examples_of(run: Run, step: int) -> list[tuple[int, Example]]:
    """The (epoch, example) pairs that step `step` (from 1) learns."""
    examples, config = run.data.train, run.config
    picked = prompts_of_step(
        step - 1,
        prompts_per_step=config.policy.train_global_batch_size,
        num_prompts=len(examples),
        seed=config.training.seed,
        shuffle=config.data.shuffle,
    )
    return [(epoch, examples[index]) for epoch, index in picked]


def give_batch(run: Run, examples: Sequence[Example], policy: PolicyConfig) -> Batch:
    """The batch of these examples, in rows as `policy` says: the ranks have it, with reference logprobs if the loss wants them."""
    config, deadline_s = run.config, run.config.deadlines.train_s
    batch = put_batch(batch_examples(examples, policy, dp_size=config.data_parallel_size, cost=run.cost))
    run.policies.set_batch(batch)
    if config.keeps_reference:
        run.policies.call("compute_reference_logprobs", deadline_s=deadline_s)
    return batch


def update_policy(run: Run, examples: Sequence[Example]) -> dict[str, float]:
    """One optimizer step on the batch of these examples."""
    batch = give_batch(run, examples, run.config.policy)
    # Every rank returns the same metrics.
    metrics = cast(dict[str, float], run.policies.call("train_step", deadline_s=run.config.deadlines.train_s)[0])
    run.saver.poll()
    return batch.metrics | metrics


def validate(run: Run, state: RunState) -> dict[str, float]:
    """The loss over held-out examples and what belongs to it, in all tokens that are learned (sft) or all pairs, under NeMo RL's names."""
    config, training, held_out = run.config, run.config.training, run.data.validation
    assert not isinstance(training, GrpoConfig), "this loop is of the other algorithms"
    batches = [
        held_out[first : first + training.val_global_batch_size] for first in range(0, len(held_out), training.val_global_batch_size)
    ]
    parts: list[tuple[float, dict[str, float]]] = []
    for examples in batches[: training.val_batches] if training.val_batches > 0 else batches:
        batch = give_batch(run, examples, as_in_validation(config.policy, training.val_micro_batch_size))
        metrics = cast(dict[str, float], run.policies.call("evaluate", deadline_s=config.deadlines.train_s)[0])
        parts.append((len(examples) if config.learns_pairs else batch.num_valid_tokens, metrics))
    if not parts:
        return {}
    means = weighted_means(parts)
    if not config.learns_pairs:
        means = {"val_loss": means["loss"], "perplexity": perplexity(means["loss"])}
    logger.info("[Validate] step %d: %s", state.step, ", ".join(f"{name}={value:.4f}" for name, value in means.items()))
    prefix = "val/validation-default_" if config.learns_pairs else "val/"
    return {f"{prefix}{name}": value for name, value in means.items()}


def weighted_means(parts: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """Mean of each metric over parts of these weights, one part at least."""
    total = sum(weight for weight, _ in parts)
    return {name: sum(weight * metrics[name] for weight, metrics in parts) / total for name in parts[0][1]}


def resume(run: Run, checkpoint: Checkpoint | None) -> RunState:
    """Where the run goes on: at its checkpoint, whose weights and optimizer state are loaded, or at the start."""
    deadlines, state = run.config.deadlines, RunState()
    if checkpoint is not None:
        logger.info("Resuming from %s (step %d of %d)", checkpoint.folder, checkpoint.step, run.last_step)
        run.policies.call("load_checkpoint", checkpoint.weights, deadline_s=deadlines.checkpoint_s)
        state = checkpoint.state()
    run.policies.call("enter", "train", deadline_s=deadlines.train_s)
    return state


def preflight(config: RunConfig) -> SupervisedData:
    """Everything that can be known to be wrong before a process starts; returns the data, read and tokenised.

    The number of steps is known with the data: `max_num_steps` is what the epochs leave of it.

    Raises:
        ValueError: naming every key, file or row at fault, the rule, and the way out.
    """
    check_start(config)
    data = load_examples(config)
    training, batch_size = config.training, config.policy.train_global_batch_size
    num_steps = training.max_num_epochs * len(data.train) // batch_size
    if num_steps == 0:
        raise ValueError(
            f"policy.train_global_batch_size={batch_size}: {training.max_num_epochs} epochs of {len(data.train)} rows do not fill one batch"
            f"; lower it or raise {config.algorithm}.max_num_epochs"
        )
    training.max_num_steps = num_steps if training.max_num_steps < 0 else min(num_steps, training.max_num_steps)
    return data
