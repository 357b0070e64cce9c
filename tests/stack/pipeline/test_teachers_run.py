# SPDX-License-Identifier: Apache-2.0
"""On-policy distillation as its command: two teachers in layouts of their own beside a policy at TP2, rows routed by agent, a resume."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from mrl.recipes.tiny import prepare_tiny
from mrl.store.checkpoints import find_damage
from mrl.view.timeline import list_windows, read_timelines
from tests.sources import ROOT
from tests.stack.pipeline.test_pipeline_run import numbers, rows, train


def distil(folder: Path, teacher: Path) -> None:
    """Runs to its end, from where it stands."""
    prepared = ROOT / "prepared" / "tiny"
    names = f"{{carrying: {teacher}, plain: {prepared / 'model'}}}"
    train(
        folder,
        "grpo.max_num_steps=2",
        "grpo.val_at_start=false",
        "grpo.num_prompts_per_step=8",
        f"data.train.datasets=[{{data_path: {prepared / 'data' / 'train.jsonl'}}}]",
        "data.train.data_path=null",
        f"on_policy_distillation.teacher_model_by_agent_name={names}",
        # The reward has a share, too.
        "on_policy_distillation.use_orm_advantage=true",
        "on_policy_distillation.orm_advantage_weight=0.1",
        "checkpointing.save_period=1",
        "checkpointing.keep_top_k=null",
        "checkpointing.metric_name=null",
        config="mopd_tiny.yaml",
    )


def test_two_teachers_judge_their_rows_and_a_resumed_run_repeats_the_step(tmp_path: Path):
    teacher, folder = tmp_path / "teacher", tmp_path / "run"
    prepare_tiny(ROOT / "prepared" / "tiny", seed=0)
    shutil.copytree(ROOT / "prepared" / "tiny" / "model", teacher)
    weights = load_file(teacher / "model.safetensors")
    weights["lm_head.weight"] *= 0.5
    save_file(weights, teacher / "model.safetensors", metadata={"format": "pt"})
    distil(folder, teacher)
    first, second = rows(folder)
    # The teacher is half as sure of everything, the student of itself not: what it draws is likelier to itself.
    assert first["train/teacher_gap/mean"] < -0.01
    assert first["train/grad_norm"] > 0 and second["time/teacher"] > 0
    for row in (first, second):
        assert None not in row.values(), row
        assert row["train/token_mult_prob_error"] <= 1.001
    (timeline,) = read_timelines([list_windows(folder)[1]]).values()
    names = [name for lane in timeline["lanes"] if lane["name"] == "policy rank 0" for name, *_ in lane["spans"]]
    # One after another, before the policy's first update.
    assert names.count("teacher") == 2 and names.index("teacher") < names.index("train_step")
    before = numbers(folder)
    shutil.rmtree(folder / "step_2")
    assert find_damage(folder / "step_1") is None
    distil(folder, teacher)
    assert numbers(folder) == before
    weights["lm_head.weight"] *= 2.0
    save_file(weights, teacher / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(AssertionError, match="another teacher than before .*carrying: model.safetensors differ"):
        distil(folder, teacher)
