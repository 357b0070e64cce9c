# SPDX-License-Identifier: Apache-2.0
"""PPO as a command: a two-stage critic beside a policy at TP2; a resume while the critic learns alone; a run ahead."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from conversion.convert import convert_mcore_to_hf
from mrl.ops.view.timeline import list_windows, read_timelines
from mrl.store.checkpoints import find_damage
from tests.sources import ROOT
from tests.stack.pipeline.test_pipeline_run import MRL, OWN_LOOP, numbers, rows, train

WARMUP = 1
STEPS = [
    "cluster.cpu_units_per_node=2",
    "grpo.max_num_steps=3",
    f"ppo.policy_training_start_step={WARMUP}",
    "ppo.adv_estimator.gae_lambda=0.9",
    "value.megatron_cfg.scheduler.lr_warmup_iters=0",
    "checkpointing.save_period=1",
    "checkpointing.keep_top_k=null",
    "checkpointing.metric_name=null",
]


def train_ppo(folder: Path, *overrides: str, program: Sequence[str] = MRL) -> None:
    """Runs to its end."""
    train(folder, *STEPS, *overrides, config="ppo_tiny.yaml", program=program)


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three steps, the critic alone in the first."""
    folder = tmp_path_factory.mktemp("ppo") / "run"
    train_ppo(folder, "ppo.val_at_start=false")
    return folder


def test_the_critic_learns_before_the_policy(three_steps: Path):
    alone, *both = rows(three_steps)
    assert "train/loss" not in alone and alone["train/critic/grad_norm"] > 0
    for row in both:
        assert row["train/critic/grad_norm"] > 0 and row["train/grad_norm"] > 0
        assert row["train/token_mult_prob_error"] <= 1.001
        # Two passes: in the second one the policy is another.
        assert row["train/probs_ratio"] != 1.0
    for row in (alone, *both):
        assert None not in row.values(), row
        assert row["train/advantages/mean"] == pytest.approx(0.0, abs=1e-6)
        assert row["train/critic/explained_var"] <= 1.0
        assert row["train/critic/values_min"] < row["train/critic/values_max"]
        # Of the last of two passes.
        assert row["train/critic/num_valid_tokens"] == sum_of_tokens(row)


@pytest.mark.long("ppo")
def test_a_loop_of_ones_own_trains_the_same(three_steps: Path, tmp_path: Path):
    train_ppo(tmp_path / "run", "ppo.val_at_start=false", program=OWN_LOOP)
    assert numbers(tmp_path / "run") == numbers(three_steps)


def test_the_critic_leaves_the_devices_before_engines_wake(three_steps: Path):
    window = list_windows(three_steps)[WARMUP]
    (timeline,) = read_timelines([window]).values()
    names = [name for lane in timeline["lanes"] if lane["name"] == "policy rank 0" for name, *_ in lane["spans"]]
    # The policy has trained nothing: only the critic enters the refit by a call of the driver, after its updates.
    last_update = max(place for place, name in enumerate(names) if name == "train_step")
    assert names[last_update + 1 :].index("enter refit") < names[last_update + 1 :].index("refit")


def test_engines_leave_the_memory_of_their_caches_while_the_critic_is_saved(three_steps: Path):
    window = list_windows(three_steps)[WARMUP]
    (timeline,) = read_timelines([window]).values()
    begins = {lane["name"]: {name: begin for name, begin, *_ in lane["spans"]} for lane in timeline["lanes"]}
    engine, rank = begins["engine 0"], begins["policy rank 0"]
    assert engine["serve"] < engine["enter checkpoint"] < rank["enter checkpoint"]
    assert rank["enter generate"] < engine["enter generate"]


def sum_of_tokens(row: dict[str, float]) -> float:
    """Tokens that the step's 16 rollouts generated."""
    return round(16 * row["rollout/mean_length"])


@pytest.mark.long("ppo")
def test_a_run_resumes_bit_for_bit_where_the_policy_has_no_moments_yet(three_steps: Path, tmp_path: Path):
    folder = tmp_path / "run"
    shutil.copytree(three_steps, folder)
    for step in (2, 3):
        shutil.rmtree(folder / f"step_{step}")
    assert find_damage(folder / f"step_{WARMUP}") is None
    sizes = {
        name: sum(path.stat().st_size for path in (folder / f"step_{WARMUP}" / name).rglob("*.distcp"))
        for name in ("policy", "value")
    }
    assert sizes["policy"] < sizes["value"] / 2
    train_ppo(folder, "ppo.val_at_start=false")
    assert numbers(folder) == numbers(three_steps)


def test_a_critic_is_exported_with_its_head(three_steps: Path, tmp_path: Path):
    convert_mcore_to_hf(three_steps / "step_3" / "value" / "weights", tmp_path / "critic")
    tensors = load_file(tmp_path / "critic" / "model.safetensors")
    start = load_file(ROOT / "prepared" / "tiny" / "model" / "model.safetensors")
    assert tensors.keys() - start.keys() == {"score.weight"} and not start.keys() - tensors.keys()
    assert tensors["score.weight"].shape == (1, tensors["lm_head.weight"].shape[1])
    assert np.array_equal(tensors["lm_head.weight"], start["lm_head.weight"])
    changed = [name for name in start if not np.array_equal(tensors[name], start[name])]
    assert len(changed) > len(start) / 2
    assert (tmp_path / "critic" / "tokenizer.json").is_file()


@pytest.mark.long("ppo")
def test_a_run_ahead_does_not_refit_what_has_not_changed(tmp_path: Path):
    train_ppo(
        tmp_path / "run",
        "ppo.val_at_start=false",
        "ppo.async_ppo={enabled: true, max_trajectory_age_steps: 1}",
        "policy.generation.colocated.enabled=false",
        # A step that saves nothing goes straight from the critic's training to the next values.
        "checkpointing.save_period=3",
    )
    steps = rows(tmp_path / "run")
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert ["refit/weight_version" in row for row in steps] == [False, True, True]
    assert all(row["train/max_trajectory_age"] <= 1 for row in steps)
    assert any(row["train/avg_trajectory_age"] > 0 for row in steps[WARMUP:])
    assert find_damage(tmp_path / "run" / "step_3") is None


@pytest.mark.long("ppo")
def test_new_engines_get_the_weights_of_a_run_that_resumes_while_the_critic_learns_alone(tmp_path: Path):
    dedicated = [
        "ppo.val_at_start=false",
        "policy.generation.colocated.enabled=false",
        "ppo.policy_training_start_step=2",
    ]
    train_ppo(tmp_path / "run", *dedicated)
    for step in (2, 3):
        shutil.rmtree(tmp_path / f"run/step_{step}")
    train_ppo(tmp_path / "run", *dedicated)
    steps = rows(tmp_path / "run")
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert ["refit/weight_version" in row for row in steps] == [False, False, True]
