# SPDX-License-Identifier: Apache-2.0
"""The parts of a run, for a training loop of your own; `examples/own_loop.py` is one. Names of `__all__` keep their meaning."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mrl import spans
from mrl.store.loggers.sink import LoggedRun, Sample, Sink
from mrl.types import Prompt, RolloutGroup, RolloutInfo, RunState, TrainSequence, Verdict

if TYPE_CHECKING:
    from mrl.config.schema.run import RunConfig
    from mrl.loop.rollout_queue import Supplied
    from mrl.loop.rollouts import RolloutSupplier
    from mrl.loop.run import Run

__all__ = [
    "Engines",
    "LoggedRun",
    "Loop",
    "Policy",
    "Prompt",
    "Refit",
    "RolloutGroup",
    "RolloutInfo",
    "Rollouts",
    "Sample",
    "Sink",
    "TrainSequence",
    "Verdict",
    "start",
]


@dataclass
class Loop:
    """A started run. A step is `rollouts.take`, `policy.train` as often as you like, and `refit.run`, which ends it."""

    run: Run[RolloutSupplier]
    state: RunState
    """Finished steps, and the version of the engines' weights."""
    taken: Supplied | None = field(default=None, init=False)
    """Groups of the step under way."""
    began: float = field(default=0.0, init=False)
    """When they were asked for, by `time.monotonic`."""

    def __post_init__(self) -> None:
        self.policy, self.engines, self.refit, self.rollouts = Policy(self), Engines(self), Refit(self), Rollouts(self)

    @property
    def config(self) -> RunConfig:
        return self.run.config

    @property
    def prompts(self) -> Sequence[Prompt]:
        """The training prompts of the data, in the order of the file."""
        return self.run.supplier.data.train

    @property
    def last_step(self) -> int:
        """The steps of the whole run: `grpo.max_num_steps`, or fewer if the epochs end before."""
        return self.run.last_step


@dataclass(frozen=True)
class Policy:
    """The model that is trained: Megatron ranks."""

    _loop: Loop

    def train(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """Makes an optimizer step on each `policy.train_global_batch_size` sequences, by the loss of the config; returns its metrics."""
        from mrl.data.batch import make_batches
        from mrl.train import update_policy

        return update_policy(self._loop.run, self._loop.state.step + 1, make_batches(sequences, self._loop.config))

    def save(self) -> Path:
        """Saves a checkpoint of the last finished step, from which the next `start` goes on; returns its folder."""
        self._loop.run.saver.begin(self._loop.state, waits=True)
        return self._loop.run.folder.path / f"step_{self._loop.state.step}"


@dataclass(frozen=True)
class Engines:
    """vLLM engines, with the weights of the last refit."""

    _loop: Loop

    def sample(self, prompts: Sequence[Prompt], *, num_generations: int, draw: int = 0) -> list[RolloutGroup]:
        """Judged rollouts of prompts of your choice, outside the order of the data. Another `draw` samples other rollouts."""
        from mrl.loop.rollouts import VALIDATION_EPOCH
        from mrl.store.summary import Clock

        supplier, version = self._loop.run.supplier, self._loop.state.weight_version
        asked = [(VALIDATION_EPOCH - 1 - draw, prompt) for prompt in prompts]
        sampling = supplier.data.sampling
        return supplier.queue.sample(asked, sampling, num_generations=num_generations, weight_version=version, clock=Clock())


@dataclass(frozen=True)
class Rollouts:
    """Rollouts of the data's prompts, in their order, with rewards."""

    _loop: Loop

    def take(self) -> list[RolloutGroup]:
        """The groups of the next step, `grpo.num_prompts_per_step` of `grpo.num_generations_per_prompt` rollouts; EOFError: none left."""
        from mrl.store.summary import Clock

        self._loop.began = time.monotonic()
        self._loop.taken = self._loop.run.supplier.queue.take(self._loop.state, Clock())
        if self._loop.taken is None:
            raise EOFError("all prompts of grpo.max_num_epochs are consumed")
        return self._loop.taken.groups

    def validate(self) -> dict[str, float]:
        """Accuracy on the held-out prompts, as `val/accuracy`."""
        found = self._loop.run.supplier.validate(self._loop.state)
        # A checkpoint is ranked by them.
        self._loop.state.metrics |= found
        return found


@dataclass(frozen=True)
class Refit:
    """Moves the policy's weights into every engine, and compares every byte there."""

    _loop: Loop

    def run(self, metrics: dict[str, float] | None = None) -> dict[str, float]:
        """Ends the step: the engines sample from the new weights from here on. Returns and logs `metrics` and the refit's own."""
        loop, supplied = self._loop, self._loop.taken
        assert supplied is not None, "Rollouts.take comes first"
        loop.state.step, loop.taken = loop.state.step + 1, None
        loop.run.folder.ledger.train(loop.state.step, supplied.trained, supplied.dropped)
        loop.state.metrics = (metrics or {}) | loop.run.supplier.refit(loop.state)
        loop.run.folder.log_metrics(loop.state.step, loop.state.metrics)
        spans.add("step", loop.began, step=loop.state.step)
        return loop.state.metrics


@contextmanager
def start(config: str | Path, overrides: Sequence[str] = ()) -> Iterator[Loop]:
    """Starts the processes of a GRPO config, and goes on from the newest checkpoint in `checkpointing.checkpoint_dir`.

    They live inside the `with` block. Policy and engines are proven to hold the same weights. ValueError: the input is at fault.
    """
    from mrl.config.load import load_run
    from mrl.loop.rollouts import prepare
    from mrl.loop.run import Budget
    from mrl.store.run_folder import RunFolder
    from mrl.train import resume

    training = prepare(load_run(config, overrides)[0])
    folder = RunFolder(training.config, training.identity)
    folder.open()
    with folder:
        checkpoint = folder.newest_checkpoint()
        with training.open(folder, Budget(None, started=time.monotonic())) as run, folder.open_loggers():
            yield Loop(run, resume(run, checkpoint))
