# SPDX-License-Identifier: Apache-2.0
"""Records of steps: what is kept of them, how many, and how the first difference of a remade step is named."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from mrl.data.recorded import read_record
from mrl.loop.recording import MAX_NOT_FINITE, RecordedSequence, RecordedStep, write_step
from mrl.retrain import step_differences
from mrl.types import FixedAdvantage, RolloutInfo, TeacherTokens
from tests.rollouts import request
from tests.unit.store.test_kept import rollout

if TYPE_CHECKING:
    from mrl.types import Batch


def floats(values: Sequence[float] | Sequence[Sequence[float]]) -> np.ndarray:
    return np.array(values, np.float32)


def sequence(index: int) -> RecordedSequence:
    one = dataclasses.replace(rollout("p", index, 3), request=request((1, 2), prompt_id="p", rollout_index=index))
    tensors = {"old_logprobs": floats([0.0, -1.5, np.nan]), "loss_mask": floats([0.0, 1.0, 0.0])}
    teacher = TeacherTokens(floats([[0.5]]), np.array([[7]], np.int32))
    return RecordedSequence(
        RolloutInfo.of(one, None), one, 0.5, True, 1.0, (FixedAdvantage(0, 1, -1.0),), teacher, index, tensors
    )


def step(number: int, problem: str = "", **metrics: float) -> RecordedStep:
    return RecordedStep(
        number, 256, "{}", ((sequence(0), sequence(1)), (sequence(2),)), metrics or {"train/loss": 0.5}, problem
    )


def test_a_record_has_every_byte_of_its_step(tmp_path: Path):
    path = write_step(tmp_path, step(3), keeps=1)
    assert path is not None
    found, expected = read_record(path, RecordedStep), step(3)
    assert found.metrics == expected.metrics and [len(batch) for batch in found.batches] == [2, 1]
    for one, other in zip(found.batches[0], expected.batches[0], strict=True):
        assert one.info == other.info and one.fixed_advantages == other.fixed_advantages and one.rank == other.rank
        assert one.rollout.request == other.rollout.request and one.rollout.turns == other.rollout.turns
        assert {name: values.tobytes() for name, values in one.tensors.items()} == {
            name: values.tobytes() for name, values in other.tensors.items()
        }
        assert one.teacher is not None and one.teacher.scores.tolist() == [[0.5]]


def test_the_last_steps_are_kept_and_so_many_that_are_not_finite(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    for number in range(1, 6):
        write_step(tmp_path, step(number), keeps=2)
    names = [path.name for path in (tmp_path / "recorded").iterdir()]
    assert sorted(names) == ["step_4.mrl", "step_5.mrl"]
    # A run that goes on from step 2 leaves no records of steps that it has not made.
    write_step(tmp_path, step(3), keeps=2)
    assert [path.name for path in (tmp_path / "recorded").glob("step_*")] == ["step_3.mrl"]
    for number in range(MAX_NOT_FINITE + 1):
        write_step(tmp_path, step(number, "NaN"), keeps=0)
    assert len(list((tmp_path / "recorded").glob("not_finite_*"))) == MAX_NOT_FINITE
    assert f"the batch of step {MAX_NOT_FINITE} is not recorded" in caplog.text
    assert (tmp_path / "recorded" / "step_3.mrl").exists()
    assert write_step(tmp_path, step(0, "NaN again"), keeps=0) is not None  # by another attempt


def differences(made: list[dict], tolerance: float | None = None, **metrics: float) -> list[str]:
    recorded = step(4)
    batches = [types.SimpleNamespace(sequences=batch) for batch in recorded.batches]
    return list(step_differences(recorded, cast("list[Batch]", batches), made, metrics or recorded.metrics, tolerance))


def test_the_first_difference_is_named_by_rank_tensor_and_token():
    def made(value: float = -1.5) -> list[dict]:
        found = [{0: (0, sequence(0).tensors), 1: (1, sequence(1).tensors)}, {0: (2, sequence(2).tensors)}]
        found[1][0] = (2, sequence(2).tensors | {"old_logprobs": floats([0.0, value, np.nan])})
        return found

    assert differences(made()) == []  # a NaN equals a NaN
    place = "step 4, update 1, rank 2, rollout 0/p/2"
    assert differences(made(-1.25)) == [f"{place}: old_logprobs[1] was -1.5 and is -1.25"]
    assert differences(made(np.nextafter(np.float32(-1.5), np.float32(0)))) != []
    assert differences(made(-1.50001), 1e-4) == [] and differences(made(-1.6), 1e-4) != []
    assert differences(made(np.nan), 1e-4) != []
    assert differences([*made()[:1], {}]) == [
        f"{place.replace('rank 2', 'rank -1')}: old_logprobs had shape (3,) and has None"
    ]
    assert differences(made(), **{"train/loss": 0.25}) == ["step 4: train/loss was 0.5 and is 0.25"]
    assert differences(made(), 1e-4, **{"train/loss": 0.5001}) == []
