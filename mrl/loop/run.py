# SPDX-License-Identifier: Apache-2.0
"""A run as the loop in `mrl.train` sees it, and when it validates, saves and ends."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, ParamSpec, Protocol, TypeVar

from mrl import startup
from mrl.cluster.tasks import in_worker
from mrl.cluster.verbs import PolicyVerbs
from mrl.config.texts import counted
from mrl.loop.signal_watch import MaskTally, NoSignal, reason_of_masks
from mrl.metrics import MASKED_IN_A_ROW, SKIPPED, SKIPPED_IN_A_ROW
from mrl.signals import LISTENER, Listener
from mrl.store.rollout_files import RECORDED, write_step
from mrl.store.samples import MAX_SEQUENCES, NUM_SAMPLES
from mrl.store.summary import Clock, is_good_enough, performance_metrics
from mrl.types import NOT_FINITE, PromptKey

if TYPE_CHECKING:
    from mrl.cluster.session import Session
    from mrl.config.schema.run import CheckpointingConfig, RunConfig
    from mrl.data.reading import LeftOut
    from mrl.loop.learning import Critic
    from mrl.loop.saving import CheckpointSaver
    from mrl.store.checkpoints import Checkpoint
    from mrl.store.identity import Identity
    from mrl.store.run_folder import RunFolder
    from mrl.types import Batch, RolloutGroup, RunState, TokenSamples, TrainSequence

logger = logging.getLogger(__name__)


class Stopped(EOFError):
    """The run ends before its last step, while nothing is being trained: a signal came, the prompts are used up, or its
    cause is raised once the last step is saved."""


def stop_of(error: BaseException) -> Stopped | None:
    """The Stopped that this error is, or that a task group has wrapped, and nothing else; else None."""
    if isinstance(error, BaseExceptionGroup):
        stops, others = error.split(Stopped)
        return stop_of(stops.exceptions[0]) if stops is not None and others is None else None
    return error if isinstance(error, Stopped) else None


class TooManySkipped(ValueError):
    """Too many steps in a row had updates that were not finite; the message says what to do."""


@dataclass
class Step:
    """A step under way, as its stages fill it."""

    number: int
    clock: Clock
    trained: Sequence[PromptKey] = ()
    dropped: Sequence[PromptKey] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Mean rewards of `trained` and `dropped`, by prompt id, where a curriculum chooses by them."""
    groups: Sequence[RolloutGroup] = ()
    batches: list[Batch] = field(default_factory=list)
    """Batches that the policy has learned from."""
    tokens: TokenSamples = field(default_factory=dict)
    """Some sequences of `batches` token by token, by request id."""
    metrics: dict[str, float] = field(default_factory=dict)
    num_skipped: float = 0.0
    """Steps in a row before this one with updates that were skipped."""
    num_masked: float = 0.0
    """Steps in a row before this one in which no rollout counted."""

    @classmethod
    def after(cls, state: RunState) -> Step:
        """The step after `state`, which begins now."""
        num_skipped, num_masked = (state.metrics.get(name, 0.0) for name in (SKIPPED_IN_A_ROW, MASKED_IN_A_ROW))
        return cls(state.step + 1, Clock(state.step + 1), num_skipped=num_skipped, num_masked=num_masked)

    @property
    def sequences(self) -> list[TrainSequence]:
        """Sequences that the policy has learned from."""
        return [sequence for batch in self.batches for sequence in batch.sequences]

    def note_update(self, batches: Sequence[Batch], metrics: Mapping[str, float], tokens: TokenSamples) -> None:
        """Adds the batch and the metrics of an update of the policy."""
        self.batches += batches
        self.metrics |= metrics
        self.tokens = {**self.tokens, **tokens}


class Supplier(Protocol):
    """Differences between training on rollouts and on examples."""

    @property
    def session(self) -> Session: ...

    async def prove_weights(self) -> None:
        """Refit zero: proves that policy and engines hold the same starting weights. Without engines, nothing."""
        ...

    async def take(self, state: RunState, step: Step) -> list[Batch]:
        """A batch per optimizer update of the step after `state`; Stopped: a signal came, or prompts are used up."""
        ...

    async def refit(self, state: RunState) -> dict[str, float]:
        """Moves the policy's weights into every engine and verifies them there; `state` gets the new weight version."""
        ...

    async def validate(self, state: RunState) -> dict[str, float]:
        """Metrics on held-out data; empty if there are none."""
        ...


P = ParamSpec("P")
S_co = TypeVar("S_co", bound=Supplier, covariant=True)


@dataclass
class Run(Generic[S_co]):
    """Everything that one run works with."""

    config: RunConfig
    folder: RunFolder
    supplier: S_co
    saver: CheckpointSaver
    budget: Budget
    last_step: int
    critic: Critic | None = None
    is_over: bool = False
    masks: MaskTally = field(default_factory=MaskTally)
    """Rollouts of this attempt that were masked."""

    @property
    def session(self) -> Session:
        return self.supplier.session

    def decide_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sets `is_over` after `step`: the last, one the budget makes the last, or one validated well enough."""
        self.is_over = step >= self.last_step or self.budget.is_over or is_good_enough(self.config.rollouts, metrics)

    async def begin(self, checkpoint: Checkpoint | None) -> RunState:
        """Resumes, and validates a run without steps. From here a signal is for the run, which saves its last step."""
        state = await self.resume(checkpoint)
        self.budget.begin(saves=self.config.checkpointing.enabled, has_steps=checkpoint is not None)
        if state.step == 0 and self.config.training.val_at_start and (metrics := await self.supplier.validate(state)):
            state.metrics = metrics
            await in_worker(self.folder.log_metrics, 0, metrics)
            startup.lap("validation")
        self.decide_end(state.step, state.metrics)
        return state

    async def resume(self, checkpoint: Checkpoint | None) -> RunState:
        """Proves that engines and policy start with equal weights; loads a whole checkpoint, if any; refits engines."""
        await self.supplier.prove_weights()
        startup.lap("refit_zero")
        async with self.session.room(is_needed=True) if checkpoint is not None else nullcontext():
            state = await in_worker(self.saver.load, checkpoint, last_step=self.last_step)
        startup.lap("checkpoint")
        await self.supplier.refit(state)
        startup.lap("refit")
        return state

    def is_done(self, state: RunState) -> bool:
        """True if the run has made all of its steps; else the same command goes on."""
        return state.step == self.last_step or not self.budget.is_over

    @asynccontextmanager
    async def saved(self, state: RunState) -> AsyncIterator[None]:
        """Saves the last finished step if the `async with` block ends by Stopped, and raises its cause, if any."""
        try:
            yield
        except (Stopped, BaseExceptionGroup) as error:
            if (end := stop_of(error)) is None:
                raise
            self.is_over = True
            await in_worker(self.saver.finish)
            if self.config.checkpointing.enabled and self.saver.lacks(state):  # engines are not moved for nothing
                await self.save(self.saver.save_last, state)
            if end.__cause__ is not None:
                raise end.__cause__ from None

    async def save(self, save: Callable[P, None], *arguments: P.args, **options: P.kwargs) -> None:
        """Awaits a save, for which engines make room."""
        async with self.session.room(is_needed=False):
            await in_worker(save, *arguments, **options)

    @contextmanager
    def profiled(self, step: int) -> Iterator[None]:
        """The policy ranks of `profiler.ranks` record the `with` block, if `step` is one of `profiler.steps`."""
        ranks = self.config.profiler.ranks if step in self.config.profiler.steps else []
        self.session.policies.call(PolicyVerbs.start_profile, only=ranks)
        yield
        problems = self.session.policies.call(
            PolicyVerbs.stop_profile, self.folder.log_folder / "profile", step, only=ranks
        )
        for problem in filter(None, problems.values()):
            logger.warning("A trace cannot be written, and the run goes on without it: %s", problem)

    @contextmanager
    def recorded(self, step: Step, batches: Sequence[Batch]) -> Iterator[dict[str, float]]:
        """Records the `with` block's step, which fills metrics, if `logger.record_steps` wants it, or if not finite."""
        metrics: dict[str, float] = {}
        try:
            yield metrics
        except RuntimeError as error:
            if NOT_FINITE in str(error):  # all ranks have said so, and answer
                self._record(step.number, batches, metrics, str(error))
            raise
        skipped = [value for name, value in metrics.items() if name.endswith(SKIPPED)]
        if any(skipped):
            step.metrics[SKIPPED_IN_A_ROW] = step.num_skipped + 1
            logger.warning(
                "Step %d: %d updates are skipped, as loss or gradient is not finite (policy.not_finite_steps); "
                "such steps in a row: %d of at most policy.max_skipped_steps=%d",
                *(step.number, sum(skipped), step.num_skipped + 1, self.config.policy.max_skipped_steps),
            )
            self._record(step.number, batches, metrics, f"{sum(skipped):g} updates are skipped")
        elif skipped:
            step.metrics.setdefault(SKIPPED_IN_A_ROW, 0.0)
        if self.config.logger.record_steps:
            self._record(step.number, batches, metrics, "")

    def _record(self, step: int, batches: Sequence[Batch], metrics: Mapping[str, float], problem: str) -> None:
        from mrl.loop.learning import record_step

        try:
            record = record_step(self.config, self.session, step, batches, metrics, problem=problem)
        except RuntimeError as error:  # an engine that has died since has taken its rollouts with it
            logger.warning("The batch of step %d is not recorded: %s", step, error)
            return
        path = write_step(self.folder.path, record, keeps=self.config.logger.record_steps)
        if path is not None and problem:
            logger.error("The batch of step %d is recorded in %s: %s", step, path, problem)

    async def refit(self, state: RunState, step: Step) -> None:
        """Counts the step as trained, and has engines sample from new weights, once checksums over all bytes agree."""
        await in_worker(self.folder.ledger.train, step.number, step.trained, step.dropped, step.rewards)
        state.step, state.metrics = step.number, step.metrics
        if self.config.has_engines:
            with step.clock.phase("refit"):
                step.metrics |= await self.supplier.refit(state)

    async def end_step(self, state: RunState, step: Step) -> None:
        """Validates and saves if that is due, decides whether another step follows, and logs this one."""
        await in_worker(self.folder.note_masked, self.masks.count(step.groups).by_kind())
        masked = (
            reason_of_masks(step.groups, step.sequences, step.metrics, self.config.rollouts) if step.batches else None
        )
        if masked is not None:
            step.metrics[MASKED_IN_A_ROW] = step.num_masked + 1
            logger.warning(
                "No signal in step %d: %s. Steps in a row in which none counts: %d",
                step.number,
                masked,
                step.num_masked + 1,
            )
        if self.is_validation_due(step.number):
            with step.clock.phase("validation"):
                step.metrics |= await self.supplier.validate(state)
        self.folder.print_header(step.number, self.last_step)
        self.budget.count_step()
        self.decide_end(step.number, step.metrics)
        section = self.config.checkpointing
        if section.enabled and (self.is_over or is_save_step(section, step.number)):
            with step.clock.phase("checkpoint"):
                await self.save(self.saver.begin, state, waits=self.is_over)
        await in_worker(self._log, step)
        self.check_skipped(step)
        self.check_masked(step, masked)

    def _log(self, step: Step) -> None:
        step.metrics |= step.clock.metrics() | self.saver.take_metrics()
        if step.batches:
            step.metrics |= performance_metrics(
                self.config, step.batches, step.metrics, device=self.session.policies.device
            )
        self.folder.log_step(step.number, step.metrics, step.groups, step.sequences, step.tokens)

    def check_skipped(self, step: Step) -> None:
        """Ends a run where too many steps in a row, also of earlier attempts, had skipped updates; they are saved."""
        limit, found = self.config.policy.max_skipped_steps, step.metrics.get(SKIPPED_IN_A_ROW, 0.0)
        if found >= limit and not self.is_over:
            raise Stopped from TooManySkipped(
                f"step {step.number}: loss or gradient of {found:g} steps in a row was not finite, and updates "
                f"were skipped; policy.max_skipped_steps={limit} ends the run: look at the batches in "
                f"{self.folder.path / RECORDED}, lower policy.megatron_cfg.optimizer.lr, go on from an earlier "
                "checkpoint, or raise that key"
            )

    def check_masked(self, step: Step, reason: str | None) -> None:
        """Ends a run where no rollout of too many steps in a row counted, also of earlier attempts; they are saved."""
        limit, found = self.config.rollouts.max_masked_steps, step.metrics.get(MASKED_IN_A_ROW, 0.0)
        if limit is not None and found >= min(limit, self.last_step):
            steps = f"{counted(int(found), 'step')} in a row" if found >= limit else "all steps of the run"
            raise Stopped from NoSignal(
                f"No signal in step {step.number}: {reason}. Nothing was learned in {steps}, and "
                f"grpo.max_masked_steps={limit} ends the run: correct what the reason names "
                f"({self.folder.log_folder / 'actors'} has each rollout's), or raise that key"
            )

    def report_start(self) -> None:
        """Logs the seconds of each phase of the start and adds them to the next metrics, before the first step."""
        startup.lap("first_rollouts")
        if laps := startup.take():
            for line in startup.lines(laps):
                logger.info("%s", line)
            self.folder.next_metrics |= {f"time/start/{phase}": seconds for phase, seconds in laps.items()}

    def token_samples(self, batches: Sequence[Batch]) -> TokenSamples:
        """Some rollouts of batches just trained token by token; none where `logger.rollouts` writes no texts."""
        if not self.config.has_engines or self.config.logger.rollouts == "none":
            return {}
        batch, firsts = batches[0], dict[PromptKey, list[int]]()
        for index, sequence in enumerate(batch.sequences):
            places = firsts.setdefault(sequence.rollout.key, [index])
            # The other sequences of an agent's rollout follow its first.
            if sequence.rollout.is_further and index == places[-1] + 1 and len(places) < MAX_SEQUENCES:
                places.append(index)
        wanted = list(firsts.values())[:NUM_SAMPLES]
        answers = self.session.policies.call(
            PolicyVerbs.token_samples, [index for places in wanted for index in places]
        )
        found = {index: sample for samples in answers.values() for index, sample in samples.items()}
        rollouts = {batch.sequences[places[0]].rollout.request_id: places for places in wanted}
        return {
            request_id: [(batch.sequences[index].rollout, found[index]) for index in places if index in found]
            for request_id, places in rollouts.items()
        }

    def is_validation_due(self, step: int) -> bool:
        """True if validation follows `step`."""
        training = self.config.training
        first = self.config.rollouts.val_start_at if self.config.has_engines else 0
        return (step >= first and is_due(step, training.val_period)) or (training.val_at_end and step == self.last_step)


@dataclass(frozen=True)
class Training(Generic[S_co]):
    """A run whose config and data have been checked, and which may start."""

    config: RunConfig
    num_steps: int
    left_out: list[LeftOut]
    identity: Identity
    open: Callable[[RunFolder, Budget], AbstractAsyncContextManager[Run[S_co]]]
    """Starts all processes, which live inside the `async with` block."""


def is_due(step: int, period: int) -> bool:
    """True if an event of every `period` steps is due at `step`; a period of 0 is never."""
    return period > 0 and step % period == 0


def is_save_step(section: CheckpointingConfig, step: int) -> bool:
    """True if the periods of checkpoints say that one follows `step`."""
    return is_due(step, section.save_period) or is_due(step, section.ft_save_period or 0)


_ENDING = {
    True: "the run saves a checkpoint and ends",
    False: "the run ends, and saves nothing (checkpointing.enabled)",
}


class Budget:
    """Decides whether the run may make another step: until its time is over, or a signal asks it to save and end."""

    def __init__(self, limit_s: float | None, *, started: float, listener: Listener = LISTENER) -> None:
        """`limit_s` counts from `started`, a time of `time.monotonic`; None: there is no limit."""
        self._limit_s = limit_s
        self._started = started
        self._first_step_began = time.monotonic()
        self._num_steps = 0
        self._saves: bool | None = None
        self._listener = listener

    def begin(self, *, saves: bool, has_steps: bool) -> None:
        """Marks when everything is up and the first step begins. From then on a signal ends the run only at `check`.

        Before a run `has_steps`, there is nothing to save.
        """
        self._first_step_began = time.monotonic()
        self._saves = saves
        self._listener.hold(
            _ENDING[saves]
            if has_steps or not saves
            else "the run ends; it saves a checkpoint once its first step is done"
        )

    def count_step(self) -> None:
        """Counts a step, after its validation."""
        self._num_steps += 1
        if self._num_steps == 1 and self._saves is not None:
            self._listener.hold(_ENDING[self._saves])

    def check(self) -> None:
        """Raises Stopped if a signal came. Call it where the run may stop at once, with its last step's weights."""
        if self._listener.first is not None:
            raise Stopped(f"{self._listener.first.name} ends the run")

    @property
    def is_over(self) -> bool:
        """True after a signal, or when the next step, at the mean time of those counted, would end after the limit."""
        if self._listener.first is not None:
            return True
        if self._limit_s is None:
            return False
        now = time.monotonic()
        mean_step_s = (now - self._first_step_began) / self._num_steps if self._num_steps else 0.0
        return now - self._started + mean_step_s >= self._limit_s
