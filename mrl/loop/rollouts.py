# SPDX-License-Identifier: Apache-2.0
"""Training on rollouts (`algorithm: grpo` and `distillation`): batches, refits and validation from prompts, engines and
rewards.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from mrl.algo.advantages import train_sequences
from mrl.algo.distillation import sequences_to_teach
from mrl.algo.rewards import is_lone, without_lone
from mrl.cluster.tasks import in_worker
from mrl.config.model import with_value
from mrl.config.rules.data import gives_accuracy, is_agent
from mrl.config.schema.run import RunConfig
from mrl.config.sharing import describe_choice
from mrl.data.batch import make_batches
from mrl.data.order import num_steps_of
from mrl.data.prompts import PromptData, load_prompts, validation_sampling
from mrl.loop.learning import Critic
from mrl.loop.preflight import check_start
from mrl.loop.queue import Revive, RolloutQueue, open_queue
from mrl.loop.run import Budget, Run, Step, Stopped, Training, is_save_step
from mrl.loop.saving import open_saver
from mrl.loop.signal_watch import NoSignal, SignalWatch
from mrl.metrics import NO_SIGNAL_IN_A_ROW, NUM_JUDGED, over_judged, shown_components
from mrl.store.about import about_refit
from mrl.store.identity import Identity, conditions_of, identity_of, with_template_date
from mrl.store.rollout_files import KEPT, KeptRollouts, drop_kept, sequences_of, with_payloads
from mrl.store.run_folder import RunFolder
from mrl.store.summary import Clock, rollout_metrics, validation_metrics
from mrl.types import Batch, Prompt, RolloutGroup, RunState, TrainSequence

if TYPE_CHECKING:
    from mrl.cluster.rollouts import RolloutCollector
    from mrl.cluster.session import RolloutSession

logger = logging.getLogger(__name__)

# Validation draws the same random numbers every time, so that its curve moves by the weights alone.
VALIDATION_EPOCH = -1
# The event loop answers another thread at once, and engines within less, unless the run ends.
ASK_S = 30.0


@dataclass
class RolloutSupplier:
    """Samples and scores rollouts, and moves weights into the engines that sample them."""

    config: RunConfig
    data: PromptData
    folder: RunFolder
    session: RolloutSession
    queue: RolloutQueue
    watch: SignalWatch
    kept: KeptRollouts | None = None
    """Rollouts that outlive the attempt."""
    has_told_sharing: bool = False

    async def prove_weights(self) -> None:
        refit = self.session.refit
        report = await refit.zero()
        about = about_refit(refit.schedule, verified_bytes=report.verified_bytes, padding_bytes=report.padding_bytes)
        await in_worker(self.folder.note_refit, about)
        if self.config.policy.generation.compare_at_start and len(self.data.train):
            from mrl.cluster.agreement import compare_at_start  # with Ray

            figures = await compare_at_start(self.session, self.data.train)
            logger.info("Trainer and engine compute the same model: %s", figures)

    async def take(self, state: RunState, step: Step) -> list[Batch]:
        """Scored rollouts, with advantages, in packed batches."""
        groups = await self.sample(state, step)
        # Teachers on the policy's ranks work in a phase of their own.
        work = self.session.on_ranks if self.config.teachers else in_worker
        return await work(lambda: self.pack(self.sequences(groups, step), step))

    async def sample(self, state: RunState, step: Step) -> list[RolloutGroup]:
        """The judged groups of the step after `state`."""
        self.watch.num_steps = int(state.metrics.get(NO_SIGNAL_IN_A_ROW, 0))
        supplied = await self.queue.take(state, step.clock)
        if supplied is None:
            reason = f"All prompts are consumed (grpo.max_num_epochs={self.config.rollouts.max_num_epochs})"
            logger.info("%s", reason)
            raise Stopped(reason)
        step.groups, step.trained, step.dropped = supplied.groups, supplied.trained, supplied.dropped
        if self.config.data.difficulty_pools:
            step.rewards = supplied.rewards
        engines = self.session.engines
        step.metrics |= supplied.metrics | self.session.rewards.take_metrics()
        step.metrics |= rollout_metrics(
            supplied.sampled,
            self.config.rollouts,
            seconds=supplied.seconds,
            num_drawn=supplied.num_drawn,
            num_engine_restarts=engines.book.num_restarts,
        )
        if engines.is_elastic:
            step.metrics["rollout/num_engines"] = float(len(engines.serving))
        if self.config.env.has_agents:
            # Dynamic sampling has left out those that it looked at.
            agents = self._compared_agents(supplied.sampled)
            num_lone = sum(group.prompt.env_name in agents and is_lone(group) for group in supplied.sampled)
            step.metrics["rollout/dropped_agent_groups"] = float(num_lone)
        return supplied.groups

    def sequences(self, groups: Sequence[RolloutGroup], step: Step) -> list[TrainSequence]:
        """The rollouts of groups as sequences to train on, with the advantages of the config's estimator."""
        if self.config.algorithm == "distillation":
            return sequences_to_teach(groups)
        groups = without_lone(groups, self._compared_agents(groups))
        sequences, metrics = train_sequences(
            groups, self.config.rollouts, compares_rollouts=self.config.compares_rollouts
        )
        step.metrics |= metrics
        return sequences

    def _compared_agents(self, groups: Sequence[RolloutGroup]) -> set[str]:
        names = {group.prompt.env_name for group in groups}
        return {name for name in names if self.config.compares_rollouts and is_agent(name, self.config.env)}

    def check_groups(self, sequences: Sequence[TrainSequence], step: Step) -> None:
        """Raises ValueError for a sequence of none of the step's groups, if there are teachers."""
        known = {rollout.key for group in step.groups for rollout in group.rollouts}
        missing = [sequence.rollout.request_id for sequence in sequences if sequence.rollout.key not in known]
        if self.config.teachers and missing:
            raise ValueError(
                f"rollout {missing[0]} is of none of the step's groups, of which alone the teachers are known"
            )

    def pack(self, sequences: Sequence[TrainSequence], step: Step) -> list[Batch]:
        """Packs the sequences of a step, with teacher outputs, into batches. Stopped: too many steps have no signal."""
        config = self.config
        if not step.batches and config.algorithm != "distillation" and (config.compares_rollouts or config.has_critic):
            problem = self.watch.note(step.number, step.groups, sequences)
            step.metrics[NO_SIGNAL_IN_A_ROW] = float(self.watch.num_steps)
            if problem:
                raise Stopped from NoSignal(problem)
        if config.teachers:
            prompts = {rollout.key: group.prompt for group in step.groups for rollout in group.rollouts}
            with step.clock.phase("teacher"):
                sequences = self.session.with_teacher_outputs(
                    sequences, [prompts[sequence.rollout.key] for sequence in sequences]
                )
        batches = make_batches(sequences, config)
        if batches and not self.has_told_sharing:
            self.has_told_sharing = True
            if text := describe_choice(config, shares=batches[0].shares_prefixes):
                logger.info("%s", text)
        return batches

    async def refit(self, state: RunState) -> dict[str, float]:
        try:
            metrics = await self.queue.pause()
        except Stopped:
            # The run saves this step and ends: agents may need longer than it has, and nothing samples again.
            await in_worker(self.session.skip_refit)
            return {}
        # False at a resume: the engines hold the model folder's weights.
        is_current = state.weight_version == self.session.refit.weight_version
        if is_current and not self.config.trains_policy(state.step) and self.config.num_dedicated_slots > 0:
            # A critic was trained alone. Colocated engines gave their memory away.
            await in_worker(self.session.skip_refit)
        else:
            if not self.config.trains_policy(state.step):
                # Otherwise the critic has left when the policy began to train.
                await in_worker(self.session.make_room)
            report = await self.session.refit.run()
            state.weight_version = report.weight_version
            metrics |= report.metrics()
        if self.kept is not None:
            await in_worker(self.kept.follow, state, self.folder.ledger.state)
        await self.queue.go_on(state)
        return metrics

    async def validate(self, state: RunState) -> dict[str, float]:
        """Accuracy on the held-out prompts."""
        asked = [(VALIDATION_EPOCH, prompt) for prompt in self.data.validation]
        if not asked:
            return {}
        sampling = validation_sampling(self.data.sampling, self.config.policy.generation)
        num_generations = self.config.rollouts.val_num_generations_per_prompt
        try:
            groups = await self.queue.sample(
                asked, sampling, num_generations=num_generations, weight_version=state.weight_version, clock=Clock()
            )
        except Stopped:
            return {}
        await in_worker(self.folder.log_samples, state.step, "validation", groups)
        # By who judges, not by the rewards of a step: one name for the whole run.
        is_accuracy = all(gives_accuracy(group.prompt.env_name, self.config.env) for group in groups)
        metrics = validation_metrics(groups, is_accuracy=is_accuracy)
        what = "accuracy" if is_accuracy else "reward"
        mean = f"{what} {metrics.get('val/accuracy', 0.0):.3f} over {len(groups)} prompts"
        text = over_judged(mean, metrics[f"val/{NUM_JUDGED}"], metrics["val/num_samples"])
        logger.info("[Validate] step %d: %s%s", state.step, text, shown_components(metrics, "val"))
        self.folder.checkpoints.check_measured(state.step, metrics)
        return metrics


@asynccontextmanager
async def open_kept(
    config: RunConfig, folder: RunFolder, identity: Identity, collector: RolloutCollector, *, last_step: int
) -> AsyncIterator[KeptRollouts | None]:
    """Keeps a run's rollouts in the block; None where checkpointing.keep_rollouts_gb=0, or nothing is saved."""
    section = config.checkpointing
    if not section.enabled or not section.keep_rollouts_gb:
        drop_kept(folder.path / KEPT)
        yield None
        return
    from mrl.cluster.payload import pull_unless

    is_over = threading.Event()
    kept = KeptRollouts(
        folder.path / KEPT,
        conditions_of(config, identity),
        lag=config.rollouts.max_lag_steps,
        limit_bytes=section.keep_rollouts_gb * 1e9,
        unfinished_s=section.keep_unfinished_s,
        saves=lambda step: is_save_step(section, step) or step == last_step,
        pull=partial(pull_unless, is_over),
        check_owner=folder.check_owner,
    )

    def note(group: RolloutGroup) -> None:
        if group.epoch >= 0:  # validation has another
            kept.note(group)

    collector.on_whole = note
    try:
        yield kept
        await in_worker(kept.write_last)
    finally:
        is_over.set()
        await in_worker(kept.close)


def reviver(kept: KeptRollouts | None) -> Revive:
    """Gives the groups that an earlier attempt has kept, each as if this one had sampled and judged as much of it."""

    def revive(epoch: int, prompt: Prompt) -> RolloutGroup | None:
        group = kept.take(epoch, prompt) if kept is not None else None
        if group is None:
            return None
        from mrl.cluster.payload import put_items

        return with_payloads([group], put_items([one.pulled for one in sequences_of([group])]))[0]

    return revive


def prepare(config: RunConfig) -> Training[RolloutSupplier]:
    """Checks config, model and data before any process starts; returns the ready run. ValueError: wrong input."""
    # With Ray, which takes a second.
    from mrl.cluster.session import start_session

    config = with_template_date(check_start(config))
    data, grpo = load_prompts(config), config.rollouts
    # Only the data tell how many steps an epoch has.
    num_steps = min(grpo.max_num_steps, num_steps_of(config, len(data.train)))
    config = with_value(config, f"{'grpo' if config.has_critic else config.algorithm}.max_num_steps", num_steps)

    identity = identity_of(config, data.train, data.left_out)

    @asynccontextmanager
    async def open_run(folder: RunFolder, budget: Budget) -> AsyncIterator[Run[RolloutSupplier]]:
        async with (
            start_session(config, pad_token_id=data.pad_token_id, log_folder=folder.log_folder / "actors") as session,
            open_kept(config, folder, identity, session.collector, last_step=num_steps) as kept,
            open_saver(config, folder, session, kept) as saver,
        ):
            collector, ledger, loop = session.collector, folder.ledger, asyncio.get_running_loop()
            collector.tasks.checks.append(budget.check)
            queue = open_queue(config, data, collector, ledger, last_step=num_steps, revive=reviver(kept))
            if kept is not None:

                def unfinished(is_last: bool) -> list[RolloutGroup]:
                    """Asks from the thread that keeps rollouts."""
                    asked = asyncio.run_coroutine_threadsafe(collector.unfinished(is_last), loop)
                    try:
                        return asked.result(ASK_S)
                    except (TimeoutError, CancelledError) as error:  # code of a loop of one's own may block the loop
                        asked.cancel()
                        raise RuntimeError(f"the driver does not answer within {ASK_S:g} s") from error

                kept.watch(queue.num_unjudged, unfinished)
            supplier = RolloutSupplier(
                config, data, folder, session, queue, SignalWatch(grpo.max_steps_without_signal), kept
            )
            critic = Critic(config, session) if config.has_critic else None
            yield Run(config, folder, supplier, saver, budget, num_steps, critic)

    return Training(config, num_steps, data.left_out, identity, open_run)
