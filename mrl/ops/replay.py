# SPDX-License-Identifier: Apache-2.0
"""`python -m mrl.replay RUN --step N`: repeats a run's step from the checkpoint before it, compares it with the record.

Of steps that `logger.record_steps` has recorded the training alone, from their rollouts: old and reference logprobs,
masks and advantages of every token, and the metrics. Of others, or with --sample, rollouts too: prompts, texts,
rewards, metrics, and of some rollouts every token and logprob. On CPU hosts they are equal bit for bit; kernels of GPUs
may add up in another order, and so do other layouts of the ranks. Writes into a folder of its own, RUN/replay by
default, and leaves the run as it is. Exit code: 0 equal, 1 different, 2 there is nothing to compare.
"""

from __future__ import annotations

import argparse
import logging
import math
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mrl import barred
from mrl.cluster.verbs import PolicyVerbs
from mrl.config.command_line import number
from mrl.config.load import load_config
from mrl.config.overrides import quoted
from mrl.config.secrets import start_logging
from mrl.data.batch import make_batches
from mrl.loop.learning import layout_of, learn, tensors_of
from mrl.loop.main import Train
from mrl.loop.main import main as run_command
from mrl.loop.preflight import check_start
from mrl.metrics import repeats
from mrl.ops.runs import rows_of
from mrl.ops.view.dumps import Dump, list_dumps, read_dump
from mrl.ops.view.run_data import read_config
from mrl.store.checkpoints import Checkpoint, checkpoints_in, find_damage
from mrl.store.identity import IDENTITY
from mrl.store.rollout_files import NOT_FINITE, RECORDED, RecordedStep, SequenceTensors, read_record
from mrl.store.run_files import METRIC_KEYS, METRICS, Row, read_rows, setting
from mrl.store.run_folder import LEDGER, RUN_CONFIG
from mrl.train import train_step
from mrl.types import NOT_FINITE as IS_NOT_FINITE
from mrl.types import TeacherTokens

if TYPE_CHECKING:
    from mrl.config.schema.run import RunConfig
    from mrl.loop.run import Run, Supplier
    from mrl.types import Batch, RunState

logger = logging.getLogger(__name__)

MARKER = "made_by_replay"
"""File of the folders that may be emptied."""
REPLAYED = ("grpo", "distillation")
"""Algorithms whose records have all that the training needs: nothing is in them of a critic, nor of the rows that pairs
share.
"""
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}
"""Allowed difference of a logprob or advantage at another layout, by `policy.precision`; of loss and gradient norm as a
share, ten times that. At the layout of the record every byte has to be equal."""
COMPARED_METRICS = ("train/loss", "train/grad_norm")
"""Metrics that another layout does not change beyond the tolerance."""
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
    parser.add_argument("--step", type=number(int, least=1), required=True, help="the step to make again")
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
        parser.error(barred(error) or str(error))
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
    if not options.sample and not missing and algorithm in REPLAYED:
        return replay_training([str(config), *NO_LOGGERS, *options.words], run, into, base, records)
    is_ahead = setting(read_config(config), "grpo.async_grpo.enabled")
    if is_ahead or setting(read_config(config), "grpo.oversample") not in (None, 1):
        key = "grpo.async_grpo.enabled=true" if is_ahead else "grpo.oversample above 1"
        parser.error(
            f"{config}: {key}: the rollouts of a step were sampled while earlier ones were "
            "trained, and an attempt that begins at a checkpoint samples them from other weights; steps without "
            f"lag can be made again, and those that logger.record_steps records, of {' and '.join(REPLAYED)} and "
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


def until(step: int) -> Train:
    """Makes a training loop that ends after a step but keeps the schedule of the whole run."""

    async def train(run: Run[Supplier], state: RunState) -> None:
        while state.step < step and not run.is_over:
            await train_step(run, state)

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


def records_of(run: Path, steps: range, finite: Collection[int]) -> list[Path]:
    """The records of these steps; missing ones too. Of steps that are not `finite`, those made for that reason."""
    names = {step: f"step_{step}.mrl" for step in steps}
    others = {
        step: f"{NOT_FINITE}{name}"
        for step, name in names.items()
        if step not in finite and not (run / RECORDED / name).exists()
    }
    return [run / RECORDED / name for name in (names | others).values()]


def check_replayed(base: Checkpoint | None, paths: Sequence[Path]) -> list[RecordedStep]:
    """Reads the records of steps; ValueError: something that their training needs is missing."""
    if base is not None and (damage := find_damage(base.folder)):
        raise ValueError(f"{base.folder}: {damage}")
    try:
        return [read_record(path, RecordedStep) for path in paths]
    except ValueError as error:
        raise ValueError(f"{error}; or sample the rollouts again, with --sample") from error


def retrained(
    config: RunConfig, base: Checkpoint | None, records: Sequence[RecordedStep], log_folder: Path
) -> Iterator[str]:
    """Differences between recorded steps and their retraining from a checkpoint; None: from the starting weights."""
    from mrl.cluster.session import start_policies

    with start_policies(config, pad_token_id=records[0].pad_token_id, log_folder=log_folder) as session:
        policies = session.policies
        if base is not None:
            policies.call(PolicyVerbs.load_checkpoint, base.weights, deadline_s=policies.start_s)
        for record in records:
            batches = restored_batches(record, config)
            ended_run = bool(record.problem) and not record.metrics
            try:
                metrics = learn(session, config, batches, record.step)
            except RuntimeError as error:
                if not ended_run or IS_NOT_FINITE not in str(error):
                    raise
                metrics = {}
            if ended_run and metrics:
                yield (
                    f"step {record.step}: it was not finite, which ended the run, and now is: loss "
                    f"{metrics['train/loss']}"
                )
            is_same = record.layout == layout_of(config)
            yield from step_differences(
                record, tensors_of(session), metrics, None if is_same else TOLERANCE[config.policy.precision]
            )


def restored_batches(record: RecordedStep, config: RunConfig) -> list[Batch]:
    """The batches of a recorded step, in rows for the ranks of this config."""
    from mrl.cluster.payload import put_items

    recorded = [sequence for batch in record.batches for sequence in batch.sequences]
    rollouts = put_items([sequence.rollout.pulled for sequence in recorded])
    taught = iter(put_items([one.teacher for one in recorded if isinstance(one.teacher, TeacherTokens)]))
    sequences = [
        replace(
            sequence,
            rollout=replace(sequence.rollout, payload=payload),
            teacher=None if sequence.teacher is None else next(taught),
        )
        for sequence, payload in zip(recorded, rollouts, strict=True)
    ]
    return make_batches(sequences, config)


def step_differences(
    record: RecordedStep, made: Sequence[SequenceTensors], metrics: Mapping[str, float], tolerance: float | None
) -> Iterator[str]:
    """Each sequence's first difference by rank, tensor and token, then metrics. `tolerance` None: every byte counts."""
    for update, (batch, computed, again) in enumerate(zip(record.batches, record.computed, made, strict=True)):
        for index, sequence in enumerate(batch.sequences):
            (_, recorded), (rank, tensors) = computed.get(index, (-1, {})), again.get(index, (-1, {}))
            place = f"step {record.step}, update {update}, rank {rank}, rollout {sequence.rollout.request_id}"
            yield from _sequence_difference(place, recorded, tensors, tolerance)
    for name in sorted(record.metrics and record.metrics.keys() | metrics.keys()):  # a step that ended its run has none
        one, other = record.metrics.get(name, math.nan), metrics.get(name, math.nan)
        is_equal = one == other or (math.isnan(one) and math.isnan(other))
        if tolerance is not None:
            is_equal = (
                is_equal
                or name not in COMPARED_METRICS
                or math.isclose(one, other, rel_tol=10 * tolerance, abs_tol=10 * tolerance)
            )
        if not is_equal and repeats(name):
            yield f"step {record.step}: {name} was {one} and is {other}"


def _sequence_difference(
    place: str, recorded: Mapping[str, np.ndarray], made: Mapping[str, np.ndarray], tolerance: float | None
) -> Iterator[str]:
    for name in {**recorded, **made}:
        one, other = recorded.get(name), made.get(name)
        if one is None or other is None or one.shape != other.shape:
            shapes = [None if found is None else found.shape for found in (one, other)]
            yield f"{place}: {name} had shape {shapes[0]} and has {shapes[1]}"
            return
        equal = (one == other) | (np.isnan(one) & np.isnan(other))
        if tolerance is not None:
            equal |= np.abs(one - other) <= tolerance
        if not equal.all():
            at = int(np.flatnonzero(~equal)[0])
            yield f"{place}: {name}[{at}] was {one[at]} and is {other[at]}"
            return
