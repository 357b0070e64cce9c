# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from mrl.algo.distillation import StudentScores, distillation_loss, sequences_to_teach
from mrl.config.schema.algo import LossConfig
from mrl.data.packing import pack_row, split_teacher
from mrl.types import (
    Prompt,
    Rollout,
    RolloutGroup,
    RolloutInfo,
    RolloutRequest,
    SamplingParams,
    TeacherTokens,
    Turn,
    Verdict,
)
from tests.rollouts import pulled

# Two tokens at one position: the teacher says 3/4 and 1/4, the student 1/2 and 1/2.
TEACHER = torch.tensor([[math.log(3.0), 0.0]])
STUDENT = torch.tensor([[1.0, 1.0]])
FORWARD = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
REVERSE = 0.5 * math.log(2 / 3) + 0.5 * math.log(2.0)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (LossConfig(kl_type="forward"), FORWARD),
        (LossConfig(kl_type="reverse"), REVERSE),
        (LossConfig(kl_type="mixed", mixed_kl_weight=0.25), 0.25 * FORWARD + 0.75 * REVERSE),
    ],
)
def test_divergences_worked_by_hand(config: LossConfig, wanted: float):
    loss, metrics = distillation_loss(StudentScores(STUDENT), TEACHER, torch.tensor([0.5]), config)
    assert float(loss) == pytest.approx(0.5 * wanted, abs=1e-7)
    assert float(metrics["kl_forward"]) == pytest.approx(0.5 * FORWARD) and float(
        metrics["kl_reverse"]
    ) == pytest.approx(0.5 * REVERSE)


def test_what_the_student_does_outside_costs_a_hundred_nats():
    # A quarter each of the two tokens, and half of a third one that the teacher gives nothing.
    logprobs = torch.tensor([[0.25, 0.25]]).log()
    negentropy = 2 * 0.25 * math.log(0.25) + 0.5 * math.log(0.5)
    student = StudentScores(logprobs, torch.zeros(1), torch.tensor([negentropy]))
    loss, _ = distillation_loss(student, TEACHER, torch.ones(1), LossConfig(kl_type="reverse", zero_outside_topk=True))
    inside = 0.25 * (math.log(0.25) - math.log(0.75)) + 0.25 * (math.log(0.25) - math.log(0.25))
    assert float(loss) == pytest.approx(inside + 0.5 * (math.log(0.5) + 100), rel=1e-6)


def test_tokens_without_weight_have_no_gradient():
    logits = torch.tensor([[1.0, 2.0], [float("nan"), 0.0]], requires_grad=True)
    loss, _ = distillation_loss(StudentScores(logits), TEACHER.expand(2, 2), torch.tensor([1.0, 0.0]), LossConfig())
    loss.backward()
    assert logits.grad is not None and torch.isfinite(loss) and not torch.equal(logits.grad[0], torch.zeros(2))
    assert torch.equal(logits.grad[1], torch.zeros(2))


def test_a_rollout_is_taught_whatever_its_reward():
    infos = [RolloutInfo(f"r{index}", "p", index, 1, 3, 2, "stop", None) for index in range(1)]
    verdicts = (Verdict(0.0, False, "error", "", ""),)
    (sequence,) = sequences_to_teach([RolloutGroup(Prompt("p", (1,), "", "", "math"), tuple(infos), verdicts)])
    assert (sequence.rollout, sequence.is_valid, sequence.advantage, sequence.teacher) == (infos[0], True, 0.0, None)


def test_all_sequences_of_an_agents_rollout_are_taught_but_what_nobody_sampled():
    first, nothing = RolloutInfo("r0", "p", 0, 1, 3, 2, "stop", None), RolloutInfo("r1", "p", 1, 1, 3, 1, "abort", None)
    further = replace(first, place=1)
    rollouts, verdict = (replace(first, further=(further,)), nothing), Verdict(0.0, False, "error", "", "")
    found = sequences_to_teach([RolloutGroup(Prompt("p", (1,), "", "", "math"), rollouts, (verdict, verdict))])
    assert [(sequence.rollout, sequence.is_valid) for sequence in found] == [
        (rollouts[0], True),
        (further, True),
        (nothing, False),
    ]


def test_what_a_teacher_says_is_packed_where_it_belongs_and_comes_back():
    request = RolloutRequest("p", 0, 0, 1, (5, 6, 7), SamplingParams(1.0, 1.0, None, 16, ()))
    rollout = Rollout(request, 1, np.arange(4, dtype=np.int32), np.zeros(4, np.float32), "stop")
    # The environment's token between two turns is nobody's.
    two_turns = replace(rollout, earlier_turns=(Turn(0, 2, 1),), last_turn_start=3)
    rng = np.random.default_rng(0)
    said = [
        TeacherTokens(rng.normal(size=(n, 2)).astype(np.float32), rng.integers(0, 9, (n, 2)).astype(np.int32))
        for n in (4, 3)
    ]
    made = {7: pulled(rollout, 0.0, True, teacher=said[0]), 3: pulled(two_turns, 0.0, True, teacher=said[1])}
    row = pack_row(made, divisible_by=8, pad_token_id=0)
    assert row.teacher is not None and row.teacher.scores_TK.shape == (16, 2)
    assert torch.equal(row.teacher.scores_TK[2:6], torch.from_numpy(said[0].scores))
    assert torch.equal((row.teacher.scores_TK != 0).any(dim=1).float(), row.generated_mask_T)
    back = split_teacher(row, row.teacher.scores_TK, row.teacher.token_ids_TK)
    assert sorted(back) == [3, 7]
    for index, wanted in ((7, said[0]), (3, said[1])):
        assert np.array_equal(back[index].scores, wanted.scores) and np.array_equal(
            back[index].token_ids, wanted.token_ids
        )
    assert back[7].token_ids.dtype == np.int32
    assert pack_row({7: replace(made[7], teacher=None)}, divisible_by=8, pad_token_id=0).teacher is None
