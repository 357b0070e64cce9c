# SPDX-License-Identifier: Apache-2.0
"""Records of steps: a step's sequences, and what the ranks computed of them. `mrl.replay` makes the training again."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from conversion.files.durable import make_folder, remove_file
from mrl.cluster.verbs import PolicyVerbs
from mrl.data.recorded import write_record
from mrl.store.kept import num_bytes, with_payloads
from mrl.types import FixedAdvantage, Rollout, RolloutInfo, TeacherTokens

if TYPE_CHECKING:
    from mrl.cluster.session import Session
    from mrl.config.schema.run import RunConfig
    from mrl.types import Batch

logger = logging.getLogger(__name__)

FOLDER = "recorded"
NOT_FINITE = "not_finite_"
"""Begins the names of records of steps with NaN or Inf."""
MAX_NOT_FINITE, MAX_BYTES = 8, 8 * 10**9
PULL_S = 600.0


@dataclass(frozen=True)
class RecordedSequence:
    """A sequence as the driver sends it, and the tensors that its rank computed."""

    info: RolloutInfo
    rollout: Rollout
    advantage: float
    is_valid: bool
    reward: float
    fixed_advantages: tuple[FixedAdvantage, ...]
    teacher: TeacherTokens | None
    rank: int
    """-1: none has computed anything."""
    tensors: dict[str, np.ndarray]
    """float32 by token, at the token before the one that they are of: old_logprobs, reference_logprobs, loss_mask,
    advantages.
    """


@dataclass(frozen=True)
class RecordedStep:
    """A step, update by update."""

    step: int
    pad_token_id: int
    layout: str
    """Equal where sums are made in the same order."""
    batches: tuple[tuple[RecordedSequence, ...], ...]
    metrics: dict[str, float]
    problem: str
    """Empty, or why the step has failed."""


def layout_of(config: RunConfig) -> str:
    """The keys that decide in which order a step sums floats."""
    policy = config.policy
    parts = (policy.megatron_cfg, policy.sequence_packing, policy.dynamic_batching)
    sizes = (config.num_policy_ranks, policy.train_micro_batch_size, policy.logprob_batch_size)
    sections = [dataclasses.asdict(part) for part in parts]
    del sections[0]["env_vars"]  # may hold secrets
    return json.dumps([*sections, *sizes], sort_keys=True, default=str)


def tensors_of(session: Session) -> list[dict[int, tuple[int, dict[str, np.ndarray]]]]:
    """Tensors of the sequences of each batch of the step, by index, each with the rank that has them."""
    found: list[dict[int, tuple[int, dict[str, np.ndarray]]]] = []
    for rank, batches in session.policies.call(PolicyVerbs.sequence_tensors).items():
        found += [{} for _ in range(len(batches) - len(found))]
        for at, sequences in enumerate(batches):
            found[at] |= {index: (rank, tensors) for index, tensors in sequences.items()}
    return found


def record_step(
    config: RunConfig,
    session: Session,
    step: int,
    batches: Sequence[Batch],
    metrics: Mapping[str, float],
    *,
    problem: str,
) -> RecordedStep:
    """Fetches a step's sequences, and the ranks' tensors of them before the ranks free those."""
    from mrl.cluster.payload import pull, pull_teacher

    tensors, recorded = tensors_of(session), []
    for batch, of_batch in zip(batches, tensors or [{} for _ in batches], strict=True):
        rollouts = pull([sequence.rollout for sequence in batch.sequences], timeout_s=PULL_S)
        teachers = pull_teacher(batch.sequences, timeout_s=PULL_S)
        sequences = []
        for index, (sequence, rollout, teacher) in enumerate(zip(batch.sequences, rollouts, teachers, strict=True)):
            info = dataclasses.replace(
                with_payloads(sequence.rollout, [None] * len(sequence.rollout.sequences)), further=()
            )
            bare = dataclasses.replace(rollout, request=dataclasses.replace(rollout.request, earlier=None))
            judged = (sequence.advantage, sequence.is_valid, sequence.reward, sequence.fixed_advantages)
            sequences.append(RecordedSequence(info, bare, *judged, teacher, *of_batch.get(index, (-1, {}))))
        recorded.append(tuple(sequences))
    return RecordedStep(step, session.policies.pad_token_id, layout_of(config), tuple(recorded), dict(metrics), problem)


def write_step(folder: Path, record: RecordedStep, *, keeps: int) -> Path | None:
    """Writes a record below the run folder and removes those `keeps` steps older; None, with a warning, on a full disk.

    Of steps that are not finite there are at most `MAX_NOT_FINITE`.
    """
    path = folder / FOLDER / (f"{NOT_FINITE}step_{record.step}.mrl" if record.problem else f"step_{record.step}.mrl")
    size = sum(num_bytes(sequence.rollout) for batch in record.batches for sequence in batch)
    try:
        make_folder(path.parent)
        for part in path.parent.glob(".*.mrl.*"):  # of a write that was killed
            remove_file(part)
        if record.problem and not path.exists() and len(list(path.parent.glob(f"{NOT_FINITE}*"))) >= MAX_NOT_FINITE:
            raise OSError(f"the folder holds {MAX_NOT_FINITE} such records; move them away")
        if size > MAX_BYTES:
            raise OSError(f"{size / 1e9:.1f} GB of rollouts are more than {MAX_BYTES / 1e9:g}")
        if not record.problem:
            for old in path.parent.glob("step_*.mrl"):
                if (number := re.fullmatch(r"step_(\d+)\.mrl", old.name)) and not record.step - keeps < int(
                    number[1]
                ) <= record.step:
                    remove_file(old)
        write_record(path, record)
    except TimeoutError:
        raise
    except OSError as error:
        logger.warning("%s: the batch of step %d is not recorded: %s", path, record.step, error)
        return None
    return path
