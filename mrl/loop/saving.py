"""Checkpoints saved while the loop goes on: begun by the ranks together, written by each on its own, published when all have written."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

from conversion.files.manifest import FileRecord
from mrl.capacity.phases import Phase
from mrl.cluster.policy_group import PolicyGroup
from mrl.config.schema.run import RunConfig
from mrl.policy.reports import WriteReport
from mrl.store.checkpoints import Checkpoint
from mrl.store.run_folder import RunFolder
from mrl.types import RunState

logger = logging.getLogger(__name__)

# Asking hundreds of ranks takes milliseconds.
POLL_INTERVAL_S = 0.5


@dataclass
class Pending:
    """A checkpoint that is being written."""

    checkpoint: Checkpoint
    polled_at: float = -math.inf


class CheckpointSaver:
    """At most one save at a time. Until it is published, the checkpoint before it is the newest one."""

    def __init__(self, config: RunConfig, folder: RunFolder, policies: PolicyGroup) -> None:
        self._has_engines = config.has_engines
        self._is_async = config.policy.megatron_cfg.checkpoint.async_save
        self._deadline_s = config.deadlines.checkpoint_s
        self._folder = folder
        self._policies = policies
        self._pending: Pending | None = None
        self._hidden_s: float | None = None

    def begin(self, state: RunState) -> None:
        """Begins to save `state` and the weights as they are now, once the save before is published.

        Raises:
            RuntimeError: a rank could not write its part, of this save or of the one before.
        """
        self.finish()
        logger.info("Saving checkpoint for step %d...", state.step)
        checkpoint = self._folder.checkpoints.begin(state)
        self._enter("checkpoint")
        self._call("begin_save", checkpoint.weights)
        self._folder.copy_tokenizer(checkpoint)
        self._enter("generate")
        self._pending = Pending(checkpoint)
        if not self._is_async:
            self.finish()

    def poll(self) -> None:
        """Publishes the save under way if every rank has written its part. To be called where the ranks are idle: it waits for them.

        Raises:
            RuntimeError: a rank could not write its part.
        """
        if self._pending is None or time.monotonic() - self._pending.polled_at < POLL_INTERVAL_S:
            return
        self._pending.polled_at = time.monotonic()
        if all(self._call("is_written")):
            self.finish()

    def finish(self) -> None:
        """Waits for the save under way, if there is one, and publishes it.

        Raises:
            RuntimeError: a rank could not write its part.
            DeadlineExceeded: that takes longer than deadlines.checkpoint_s.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        parts = cast(list[WriteReport], self._call("finish_save"))
        on_disk: dict[str, FileRecord] = {}
        for part in parts:
            on_disk |= part.files
        self._folder.checkpoints.commit(pending.checkpoint, on_disk)
        if self._is_async:
            self._hidden_s = (self._hidden_s or 0.0) + max(part.hidden_s for part in parts)

    def take_metrics(self) -> dict[str, float]:
        """`time/checkpoint_hidden` of what was published since the last call, if anything: seconds of writing for which nothing waited."""
        hidden_s, self._hidden_s = self._hidden_s, None
        return {} if hidden_s is None else {"time/checkpoint_hidden": hidden_s}

    def _enter(self, phase: Phase) -> None:
        if self._has_engines:
            self._call("enter", phase)

    def _call(self, method: str, *arguments: object) -> list[object]:
        return self._policies.call(method, *arguments, deadline_s=self._deadline_s)


@contextmanager
def open_saver(config: RunConfig, folder: RunFolder, policies: PolicyGroup) -> Iterator[CheckpointSaver]:
    """What saves checkpoints inside the `with` block. Its end waits for the save under way, also when a signal brings it about."""
    saver = CheckpointSaver(config, folder, policies)
    try:
        yield saver
    except (KeyboardInterrupt, SystemExit):
        saver.finish()
        raise
    saver.finish()
