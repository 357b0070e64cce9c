# SPDX-License-Identifier: Apache-2.0
"""`python -m mrl.replay RUN --step N`: repeats a run's step from the checkpoint before it, compares it with the record.

Of steps that `logger.record_steps` has recorded the training alone, from their rollouts: old and reference logprobs,
masks and advantages of every token, and the metrics. Of others, or with --sample, rollouts too: prompts, texts,
rewards, metrics, and of some rollouts every token and logprob. On CPU hosts they are equal bit for bit; kernels of GPUs
may add up in another order, and so do other layouts of the ranks. Writes into a folder of its own, RUN/replay by
default, and leaves the run as it is. Exit code: 0 equal, 1 different, 2 there is nothing to compare.
"""

from __future__ import annotations

from conversion.files.limits import flush_console, limit_console
from mrl.signals import LISTENER

if __name__ == "__main__":
    LISTENER.listen()
    limit_console()
    LISTENER.cleanups.append(flush_console)

import argparse
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mrl.config.load import load_config
from mrl.config.overrides import quoted
from mrl.config.secrets import start_logging
from mrl.loop.main import main as run_command
from mrl.loop.preflight import check_start
from mrl.loop.recording import layout_of
from mrl.metrics import repeats
from mrl.retrain import TOLERANCE, check_replayed, records_of, retrained
from mrl.runs import rows_of
from mrl.store.checkpoints import Checkpoint, checkpoints_in, find_damage
from mrl.store.identity import IDENTITY
from mrl.store.loggers.thread import exit_with
from mrl.store.run_folder import LEDGER, RUN_CONFIG
from mrl.train import train_step
from mrl.view.dumps import Dump, list_dumps, read_dump
from mrl.view.rows import METRIC_KEYS, METRICS, Row, read_rows
from mrl.view.run_data import read_config, setting

if TYPE_CHECKING:
    from mrl.loop.run import Run, Supplier
    from mrl.types import RunState

logger = logging.getLogger(__name__)

MARKER = "made_by_replay"
"""File of the folders that may be emptied."""
RECORDED = ("grpo", "distillation")
"""Algorithms whose records have all that the training needs: nothing is in them of a critic, nor of the rows that pairs
share.
"""
COMPARED = (
    "prompt_id",
    "content",
    "rewards",
    "masked",
    "input_lengths",
    "token_ids",
    "generation_logprobs",
    "prev_logprobs",
    "advantages",
)
"""Keys of a rollout's record."""
NO_LOGGERS = [f"logger.{name}_enabled=false" for name in ("wandb", "tensorboard", "mlflow", "swanlab")]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="mrl.replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="checkpointing.checkpoint_dir of the run")
    parser.add_argument("--step", type=int, required=True, help="the step to make again")
    parser.add_argument(
        "--into",
        type=Path,
        metavar="FOLDER",
        help="where to write, instead of RUN/replay; what an earlier replay left there goes",
    )
    parser.add_argument(
        "--sample", action="store_true", help="sample the rollouts again, too, where the steps are recorded"
    )
    parser.add_argument("words", nargs="*", metavar="a.b=c", help="other settings, such as another layout of the ranks")
    options = parser.parse_intermixed_args(arguments)
    run, step = options.run.absolute(), options.step
    into = (options.into or run / "replay").absolute()
    try:
        rows = {int(row["step"] or 0): row for row in rows_of(run)}
    except (OSError, ValueError) as error:
        parser.error(str(error))
    finite = {number for number, row in rows.items() if not row.get("train/num_skipped_updates")}
    if step < 1 or (step not in rows and not records_of(run, range(step, step + 1), finite)[0].exists()):
        parser.error(
            f"{run / METRICS} has no step {step}; it has {', '.join(map(str, sorted(rows)[:3]))} ... "
            f"{max(rows, default=0)}"
        )
    if into.exists() and not (into / MARKER).is_file():
        parser.error(f"{into} is there, and no replay has made it; name a folder that is not there")
    config = config_of(run, step)
    if not config.is_file():
        parser.error(f"{config} is missing: nothing says how the step was made; restore it")
    base = next(
        (
            found
            for found in checkpoints_in(run)
            if found.step < step and find_damage(found.folder, with_shards=False) is None
        ),
        None,
    )
    first = 1 if base is None else base.step + 1
    records = records_of(run, range(first, step + 1), finite)
    algorithm, missing = setting(read_config(config), "algorithm"), [path.name for path in records if not path.exists()]
    if not options.sample and not missing and algorithm in RECORDED:
        return replay_training([str(config), *NO_LOGGERS, *options.words], run, into, base, records)
    if setting(read_config(config), "grpo.async_grpo.enabled"):
        parser.error(
            f"{config}: grpo.async_grpo.enabled=true: the rollouts of a step were sampled while earlier ones were "
            "trained, and an attempt that begins at a checkpoint samples them from other weights; steps without "
            f"lag can be made again, and those that logger.record_steps records, of {' and '.join(RECORDED)} and "
            f"without --sample; missing: {', '.join(missing) or 'none'}"
        )
    try:
        lay_out(into, run, base)
    except OSError as error:
        parser.error(f"{error}; name another folder with --into, or restore what is missing")
    words = [str(config), *NO_LOGGERS, "checkpointing.save_period=1000000000", *options.words]
    code = run_command(until(step), [*words, *into_folder(into)])
    if code:
        return code
    return tell(
        differences(run, into, range(first, step + 1)),
        f"steps {first} to {step} of {run}, made again from {name_of(base)}",
    )


def into_folder(folder: Path) -> list[str]:
    """The overrides with which a run writes to a folder."""
    return [f"checkpointing.checkpoint_dir={quoted(folder)}", f"logger.log_dir={quoted(folder / 'logs')}"]


def replay_training(
    words: Sequence[str], run: Path, into: Path, base: Checkpoint | None, records: Sequence[Path]
) -> int:
    """Makes the training of recorded steps again, whatever the lag; returns the exit code."""
    secrets = start_logging("text")
    settings = [*words[1:], *into_folder(into)]
    try:
        config = check_start(load_config(words[0], settings, secrets=secrets))
        recorded = check_replayed(base, records)
        lay_out(into, run, None)
    except (OSError, ValueError) as error:
        logger.error("%s", error)
        return 2
    for record in recorded:
        if record.problem:
            logger.info("Step %d, as the run said: %s", record.step, record.problem)
    same = all(record.layout == layout_of(config) for record in recorded)
    how = "bit for bit" if same else f"within {TOLERANCE[config.policy.precision]:g}, as the layout is another"
    what = (
        f"the training of steps {recorded[0].step} to {recorded[-1].step} of {run}, from their records and "
        f"{name_of(base)}, {how}"
    )
    try:
        return tell(retrained(config, base, recorded, into / "logs" / "actors"), what)
    except RuntimeError as error:
        logger.error("The replay ended: %s. Logs of the ranks: %s", error, into / "logs" / "actors")
        return 2


def name_of(base: Checkpoint | None) -> str:
    return "the start" if base is None else base.folder.name


def tell(different: Iterable[str], what: str) -> int:
    """Logs the first differences, or that there is none; returns the exit code."""
    found = list(different)
    for line in found[:5]:
        logger.error("%s", line)
    if not found:
        logger.info("Equal: %s", what)
    return int(bool(found))


def lay_out(into: Path, run: Path, base: Checkpoint | None) -> None:
    """Makes a run folder in the state of the run at a checkpoint; None: at its start. Checkpoints are links."""
    if into.exists():
        shutil.rmtree(into)
    into.mkdir(parents=True)
    (into / MARKER).touch()
    if base is not None:
        (into / base.folder.name).symlink_to(base.folder)
        shutil.copy(base.ledger, into / LEDGER)
        shutil.copy(run / IDENTITY, into / IDENTITY)


def config_of(run: Path, step: int) -> Path:
    """The config of the attempt whose rollouts of the step are here; else that of the last attempt."""
    made = next((dump.path.parent for dump in list_dumps(run) if dump.step == step), run)
    return next((path for folder in (made, run) if (path := folder / RUN_CONFIG).exists()), run / RUN_CONFIG)


def until(step: int) -> Callable[[Run[Supplier], RunState], None]:
    """Makes a training loop that ends after a step but keeps the schedule of the whole run."""

    def train(run: Run[Supplier], state: RunState) -> None:
        while state.step < step and not run.is_over:
            train_step(run, state)

    return train


def differences(one: Path, other: Path, steps: range) -> Iterator[str]:
    """The differences of two run folders in these steps, in the order a step computes: rollouts before metrics."""
    dumps, others = ({(dump.step, dump.split): dump for dump in list_dumps(folder)} for folder in (one, other))
    rows, other_rows = (
        {row["step"]: row for row in read_rows(folder / METRICS, METRIC_KEYS)[0]} for folder in (one, other)
    )
    for step in steps:
        if (dump := dumps.get((step, "train"))) is not None:
            yield from rollout_differences(step, dump, others.get((step, "train")))
        yield from metric_differences(step, rows.get(step, {}), other_rows.get(step, {}))


def rollout_differences(step: int, one: Dump, other: Dump | None) -> Iterator[str]:
    """The first difference of each rollout."""
    found = [] if other is None else read_dump(other.path)
    recorded = read_dump(one.path)
    if len(found) != len(recorded):
        yield f"step {step}: rollouts recorded {len(recorded)}, made {len(found)}"
    for index, (row, made) in enumerate(zip(recorded, found, strict=False)):
        key = next((key for key in COMPARED if row.get(key) != made.get(key)), None)
        if key is None:
            continue
        values, others = row.get(key), made.get(key)
        place = ""
        if isinstance(values, list) and isinstance(others, list):
            at = next(
                (at for at, pair in enumerate(zip(values, others, strict=False)) if pair[0] != pair[1]),
                min(len(values), len(others)),
            )
            place, values, others = f"[{at}]", values[at : at + 1], others[at : at + 1]
        yield (
            f"step {step}, rollout {index} of prompt {row.get('prompt_id')}: {key}{place} was {values!r:.80} and "
            f"is {others!r:.80}"
        )


def metric_differences(step: int, recorded: Row, made: Row) -> Iterator[str]:
    for name in sorted(recorded.keys() | made.keys()):
        if repeats(name) and recorded.get(name) != made.get(name):
            yield f"step {step}: {name} was {recorded.get(name)} and is {made.get(name)}"


if __name__ == "__main__":
    exit_with(main)
