"""Training on rollouts (`algorithm: grpo`): what the loop takes from prompts, engines and rewards."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mrl.algo.signals import train_sequences
from mrl.capacity.phases import Phase
from mrl.cluster.session import Session, start_session
from mrl.config.schema.run import RunConfig
from mrl.data.batch import make_batches
from mrl.data.prompts import PromptData, load_prompts, validation_sampling
from mrl.data.reading import LeftOut
from mrl.loop.budget import Budget, Stopped
from mrl.loop.preflight import check_start
from mrl.loop.rollout_queue import RolloutQueue, open_queue
from mrl.loop.run import Run, StepData
from mrl.loop.saving import open_saver
from mrl.store.clock import Clock
from mrl.store.run_folder import RunFolder
from mrl.store.summary import rollout_metrics, validation_metrics
from mrl.types import RunState

logger = logging.getLogger(__name__)

# Validation draws the same random numbers every time, so that its curve moves by the weights alone.
VALIDATION_EPOCH = -1


@dataclass
class RolloutSupplier:
    """Samples and scores rollouts, and moves weights into the engines that sample them."""

    config: RunConfig
    data: PromptData
    folder: RunFolder
    session: Session
    queue: RolloutQueue

    def start(self) -> None:
        """Refit zero."""
        self.session.refit.zero()

    def take(self, state: RunState, clock: Clock) -> StepData | None:
        """The scored rollouts of the step after `state`, with advantages, in packed batches; None if the prompts are used up."""
        supplied = self.queue.take(state, clock)
        if supplied is None:
            logger.info("All prompts of %d epochs are consumed", self.config.grpo.max_num_epochs)
            return None
        grpo, restarts = self.config.grpo, self.session.engines.num_restarts
        metrics = supplied.metrics | rollout_metrics(supplied.sampled, grpo, seconds=supplied.seconds, num_engine_restarts=restarts)
        sequences, signals = train_sequences(supplied.groups, grpo)
        batches = make_batches(sequences, self.config)
        return StepData(batches, supplied.trained, supplied.dropped, metrics | signals, supplied.groups, sequences)

    def enter(self, phase: Phase) -> None:
        """Brings the policy and colocated engines into a phase."""
        self.session.enter(phase, deadline_s=self.config.deadlines.train_s)

    def refit(self, state: RunState) -> dict[str, float]:
        """Moves the policy's weights into every engine and verifies them there."""
        paused = self.queue.pause()
        report = self.session.refit.run()
        state.weight_version = report.weight_version
        self.queue.go_on(state)
        return report.metrics() | paused

    def validate(self, state: RunState) -> dict[str, float]:
        """Accuracy on the held-out prompts."""
        asked = [(VALIDATION_EPOCH, prompt) for prompt in self.data.validation]
        if not asked:
            return {}
        sampling = validation_sampling(self.data.sampling, self.config.policy.generation)
        num_generations = self.config.grpo.val_num_generations_per_prompt
        try:
            groups = self.queue.sample(asked, sampling, num_generations=num_generations, weight_version=state.weight_version, clock=Clock())
        except Stopped:
            return {}
        self.folder.log_samples(state.step, "validation", groups)
        metrics = validation_metrics(groups)
        logger.info("[Validate] step %d: accuracy %.3f over %d prompts", state.step, metrics["val/accuracy"], len(groups))
        return metrics


@dataclass(frozen=True)
class RolloutTraining:
    """A run on rollouts that may start: its config and data are checked."""

    config: RunConfig
    data: PromptData

    @property
    def num_steps(self) -> int:
        """Steps of the whole run, those before a resume included."""
        grpo = self.config.grpo
        return min(grpo.max_num_steps, grpo.max_num_epochs * len(self.data.train) // grpo.num_prompts_per_step)

    @property
    def left_out(self) -> list[LeftOut]:
        """Rows of the data that are left out."""
        return self.data.left_out

    @contextmanager
    def open(self, folder: RunFolder, budget: Budget) -> Iterator[Run[RolloutSupplier]]:
        """The run with all its actors, inside the `with` block, from where its ledger stands."""
        config, data = self.config, self.data
        with (
            start_session(config, pad_token_id=data.pad_token_id, log_folder=folder.log_folder / "actors") as session,
            open_saver(config, folder, session.policies) as saver,
        ):

            def on_wait() -> None:
                saver.poll()
                budget.check()

            queue = open_queue(config, data, session.collector, folder.ledger, last_step=self.num_steps, on_wait=on_wait)
            supplier = RolloutSupplier(config, data, folder, session, queue)
            yield Run(config, folder, session.policies, supplier, saver, budget, self.num_steps)


def preflight(config: RunConfig) -> PromptData:
    """Checks everything that can be known to be wrong before a process starts; returns the data, read and tokenised.

    Raises:
        ValueError: naming every key, file or row at fault, the rule, and the way out.
    """
    check_start(config)
    return load_prompts(config)
