# SPDX-License-Identifier: Apache-2.0
"""Steps of PPO in a process: policy and critic in own layouts, against transformers, one rank, and a resumed run."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from conversion.cache import cached_mcore
from conversion.convert import convert_mcore_to_hf, differences
from mrl.config.load import load_config
from mrl.config.rules.checks import find_problems
from mrl.config.schema.run import RunConfig
from tests import models
from tests.stack.policy import critic_ranks, policy_ranks
from tests.stack.policy.critic_ranks import Steps, ppo_config, reward_of
from tests.stack.policy.policy_ranks import rollouts, run_config, world_size
from tests.stack.ranks import RankPool

GAMMA, LAMBDA, CLIP = 0.9, 0.8, 0.01
OVERRIDES = [
    f"ppo.adv_estimator.gae_gamma={GAMMA}",
    f"ppo.adv_estimator.gae_lambda={LAMBDA}",
    f"value_loss_fn.cliprange={CLIP}",
    "loss_fn.use_importance_sampling_correction=false",
]
NUM_STEPS = 2


@pytest.fixture(scope="module")
def of_one_rank(ranks: RankPool, folder: Path) -> Steps:
    (found,) = ranks.run(critic_ranks.steps, ppo_config(folder, "one", "one", *OVERRIDES), NUM_STEPS, world_size=1)
    return found


def value_model(head: torch.Tensor | None = None) -> torch.nn.Module:
    """The tiny model with this head, or with that of a critic that starts without one."""
    model = models.nemotron_h()
    model.score = torch.nn.Linear(64, 1, bias=False)
    with torch.no_grad():
        start = 0.02 * torch.randn(1, 64, generator=torch.Generator().manual_seed(42))
        model.score.weight.copy_(start if head is None else head)
    return model


def values_of(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """Values at each token."""
    hidden = model.get_submodule("model")(torch.tensor([tokens])).last_hidden_state[0]
    return model.get_submodule("score")(hidden)[:, 0]


def test_values_returns_and_first_update_equal_transformers(of_one_rank: Steps):
    model, losses, count = (
        value_model(),
        [],
        sum(len(rollout.token_ids) for _, rollout, _, is_valid in rollouts() if is_valid),
    )
    for index, rollout, _, is_valid in rollouts():
        prompt, length = len(rollout.request.token_ids), len(rollout.token_ids)
        values = values_of(model, [*rollout.request.token_ids, *rollout.token_ids.tolist()])
        np.testing.assert_allclose(of_one_rank.values[0][index], values.detach(), atol=2e-5)
        returns = of_one_rank.returns[0][index]
        generated = slice(prompt - 1, prompt - 1 + length)
        if not is_valid:
            assert np.isnan(returns).all()
            continue
        wanted, advantage, after = [], 0.0, 0.0
        for place, value in reversed(list(enumerate(values[generated].tolist()))):
            reward = reward_of(index) if place == length - 1 else 0.0
            advantage = reward + GAMMA * after - value + GAMMA * LAMBDA * advantage
            after = value
            wanted.append(advantage + value)
        np.testing.assert_allclose(returns[generated], wanted[::-1], atol=2e-5)
        assert np.isnan(np.delete(returns, np.arange(len(returns))[generated])).all()
        # Before the first update all values are the old ones, and nothing is clipped.
        losses.append((values[generated] - torch.tensor(wanted[::-1])).square().sum())
    loss = 0.5 * torch.stack(losses).sum() / count
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(
        [parameter for parameter in model.parameters() if parameter.grad is not None], 1.0
    )
    first, second, *_ = of_one_rank.critic
    assert first["train/loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert first["train/grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    assert first["train/vf_clipfrac"] == 0.0 < second["train/vf_clipfrac"]


@pytest.fixture(scope="module")
def judge(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder with a head of its own."""
    judge = shutil.copytree(folder, tmp_path_factory.mktemp("judge") / "model")
    weights = load_file(judge / "model.safetensors")
    weights["score.weight"] = torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
    save_file(weights, judge / "model.safetensors", metadata={"format": "pt"})
    return judge


def test_a_critic_starts_with_the_head_of_its_folder(ranks: RankPool, folder: Path, judge: Path):
    config = ppo_config(folder, "tp2 sp dp2 ep2", "pp2 dp2 ep2", f"value.model_name={judge}", *OVERRIDES)
    found = ranks.run(critic_ranks.steps, config, 1, world_size=4)[0]
    model = value_model(load_file(judge / "model.safetensors")["score.weight"])
    for index, rollout, _, _ in rollouts():
        values = values_of(model, [*rollout.request.token_ids, *rollout.token_ids.tolist()])
        np.testing.assert_allclose(found.values[0][index], values.detach(), atol=1e-4)


@pytest.mark.parametrize("layout", ["one", "pp2 dp2 ep2"])
def test_a_head_comes_out_of_the_cache_bit_for_bit_and_goes_back(
    ranks: RankPool, judge: Path, tmp_path: Path, layout: str
):
    config = run_config(judge, layout, "algorithm=rm")
    cached = cached_mcore(judge, tmp_path / "cache", parallel=config.policy.megatron_cfg.parallel)
    results = ranks.run(policy_ranks.load_both_ways, config, cached, world_size=world_size(layout))
    assert [differing for differing, _ in results] == [[]] * len(results)
    convert_mcore_to_hf(cached, tmp_path / "back")
    assert list(differences(judge, tmp_path / "back")) == []


def test_a_head_that_nobody_would_use_is_refused(folder: Path, judge: Path):
    def found(*words: str) -> list[str]:
        problems = map(str, find_problems(load_config("grpo_tiny.yaml", list(words))))
        return [problem for problem in problems if "reward model" in problem]

    (problem,) = found(f"policy.model_name={judge}")
    assert problem.startswith(
        f"policy.model_name={judge}: it has the head of a reward model (score.weight), for which algorithm=grpo"
    )
    assert found(f"policy.model_name={folder}") == found(f"policy.model_name={judge}", "algorithm=rm") == []


@pytest.mark.parametrize(
    ("layout", "critic_layout"),
    [
        pytest.param("tp2 sp dp2 ep2", "pp2 dp2 ep2", marks=pytest.mark.long("ppo")),
        ("pp2 dp2 ep2", "tp2 sp cp2 ep2"),
        pytest.param("cp2 dp2 ep2", "tp2 sp dp2 ep2", marks=pytest.mark.long("ppo")),
    ],
)
def test_layouts_of_policy_and_critic_give_the_steps_of_one_rank(
    ranks: RankPool, folder: Path, of_one_rank: Steps, layout: str, critic_layout: str
):
    assert_steps_of_one_rank(
        ranks, of_one_rank, ppo_config(folder, layout, critic_layout, *OVERRIDES), world_size(layout)
    )


def test_the_last_stage_of_a_critic_has_a_copy_of_tied_embeddings_that_learns_as_the_first_does(
    ranks: RankPool, tmp_path: Path
):
    tied = models.save_model(tmp_path / "tied", "qwen2", tie_word_embeddings=True)
    (alone,) = ranks.run(critic_ranks.steps, ppo_config(tied, "one", "one", *OVERRIDES), NUM_STEPS, world_size=1)
    # Where DDP waits for gradients, of which the copy has none.
    overlap = [
        f"value.megatron_cfg.distributed_data_parallel_config.overlap_{name}=true"
        for name in ("grad_reduce", "param_gather")
    ]
    config = ppo_config(tied, "tp2 sp dp2", "pp2 dp2", *OVERRIDES, *overlap)
    assert [problem for problem in find_problems(config) if problem.kind == "refused"] == []
    assert_steps_of_one_rank(ranks, alone, config, 4)


def assert_steps_of_one_rank(ranks: RankPool, of_one_rank: Steps, config: RunConfig, num_ranks: int) -> None:
    """Losses, gradients, values and returns of steps in another layout are those of one rank."""
    results = ranks.run(critic_ranks.steps, config, NUM_STEPS, world_size=num_ranks)
    found = results[0]
    assert all(result.critic == found.critic and result.policy == found.policy for result in results)
    for mine, wanted in ((found.critic, of_one_rank.critic), (found.policy, of_one_rank.policy)):
        for name in ("train/loss", "train/grad_norm"):
            np.testing.assert_allclose(
                [step[name] for step in mine], [step[name] for step in wanted], rtol=2e-4, atol=1e-6
            )
    for mine, wanted in ((found.values, of_one_rank.values), (found.returns, of_one_rank.returns)):
        for batch, other in zip(mine, wanted, strict=True):
            assert batch.keys() == other.keys()
            for index in batch:
                np.testing.assert_allclose(batch[index], other[index], atol=1e-4)


def test_a_run_goes_on_bit_for_bit_while_the_critic_learns_alone(ranks: RankPool, folder: Path, tmp_path: Path):
    config = ppo_config(folder, "tp2 sp dp2 ep2", "pp2 dp2 ep2", *OVERRIDES)
    before = ranks.run(critic_ranks.step_after_save, config, tmp_path, 1, world_size=4)
    after = ranks.run(critic_ranks.step_after_load, config, tmp_path, world_size=4)
    for first, again in zip(before, after, strict=True):
        assert first.critic == again.critic
        assert first.policy == again.policy
        assert first.checksums == again.checksums
