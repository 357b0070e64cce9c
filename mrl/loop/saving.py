# SPDX-License-Identifier: Apache-2.0
"""Loads a checkpoint at the start and saves others during the loop: each rank writes alone; a thread publishes all."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, wait
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from conversion.files.durable import IO_TIMEOUT_S, WRITE_TIMEOUT_S, remove_file
from conversion.files.limits import LimitedThread
from conversion.files.manifest import WRITTEN, read_written
from mrl.cluster.tasks import in_worker
from mrl.cluster.verbs import PolicyVerbs
from mrl.config.schema.run import RunConfig
from mrl.config.texts import step_span
from mrl.plan.deadlines import checkpoint_deadline
from mrl.shortage import is_shortage
from mrl.store.checkpoints import Checkpoint
from mrl.store.disk import way_out
from mrl.store.run_folder import RunFolder
from mrl.types import RunState

if TYPE_CHECKING:
    from conversion.files.manifest import FileRecord
    from mrl.cluster.session import Session
    from mrl.phases import ModelName
    from mrl.store.rollout_files import KeptRollouts

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5


# For the thread of a save to leave Ray alone, before that is shut down.
ABANDON_S = 10.0


class SaveFailed(RuntimeError):
    """The last checkpoint of a run cannot be written; the message says why."""


class CheckpointSaver:
    """Makes at most one save at a time. Until it is published, the checkpoint before it is the newest one."""

    def __init__(
        self, config: RunConfig, folder: RunFolder, session: Session, kept: KeptRollouts | None = None
    ) -> None:
        """`kept` are rollouts of later steps, which are written before a checkpoint is published."""
        self._kept = kept
        self._is_enabled = config.checkpointing.enabled
        self._is_async = config.policy.megatron_cfg.checkpoint.async_save
        self._deadline_s = checkpoint_deadline(config).seconds
        self._folder = folder
        self._session = session
        self._under_way: Future[None] | None = None
        self._is_awaited = threading.Event()
        """Set while the driver waits for the save under way: only then are ranks asked, which nobody else asks then."""
        self._is_abandoned = threading.Event()
        self._thread = LimitedThread("saves")
        self._hidden_s: float | None = None
        self._saved_step = 0

    def load(self, checkpoint: Checkpoint | None, *, last_step: int) -> RunState:
        """Loads `checkpoint`, or the newest whole before it, into the policy; returns the run's state, step 0 if none.

        The driver has compared sizes. Here every rank compares the content of a share of the shards, before any loads
        one, and before ledger and metrics are taken back to the checkpoint's step.
        """
        policies, deadline_s = self._session.policies, self._deadline_s
        while checkpoint is not None:
            shares = {rank: (share,) for rank, share in enumerate(checkpoint.shards(policies.world_size))}
            damage = next(
                filter(None, policies.call_each(PolicyVerbs.find_damage, shares, deadline_s=deadline_s).values()), ""
            )
            if not damage:
                first, last = checkpoint.step + 1, max(self._folder.ledger.state.trained, default=0)
                self._folder.resume_from(checkpoint)
                again = f"; trained after it and made again: {step_span(first, last)}" if last >= first else ""
                logger.info("Resuming from %s (step %d of %d)%s", checkpoint.folder, checkpoint.step, last_step, again)
                with self._session.loading():
                    for model, group in self._session.trained_models.items():
                        group.call(PolicyVerbs.load_checkpoint, checkpoint.weights_of(model), deadline_s=deadline_s)
                self._saved_step = checkpoint.step
                return checkpoint.state()
            checkpoint = self._folder.pass_over(checkpoint, damage)
        self._folder.resume_from(None)
        return RunState()

    def begin(self, state: RunState, *, waits: bool = False) -> None:
        """Publishes the save before, and begins to save `state` and the weights as now; `waits` until it is published.

        A checkpoint that cannot be written is reported, and the newest one stays. SaveFailed: with `waits`, because it
        is the run's last.
        """
        self.finish()
        self._folder.check_owner()  # a folder that was moved away is not made again
        logger.info("Saving checkpoint for step %d...", state.step)
        with self._may_fail(state.step, is_needed=waits):
            models = self._session.trained_models
            checkpoint = self._folder.checkpoints.begin(state, models)
            self._folder.ledger.copy_to(checkpoint.ledger, checkpoint.mark)
            self._folder.copy_identity(checkpoint)
            for model in models:
                self._folder.copy_tokenizer(checkpoint, model)
            begun: list[ModelName] = []
            with self._session.saving():
                for model, group in models.items():
                    problem = group.call(
                        PolicyVerbs.begin_save, checkpoint.weights_of(model), deadline_s=self._deadline_s
                    )[0]
                    if problem:
                        break
                    begun.append(model)
            if problem:
                # What another model has begun to write is no checkpoint, and leaves with the folder.
                for model in begun:
                    models[model].call(PolicyVerbs.finish_save, self._deadline_s, deadline_s=self._deadline_s)
                raise OSError(problem)
            if waits or not self._is_async:
                self._is_awaited.set()
                self._publish(checkpoint, ends=waits)
            else:
                self._is_awaited.clear()
                self._under_way = self._thread.begin(self._publish_once_written, checkpoint)

    def finish(self) -> None:
        """Waits until the save under way, if any, is published or has failed."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            self._is_awaited.set()
            # Its own waits have deadlines now: two calls of each model's ranks, and the writes of the driver. They name
            # what they wait for.
            under_way.result(
                2 * len(self._session.trained_models) * self._deadline_s + 2 * (WRITE_TIMEOUT_S + IO_TIMEOUT_S)
            )

    def _publish_once_written(self, pending: Checkpoint) -> None:
        """Publishes a save once every rank has written its part, or as soon as the driver waits for it."""
        with self._may_fail(pending.step, is_needed=False):
            # Ranks that train the next step would not answer before its end.
            while any(read_written(pending.weights_of(model)) is None for model in self._session.trained_models):
                if self._is_awaited.wait(POLL_INTERVAL_S):
                    break
                if self._is_abandoned.is_set():
                    raise InterruptedError("the save is abandoned")
            self._publish(pending)

    def _publish(self, pending: Checkpoint, *, ends: bool = False) -> None:
        """Waits until all ranks wrote, then publishes the checkpoint, with which a run `ends`. OSError: unwritable."""
        files: dict[str, FileRecord] = {}
        hidden_s, problems = 0.0, list[str]()
        for model, group in self._session.trained_models.items():
            weights = pending.weights_of(model)
            parts = read_written(weights) or list(
                group.call(PolicyVerbs.finish_save, self._deadline_s, deadline_s=self._deadline_s).values()
            )
            remove_file(weights / WRITTEN)
            problems += [parts[0].problem] if parts[0].problem else []
            files |= {
                f"{weights.relative_to(pending.folder)}/{name}": one
                for part in parts
                for name, one in part.files.items()
            }
            hidden_s = max(hidden_s, *(part.hidden_s for part in parts))
        if problems:
            raise OSError(problems[0])
        if self._is_abandoned.is_set():
            return
        # A checkpoint whose steps the ledger lacks could not be resumed from.
        self._folder.ledger.flush()
        if self._kept is not None:
            self._kept.prepare(pending.step, ends=ends)
        self._folder.sync()
        self._folder.note_saved(self._folder.checkpoints.commit(pending, files))
        if self._kept is not None:
            self._kept.published(pending.step)
        self._saved_step = pending.step
        if self._is_async:
            self._hidden_s = (self._hidden_s or 0.0) + hidden_s

    @contextmanager
    def _may_fail(self, step: int, *, is_needed: bool) -> Iterator[None]:
        try:
            yield
        except TimeoutError:  # the file system does not answer: it would not let go of what has been begun
            raise
        except OSError as error:
            if self._is_abandoned.is_set():
                return
            before = self._saved_step
            stays = f"the one before it stays: step_{before}" if before else "there is none before it"
            # write(2) on a full disk names no file.
            place = f": {self._folder.path}" if error.errno is not None and error.filename is None else ""
            reason = "; ".join(filter(None, [f"{error}{place}", way_out(error, self._folder.path), stays]))
            text = f"the checkpoint of step {step} cannot be written: {reason}"
            logger.error("%s", text)
            self._folder.checkpoints.remove_unfinished()
            if is_needed or is_shortage(error):  # the next step would fail, too, or hang
                raise SaveFailed(text) from error

    def abandon(self) -> None:
        """Leaves the save under way as it is: the attempt fails, and its folder may soon be another's."""
        self._is_abandoned.set()
        wait([self._thread.begin(int)], ABANDON_S)

    def lacks(self, state: RunState) -> bool:
        """True if a state is not saved, and no save of it is under way; `finish` comes first."""
        return state.step > self._saved_step

    def save_last(self, state: RunState) -> None:
        """Saves the state of a run that ends early, unless it has been saved, and waits for it."""
        self.finish()
        if self._is_enabled:
            self.save(state)

    def save(self, state: RunState) -> None:
        """Saves a state, unless it has been saved, and waits for it."""
        self.finish()
        if self.lacks(state):
            self.begin(state, waits=True)

    def take_metrics(self) -> dict[str, float]:
        """`time/checkpoint_hidden` of saves since the last call, if any: seconds of writing that nothing awaited."""
        if self._under_way is not None and self._under_way.done():
            self.finish()
        hidden_s, self._hidden_s = self._hidden_s, None
        return {} if hidden_s is None else {"time/checkpoint_hidden": hidden_s}


@asynccontextmanager
async def open_saver(
    config: RunConfig, folder: RunFolder, session: Session, kept: KeptRollouts | None = None
) -> AsyncIterator[CheckpointSaver]:
    """Saves checkpoints inside the block. Its end waits for the save under way, also after a signal."""
    saver = CheckpointSaver(config, folder, session, kept)
    try:
        yield saver
    except (KeyboardInterrupt, SystemExit):
        await in_worker(saver.finish)
        raise
    except BaseException:
        await in_worker(saver.abandon)
        raise
    await in_worker(saver.finish)
