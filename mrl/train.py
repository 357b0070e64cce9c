# SPDX-License-Identifier: Apache-2.0
"""`python -m mrl.train CONFIG [a.b=c ...]`: trains a model. This file is the training loop, and nothing else.

prompts -> rollouts (vLLM) -> rewards -> advantages -> packed batches -> old and reference logprobs -> optimizer steps
        -> refit of the engines, verified -> validation -> checkpoint -> metrics

SFT, DPO and reward models run the same loop on examples in place of rollouts. In PPO a critic judges the batches first, and learns, too; in
distillation what teachers say of the tokens stands in place of advantages, or makes them.
"""

from __future__ import annotations

import sys

from conversion.files.limits import flush_console, limit_console
from mrl.signals import LISTENER

if __name__ == "__main__" and "--check" not in sys.argv:
    LISTENER.listen()  # before libraries start threads, which would not block what this blocks
    limit_console()
    LISTENER.cleanups.append(flush_console)

from mrl import check
from mrl.config.secrets import run_entry

if __name__ == "__main__" and check.OPTION in sys.argv:
    # Before the imports below, which take longer than a check and need libraries that a login node may lack.
    sys.exit(run_entry(check.main))

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mrl.cluster.verbs import PolicyVerbs
from mrl.loop.run import Step
from mrl.metrics import metrics_of_updates
from mrl.store.summary import performance_metrics, warn_of_bounded_ratios
from mrl.types import Batch

if TYPE_CHECKING:
    from mrl.cluster.session import Session
    from mrl.config.schema.run import RunConfig
    from mrl.loop.critic import Critic
    from mrl.loop.run import Run, Supplier
    from mrl.store.checkpoints import Checkpoint
    from mrl.types import RunState


def train(run: Run[Supplier], checkpoint: Checkpoint | None) -> RunState:
    """Trains from `checkpoint` or the starting weights until the run ends; returns its progress."""
    state = run.begin(checkpoint)
    with run.saved(state):
        while not run.is_over:
            train_step(run, state)
    return state


def train_step(run: Run[Supplier], state: RunState) -> None:
    """One step; advances `state`. `mrl.api` gives a loop of one's own the same parts."""
    step = Step.after(state)
    batches = run.supplier.take(state, step)
    update_policy(run, step, batches)
    refit_engines(run, state, step)
    end_step(run, state, step)


def update_policy(run: Run[Supplier], step: Step, batches: Sequence[Batch]) -> dict[str, float]:
    """Computes the values and logprobs that the losses need, then makes an optimizer step on each batch; returns their metrics."""
    run.report_start()
    with step.clock.phase("train"), run.profiled(step.number), run.recorded(step.number, batches) as metrics:
        metrics |= learn(run.session, run.config, batches, step.number, run.critic)
    warn_of_bounded_ratios(metrics)
    step.note_update(batches, metrics, run.token_samples(batches))
    return metrics


def learn(session: Session, config: RunConfig, batches: Sequence[Batch], step: int, critic: Critic | None = None) -> dict[str, float]:
    """Makes the ranks compute logprobs, then take an optimizer step on each batch of `step`; returns the metrics."""
    policies = session.policies
    judged = critic.judge(batches) if critic is not None else None
    session.enter("logprob")
    policies.set_batches(batches)
    if config.needs_old_logprobs:
        policies.call(PolicyVerbs.compute_old_logprobs)
    if config.keeps_reference:
        policies.call(PolicyVerbs.compute_reference_logprobs)
    metrics = metrics_of_updates([batch.metrics for batch in batches])
    if critic is not None and judged is not None:
        metrics |= critic.learn(judged, batches)
    if config.trains_policy(step):
        session.enter("train")
        updates = [policies.call(PolicyVerbs.train_step, index)[0] for _ in range(config.num_passes) for index in range(len(batches))]
        metrics |= metrics_of_updates(updates[-len(batches) :])
    metrics["train/num_logprob_passes"] = float(config.needs_old_logprobs + config.keeps_reference)
    return metrics


def refit_engines(run: Run[Supplier], state: RunState, step: Step) -> None:
    """Counts the step as trained, and has the engines sample from the new weights, once checksums over all bytes agree."""
    run.folder.ledger.train(step.number, step.trained, step.dropped)
    state.step, state.metrics = step.number, step.metrics
    if run.config.has_engines:
        with step.clock.phase("refit"):
            step.metrics |= run.supplier.refit(state)


def end_step(run: Run[Supplier], state: RunState, step: Step) -> None:
    """Validates and saves if that is due, decides whether another step follows, and logs this one."""
    if run.is_validation_due(step.number):
        with step.clock.phase("validation"):
            step.metrics |= run.supplier.validate(state)
    run.folder.print_header(step.number, run.last_step)
    run.budget.count_step()
    run.decide_end(step.number, step.metrics)
    if run.is_save_due(step.number):
        with step.clock.phase("checkpoint"):
            run.saver.begin(state, waits=run.is_over)
    step.metrics |= step.clock.metrics() | run.saver.take_metrics()
    if step.batches:
        step.metrics |= performance_metrics(run.config, step.batches, step.metrics, device=run.session.policies.device)
    run.folder.log_step(step.number, step.metrics, step.groups, step.sequences, step.tokens)


if __name__ == "__main__":
    from mrl.loop.main import main
    from mrl.store.loggers.thread import exit_with

    exit_with(lambda: main(train))
