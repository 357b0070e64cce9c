# SPDX-License-Identifier: Apache-2.0
"""Distillation: loss and gradient against a plain loop, a teacher's top k against transformers, steps in any layout."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mrl.config.schema.algo import LossConfig
from mrl.types import Rollout, TeacherTokens
from tests import models
from tests.stack.policy import distillation_ranks, logprob_ranks, policy_ranks
from tests.stack.policy.distillation_ranks import Case, Distilled, K, judging_config, run_configs
from tests.stack.policy.layouts import transformers_model
from tests.stack.ranks import RankPool

LOSSES = [
    LossConfig(kl_type=kind, mixed_kl_weight=0.3, zero_outside_topk=is_zero)
    for kind in ("forward", "reverse", "mixed")
    for is_zero in (False, True)
]
# Where all real columns are in the first half, where a rank has both kinds, and of which one has less than k.
OF = [logprob_ranks.Case(vocab_size=size, chunk_tokens=chunk) for size in (200, 264, 258) for chunk in (None, 11)]
CASES = [Case(loss, of) for loss in LOSSES for of in OF]


@pytest.mark.parametrize("world_size", [1, 2])
def test_loss_and_gradients_are_those_of_a_loop_over_whole_logits(ranks: RankPool, world_size: int):
    by_rank = ranks.run(distillation_ranks.losses, CASES, world_size=world_size)
    for case, parts in zip(CASES, zip(*by_rank, strict=True), strict=True):
        loss, grad_hidden, grad_weight, logits = expected(case)
        best = torch.topk(logits, K, dim=-1)
        for part in parts:
            assert part.metrics["loss"] == pytest.approx(loss, rel=1e-5), case
            assert not part.keeps_inputs, case
            np.testing.assert_allclose(part.top_logits, best.values.numpy(), atol=2e-5, rtol=1e-6)
            np.testing.assert_array_equal(part.top_tokens, best.indices.numpy())
        assert relative_error(np.sum([part.grad_hidden for part in parts], axis=0), grad_hidden) <= 1e-5, case
        assert relative_error(np.concatenate([part.grad_weight for part in parts]), grad_weight) <= 1e-5, case


def expected(case: Case) -> tuple[float, np.ndarray, np.ndarray, torch.Tensor]:
    """Loss and gradients of hidden states and weight, by token from float64 logits as in NeMo RL; the real logits."""
    given, (teacher_logits, tokens, weights) = logprob_ranks.inputs(case.of), distillation_ranks.teacher_inputs(case)
    hidden, weight = given.hidden.double().requires_grad_(), given.weight.double().requires_grad_()
    logits = (hidden @ weight.t())[:, : case.of.vocab_size] / case.of.temperature
    total, config = torch.zeros((), dtype=torch.double), case.loss
    for t in range(len(logits)):
        q = torch.softmax(teacher_logits[t].double(), dim=0)
        whole = torch.softmax(logits[t], dim=0)
        p = whole[tokens[t]] if config.zero_outside_topk else torch.softmax(logits[t, tokens[t]], dim=0)
        forward = sum(q[i] * (q[i].log() - p[i].log()) for i in range(K))
        reverse = sum(p[i] * (p[i].log() - q[i].log()) for i in range(K))
        if config.zero_outside_topk:
            outside = [v for v in range(case.of.vocab_size) if v not in tokens[t].tolist()]
            reverse = reverse + (whole[outside] * (whole[outside].log() + 100)).sum()
        kl = {
            "forward": forward,
            "reverse": reverse,
            "mixed": config.mixed_kl_weight * forward + (1 - config.mixed_kl_weight) * reverse,
        }
        total = total + weights[t].double() * kl[config.kl_type]
    total.backward()
    assert hidden.grad is not None and weight.grad is not None
    return float(total), hidden.grad.numpy(), weight.grad.numpy(), logits.detach()


def relative_error(value: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(value - wanted) / np.linalg.norm(wanted))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A student, and a teacher of another family and size."""
    student = models.save_nemotron_h(tmp_path_factory.mktemp("student"))
    return student, models.save_model(tmp_path_factory.mktemp("teacher"), "qwen3_moe", seed=3)


def test_a_teacher_says_what_transformers_says_and_steps_are_those_of_one_rank(
    ranks: RankPool, folders: tuple[Path, Path]
):
    zero = "loss_fn.zero_outside_topk=true"
    one = run_configs(*folders, "one", "one", zero)
    (alone,) = ranks.run(distillation_ranks.distilled, one, 3, world_size=1)
    taught, steps = alone.taught, alone.metrics
    check_taught(taught, folders[1], one.distillation.topk_logits_k)
    assert steps[0]["train/loss"] > 0 and steps[2]["train/loss"] < steps[0]["train/loss"]
    for layout, teacher_layout in (("tp2 sp dp2 ep2", "tp2 sp pp2"), ("cp2 dp2 ep2", "pp2 dp2")):
        config = run_configs(*folders, layout, teacher_layout, zero)
        results = ranks.run(distillation_ranks.distilled, config, 3, world_size=policy_ranks.world_size(layout))
        check_equal(results, alone, ("train/loss", "train/kl_forward", "train/kl_reverse", "train/grad_norm"))


def check_equal(results: list[Distilled], alone: Distilled, names: tuple[str, ...]) -> None:
    """Compares what every rank has seen with what one rank alone has."""
    for result in results:
        assert result.metrics == results[0].metrics
        for index, said in alone.taught.items():
            np.testing.assert_allclose(result.taught[index].scores, said.scores, atol=3e-5, rtol=1e-5)
    for found, wanted in zip(results[0].metrics, alone.metrics, strict=True):
        for name in names:
            assert found[name] == pytest.approx(wanted[name], rel=2e-5, abs=1e-6), name


REWARD_WEIGHT = 0.25


def test_several_teachers_judge_the_tokens_that_the_student_drew(ranks: RankPool, folders: tuple[Path, Path]):
    student, other = folders
    one = judging_config(student, {"math": (other, "one"), "code": (student, "one")}, "one", REWARD_WEIGHT)
    (alone,) = ranks.run(distillation_ranks.distilled, one, 2, world_size=1)
    gaps = check_judged(alone, student, [other, student])
    assert alone.metrics[0]["train/teacher_gap/mean"] == pytest.approx(np.mean(gaps), abs=1e-5)
    # Half of the sequences are taught by the student itself: only the other half differs, and only in the first step.
    assert 0.3 < np.mean(np.array(gaps) != 0.0) < 0.7
    places = {"math": (other, "tp2 sp pp2"), "code": (student, "cp2 dp2 ep2")}
    config = judging_config(student, places, "tp2 sp dp2 ep2", REWARD_WEIGHT)
    results = ranks.run(distillation_ranks.distilled, config, 2, world_size=4)
    check_equal(
        results,
        alone,
        ("train/loss", "train/teacher_gap/mean", "train/advantages/min", "train/advantages/max", "train/grad_norm"),
    )


def test_a_teacher_with_more_rows_of_the_embedding_chooses_among_the_students_tokens(ranks: RankPool, tmp_path: Path):
    student = models.save_nemotron_h(tmp_path / "student", vocab_size=264)
    teacher = models.save_model(tmp_path / "teacher", "qwen3_moe", seed=3, vocab_size=330)
    top = run_configs(student, teacher, "tp2 sp dp2 ep2", "tp2 sp pp2")
    results = ranks.run(distillation_ranks.distilled, top, 1, world_size=4)
    check_taught(results[0].taught, teacher, top.distillation.topk_logits_k, vocab_size=264)
    drawn = judging_config(student, {"math": (teacher, "tp2 sp dp2 ep2")}, "tp2 sp dp2 ep2", REWARD_WEIGHT)
    results = ranks.run(distillation_ranks.distilled, drawn, 1, world_size=4)
    model = transformers_model(teacher)
    for index, rollout, _, _ in policy_ranks.rollouts():
        said = drawn_logprobs(model, rollout, vocab_size=264)
        np.testing.assert_allclose(results[0].taught[index].scores[:, 0], said, atol=1e-4, rtol=1e-4)


def check_judged(alone: Distilled, student: Path, teachers: list[Path]) -> list[float]:
    """Compares every advantage with logprobs of transformers; returns the gaps of all tokens that count."""
    models, policy, gaps = (
        [transformers_model(folder) for folder in teachers],
        transformers_model(student),
        list[float](),
    )
    for index, rollout, advantage, is_valid in policy_ranks.rollouts():
        said, drawn = (drawn_logprobs(model, rollout) for model in (models[index % len(models)], policy))
        np.testing.assert_allclose(alone.taught[index].scores[:, 0], said, atol=1e-4, rtol=1e-4)
        assert alone.taught[index].token_ids[:, 0].tolist() == rollout.token_ids.tolist()
        sample = alone.samples[index]
        found = [
            value for value, is_generated in zip(sample.advantages, sample.is_generated, strict=True) if is_generated
        ]
        wanted = REWARD_WEIGHT * advantage + said - drawn if is_valid else np.zeros(len(said))
        np.testing.assert_allclose(found, wanted, atol=2e-4)
        gaps += (
            []
            if not is_valid
            else [0.0] * len(said)
            if teachers[index % len(models)] == student
            else (said - drawn).tolist()
        )
    return gaps


def drawn_logprobs(model: torch.nn.Module, rollout: Rollout, vocab_size: int | None = None) -> np.ndarray:
    """Logprobs of the generated tokens, by transformers; with `vocab_size` among the first tokens alone."""
    token_ids, start = (
        torch.tensor([[*rollout.request.token_ids, *rollout.token_ids.tolist()]]),
        len(rollout.request.token_ids),
    )
    with torch.no_grad():
        logprobs = torch.log_softmax(model(token_ids).logits[0, start - 1 : -1, :vocab_size].float(), dim=-1)
    return logprobs.gather(1, token_ids[0, start:, None])[:, 0].numpy()


def check_taught(taught: dict[int, TeacherTokens], folder: Path, k: int, vocab_size: int | None = None) -> None:
    """Compares every generated token with transformers, by sequence; with `vocab_size` among the first tokens alone."""
    model = transformers_model(folder)
    assert sorted(taught) == list(range(policy_ranks.NUM_SEQUENCES))
    for index, rollout, _, _ in policy_ranks.rollouts():
        token_ids = torch.tensor([[*rollout.request.token_ids, *rollout.token_ids.tolist()]])
        with torch.no_grad():
            logits = model(token_ids).logits[0, len(rollout.request.token_ids) - 1 : -1, :vocab_size]
        best = torch.topk(logits, k, dim=-1)
        np.testing.assert_allclose(taught[index].scores, best.values.numpy(), atol=1e-4, rtol=1e-4)
        # Near ties may change places.
        own = logits.gather(1, torch.from_numpy(taught[index].token_ids).long())
        np.testing.assert_allclose(own.numpy(), taught[index].scores, atol=1e-4, rtol=1e-4)
        assert all(len(set(row)) == k for row in taught[index].token_ids.tolist())


def test_a_student_that_is_its_teacher_has_nothing_to_learn(ranks: RankPool, folders: tuple[Path, Path]):
    config = run_configs(folders[0], folders[0], "one", "one", "loss_fn.zero_outside_topk=true")
    config = replace(config, distillation=replace(config.distillation, topk_logits_k=264))
    (alone,) = ranks.run(distillation_ranks.distilled, config, 1, world_size=1)

    (step,) = alone.metrics
    assert math.isclose(step["train/kl_forward"], 0.0, abs_tol=1e-6)
    assert step["train/grad_norm"] < 1e-4
