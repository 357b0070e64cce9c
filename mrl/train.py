"""`python -m mrl.train CONFIG [a.b=c ...]`: GRPO, from prompts to updated weights. This file is the loop; all else is a stage of it.

prompts -> rollouts (vLLM) -> rewards -> advantages -> packed batch -> old/reference logprobs -> train step
        -> settle, reshard into vLLM, verify -> metrics, ledger, checkpoint

SFT, DPO and reward models run the same loop on examples in place of rollouts.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from mrl.loop.budget import Stopped
from mrl.store.clock import Clock
from mrl.store.summary import is_good_enough, metrics_of_updates, warn_of_bounded_ratios
from mrl.types import Batch, RunState

if TYPE_CHECKING:
    from mrl.loop.run import Run, Supplier
    from mrl.store.checkpoints import Checkpoint

logger = logging.getLogger(__name__)


def train(run: Run[Supplier], checkpoint: Checkpoint | None) -> RunState:
    """Trains from `checkpoint`, or from the starting weights, to the last step, or until the run has to end; returns where it stands."""
    state = resume(run, checkpoint)
    if state.step == 0 and run.config.training.val_at_start and (metrics := run.supplier.validate(state)):
        run.folder.log_metrics(0, metrics)
        run.is_over = is_good_enough(run.config.grpo, metrics)
    run.is_over |= run.budget.is_over
    try:
        while state.step < run.last_step and not run.is_over:
            train_step(run, state)
    except Stopped:
        end_early(run, state)
    return state


def train_step(run: Run[Supplier], state: RunState) -> None:
    """One step; `state` is advanced."""
    step, clock = state.step + 1, Clock()

    data = run.supplier.take(state, clock)
    if data is None:
        return end_early(run, state)
    with clock.phase("train"):
        metrics = data.metrics | update_policy(run, data.batches)
    run.folder.ledger.train(step, data.trained, data.dropped)
    state.step = step

    if run.config.has_engines:
        with clock.phase("refit"):
            metrics |= run.supplier.refit(state)
    if run.is_validation_due(step):
        with clock.phase("validation"):
            metrics |= run.supplier.validate(state)
    state.metrics = metrics

    run.folder.print_header(step, run.last_step)
    run.budget.count_step()
    run.is_over = step == run.last_step or run.budget.is_over or is_good_enough(run.config.grpo, metrics)
    if run.is_save_due(step):
        with clock.phase("checkpoint"):
            save_checkpoint(run, state)
    metrics |= clock.metrics() | run.saver.take_metrics()
    run.folder.log_step(step, metrics, data.groups, data.sequences)


def update_policy(run: Run[Supplier], batches: Sequence[Batch]) -> dict[str, float]:
    """Old and reference logprobs as the loss needs them, then an optimizer step on each batch; the ranks pull the payload themselves."""
    policies, deadline_s = run.policies, run.config.deadlines.train_s
    is_needed = {
        "compute_old_logprobs": run.config.needs_old_logprobs,
        "compute_reference_logprobs": run.config.keeps_reference,
    }
    run.supplier.enter("logprob")
    for index, batch in enumerate(batches):
        policies.set_batch(batch, is_further=index > 0)
    for logprob_pass in (name for name, needed in is_needed.items() if needed):
        policies.call(logprob_pass, deadline_s=deadline_s)
    run.supplier.enter("train")
    updates = [cast(dict[str, float], policies.call("train_step", deadline_s=deadline_s)[0]) for _ in batches]
    run.saver.poll()
    metrics = metrics_of_updates([batch.metrics for batch in batches]) | metrics_of_updates(updates)
    warn_of_bounded_ratios(metrics)
    return metrics | {"train/num_logprob_passes": float(sum(is_needed.values()))}


def save_checkpoint(run: Run[Supplier], state: RunState) -> None:
    """Begins `step_N`, which is published when every byte is on disk. If there is a next step, its rollouts do not wait for that."""
    run.saver.begin(state)
    if run.is_over:
        run.saver.finish()


def end_early(run: Run[Supplier], state: RunState) -> None:
    """Ends the run with `state`, which is saved unless it has been."""
    run.is_over = True
    run.saver.finish()
    newest = run.folder.checkpoints.newest()
    if run.config.checkpointing.enabled and state.step > (newest.step if newest else 0):
        save_checkpoint(run, state)


def resume(run: Run[Supplier], checkpoint: Checkpoint | None) -> RunState:
    """Where the run goes on: refit zero on the starting weights, then the checkpoint, if there is one, and a refit of its weights."""
    run.supplier.start()
    state = RunState() if checkpoint is None else checkpoint.state()
    if checkpoint is not None:
        logger.info("Resuming from %s (step %d of %d)", checkpoint.folder, checkpoint.step, run.last_step)
        run.policies.call("load_checkpoint", checkpoint.weights, deadline_s=run.config.deadlines.checkpoint_s)
    run.supplier.refit(state)
    return state


if __name__ == "__main__":
    from mrl import check

    if check.OPTION in sys.argv:
        # Before imports that take longer than a check and need libraries that a login node may lack.
        sys.exit(check.main())

    from mrl.loop.main import main
    from mrl.store.loggers.thread import exit_with

    exit_with(main)
