# SPDX-License-Identifier: Apache-2.0
"""`python -m mrl.train CONFIG [a.b=c ...]`: trains a model. This file is the training loop, and nothing else.

prompts -> rollouts (vLLM) -> rewards -> advantages -> packed batches -> old and reference logprobs -> optimizer steps
        -> refit of the engines, verified -> validation -> checkpoint -> metrics

SFT, DPO and reward models run the same loop on examples in place of rollouts. In PPO a critic judges the batches first, and learns, too; in
distillation what teachers say of the tokens stands in place of advantages, or makes them.
"""

from __future__ import annotations

import sys

from conversion.files.limits import limit_console
from mrl.signals import LISTENER

if __name__ == "__main__" and "--check" not in sys.argv:
    LISTENER.listen()  # before libraries start threads, which would not block what this blocks
    limit_console()

from mrl import check, startup
from mrl.config.secrets import run_entry

if __name__ == "__main__" and check.OPTION in sys.argv:
    # Before the imports below, which take longer than a check and need libraries that a login node may lack.
    sys.exit(run_entry(check.main))

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mrl.cluster.verbs import PolicyVerbs
from mrl.loop.run import Stopped
from mrl.metrics import metrics_of_updates
from mrl.store.summary import Clock, performance_metrics, warn_of_bounded_ratios
from mrl.types import Batch

if TYPE_CHECKING:
    from mrl.loop.run import Run, Supplier
    from mrl.store.checkpoints import Checkpoint
    from mrl.types import RunState


def train(run: Run[Supplier], checkpoint: Checkpoint | None) -> RunState:
    """Trains from `checkpoint`, or from the starting weights, to the last step or until the run has to end; returns where it stands."""
    state = resume(run, checkpoint)
    run.budget.begin(saves=run.config.checkpointing.enabled)
    metrics = run.supplier.validate(state) if state.step == 0 and run.config.training.val_at_start else {}
    if metrics:
        run.folder.log_metrics(0, metrics)
        startup.lap("validation")
    run.decide_end(state.step, metrics)
    try:
        while not run.is_over:
            train_step(run, state)
    except Stopped as end:
        run.saver.save_last(state)
        if end.__cause__ is not None:
            raise end.__cause__ from None
    return state


def resume(run: Run[Supplier], checkpoint: Checkpoint | None) -> RunState:
    """Proves that engines and policy hold the same starting weights; loads the checkpoint, if there is a whole one; refits the engines."""
    run.supplier.prove_weights()
    startup.lap("refit_zero")
    state = run.saver.load(checkpoint, last_step=run.last_step)
    startup.lap("checkpoint")
    run.supplier.refit(state)
    startup.lap("refit")
    return state


def train_step(run: Run[Supplier], state: RunState) -> None:
    """One step; advances `state`."""
    step, clock = state.step + 1, Clock(state.step + 1)

    data = run.supplier.take(state, clock)
    run.report_start()
    with clock.phase("train"), run.profiled(step):
        metrics = data.metrics | update_policy(run, step, data.batches)
    run.folder.ledger.train(step, data.trained, data.dropped)
    state.step = step
    tokens = run.token_samples(data)

    if run.config.has_engines:
        with clock.phase("refit"):
            metrics |= run.supplier.refit(state)
    if run.is_validation_due(step):
        with clock.phase("validation"):
            metrics |= run.supplier.validate(state)
    state.metrics = metrics

    run.folder.print_header(step, run.last_step)
    run.budget.count_step()
    run.decide_end(step, metrics)
    if run.is_save_due(step):
        with clock.phase("checkpoint"):
            # The rollouts of the next step do not wait until the checkpoint is written.
            run.saver.begin(state, waits=run.is_over)
    metrics |= clock.metrics() | run.saver.take_metrics()
    metrics |= performance_metrics(run.config, data.batches, metrics, device=run.session.policies.device)
    run.folder.log_step(step, metrics, data.groups, data.sequences, tokens)


def update_policy(run: Run[Supplier], step: int, batches: Sequence[Batch]) -> dict[str, float]:
    """Computes the values and logprobs that the losses need, then makes an optimizer step on each batch; returns their metrics."""
    policies, config, critic = run.session.policies, run.config, run.critic
    judged = critic.judge(batches) if critic is not None else None
    run.session.enter("logprob")
    policies.set_batches(batches)
    if config.needs_old_logprobs:
        policies.call(PolicyVerbs.compute_old_logprobs)
    if config.keeps_reference:
        policies.call(PolicyVerbs.compute_reference_logprobs)
    metrics = metrics_of_updates([batch.metrics for batch in batches])
    if critic is not None and judged is not None:
        metrics |= critic.learn(judged, batches)
    if config.trains_policy(step):
        run.session.enter("train")
        updates = [policies.call(PolicyVerbs.train_step, index)[0] for _ in range(config.num_passes) for index in range(len(batches))]
        # Of the last pass, as in NeMo RL.
        metrics |= metrics_of_updates(updates[-len(batches) :])
    run.saver.poll()
    warn_of_bounded_ratios(metrics)
    return metrics | {"train/num_logprob_passes": float(config.needs_old_logprobs + config.keeps_reference)}


if __name__ == "__main__":
    from mrl.loop.main import main
    from mrl.store.loggers.thread import exit_with

    exit_with(lambda: main(train))
