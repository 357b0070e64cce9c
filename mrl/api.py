# SPDX-License-Identifier: Apache-2.0
"""Public parts of a training loop. `mrl.train` is made of them, as does your own loop: see `examples/own_loop.py`.

Names of `__all__` keep their meaning.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mrl import env, startup
from mrl.exit_codes import DONE, FAILED
from mrl.signals import ENDED_EARLY, LISTENER
from mrl.store.loggers.sink import LoggedRun, Sample, Sink
from mrl.types import Batch, Prompt, RolloutGroup, RolloutInfo, RunState, TrainSequence, Verdict

if TYPE_CHECKING:
    from mrl.config.schema.run import RunConfig
    from mrl.loop.rollouts import RolloutSupplier
    from mrl.loop.run import Run, Step, Supplier

__all__ = [
    "Batch",
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

logger = logging.getLogger(__name__)


@dataclass(repr=False)
class Loop:
    """A started run. A step is `rollouts.take`, `policy.train` as often as you like, and `refit.run`, which ends it.

    `take_batches` and `policy.update` in place of the first two make it as the config says, also on examples.

    >>> (group,) = await loop.engines.sample(loop.prompts[:1], num_generations=2)
    >>> len(group.rewards)
    2
    >>> groups = await loop.rollouts.take()
    >>> sequences = loop.rollouts.sequences(groups)
    >>> losses = [(await loop.policy.train(sequences))["train/loss"] for _ in range(2)]
    >>> metrics = await loop.refit.run({"mine/num_groups": float(len(groups))})
    >>> metrics["mine/num_groups"], loop.step
    (4.0, None)
    """

    run: Run[Supplier]
    state: RunState
    """Finished steps, and the version of the engines' weights."""
    step: Step | None = field(default=None, init=False)
    """The step under way."""
    _awaited: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.policy, self.engines, self.refit, self.rollouts = Policy(self), Engines(self), Refit(self), Rollouts(self)

    def __repr__(self) -> str:
        return f"Loop(step {self.state.step} of {self.last_step}, {self.config.checkpointing.checkpoint_dir})"

    @property
    def config(self) -> RunConfig:
        return self.run.config

    @property
    def supplier(self) -> RolloutSupplier:
        """Supplier of a run with rollouts."""
        from mrl.loop.rollouts import RolloutSupplier

        assert isinstance(self.run.supplier, RolloutSupplier), "start refuses all others"
        return self.run.supplier

    @property
    def prompts(self) -> Sequence[Prompt]:
        """The training prompts of the data, in the order of the file."""
        return self.supplier.data.train

    @property
    def last_step(self) -> int:
        """The steps of the whole run: `grpo.max_num_steps`, or fewer if the epochs end before."""
        return self.run.last_step

    @property
    def is_over(self) -> bool:
        """True if no step follows: all are done, a signal or time limit ends the run, or validation is good enough."""
        return self.run.is_over

    async def take_batches(self) -> list[Batch]:
        """Begins a step; packed batches, one per update: rollouts with advantages or examples. EOFError: no more."""
        with self.alone("take_batches"):
            step = self.next_step()
            batches = await self.run.supplier.take(self.state, step)
            self.step = step
            return batches

    def next_step(self) -> Step:
        """The step after `state`. EOFError: the run is over."""
        from mrl.loop.run import Step, Stopped

        if self.step is not None:
            raise RuntimeError("a step is under way: call loop.refit.run() to end it first")
        if self.is_over:
            raise Stopped(f"the run is over after step {self.state.step} of {self.last_step}; start begins it again")
        return Step.after(self.state)

    def step_under_way(self) -> Step:
        """The step begun by `rollouts.take` or `take_batches`."""
        if self.step is None:
            raise RuntimeError("no step is under way: loop.rollouts.take() begins one")
        return self.step

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Raises RuntimeError if another call of the loop is awaited meanwhile: ranks and engines do one at a time."""
        if self._awaited:
            raise RuntimeError(f"{name} while {self._awaited} is under way: await one call of the loop after the other")
        self._awaited = name
        try:
            yield
        except EOFError:
            self.run.is_over = True
            raise
        finally:
            self._awaited = ""

    def check_refitted(self, name: str) -> None:
        """Raises RuntimeError while the policy is ahead of the engines and of `state`."""
        if self.step is not None and self.step.batches:
            raise RuntimeError(f"{name} comes before policy.train, or after refit.run, which ends the step")


def check_sequences(sequences: Sequence[TrainSequence]) -> None:
    """Raises ValueError for what `Policy.train` cannot train on."""
    if not sequences:
        raise ValueError("policy.train got no sequences; give it those of loop.rollouts.sequences(groups)")
    for index, sequence in enumerate(sequences):
        if not isinstance(sequence, TrainSequence):
            raise ValueError(
                f"policy.train takes sequences, and entry {index} is a {type(sequence).__name__}; "
                "loop.rollouts.sequences(groups) makes them of groups"
            )
        try:
            is_number = math.isfinite(sequence.advantage)
        except TypeError:
            is_number = False
        if not is_number:
            name, value = f"sequence {index} (of {sequence.rollout.prompt_id})", f"{sequence.advantage!r:.60}"
            raise ValueError(f"policy.train: {name} has advantage {value}; give one number for the whole rollout")


@dataclass(frozen=True)
class Policy:
    """The model that is trained: Megatron ranks."""

    _loop: Loop

    async def train(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """Steps the optimizer on each `policy.train_global_batch_size` sequences by the config's loss; returns metrics.

        PPO's critic, whose advantages replace yours, and teachers take part too.
        """
        from mrl.cluster.tasks import in_worker

        check_sequences(sequences)
        step = self._loop.step_under_way()
        with self._loop.alone("policy.train"):
            session, supplier = self._loop.run.session, self._loop.supplier
            supplier.check_groups(sequences, step)
            if supplier.config.teachers:  # packing asks them
                return await session.on_ranks(lambda: self._update(supplier.pack(sequences, step), step))
            # What it refuses leaves the engines as they are.
            batches = await in_worker(supplier.pack, sequences, step)
            return await session.on_ranks(self._update, batches, step)

    async def update(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Computes values and logprobs for the losses, then makes an optimizer step on each batch; returns metrics."""
        with self._loop.alone("policy.update"):
            return await self._loop.run.session.on_ranks(self._update, batches, self._loop.step_under_way())

    def _update(self, batches: Sequence[Batch], step: Step) -> dict[str, float]:
        from mrl.loop.learning import learn
        from mrl.store.summary import warn_of_bounded_ratios

        run = self._loop.run
        run.report_start()
        with step.clock.phase("train"), run.profiled(step.number), run.recorded(step, batches) as metrics:
            metrics |= learn(run.session, run.config, batches, step.number, run.critic)
        warn_of_bounded_ratios(metrics)
        step.note_update(batches, metrics, run.token_samples(batches))
        return metrics

    async def save(self) -> Path:
        """Saves a checkpoint of the last finished step, from which the next `start` goes on; returns its folder."""
        from mrl.cluster.tasks import in_worker

        self._loop.check_refitted("policy.save")
        run, state = self._loop.run, self._loop.state
        with self._loop.alone("policy.save"):
            await in_worker(run.saver.finish)
            if run.saver.lacks(state):
                await run.save(run.saver.save, state)
        return run.folder.path / f"step_{state.step}"


@dataclass(frozen=True)
class Engines:
    """vLLM engines, with the weights of the last refit."""

    _loop: Loop

    async def sample(self, prompts: Sequence[Prompt], *, num_generations: int, draw: int = 0) -> list[RolloutGroup]:
        """Judged rollouts of prompts you choose, outside the data's order. Another `draw` samples other rollouts."""
        from mrl.loop.rollouts import VALIDATION_EPOCH
        from mrl.store.summary import Clock

        if num_generations < 1:
            raise ValueError(f"engines.sample: num_generations={num_generations}; use at least 1")
        for index, prompt in enumerate(prompts):
            if not isinstance(prompt, Prompt):
                what = f"entry {index} is a {type(prompt).__name__}"
                raise ValueError(f"engines.sample takes a list of loop.prompts, and {what}")
        self._loop.check_refitted("engines.sample")
        supplier, version = self._loop.supplier, self._loop.state.weight_version
        asked = [(VALIDATION_EPOCH - 1 - draw, prompt) for prompt in prompts]
        sampling = supplier.data.sampling
        with self._loop.alone("engines.sample"):
            return await supplier.queue.sample(
                asked, sampling, num_generations=num_generations, weight_version=version, clock=Clock()
            )


@dataclass(frozen=True)
class Rollouts:
    """Rollouts of the data's prompts, in their order, with rewards."""

    _loop: Loop

    async def take(self) -> list[RolloutGroup]:
        """The groups of the next step, `grpo.num_prompts_per_step` of `grpo.num_generations_per_prompt` rollouts.

        EOFError, which ends the block of `start` quietly: none follow, as all prompts are used up, or the run is over.
        """
        with self._loop.alone("rollouts.take"):
            step = self._loop.next_step()
            groups = await self._loop.supplier.sample(self._loop.state, step)
            self._loop.step = step
            return groups

    def sequences(self, groups: Sequence[RolloutGroup]) -> list[TrainSequence]:
        """Groups of the step as `mrl.train` trains on them: with the advantages and masks that the config says."""
        return self._loop.supplier.sequences(groups, self._loop.step_under_way())

    async def validate(self) -> dict[str, float]:
        """Accuracy on the held-out prompts, as `val/accuracy`, in addition to the validations of the config."""
        self._loop.check_refitted("rollouts.validate")
        with self._loop.alone("rollouts.validate"):
            found = await self._loop.run.supplier.validate(self._loop.state)
        if not found:
            self._loop.run.budget.check()
        self._loop.state.metrics |= found
        return found


@dataclass(frozen=True)
class Refit:
    """Moves the policy's weights into every engine, and compares checksums over all bytes there."""

    _loop: Loop

    async def run(self, metrics: Mapping[str, float] | None = None) -> dict[str, float]:
        """Ends the step: the engines sample from the new weights from here on. Returns the step's metrics, with yours.

        Validates and saves as the config says, then prints and logs the step.
        """
        for name, value in (metrics or {}).items():
            if not isinstance(value, int | float):
                raise ValueError(f"refit.run: metric {name} is {value!r:.60}, a {type(value).__name__}; give numbers")
        loop, step = self._loop, self._loop.step_under_way()
        with loop.alone("refit.run"):
            await loop.run.refit(loop.state, step)
            loop.step = None
            step.metrics |= metrics or {}
            await loop.run.end_step(loop.state, step)
        return step.metrics


def ending(run: Run[Supplier], state: RunState) -> tuple[int, str]:
    """Exit code and last line of a block without an error, which `break` may leave before the last step."""
    if not run.is_over and not run.budget.is_over:
        step = f"step {state.step} of {run.last_step}"
        lost = ", which lacks it: `await loop.policy.save()` would have kept it" if run.saver.lacks(state) else ""
        return ENDED_EARLY, f"The loop was left after {step}; the same command goes on from its newest checkpoint{lost}"
    if run.is_done(state):
        return DONE, "The run is complete"
    return ENDED_EARLY, "Ended before the last step; the same command goes on"


@asynccontextmanager
async def start(config: str | Path, overrides: Sequence[str] = ()) -> AsyncIterator[Loop]:
    """Starts processes of a config with rollouts; goes on from the newest checkpoint in `checkpointing.checkpoint_dir`.

    They live in the `async with` block. Policy and engines are proven to hold the same weights. A signal or the time
    limit saves the last finished step, ends the block, and exits with code 75: the same command goes on. ValueError:
    the input is at fault.
    """
    from mrl.config.files import find_config
    from mrl.config.load import load_run
    from mrl.config.secrets import redact_text, start_logging
    from mrl.loop import rollouts
    from mrl.loop.main import find_start, open_folder, said_of_end, start_run
    from mrl.loop.run import Budget

    if isinstance(overrides, str | Mapping):
        what, words = "a text", [overrides]
        if isinstance(overrides, Mapping):
            what, words = "a dict", [f"{name}={json.dumps(value, default=str)}" for name, value in overrides.items()]
        raise ValueError(f"overrides is {what}; write a list: {words}")
    startup.lap("import")
    started = time.monotonic() - env.job_age_s()
    secrets = None if logging.getLogger().handlers else start_logging("text")
    logger.info("Config: %s", find_config(config))
    loaded, migration = load_run(config, overrides, secrets=secrets)
    if not loaded.has_engines:
        raise ValueError(
            f"algorithm={loaded.algorithm}: a loop of one's own trains on rollouts, and this algorithm on rows "
            f"alone; run `python -m mrl.train {config}`, or choose algorithm grpo, ppo or distillation"
        )
    migration.log()
    listens = threading.current_thread() is threading.main_thread() and not LISTENER.is_listening
    if listens:
        LISTENER.listen()
    try:
        training = rollouts.prepare(loaded)
        folder, code, said, must_exit = open_folder(training), FAILED, "", False
    except BaseException:
        if listens:
            LISTENER.stop()
        raise
    try:
        with folder:
            budget = Budget(loaded.checkpointing.must_save_by_s, started=started)
            checkpoint, is_complete = find_start(training, folder)
            if is_complete:  # what the run was trained with stays
                folder.write_config(folder.log_folder)
            async with start_run(training, folder, checkpoint, budget) as (run, state):
                yield Loop(run, state)
        (code, said), must_exit = ending(run, state), run.budget.is_over
        run.is_over = True  # for who still holds the loop
    except BaseException as error:
        said = f"The loop ended: {type(error).__name__}: {error}"
        raise
    finally:
        folder.note_end(code, redact_text(said, loaded.facts.secrets))
        LISTENER.let_go()
        if listens and not must_exit:  # a second signal must not end an exit that other programs wait for
            LISTENER.stop()
    if code == DONE:
        said_of_end(folder, state.step, training.num_steps)
    else:
        logger.info("%s", said)
        if must_exit:
            raise SystemExit(code)
