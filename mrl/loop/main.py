# SPDX-License-Identifier: Apache-2.0
"""The command line of `python -m mrl.train`: config, checks, run folder, the loop, exit code."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from conversion.files.limits import within
from mrl import ENVIRONMENT, check, env, startup
from mrl.algo.agreement import Disagreement
from mrl.cluster.errors import ActorLost, DeadlineExceeded, NoCluster
from mrl.cluster.nodes import watch_hosts
from mrl.config.files import find_config
from mrl.config.load import load_run
from mrl.config.schema.run import RunConfig
from mrl.config.secrets import TRACEBACK, note_traceback, reason_of, redact_text
from mrl.exit_codes import DONE, FAILED, REFUSED
from mrl.loop import examples, rollouts
from mrl.loop.run import Budget, Run, Supplier, TooManySkipped, Training
from mrl.loop.saving import SaveFailed
from mrl.loop.signal_watch import NoSignal
from mrl.rooms import write_report
from mrl.shortage import is_shortage
from mrl.signals import ENDED_EARLY, LISTENER
from mrl.store.about import attempt_changes, drop_log_folder
from mrl.store.checkpoints import Checkpoint, NoWholeCheckpoint, find_damage
from mrl.store.console import outlook
from mrl.store.disk import way_out
from mrl.store.ownership import FolderLost
from mrl.store.run_files import ENDED
from mrl.store.run_folder import END_S, REPORT, RunFolder
from mrl.store.summary import is_good_enough
from mrl.types import RunState

logger = logging.getLogger(__name__)

Train = Callable[[Run[Supplier], RunState], Awaitable[None]]


def prepare(config: RunConfig) -> Training[Supplier]:
    """Checks config, model and data before any process starts; returns the ready run. ValueError: wrong input."""
    return rollouts.prepare(config) if config.has_engines else examples.prepare(config)


def open_folder(training: Training[Supplier]) -> RunFolder:
    """Makes this process the owner of the run's folder; see `RunFolder.open`."""
    folder = RunFolder(training.config, training.identity)
    LISTENER.cleanups.append(folder.give_back)
    folder.open()
    LISTENER.cleanups.append(partial(end_at_once, folder))
    startup.lap("input")
    return folder


def end_at_once(folder: RunFolder) -> None:
    """Writes how a process ends that leaves its run at once, into the page, too, if there is one."""
    page, end = folder.path / REPORT, folder.log_folder / ENDED
    try:
        if within(END_S, f"look at {end}", end.exists):
            return  # an earlier run of this process: another may go on there
        folder.note_end(*LISTENER.left)
        if page.exists():
            within(END_S, f"write of {page}", write_report, page, state="over")
    except (OSError, ValueError) as error:
        logger.warning("%s still says that the run goes on: %s", page, error)


@asynccontextmanager
async def start_run(
    training: Training[Supplier], folder: RunFolder, checkpoint: Checkpoint | None, budget: Budget
) -> AsyncIterator[tuple[Run[Supplier], RunState]]:
    """Starts all processes and loggers of a run in the block, from a checkpoint on, and says what is ahead.

    A signal or the time limit ends the block, once the last finished step is saved.
    """
    config, started = training.config, time.monotonic()
    first_step = checkpoint.step + 1 if checkpoint is not None else 1
    times = {
        "start_s": folder.measured("time/start", num_steps=1),
        "step_s": folder.measured("time/total", num_steps=20),
    }
    logger.info("%s", outlook(config, first_step=first_step, last_step=training.num_steps, **times))
    async with training.open(folder, budget) as run:
        with folder.open_loggers() as loggers, watch_hosts(config, None if loggers.is_empty else loggers.log_host):
            folder.next_metrics["time/start"] = time.monotonic() - started
            state = await run.begin(checkpoint)
            async with run.saved(state):
                yield run, state
    if masked := run.masks.text():
        logger.warning("In the steps of this attempt %s", masked)


def find_start(training: Training[Supplier], folder: RunFolder) -> tuple[Checkpoint | None, bool]:
    """The checkpoint to go on from, and whether it is whole and no step follows; else describes the attempt on disk."""
    checkpoint = folder.newest_checkpoint()
    while checkpoint is not None and (
        checkpoint.step >= training.num_steps or is_good_enough(training.config.rollouts, checkpoint.state().metrics)
    ):
        # No rank will load it, and look at its shards.
        damage = find_damage(checkpoint.folder)
        if damage is None:
            return checkpoint, True
        checkpoint = folder.pass_over(checkpoint, damage)
    folder.note_attempt(training.left_out)
    return checkpoint, False


def said_of_complete(training: Training[Supplier], checkpoint: Checkpoint, changes: Sequence[str]) -> str:
    """The line of an attempt that finds no step to make, and what would make more."""
    config = training.config
    has_all = checkpoint.step >= training.num_steps
    way_on = "grpo.stop_at_validation_threshold=X"
    if has_all:
        way_on = f"{config.algorithm}.max_num_steps=N, and {config.algorithm}.max_num_epochs=M if the rows end before"
    without_effect = f"; the changed keys have no effect: {', '.join(changes)}" if changes else ""
    step = f"step {checkpoint.step} of {training.num_steps}"
    return f"Already complete at {step}: {checkpoint.folder}{without_effect}; to go on: {way_on}"


async def run_attempt(train: Train, training: Training[Supplier], folder: RunFolder, budget: Budget) -> bool:
    """Runs configured steps from the newest checkpoint. False if the budget ended first: the same command goes on."""
    checkpoint, is_complete = find_start(training, folder)
    last_step = training.num_steps
    if checkpoint is not None and is_complete:
        folder.resume_from(checkpoint)
        folder.note_complete()
        drop_log_folder(folder.path, folder.log_folder)
        logger.info("%s", said_of_complete(training, checkpoint, attempt_changes(folder.path, training.config)))
        return True
    async with start_run(training, folder, checkpoint, budget) as (run, state):
        await train(run, state)
    said_of_end(folder, state.step, last_step)
    if Path(sys.prefix) == ENVIRONMENT and env.VIRTUAL_ENV.read() is None:
        logger.info("For further commands: source %s/bin/activate", ENVIRONMENT)
    return run.is_done(state)


def said_of_end(folder: RunFolder, step: int, last_step: int) -> None:
    """Logs the last lines of an attempt that ends well: its newest and best checkpoints, and the page."""
    if best := folder.checkpoints.best_text():
        logger.info("Checkpoints: %s", best)
    logger.info("Step %d of %d is done; report: %s", step, last_step, folder.path / REPORT)


def main(train: Train, arguments: Sequence[str] | None = None) -> int:
    """Entry point of a training loop; returns the exit code, one of `mrl.exit_codes.CODES`."""
    startup.lap("import")
    started = time.monotonic() - env.job_age_s()
    options = check.parse_arguments(arguments)
    if options.check:
        return check.check_run(options, options.name, options.words)
    try:
        logger.info("Config: %s", find_config(options.name))
        config, migration = load_run(options.name, options.words, secrets=options.secrets)
        migration.log()
        budget = Budget(config.checkpointing.must_save_by_s, started=started)
        training = prepare(config)
        folder = open_folder(training)
    except ValueError as error:
        logger.error("%s", error)
        return REFUSED
    except TimeoutError as error:
        logger.error("The attempt ended: %s. The same command resumes.", error)
        return FAILED
    code, said = end_of(train, training, folder, budget)
    folder.note_end(code, redact_text(said, options.secrets))
    if code != DONE:
        logger.log(logging.INFO if code == ENDED_EARLY else logging.ERROR, "%s", said)
    return code


def end_of(train: Train, training: Training[Supplier], folder: RunFolder, budget: Budget) -> tuple[int, str]:
    """Runs an attempt; returns its exit code, and how it ended."""
    actors = folder.log_folder / "actors"
    try:
        with folder:
            is_done = asyncio.run(run_attempt(train, training, folder, budget))
    except (NoSignal, TooManySkipped) as error:
        return FAILED, str(error)
    except (Disagreement, NoWholeCheckpoint) as error:
        return REFUSED, str(error)
    except FolderLost as error:
        return FAILED, f"The attempt ended: {error}.{' The same command resumes.' if folder.path.is_dir() else ''}"
    except (SaveFailed, ActorLost, DeadlineExceeded, NoCluster, TimeoutError) as error:
        if isinstance(error, SaveFailed):
            note_traceback(error, actors, is_needed=False)
        reason = str(error).removesuffix(".")
        return FAILED, f"The attempt ended: {reason}. Logs of the actors: {actors}. The same command resumes."
    except Exception as error:  # of a library, of own code, or of this package: its frames go to the logs
        note_traceback(error, actors)
        advice = way_out(error, folder.path) if isinstance(error, OSError) or is_shortage(error) else ""
        reason = reason_of(error)
        reason += f"; {advice}" if advice and advice not in reason else ""
        return FAILED, f"The attempt ended: {reason}. Traceback ({TRACEBACK}) and logs of the actors: {actors}"
    return (
        (DONE, "The run is complete")
        if is_done
        else (ENDED_EARLY, "Ended before the last step; the same command goes on")
    )
