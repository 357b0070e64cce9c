# SPDX-License-Identifier: Apache-2.0
"""A policy with virtual pipeline stages trains, saves, loads and refits as one without."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from conversion.cache import cached_mcore
from conversion.families.registry import family
from conversion.files.torch_dist import TorchDistFolder
from tests import models
from tests.stack.policy import policy_ranks, save_ranks
from tests.stack.policy.layouts import EP2, TP2_SP, assert_close, gradients_of
from tests.stack.ranks import RankPool

SAVED, OTHER = "pp2 vpp2", "one"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Tied embeddings are held by the first and the last chunk of the model.
    return models.save_model(tmp_path_factory.mktemp("model"), "qwen3_moe", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def saved(ranks: RankPool, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list]]:
    """Checkpoints after two steps, by layout, and each rank's work in the two steps that followed."""
    result = {}
    for layout in (SAVED, OTHER):
        weights_dir = tmp_path_factory.mktemp("step_2") / "weights"
        config = policy_ranks.run_config(folder, layout)
        result[layout] = (
            weights_dir,
            ranks.run(save_ranks.save_after_steps, config, weights_dir, 2, world_size=policy_ranks.world_size(layout)),
        )
    return result


def test_rows_that_are_no_whole_group_give_what_one_rank_gives(ranks: RankPool, folder: Path):
    ((logprobs, metrics),) = ranks.run(
        policy_ranks.step_on_rows, policy_ranks.run_config(folder, OTHER), 3, world_size=1
    )
    (none, _), (parallel_logprobs, parallel_metrics) = ranks.run(
        policy_ranks.step_on_rows, policy_ranks.run_config(folder, SAVED), 3, world_size=2
    )
    assert none == [] and len(parallel_logprobs) == 3
    np.testing.assert_allclose(np.concatenate(parallel_logprobs), np.concatenate(logprobs), atol=1e-5)
    assert_same_steps([parallel_metrics], [metrics])


def test_steps_are_those_of_one_rank(saved: dict[str, tuple[Path, list]]):
    assert_same_steps(saved[SAVED][1][0][0], saved[OTHER][1][0][0])


def test_the_same_layout_goes_on_bit_for_bit(ranks: RankPool, folder: Path, saved: dict[str, tuple[Path, list]]):
    weights_dir, unbroken = saved[SAVED]
    resumed = ranks.run(save_ranks.load_and_step, policy_ranks.run_config(folder, SAVED), weights_dir, world_size=2)
    assert resumed == [(metrics, checksums) for metrics, checksums, _ in unbroken]


@pytest.mark.parametrize(("written", "read"), [(SAVED, OTHER), (OTHER, SAVED)])
def test_another_layout_goes_on_with_the_same_losses(
    ranks: RankPool, folder: Path, saved: dict[str, tuple[Path, list]], written: str, read: str
):
    weights_dir, unbroken = saved[written]
    config = policy_ranks.run_config(folder, read)
    metrics, _ = ranks.run(save_ranks.load_and_step, config, weights_dir, world_size=policy_ranks.world_size(read))[0]
    assert_same_steps(metrics, unbroken[0][0])


def test_checkpoints_have_the_keys_of_any_layout(folder: Path, saved: dict[str, tuple[Path, list]]):
    hf_config = json.loads((folder / "config.json").read_text())
    weights = family(hf_config).torch_dist_layout(hf_config, "float32")
    checkpoint = TorchDistFolder(saved[SAVED][0] / "iter_0000000")
    checkpoint.check(weights)
    for slot in weights:
        for kind in ("param", "exp_avg", "exp_avg_sq"):
            assert checkpoint.shape(f"optimizer.state.{kind}.{slot.name}") == weights[slot].shape


def test_both_ways_of_loading_give_the_same_bits(ranks: RankPool, folder: Path, tmp_path: Path):
    config = policy_ranks.run_config(folder, SAVED, "loss_fn.reference_policy_kl_penalty=0.01")
    cached = cached_mcore(folder, tmp_path, parallel=config.policy.megatron_cfg.parallel)
    results = ranks.run(policy_ranks.load_both_ways, config, cached, world_size=2)
    assert [differing for differing, _ in results] == [[], []]


def test_a_refit_brings_the_weights_of_one_rank(ranks: RankPool, folder: Path):
    (live, _), _ = ranks.run(policy_ranks.refit_after_steps, policy_ranks.run_config(folder, SAVED), world_size=2)
    ((expected, _),) = ranks.run(policy_ranks.refit_after_steps, policy_ranks.run_config(folder, OTHER), world_size=1)
    assert live.keys() == expected.keys()
    for name, values in live.items():
        np.testing.assert_allclose(values, expected[name], atol=1e-6, rtol=1e-5, err_msg=name)


def test_a_flipped_byte_in_the_copy_of_a_tied_embedding_is_named(ranks: RankPool, folder: Path):
    config = policy_ranks.run_config(folder, SAVED)
    for (message,) in ranks.run(
        policy_ranks.settle_with_flipped_bytes, config, ["output_layer.weight (chunk 1)"], world_size=2
    ):
        assert "copies of weights differ between ranks (1)" in message and "ranks [0] / [1]" in message


@pytest.mark.long("parity")
@pytest.mark.parametrize("is_recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    ("world_size", "megatron"), [(4, {}), (8, TP2_SP | EP2)], ids=["pp4 vpp2", "tp2 sp pp4 vpp2 ep2"]
)
def test_four_stages_give_the_loss_and_gradients_of_one_rank(
    ranks: RankPool, tmp_path: Path, world_size: int, megatron: dict[str, object], is_recomputed: bool
):
    folder = models.save_model(tmp_path, "qwen3_moe", pad_token_id=None, num_hidden_layers=8)
    loss, grads = gradients_of(ranks, folder, 1, {})
    stages = dict(
        pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2, activation_checkpointing=is_recomputed
    )
    parallel_loss, parallel_grads = gradients_of(ranks, folder, world_size, megatron | stages)
    assert parallel_loss == pytest.approx(loss, rel=1e-6)
    assert_close(parallel_grads, grads, 1e-5)


def assert_same_steps(metrics: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert [step.keys() for step in metrics] == [step.keys() for step in expected]
    for name in expected[0]:
        np.testing.assert_allclose(
            [step[name] for step in metrics], [step[name] for step in expected], atol=1e-6, rtol=1e-5, err_msg=name
        )
