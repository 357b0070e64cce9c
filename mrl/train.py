"""`python -m mrl.train CONFIG [a.b=c ...]`: GRPO, from prompts to updated weights. This file is the loop; all else is a stage of it.

prompts -> rollouts (vLLM) -> rewards -> advantages -> packed batch -> old/reference logprobs -> train step
        -> settle, reshard into vLLM, verify -> metrics, ledger, checkpoint
"""

from __future__ import annotations

import sys

from mrl import check

if __name__ == "__main__" and check.OPTION in sys.argv:
    # Before the imports below, which take longer than a check and need libraries that a login node may lack.
    sys.exit(check.main())

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from mrl import env, supervised
from mrl.algo.signals import train_sequences
from mrl.cluster.head import NoCluster
from mrl.cluster.monitor import watch_hosts
from mrl.cluster.session import Session, start_session
from mrl.cluster.waiting import ActorLost, DeadlineExceeded
from mrl.config.files import find_config
from mrl.config.load import load_run
from mrl.config.schema.run import RunConfig
from mrl.data.batch import make_batches
from mrl.data.prompts import PromptData, load_prompts
from mrl.data.reading import write_quarantine
from mrl.saving import CheckpointSaver, open_saver
from mrl.schedule import is_due, is_save_due
from mrl.start import check_start
from mrl.store.checkpoints import Checkpoint
from mrl.store.clock import Budget, Clock, Stopped
from mrl.store.ownership import FolderLost
from mrl.store.run_folder import RunFolder
from mrl.store.summary import is_good_enough, metrics_of_updates, rollout_metrics, validation_metrics, warn_of_bounded_ratios
from mrl.supply import NoSignal, Supply, open_supply, validation_sampling
from mrl.types import Batch, RunState

logger = logging.getLogger(__name__)

# Validation draws the same random numbers every time, so that its curve moves by the weights alone.
VALIDATION_EPOCH = -1
# EX_TEMPFAIL of sysexits.h, by which launchers know that the job is to be queued again.
ENDED_EARLY = 75


@dataclass
class Run:
    """What one run works with."""

    config: RunConfig
    data: PromptData
    folder: RunFolder
    session: Session
    saver: CheckpointSaver
    supply: Supply
    budget: Budget
    last_step: int
    is_over: bool = False
    """Whether no further step is made."""


def train(config: RunConfig, data: PromptData, folder: RunFolder, budget: Budget) -> bool:
    """Runs the configured steps from where the run folder stands. False if the budget was over first: the same command goes on."""
    write_quarantine(data.findings, folder.path / "quarantine")
    checkpoint = folder.newest_checkpoint()
    last_step = num_steps(config, data)
    if checkpoint is not None and (checkpoint.step >= last_step or is_good_enough(config.grpo, checkpoint.state().metrics)):
        logger.info("All is done by step %d of %d: %s", checkpoint.step, last_step, checkpoint.folder)
        return True
    with (
        start_session(config, pad_token_id=data.pad_token_id, log_folder=folder.log_folder / "actors") as session,
        open_saver(config, folder, session.policies) as saver,
        folder.open_loggers() as loggers,
        watch_hosts(config, loggers),
    ):
        run = open_run(config, data, folder, session, saver, budget)
        state = resume(run, checkpoint)
        if state.step == 0 and config.grpo.val_at_start:
            metrics = validate(run, state)
            folder.log_metrics(0, metrics)
            run.is_over = is_good_enough(config.grpo, metrics)
        run.is_over |= run.budget.is_over
        try:
            while state.step < run.last_step and not run.is_over:
                train_step(run, state)
        except Stopped:
            end_early(run, state)
    logger.info("Step %d of %d is done; report: %s", state.step, last_step, folder.path / "report.html")
    return state.step == last_step or not budget.is_over


def open_run(config: RunConfig, data: PromptData, folder: RunFolder, session: Session, saver: CheckpointSaver, budget: Budget) -> Run:
    """The run of a session, from where its ledger stands."""

    def on_wait() -> None:
        saver.poll()
        budget.check()

    last_step = num_steps(config, data)
    supply = open_supply(config, data, session.collector, folder.ledger, last_step=last_step, on_wait=on_wait)
    budget.begin()
    return Run(config, data, folder, session, saver, supply, budget, last_step)


def train_step(run: Run, state: RunState) -> None:
    """One step of the loop; `state` is advanced."""
    config, folder = run.config, run.folder
    step, clock = state.step + 1, Clock()

    supplied = run.supply.take(state, clock)
    if supplied is None:
        logger.info("All prompts of %d epochs are consumed", config.grpo.max_num_epochs)
        end_early(run, state)
        return
    groups, restarts = supplied.groups, run.session.engines.num_restarts
    metrics = supplied.metrics | rollout_metrics(supplied.sampled, config.grpo, seconds=supplied.seconds, num_engine_restarts=restarts)

    sequences, signals = train_sequences(groups, config.grpo)
    batches = make_batches(sequences, config)
    with clock.phase("train"):
        metrics |= signals | metrics_of_updates([batch.metrics for batch in batches]) | update_policy(run, batches)
    folder.ledger.train(step, supplied.trained, supplied.dropped)
    state.step = step

    with clock.phase("refit"):
        metrics |= refit(run, state)
    grpo, checkpointing = config.grpo, config.checkpointing
    if (step >= grpo.val_start_at and is_due(step, grpo.val_period)) or (grpo.val_at_end and step == run.last_step):
        with clock.phase("validation"):
            metrics |= validate(run, state)
    state.metrics = metrics
    folder.print_header(step, run.last_step)
    run.budget.count_step()
    run.is_over = step == run.last_step or run.budget.is_over or is_good_enough(grpo, metrics)
    if checkpointing.enabled and (run.is_over or is_save_due(step, checkpointing)):
        with clock.phase("checkpoint"):
            save_checkpoint(run, state, has_next=not run.is_over)
    metrics |= clock.metrics() | run.saver.take_metrics()
    folder.print_step(metrics)
    folder.log_samples(step, "train", groups, sequences)
    folder.log_metrics(step, metrics)


def update_policy(run: Run, batches: Sequence[Batch]) -> dict[str, float]:
    """Old and reference logprobs as the loss needs them, then an optimizer step on each batch; the ranks pull the payload themselves."""
    policies, deadline_s = run.session.policies, run.config.deadlines.train_s
    is_needed = {
        "compute_old_logprobs": run.config.needs_old_logprobs,
        "compute_reference_logprobs": run.config.keeps_reference,
    }
    run.session.enter("logprob", deadline_s=deadline_s)
    for index, batch in enumerate(batches):
        policies.set_batch(batch, is_further=index > 0)
    for logprob_pass in (name for name, needed in is_needed.items() if needed):
        policies.call(logprob_pass, deadline_s=deadline_s)
    run.session.enter("train", deadline_s=deadline_s)
    # Every rank returns the same metrics.
    updates = [cast(dict[str, float], policies.call("train_step", deadline_s=deadline_s)[0]) for _ in batches]
    metrics = metrics_of_updates(updates)
    warn_of_bounded_ratios(metrics)
    return metrics | {"train/num_logprob_passes": float(sum(is_needed.values()))}


def refit(run: Run, state: RunState) -> dict[str, float]:
    """Moves the policy's weights into every engine and verifies them there."""
    paused = run.supply.pause()
    report = run.session.refit.run()
    state.weight_version = report.weight_version
    run.supply.go_on(state)
    return report.metrics() | paused


def validate(run: Run, state: RunState) -> dict[str, float]:
    """Accuracy on the held-out prompts."""
    asked = [(VALIDATION_EPOCH, prompt) for prompt in run.data.validation]
    if not asked:
        return {}
    sampling = validation_sampling(run.data.sampling, run.config.policy.generation)
    num_generations = run.config.grpo.val_num_generations_per_prompt
    try:
        groups = run.supply.sample(asked, sampling, num_generations=num_generations, weight_version=state.weight_version, clock=Clock())
    except Stopped:
        return {}
    run.folder.log_samples(state.step, "validation", groups)
    metrics = validation_metrics(groups)
    logger.info("[Validate] step %d: accuracy %.3f over %d prompts", state.step, metrics["val/accuracy"], len(groups))
    return metrics


def save_checkpoint(run: Run, state: RunState, *, has_next: bool) -> None:
    """Begins `step_N`, which is published when every byte is on disk. If there is a next step, its rollouts do not wait for that."""
    run.saver.begin(state)
    if not has_next:
        run.saver.finish()


def end_early(run: Run, state: RunState) -> None:
    """Ends the run with `state`, which is saved unless it has been."""
    run.is_over = True
    run.saver.finish()
    newest = run.folder.checkpoints.newest()
    if run.config.checkpointing.enabled and state.step > (newest.step if newest else 0):
        save_checkpoint(run, state, has_next=False)


def resume(run: Run, checkpoint: Checkpoint | None) -> RunState:
    """Refit zero on the starting weights, then the checkpoint, if there is one, and a refit of its weights."""
    run.session.refit.zero()
    state = RunState() if checkpoint is None else checkpoint.state()
    if checkpoint is not None:
        logger.info("Resuming from %s (step %d of %d)", checkpoint.folder, checkpoint.step, run.last_step)
        run.session.policies.call("load_checkpoint", checkpoint.weights, deadline_s=run.config.deadlines.checkpoint_s)
    refit(run, state)
    return state


def num_steps(config: RunConfig, data: PromptData) -> int:
    """Steps of the whole run, those before a resume included."""
    grpo = config.grpo
    return min(grpo.max_num_steps, grpo.max_num_epochs * len(data.train) // grpo.num_prompts_per_step)


def preflight(config: RunConfig) -> PromptData:
    """Everything that can be known to be wrong before a process starts; returns the data, read and tokenised.

    Raises:
        ValueError: naming every key, file or row at fault, the rule, and the way out.
    """
    check_start(config)
    return load_prompts(config)


def loop_of(config: RunConfig) -> Callable[[RunFolder, Budget], bool]:
    """The loop of the configured algorithm over its data, read and checked: see `train`.

    Raises:
        ValueError: see `preflight`.
    """
    if config.algorithm == "grpo":
        prompts = preflight(config)
        return lambda folder, budget: train(config, prompts, folder, budget)
    examples = supervised.preflight(config)
    return lambda folder, budget: supervised.train(config, examples, folder, budget)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Exit code 0; 2 with one clear message if the input is at fault.

    1 if the attempt failed and 75 if it was asked to end before its last step: the same command resumes.
    """
    started = time.monotonic() - env.job_age_s()
    options = check.parse_arguments(arguments)
    if options.check:
        return check.check_run(options.name, options.words)
    try:
        logger.info("Config: %s", find_config(options.name))
        config, migration = load_run(options.name, options.words)
        migration.log()
        budget = Budget(config.checkpointing.must_save_by_s, started=started)
        budget.listen()
        loop = loop_of(config)
        folder = RunFolder(config)
        folder.open()
    except ValueError as error:
        logger.error("%s", error)
        return 2
    try:
        with folder:
            is_done = loop(folder, budget)
    except NoSignal as error:
        logger.error("%s", error)
        return 2
    except (ActorLost, DeadlineExceeded, FolderLost, NoCluster) as error:
        logger.error("The attempt ended: %s. Logs of the actors: %s. The same command resumes.", error, folder.log_folder / "actors")
        return 1
    if not is_done:
        logger.info("Ended before the last step; the same command resumes")
    return 0 if is_done else ENDED_EARLY


if __name__ == "__main__":
    sys.exit(main())
