# SPDX-License-Identifier: Apache-2.0
"""Distillation on policy as its command: two teachers in own layouts beside a TP2 policy, rows by agent, a resume."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from mrl.ops.view.timeline import list_windows, read_timelines
from mrl.recipes.tiny import prepare_tiny
from mrl.store.checkpoints import find_damage
from tests.sources import ROOT
from tests.stack.pipeline.test_pipeline_run import MRL, OWN_LOOP, numbers, rows, train


def distil(folder: Path, teacher: Path, *, program: Sequence[str] = MRL) -> None:
    """Runs to its end, from where it stands."""
    prepared = ROOT / "prepared" / "tiny"
    names = f"{{carrying: {teacher}, plain: {prepared / 'model'}}}"
    train(
        folder,
        "cluster.cpu_units_per_node=2",
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
        program=program,
    )


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a teacher that is less sure of everything than the student."""
    prepare_tiny(ROOT / "prepared" / "tiny", seed=0)
    folder = shutil.copytree(ROOT / "prepared" / "tiny" / "model", tmp_path_factory.mktemp("teacher") / "model")
    scale_logits(folder, 0.5)
    return folder


def scale_logits(folder: Path, factor: float) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] *= factor
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def two_steps(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps."""
    folder = tmp_path_factory.mktemp("teachers") / "run"
    distil(folder, teacher)
    return folder


@pytest.mark.long("distillation")
def test_a_loop_of_ones_own_trains_the_same(two_steps: Path, teacher: Path, tmp_path: Path):
    distil(tmp_path / "run", teacher, program=OWN_LOOP)
    assert numbers(tmp_path / "run") == numbers(two_steps)


@pytest.mark.long("distillation")
def test_two_teachers_judge_the_tokens_of_their_rows(two_steps: Path):
    first, second = rows(two_steps)
    # What the student draws is likelier to itself.
    assert first["train/teacher_gap/mean"] < -0.01
    assert first["train/grad_norm"] > 0 and second["time/teacher"] > 0
    for row in (first, second):
        assert None not in row.values(), row
        assert row["train/token_mult_prob_error"] <= 1.001
    (timeline,) = read_timelines([list_windows(two_steps)[1]]).values()
    names = [name for lane in timeline["lanes"] if lane["name"] == "policy rank 0" for name, *_ in lane["spans"]]
    # One after another, before the policy's first update.
    assert names.count("teacher") == 2 and names.index("teacher") < names.index("train_step")


@pytest.mark.long("distillation")
def test_a_resumed_run_repeats_the_step_with_the_same_teachers_alone(two_steps: Path, teacher: Path, tmp_path: Path):
    folder = shutil.copytree(two_steps, tmp_path / "run")
    shutil.rmtree(folder / "step_2")
    assert find_damage(folder / "step_1") is None
    distil(folder, teacher)
    assert numbers(folder) == numbers(two_steps)
    scale_logits(teacher, 2.0)
    with pytest.raises(AssertionError, match="another teacher than before .*carrying: model.safetensors differ"):
        distil(folder, teacher)
