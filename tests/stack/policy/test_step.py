# SPDX-License-Identifier: Apache-2.0
"""The train step: against transformers and torch's AdamW, and what happens to numbers that are not finite."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mrl.data.planning import PACKERS
from mrl.types import Rollout
from tests import models
from tests.stack.policy import finite_ranks, policy_ranks
from tests.stack.policy.objective_reference import plain_steps
from tests.stack.ranks import RankPool

KL_PENALTY = 0.05


def test_two_steps_equal_transformers_and_adamw(ranks: RankPool, folder: Path, tmp_path: Path):
    config = policy_ranks.run_config(folder, "one", f"loss_fn.reference_policy_kl_penalty={KL_PENALTY}")
    ((metrics, weights),) = ranks.run(policy_ranks.off_policy_steps, config, 2, world_size=1)
    losses, grad_norms, clip_fractions = transformers_steps(2, tmp_path)
    np.testing.assert_allclose([step["train/loss"] for step in metrics], losses, rtol=1e-5)
    np.testing.assert_allclose([step["train/grad_norm"] for step in metrics], grad_norms, rtol=1e-5)
    np.testing.assert_allclose([step["train/clip_fraction"] for step in metrics], clip_fractions, atol=1e-6)
    assert min(clip_fractions) > 0.2
    assert metrics[0]["train/kl_penalty"] == 0.0
    assert metrics[1]["train/kl_penalty"] > 1e-6
    expected = load_file(tmp_path / "model.safetensors")
    start = load_file(folder / "model.safetensors")
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        assert relative_error(value, expected[name].numpy()) <= 1e-5, name
        # The step itself, which is small beside the weights.
        moved, expected_move = value - start[name].numpy(), (expected[name] - start[name]).numpy()
        assert relative_error(moved, expected_move) <= 1e-3, name


@pytest.mark.parametrize("layout", ["tp2 sp", "pp2 dp2 ep2", "cp2 ep2"])
def test_one_rank_of_each_row_tells_its_tokens_once(ranks: RankPool, folder: Path, layout: str):
    """Sequence 3 is not valid; the old logprobs and the entropies are those of transformers."""
    config, wanted = policy_ranks.run_config(folder, layout), [0, 3, 15]
    answers = ranks.run(policy_ranks.sampled_tokens, config, wanted, world_size=policy_ranks.world_size(layout))
    assert sorted(index for first, _ in answers for index in first) == wanted and not any(
        second for _, second in answers
    )
    model = models.nemotron_h()
    for index, sample in ((index, sample) for first, _ in answers for index, sample in first.items()):
        _, rollout, advantage, is_valid = policy_ranks.rollouts()[index]
        prompt, length = rollout.request.token_ids, len(rollout.token_ids)
        assert sample.token_ids == [*prompt, *rollout.token_ids.tolist()]
        assert (
            sample.is_generated == [0] * len(prompt) + [1] * length
            and sample.loss_mask[-length:] == [int(is_valid)] * length
        )
        assert sample.generator_logprobs[-length:] == rollout.generator_logprobs.tolist()
        np.testing.assert_allclose(sample.advantages[-length:], [advantage * is_valid] * length, rtol=1e-6)
        with torch.no_grad():
            expected = sequence_logprobs(model, rollout)
            logits = model(torch.tensor([sample.token_ids])).logits[0, len(prompt) - 1 : -1]
            entropies = torch.distributions.Categorical(logits=logits).entropy()
        np.testing.assert_allclose(sample.entropies[-length:], entropies, atol=1e-5)
        assert sample.old_logprobs is not None and not any(sample.old_logprobs[: len(prompt)])
        np.testing.assert_allclose(sample.old_logprobs[-length:], expected, atol=1e-5)


def transformers_steps(num_steps: int, out: Path) -> tuple[list[float], list[float], list[float]]:
    """Loss, gradient norm and clipped share of steps of a plain implementation, by sequence; then saves the model."""
    model, reference = models.nemotron_h(), models.nemotron_h()
    sequences = [(rollout, advantage) for _, rollout, advantage, is_valid in policy_ranks.rollouts() if is_valid]
    num_tokens = sum(len(rollout.token_ids) for rollout, _ in sequences)
    clip_fractions = []

    def loss_of() -> torch.Tensor:
        loss, num_clipped = torch.zeros(()), 0
        for rollout, advantage in sequences:
            logprobs = sequence_logprobs(model, rollout)
            with torch.no_grad():
                reference_logprobs = sequence_logprobs(reference, rollout)
            old = torch.from_numpy(policy_ranks.old_logprobs(rollout.token_ids, rollout.generator_logprobs))
            for new, before, frozen, generated in zip(
                logprobs, old, reference_logprobs, rollout.generator_logprobs, strict=True
            ):
                ratio = torch.exp(new - before)
                surrogate, clipped = ratio * advantage, ratio.clamp(0.8, 1.2) * advantage
                num_clipped += bool(clipped < surrogate)
                # A factor of 1 with the gradient of the token's probability: what is drawn changes with the policy too.
                kl = torch.exp(new - new.detach()) * (torch.exp(frozen - new) - (frozen - new) - 1)
                loss = loss - torch.minimum(surrogate, clipped) * torch.exp(before - float(generated)) + KL_PENALTY * kl
        clip_fractions.append(num_clipped / num_tokens)
        return loss / num_tokens

    losses, grad_norms = plain_steps(model, loss_of, num_steps)
    model.save_pretrained(out)
    return losses, grad_norms, clip_fractions


def sequence_logprobs(model: torch.nn.Module, rollout: Rollout) -> torch.Tensor:
    tokens = torch.tensor([[*rollout.request.token_ids, *rollout.token_ids.tolist()]])
    logprobs = torch.log_softmax(model(tokens).logits[0, :-1], dim=-1).gather(1, tokens[0, 1:, None])[:, 0]
    return logprobs[len(rollout.request.token_ids) - 1 :]


def relative_error(value: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(value - expected) / (np.linalg.norm(expected) + 1e-12))


def test_updates_of_a_step_share_old_logprobs_and_learning_rate(ranks: RankPool, folder: Path):
    decay = [
        f"policy.megatron_cfg.{item}"
        for item in ("optimizer.min_lr=1e-4", "scheduler.lr_decay_style=linear", "scheduler.lr_decay_iters=2")
    ]
    ((before, kept, (first, second), (next_step,)),) = ranks.run(
        policy_ranks.two_updates_of_a_step, policy_ranks.run_config(folder, "one", *decay), world_size=1
    )
    np.testing.assert_array_equal(kept, before)
    assert first["train/probs_ratio_min"] == first["train/probs_ratio_max"] == 1.0
    assert second["train/probs_ratio_max"] > 1.0 + 1e-6
    assert first["train/lr"] == second["train/lr"] == 1e-3
    assert next_step["train/lr"] == pytest.approx(0.55e-3)


def test_reinforce_plus_plus_is_normalised_over_all_updates_of_a_step(ranks: RankPool, folder: Path):
    config = policy_ranks.run_config(folder, "one", "grpo.adv_estimator.name=reinforce_plus_plus")
    ((_, _, updates, _),) = ranks.run(policy_ranks.two_updates_of_a_step, config, world_size=1)
    means, counts = (
        [update[f"train/{name}"] for update in updates] for name in ("advantages/mean", "num_valid_tokens")
    )
    assert min(map(abs, means)) > 1e-3
    assert sum(mean * count for mean, count in zip(means, counts, strict=True)) / sum(counts) == pytest.approx(
        0.0, abs=1e-6
    )


def test_all_ranks_return_the_same_metrics(ranks: RankPool, folder: Path):
    layout = "pp2 dp2 ep2"
    results = ranks.run(
        policy_ranks.metrics_of_steps,
        policy_ranks.run_config(folder, layout),
        2,
        world_size=policy_ranks.world_size(layout),
    )
    assert all(result == results[0] for result in results)
    first = results[0][0]
    assert first["train/probs_ratio_min"] == first["train/probs_ratio_max"] == 1.0
    num_valid = sum(len(rollout.token_ids) for _, rollout, _, is_valid in policy_ranks.rollouts() if is_valid)
    assert first["train/num_valid_tokens"] == num_valid
    assert {
        "train/loss",
        "train/grad_norm",
        "train/lr",
        "train/gen_kl_error",
        "train/token_mult_prob_error",
        "train/mean_abs_dlogp",
    } <= set(first)


def test_any_packing_gives_the_same_step(ranks: RankPool, folder: Path):
    algorithms = ["", "balanced", *PACKERS]
    by_algorithm, _ = ranks.run(
        policy_ranks.first_step_of_plans, policy_ranks.run_config(folder, "dp2"), algorithms, world_size=2
    )
    unpacked = by_algorithm.pop("")
    for algorithm, metrics in by_algorithm.items():
        for name in ("loss", "grad_norm", "gen_kl_error", "token_mult_prob_error", "approx_entropy"):
            assert metrics[f"train/{name}"] == pytest.approx(unpacked[f"train/{name}"], rel=1e-5), (algorithm, name)
        assert metrics["train/probs_ratio_max"] == pytest.approx(1.0, abs=1e-5), algorithm
    assert len({policy_ranks.plan_of(algorithm, 2) for algorithm in algorithms[1:]}) >= 4


# NaN shows in the loss; 1e38 leaves the loss finite, and the gradients overflow.
@pytest.mark.parametrize("advantage", [float("nan"), 1e38])
def test_a_step_that_is_not_finite_stops_all_ranks_and_changes_nothing(ranks: RankPool, folder: Path, advantage: float):
    config = policy_ranks.run_config(folder, "dp2", "policy.megatron_cfg.moe_router_bias_update_rate=0.01")
    results = ranks.run(finite_ranks.step_with_advantage, config, advantage, world_size=2)
    for message, is_unchanged, clean_step in results:
        assert "not finite" in message
        assert is_unchanged
        assert np.isfinite(clean_step[0]["train/loss"])
    assert results[0][0] == results[1][0]


def test_a_run_that_has_skipped_all_updates_is_saved(ranks: RankPool, folder: Path, tmp_path: Path):
    config = policy_ranks.run_config(folder, "dp2", "policy.not_finite_steps=skip")
    assert ranks.run(finite_ranks.saved_after_skipping, config, tmp_path, world_size=2) == [(1, 0)] * 2
    sizes = [
        sum(file.stat().st_size for file in (tmp_path / name).rglob("*") if file.is_file())
        for name in ("first", "second")
    ]
    assert sizes[1] > 2 * sizes[0]  # with the optimizer's state


def test_a_step_that_is_not_finite_may_be_skipped_and_its_tensors_are_there(ranks: RankPool, folder: Path):
    config = policy_ranks.run_config(
        folder, "dp2", "policy.megatron_cfg.moe_router_bias_update_rate=0.01", "policy.not_finite_steps=skip"
    )
    results = ranks.run(finite_ranks.skipped_step, config, world_size=2)
    for metrics, is_unchanged, _, clean_step in results:
        assert metrics["train/num_skipped_updates"] == 1 and not np.isfinite(metrics["train/loss"]) and is_unchanged
        assert clean_step[0]["train/num_skipped_updates"] == 0 and np.isfinite(clean_step[0]["train/loss"])
        assert metrics.keys() == clean_step[0].keys()
    # Each rank answers for its own sequences, without padding, in the step's order of tokens.
    found = {index: tensors for _, _, (batch,), _ in results for index, tensors in batch.items()}
    assert sorted(found) == [index for index, *_ in policy_ranks.rollouts()]
    assert any(np.isnan(tensors["advantages"]).any() for tensors in found.values())
    for index, rollout, _, is_valid in policy_ranks.rollouts():
        tensors, prompt, length = found[index], len(rollout.request.token_ids), len(rollout.token_ids)
        assert {len(values) for values in tensors.values()} == {prompt + length}
        assert tensors["loss_mask"].tolist() == [0.0] * (prompt - 1) + [float(is_valid)] * length + [0.0]
        assert (tensors["old_logprobs"][prompt - 1 : prompt + length - 1] < 0).all()
