# SPDX-License-Identifier: Apache-2.0
"""Records of steps: what is kept of them, how many, and how the first difference of a remade step is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from mrl.ops.replay import check_replayed, step_differences
from mrl.store.rollout_files import MAX_NOT_FINITE, RecordedStep, read_record, write_step
from mrl.types import Batch, FixedAdvantage, RolloutInfo, TeacherTokens, TrainSequence
from tests.rollouts import request
from tests.unit.store.test_rollout_files import rollout


def floats(values: Sequence[float] | Sequence[Sequence[float]]) -> np.ndarray:
    return np.array(values, np.float32)


def tensors(index: int) -> tuple[int, dict[str, np.ndarray]]:
    return index, {"old_logprobs": floats([0.0, -1.5, np.nan]), "loss_mask": floats([0.0, 1.0, 0.0])}


def sequence(index: int) -> TrainSequence:
    one = dataclasses.replace(rollout("p", index, 3), request=request((1, 2), prompt_id="p", rollout_index=index))
    teacher = TeacherTokens(floats([[0.5]]), np.array([[7]], np.int32))
    return TrainSequence(RolloutInfo.of(one, one), 0.5, True, 1.0, (FixedAdvantage(0, 1, -1.0),), teacher)


def batch(*indices: int) -> Batch:
    return Batch(tuple(map(sequence, indices)), (((0,),),), (((0,),),), 5, len(indices), {"train/rows": 1.0})


def step(number: int, problem: str = "", **metrics: float) -> RecordedStep:
    computed = ({0: tensors(0), 1: tensors(1)}, {0: tensors(2)})
    return RecordedStep(number, 256, "{}", (batch(0, 1), batch(2)), computed, metrics or {"train/loss": 0.5}, problem)


def test_a_record_has_every_byte_of_its_step(tmp_path: Path):
    path = write_step(tmp_path, step(3), keeps=1)
    assert path is not None
    found, expected = read_record(path, RecordedStep), step(3)
    assert found.metrics == expected.metrics and [len(one.sequences) for one in found.batches] == [2, 1]
    assert (found.batches[0].rows, found.batches[0].metrics) == (expected.batches[0].rows, expected.batches[0].metrics)
    for one, other in zip(found.batches[0].sequences, expected.batches[0].sequences, strict=True):
        infos = [dataclasses.replace(each.rollout, payload=None) for each in (one, other)]
        assert infos[0] == infos[1] and one.fixed_advantages == other.fixed_advantages
        assert one.rollout.pulled.request == other.rollout.pulled.request
        assert one.rollout.pulled.token_ids.tobytes() == other.rollout.pulled.token_ids.tobytes()
        assert isinstance(one.teacher, TeacherTokens) and one.teacher.scores.tolist() == [[0.5]]
    for one, other in zip(found.computed, expected.computed, strict=True):
        assert one.keys() == other.keys() and [rank for rank, _ in one.values()] == [rank for rank, _ in other.values()]
        for (_, some), (_, others) in zip(one.values(), other.values(), strict=True):
            assert {name: values.tobytes() for name, values in some.items()} == {
                name: values.tobytes() for name, values in others.items()
            }


def test_a_record_of_the_last_release_is_refused_with_the_way_out(tmp_path: Path):
    path = write_step(tmp_path, step(3), keeps=1)
    assert path is not None
    path.write_bytes(path.read_bytes().replace(b'"format": 2', b'"format": 1', 1))
    with pytest.raises(
        ValueError, match=r"step_3.mrl has format 1 of 'RecordedStep'.*use the version that wrote it; or .* --sample"
    ):
        check_replayed(None, [path])


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
    return list(step_differences(recorded, made, metrics or recorded.metrics, tolerance))


def test_the_first_difference_is_named_by_rank_tensor_and_token():
    def made(value: float = -1.5) -> list[dict]:
        found = [{0: tensors(0), 1: tensors(1)}, {0: tensors(2)}]
        found[1][0] = (2, tensors(2)[1] | {"old_logprobs": floats([0.0, value, np.nan])})
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
