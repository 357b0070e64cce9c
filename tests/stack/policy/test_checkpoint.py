# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: the same layout goes on bit for bit, another one with the same losses, and the format is Megatron's."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from torch.distributed.checkpoint import FileSystemReader

from conversion.boxes import Slot
from conversion.families.registry import family
from conversion.files.manifest import WRITTEN
from conversion.files.torch_dist import TorchDistFolder
from tests import models
from tests.stack.policy import policy_ranks, save_ranks
from tests.stack.policy.policy_ranks import BF16
from tests.stack.ranks import RankPool

SAVED_LAYOUT = "tp2 sp dp2 ep2"
# The hybrid model; and one with tied embeddings, which its first and its last virtual stage hold.
CASES = {
    "hybrid": (SAVED_LAYOUT, ("pp2 dp2 ep2", "cp2 ep2", "one")),
    "virtual": ("pp2 vpp2", ("one",)),
    "virtual, from one rank": ("one", ("pp2 vpp2",)),
}
UNDISTRIBUTED = ("optimizer.use_distributed_optimizer", "distributed_data_parallel_config.overlap_param_gather")


@dataclass(frozen=True)
class Saved:
    """A checkpoint after two steps, and what each rank did in the two steps that followed."""

    folder: Path
    layout: str
    weights_dir: Path
    results: list


@pytest.fixture(scope="module")
def saved_as(ranks: RankPool, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    tied = cache(lambda: models.save_model(tmp_path_factory.mktemp("tied"), "qwen3_moe", tie_word_embeddings=True))

    @cache
    def saved_as(case: str) -> Saved:
        model, layout = folder if case == "hybrid" else tied(), CASES[case][0]
        weights_dir = tmp_path_factory.mktemp("step_2") / "weights"
        config = policy_ranks.run_config(model, layout)
        size = policy_ranks.world_size(layout)
        results = ranks.run(save_ranks.save_after_steps, config, weights_dir, 2, world_size=size)
        return Saved(model, layout, weights_dir, results)

    return saved_as


@pytest.fixture(scope="module")
def saved(saved_as: Callable[[str], Saved]) -> Saved:
    return saved_as("hybrid")


def test_a_save_leaves_no_helper_processes(saved: Saved):
    assert [children for _, _, children in saved.results] == [[]] * policy_ranks.world_size(SAVED_LAYOUT)


@pytest.mark.parametrize("case", ["hybrid", "virtual"])
def test_the_same_layout_goes_on_bit_for_bit(ranks: RankPool, saved_as: Callable[[str], Saved], case: str):
    saved = saved_as(case)
    config = policy_ranks.run_config(saved.folder, saved.layout)
    size = policy_ranks.world_size(saved.layout)
    resumed = ranks.run(save_ranks.load_and_step, config, saved.weights_dir, world_size=size)
    assert resumed == [(metrics, checksums) for metrics, checksums, _ in saved.results]


def test_what_is_written_late_is_what_was_saved_bit_for_bit(ranks: RankPool, folder: Path, tmp_path: Path):
    at_once, late = tmp_path / "at_once", tmp_path / "late"
    config = policy_ranks.run_config(folder, SAVED_LAYOUT)
    results = ranks.run(
        save_ranks.save_at_once_and_late, config, at_once, late, world_size=policy_ranks.world_size(SAVED_LAYOUT)
    )
    assert [(is_written, is_changed) for is_written, is_changed, _, _ in results] == [(False, True)] * len(results)
    shards = [f"iter_0000000/__{rank}_0.distcp" for rank in range(len(results))]
    assert [files for _, _, files, _ in results] == [[shard] for shard in shards]
    assert all(told == shards for _, _, _, told in results)
    (late / WRITTEN).unlink()
    names = {path.relative_to(at_once) for path in at_once.rglob("*") if path.is_file()}
    assert names == {path.relative_to(late) for path in late.rglob("*") if path.is_file()}
    # It also holds an id of the save; which bytes are whose it says by offsets into the files, which are equal.
    names.remove(Path("iter_0000000/.metadata"))
    assert [name for name in names if (at_once / name).read_bytes() != (late / name).read_bytes()] == []
    first, second = (FileSystemReader(folder / "iter_0000000").read_metadata() for folder in (at_once, late))
    assert (first.state_dict_metadata, first.storage_data) == (second.state_dict_metadata, second.storage_data)


def test_a_write_that_fails_in_the_background_is_told_with_its_file(ranks: RankPool, folder: Path, tmp_path: Path):
    config = policy_ranks.run_config(folder, "one")
    ((message, loss),) = ranks.run(save_ranks.save_where_a_file_cannot_be_written, config, tmp_path, world_size=1)
    assert message.startswith(f"{tmp_path / 'iter_0000000'}: this rank's part of the checkpoint could not be written: ")
    assert "[Errno 21] Is a directory" in message, "the driver finds its advice by that number"
    assert np.isfinite(loss)


@pytest.mark.parametrize(("case", "layout"), [(case, other) for case, (_, others) in CASES.items() for other in others])
def test_another_layout_goes_on_with_the_same_losses(
    ranks: RankPool, saved_as: Callable[[str], Saved], case: str, layout: str
):
    saved = saved_as(case)
    config, size = policy_ranks.run_config(saved.folder, layout), policy_ranks.world_size(layout)
    metrics, _ = ranks.run(save_ranks.load_and_step, config, saved.weights_dir, world_size=size)[0]
    expected = saved.results[0][0]
    for name, tolerance in (("train/loss", 5e-7), ("train/grad_norm", 5e-6)):
        np.testing.assert_allclose(
            [step[name] for step in metrics], [step[name] for step in expected], atol=tolerance, rtol=tolerance
        )
    assert [step["train/lr"] for step in metrics] == [step["train/lr"] for step in expected]


def test_bf16_goes_on_bit_for_bit(ranks: RankPool, folder: Path, tmp_path: Path):
    config = policy_ranks.run_config(folder, "dp2", *BF16)
    unbroken = ranks.run(save_ranks.save_after_steps, config, tmp_path, 1, world_size=2)
    for load in (save_ranks.load_and_step, save_ranks.load_as_on_the_host_and_step):
        resumed = ranks.run(load, config, tmp_path, world_size=2)
        assert resumed == [(metrics, checksums) for metrics, checksums, _ in unbroken]


def test_an_optimizer_that_is_not_distributed_goes_on_bit_for_bit(ranks: RankPool, folder: Path, tmp_path: Path):
    config = policy_ranks.run_config(folder, "one", *[f"policy.megatron_cfg.{name}=false" for name in UNDISTRIBUTED])
    unbroken = ranks.run(save_ranks.save_after_steps, config, tmp_path, 1, world_size=1)
    resumed = ranks.run(save_ranks.load_and_step, config, tmp_path, world_size=1)
    assert resumed == [(metrics, checksums) for metrics, checksums, _ in unbroken]


@pytest.mark.parametrize(("case", "padded_vocabulary"), [("hybrid", 512), ("virtual", None)])
def test_keys_are_those_of_transformer_engine_models_in_any_layout(
    saved_as: Callable[[str], Saved], case: str, padded_vocabulary: int | None
):
    saved = saved_as(case)
    iteration = saved.weights_dir / "iter_0000000"
    hf_config = json.loads((saved.folder / "config.json").read_text())
    assert json.loads((iteration / "hf_config.json").read_text()) == hf_config
    model = json.loads((iteration / "run_config.yaml").read_text())["model"]
    assert model["tensor_model_parallel_size"] == (2 if case == "hybrid" else 1)
    assert (saved.weights_dir / "latest_checkpointed_iteration.txt").read_text() == "0"
    weights = family(hf_config).torch_dist_layout(hf_config, "float32", padded_vocabulary)
    checkpoint = TorchDistFolder(iteration)
    checkpoint.check(weights)
    for slot in weights:
        # Correction biases are no parameters, so the optimizer has no state of them.
        if not slot.name.endswith("expert_bias"):
            for kind in ("param", "exp_avg", "exp_avg_sq"):
                assert checkpoint.shape(f"optimizer.state.{kind}.{slot.name}") == weights[Slot(slot.name)].shape


def test_random_states_come_back_on_their_ranks(ranks: RankPool, folder: Path, tmp_path: Path):
    config = policy_ranks.run_config(folder, "dp2")
    saved_states = ranks.run(save_ranks.save_random_states, config, tmp_path, world_size=2)
    assert saved_states[0] != saved_states[1]
    assert ranks.run(save_ranks.load_random_states, config, tmp_path, world_size=2) == saved_states


def test_a_checkpoint_without_optimizer_starts_from_its_weights(ranks: RankPool, folder: Path, tmp_path: Path):
    config = policy_ranks.run_config(folder, "dp2", "checkpointing.save_optimizer=false", *BF16)
    ranks.run(save_ranks.save_after_steps, config, tmp_path, 1, world_size=2)
    (is_same, loss), _ = ranks.run(save_ranks.load_weights_only, config, tmp_path, world_size=2)
    assert is_same
    assert np.isfinite(loss)


CHANGED = [
    *(
        f"policy.megatron_cfg.optimizer.{item}"
        for item in "lr=4e-3 min_lr=1e-4 adam_beta1=0.5 adam_beta2=0.9 adam_eps=1e-6".split()
    ),
    *(
        f"policy.megatron_cfg.scheduler.{item}"
        for item in "lr_decay_style=linear lr_decay_iters=39 start_weight_decay=0.1".split()
    ),
    *(
        f"policy.megatron_cfg.scheduler.{item}"
        for item in "end_weight_decay=0.3 weight_decay_incr_style=linear".split()
    ),
    "grpo.max_num_steps=20",
]
"""Every setting of optimizer and schedule that may change at a resume, and their values."""


@pytest.mark.parametrize(
    "kind",
    [
        [],
        [f"policy.megatron_cfg.{name}=false" for name in UNDISTRIBUTED],
        ["checkpointing.save_optimizer=false"],
    ],
    ids=["distributed", "not distributed", "weights only"],
)
def test_a_resumed_run_has_the_settings_of_a_fresh_one_at_its_step(
    ranks: RankPool, folder: Path, tmp_path: Path, kind: list[str]
):
    before = policy_ranks.run_config(folder, "one", *kind)
    ranks.run(save_ranks.save_after_steps, before, tmp_path, 3, world_size=1)
    config = policy_ranks.run_config(folder, "one", *kind, *CHANGED)
    ((fresh, resumed, rates),) = ranks.run(save_ranks.settings_after_load, config, tmp_path, 3, world_size=1)
    assert resumed == fresh
    assert {(group["max_lr"], group["min_lr"], group["betas"], group["eps"]) for group in resumed} == {
        (4e-3, 1e-4, (0.5, 0.9), 1e-6)
    }
    # Linear from the peak to the end of the decay, and from one weight decay to the other, after 3 steps.
    assert {round(group["lr"], 9) for group in resumed} == {round(1e-4 + 3.9e-3 * (1 - 3 / 39), 9)}
    assert {round(group["weight_decay"], 9) for group in resumed} == {0.0, 0.13}
    assert rates == [pytest.approx(1e-4 + 3.9e-3 * (1 - step / 39)) for step in (3, 4)]


def test_optimizer_state_of_another_form_is_refused_with_the_setting(ranks: RankPool, folder: Path, saved: Saved):
    config = policy_ranks.run_config(folder, "one", *[f"policy.megatron_cfg.{name}=false" for name in UNDISTRIBUTED])
    with pytest.raises(
        RuntimeError, match=r"ValueError: .*optimizer\.use_distributed_optimizer=False .*: set that as it was"
    ):
        ranks.run(save_ranks.load_and_step, config, saved.weights_dir, world_size=1)


def test_a_folder_without_a_checkpoint_is_refused(ranks: RankPool, folder: Path, tmp_path: Path):
    with pytest.raises(RuntimeError, match="ValueError: .*is not a Megatron torch_dist checkpoint"):
        ranks.run(save_ranks.load_and_step, policy_ranks.run_config(folder, "one"), tmp_path, world_size=1)
