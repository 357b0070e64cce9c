# SPDX-License-Identifier: Apache-2.0
"""Trains recorded steps again from the checkpoint before them, without engines, at any layout of the ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mrl.cluster.verbs import PolicyVerbs
from mrl.config.schema.run import RunConfig
from mrl.data.batch import make_batches
from mrl.data.recorded import read_record
from mrl.loop.learning import learn
from mrl.loop.recording import FOLDER, NOT_FINITE, RecordedStep, layout_of, tensors_of
from mrl.metrics import repeats
from mrl.store.checkpoints import Checkpoint, find_damage
from mrl.types import NOT_FINITE as IS_NOT_FINITE
from mrl.types import TrainSequence

if TYPE_CHECKING:
    from mrl.types import Batch

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}
"""Allowed difference of a logprob or advantage at another layout, by `policy.precision`; of loss and gradient norm as a
share, ten times that. At the layout of the record every byte has to be equal."""
COMPARED = ("train/loss", "train/grad_norm")
"""Metrics that another layout does not change beyond the tolerance."""


def records_of(run: Path, steps: range, finite: Collection[int]) -> list[Path]:
    """The records of these steps; missing ones too. Of steps that are not `finite`, those made for that reason."""
    names = {step: f"step_{step}.mrl" for step in steps}
    others = {
        step: f"{NOT_FINITE}{name}"
        for step, name in names.items()
        if step not in finite and not (run / FOLDER / name).exists()
    }
    return [run / FOLDER / name for name in (names | others).values()]


def check_replayed(base: Checkpoint | None, paths: Sequence[Path]) -> list[RecordedStep]:
    """Reads the records of steps; ValueError: something that their training needs is missing."""
    if base is not None and (damage := find_damage(base.folder)):
        raise ValueError(f"{base.folder}: {damage}")
    return [read_record(path, RecordedStep) for path in paths]


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
                record, batches, tensors_of(session), metrics, None if is_same else TOLERANCE[config.policy.precision]
            )


def restored_batches(record: RecordedStep, config: RunConfig) -> list[Batch]:
    """The batches of a recorded step, in rows for the ranks of this config."""
    from mrl.cluster.payload import put_items

    recorded = [sequence for batch in record.batches for sequence in batch]
    rollouts = put_items([sequence.rollout for sequence in recorded])
    taught = iter(put_items([sequence.teacher for sequence in recorded if sequence.teacher is not None]))
    sequences = [
        TrainSequence(
            rollout=replace(sequence.info, payload=payload),
            advantage=sequence.advantage,
            is_valid=sequence.is_valid,
            reward=sequence.reward,
            fixed_advantages=sequence.fixed_advantages,
            teacher=None if sequence.teacher is None else next(taught),
        )
        for sequence, payload in zip(recorded, rollouts, strict=True)
    ]
    return make_batches(sequences, config)


def step_differences(
    record: RecordedStep,
    batches: Sequence[Batch],
    made: Sequence[Mapping[int, tuple[int, Mapping[str, np.ndarray]]]],
    metrics: Mapping[str, float],
    tolerance: float | None,
) -> Iterator[str]:
    """Each sequence's first difference by rank, tensor and token, then metrics. `tolerance` None: every byte counts."""
    start = 0
    recorded = [sequence for batch in record.batches for sequence in batch]
    for update, (batch, of_batch) in enumerate(zip(batches, made, strict=True)):
        for index in range(len(batch.sequences)):
            sequence, (rank, tensors) = recorded[start + index], of_batch.get(index, (-1, {}))
            place = f"step {record.step}, update {update}, rank {rank}, rollout {sequence.info.request_id}"
            yield from _sequence_difference(place, sequence.tensors, tensors, tolerance)
        start += len(batch.sequences)
    for name in sorted(record.metrics and record.metrics.keys() | metrics.keys()):  # a step that ended its run has none
        one, other = record.metrics.get(name, math.nan), metrics.get(name, math.nan)
        is_equal = one == other or (math.isnan(one) and math.isnan(other))
        if tolerance is not None:
            is_equal = (
                is_equal
                or name not in COMPARED
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
