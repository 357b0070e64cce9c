"""The command line of `python -m mrl.train`: config, checks, run folder, the loop, exit code."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from mrl import check, env
from mrl.cluster.head import NoCluster
from mrl.cluster.monitor import watch_hosts
from mrl.cluster.waiting import ActorLost, DeadlineExceeded
from mrl.config.files import find_config
from mrl.config.load import load_run
from mrl.config.schema.run import RunConfig
from mrl.data.reading import LeftOut, write_quarantine
from mrl.loop import examples, rollouts
from mrl.loop.budget import Budget
from mrl.loop.examples import ExampleTraining
from mrl.loop.rollout_queue import NoSignal
from mrl.loop.rollouts import RolloutTraining
from mrl.loop.run import Run, Supplier
from mrl.store.ownership import FolderLost
from mrl.store.run_folder import RunFolder
from mrl.store.summary import is_good_enough
from mrl.train import train

logger = logging.getLogger(__name__)

# EX_TEMPFAIL of sysexits.h, by which launchers know that the job is to be queued again.
ENDED_EARLY = 75


class Training(Protocol):
    """A run that may start: its config and data are checked."""

    @property
    def num_steps(self) -> int: ...

    @property
    def left_out(self) -> list[LeftOut]: ...

    def open(self, folder: RunFolder, budget: Budget) -> AbstractContextManager[Run[Supplier]]: ...


def prepare(config: RunConfig) -> Training:
    """Reads and checks the data of the configured algorithm.

    Raises:
        ValueError: naming every key, file or row at fault, the rule, and the way out.
    """
    if config.has_engines:
        return RolloutTraining(config, rollouts.preflight(config))
    return ExampleTraining(config, examples.preflight(config))


def run_attempt(config: RunConfig, training: Training, folder: RunFolder, budget: Budget) -> bool:
    """Runs the configured steps from where the run folder stands. False if the budget was over first: the same command goes on."""
    write_quarantine(training.left_out, folder.path / "quarantine")
    checkpoint, last_step = folder.newest_checkpoint(), training.num_steps
    if checkpoint is not None and (checkpoint.step >= last_step or is_good_enough(config.grpo, checkpoint.state().metrics)):
        logger.info("All is done by step %d of %d: %s", checkpoint.step, last_step, checkpoint.folder)
        return True
    with training.open(folder, budget) as run, folder.open_loggers() as loggers, watch_hosts(config, loggers):
        budget.begin()
        state = train(run, checkpoint)
    logger.info("Step %d of %d is done; report: %s", state.step, last_step, folder.path / "report.html")
    return state.step == last_step or not budget.is_over


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Exit code 0; 2 with one clear message if the input is at fault.

    1 if the attempt failed and 75 if it was asked to end before its last step: the same command resumes.
    """
    started = time.monotonic() - env.job_age_s()
    options = check.parse_arguments(arguments)
    if options.check:
        return check.check_run(options.name, options.words)
    try:
        logger.info("Config: %s", find_config(options.name))
        config, migration = load_run(options.name, options.words)
        migration.log()
        budget = Budget(config.checkpointing.must_save_by_s, started=started)
        budget.listen()
        training = prepare(config)
        folder = RunFolder(config)
        folder.open()
    except ValueError as error:
        logger.error("%s", error)
        return 2
    try:
        with folder:
            is_done = run_attempt(config, training, folder, budget)
    except NoSignal as error:
        logger.error("%s", error)
        return 2
    except (ActorLost, DeadlineExceeded, FolderLost, NoCluster) as error:
        logger.error("The attempt ended: %s. Logs of the actors: %s. The same command resumes.", error, folder.log_folder / "actors")
        return 1
    if not is_done:
        logger.info("Ended before the last step; the same command resumes")
    return 0 if is_done else ENDED_EARLY
