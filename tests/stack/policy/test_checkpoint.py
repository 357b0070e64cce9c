"""Checkpoints: the same layout goes on bit for bit, another one with the same losses, and the format is Megatron's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from conversion.boxes import Slot
from conversion.families.registry import family
from conversion.torch_dist_io import TorchDistFolder
from tests import models
from tests.stack.policy import policy_ranks
from tests.stack.ranks import RankPool

SAVED_LAYOUT = "tp2 sp dp2 ep2"
BF16 = ["policy.precision=bfloat16", "policy.megatron_cfg.optimizer.bf16=true"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save_nemotron_h(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def saved(ranks: RankPool, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list]:
    """A checkpoint after two steps, and what each rank did in the two steps that followed."""
    weights_dir = tmp_path_factory.mktemp("step_2") / "weights"
    config = policy_ranks.run_config(folder, SAVED_LAYOUT)
    results = ranks.run(policy_ranks.save_after_steps, config, weights_dir, 2, world_size=policy_ranks.world_size(SAVED_LAYOUT))
    return weights_dir, results


def test_a_save_leaves_no_helper_processes(saved: tuple[Path, list]):
    assert [children for _, _, children in saved[1]] == [[]] * policy_ranks.world_size(SAVED_LAYOUT)


def test_the_same_layout_goes_on_bit_for_bit(ranks: RankPool, folder: Path, saved: tuple[Path, list]):
    weights_dir, unbroken = saved
    config = policy_ranks.run_config(folder, SAVED_LAYOUT)
    resumed = ranks.run(policy_ranks.load_and_step, config, weights_dir, world_size=policy_ranks.world_size(SAVED_LAYOUT))
    assert resumed == [(metrics, checksums) for metrics, checksums, _ in unbroken]


@pytest.mark.parametrize("layout", ["pp2 dp2 ep2", "cp2 ep2", "one"])
def test_another_layout_goes_on_with_the_same_losses(ranks: RankPool, folder: Path, saved: tuple[Path, list], layout: str):
    weights_dir, unbroken = saved
    config = policy_ranks.run_config(folder, layout)
    metrics, _ = ranks.run(policy_ranks.load_and_step, config, weights_dir, world_size=policy_ranks.world_size(layout))[0]
    expected = unbroken[0][0]
    for name, tolerance in (("train/loss", 5e-7), ("train/grad_norm", 5e-6)):
        np.testing.assert_allclose([step[name] for step in metrics], [step[name] for step in expected], atol=tolerance, rtol=tolerance)
    assert [step["train/lr"] for step in metrics] == [step["train/lr"] for step in expected]


def test_bf16_goes_on_bit_for_bit(ranks: RankPool, folder: Path, tmp_path: Path):
    config = policy_ranks.run_config(folder, "dp2", *BF16)
    unbroken = ranks.run(policy_ranks.save_after_steps, config, tmp_path, 1, world_size=2)
    resumed = ranks.run(policy_ranks.load_and_step, config, tmp_path, world_size=2)
    assert resumed == [(metrics, checksums) for metrics, checksums, _ in unbroken]


def test_keys_are_those_of_transformer_engine_models(folder: Path, saved: tuple[Path, list]):
    iteration = saved[0] / "iter_0000000"
    hf_config = json.loads((folder / "config.json").read_text())
    assert json.loads((iteration / "hf_config.json").read_text()) == hf_config
    assert json.loads((iteration / "run_config.yaml").read_text())["model"]["tensor_model_parallel_size"] == 2
    assert (saved[0] / "latest_checkpointed_iteration.txt").read_text() == "0"
    weights = family(hf_config).torch_dist_layout(hf_config, "float32", 512)
    checkpoint = TorchDistFolder(iteration)
    checkpoint.check(weights)
    for slot in weights:
        # Correction biases are no parameters, so the optimizer has no state of them.
        if not slot.name.endswith("expert_bias"):
            for kind in ("param", "exp_avg", "exp_avg_sq"):
                assert checkpoint.shape(f"optimizer.state.{kind}.{slot.name}") == weights[Slot(slot.name)].shape


def test_random_states_come_back_on_their_ranks(ranks: RankPool, folder: Path, tmp_path: Path):
    config = policy_ranks.run_config(folder, "dp2")
    saved_states = ranks.run(policy_ranks.save_random_states, config, tmp_path, world_size=2)
    assert saved_states[0] != saved_states[1]
    assert ranks.run(policy_ranks.load_random_states, config, tmp_path, world_size=2) == saved_states


def test_a_checkpoint_without_optimizer_starts_from_its_weights(ranks: RankPool, folder: Path, tmp_path: Path):
    config = policy_ranks.run_config(folder, "dp2", "checkpointing.save_optimizer=false", *BF16)
    ranks.run(policy_ranks.save_after_steps, config, tmp_path, 1, world_size=2)
    (is_same, loss), _ = ranks.run(policy_ranks.load_weights_only, config, tmp_path, world_size=2)
    assert is_same
    assert np.isfinite(loss)


def test_a_folder_without_a_checkpoint_is_refused(ranks: RankPool, folder: Path, tmp_path: Path):
    with pytest.raises(RuntimeError, match="ValueError: .*is not a Megatron torch_dist checkpoint"):
        ranks.run(policy_ranks.load_and_step, policy_ranks.run_config(folder, "one"), tmp_path, world_size=1)
