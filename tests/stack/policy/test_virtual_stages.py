"""A policy with virtual pipeline stages trains, saves, loads and refits as one without."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from conversion.cache import cached_mcore
from conversion.families.registry import family
from conversion.torch_dist_io import TorchDistFolder
from tests import models
from tests.stack.policy import policy_ranks
from tests.stack.ranks import RankPool

SAVED, OTHER = "pp2 vpp2", "one"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Tied embeddings are held by the first and the last chunk of the model.
    return models.save_model(tmp_path_factory.mktemp("model"), "qwen3_moe", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def saved(ranks: RankPool, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list]]:
    """By layout: a checkpoint after two steps, and what each rank did in the two steps that followed."""
    result = {}
    for layout in (SAVED, OTHER):
        weights_dir = tmp_path_factory.mktemp("step_2") / "weights"
        config = policy_ranks.run_config(folder, layout)
        result[layout] = (
            weights_dir,
            ranks.run(policy_ranks.save_after_steps, config, weights_dir, 2, world_size=policy_ranks.world_size(layout)),
        )
    return result


def test_rows_do_not_come_in_groups():
    # Else no empty row is ever added, and the tests below show less than they say.
    assert len(policy_ranks.packed_rows(0, 1)) % 2 == 1


def test_steps_are_those_of_one_rank(saved: dict[str, tuple[Path, list]]):
    assert_same_steps(saved[SAVED][1][0][0], saved[OTHER][1][0][0])


def test_the_same_layout_goes_on_bit_for_bit(ranks: RankPool, folder: Path, saved: dict[str, tuple[Path, list]]):
    weights_dir, unbroken = saved[SAVED]
    resumed = ranks.run(policy_ranks.load_and_step, policy_ranks.run_config(folder, SAVED), weights_dir, world_size=2)
    assert resumed == [(metrics, checksums) for metrics, checksums, _ in unbroken]


@pytest.mark.parametrize(("written", "read"), [(SAVED, OTHER), (OTHER, SAVED)])
def test_another_layout_goes_on_with_the_same_losses(
    ranks: RankPool, folder: Path, saved: dict[str, tuple[Path, list]], written: str, read: str
):
    weights_dir, unbroken = saved[written]
    config = policy_ranks.run_config(folder, read)
    metrics, _ = ranks.run(policy_ranks.load_and_step, config, weights_dir, world_size=policy_ranks.world_size(read))[0]
    assert_same_steps(metrics, unbroken[0][0])


def test_checkpoints_have_the_keys_of_any_layout(folder: Path, saved: dict[str, tuple[Path, list]]):
    hf_config = json.loads((folder / "config.json").read_text())
    weights = family(hf_config).torch_dist_layout(hf_config, "float32", 512)
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
    for (message,) in ranks.run(policy_ranks.settle_with_flipped_bytes, config, ["output_layer.weight (chunk 1)"], world_size=2):
        assert "copies of 1 weights differ" in message and "ranks [0] / [1]" in message


def assert_same_steps(metrics: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert [step.keys() for step in metrics] == [step.keys() for step in expected]
    for name in expected[0]:
        np.testing.assert_allclose([step[name] for step in metrics], [step[name] for step in expected], atol=1e-6, rtol=1e-5, err_msg=name)
