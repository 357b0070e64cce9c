# SPDX-License-Identifier: Apache-2.0
"""Teachers on nodes of their own, of a real Ray cluster, teach as teachers on the policy's slots do, bit for bit."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from mrl.recipes.tiny import prepare_tiny
from tests.faults.attempts import Attempt, tiny_inputs
from tests.faults.test_kill import rows
from tests.sources import ROOT
from tests.stack.cluster.conftest import ray_nodes
from tests.stack.loop.conftest import SMALL
from tests.stack.pipeline.test_pipeline_run import numbers, train
from tests.stack.pipeline.test_teachers_run import scale_logits

TINY = ROOT / "prepared" / "tiny"
SIZES = [
    f"policy.megatron_cfg.{size}"
    for size in ("tensor_model_parallel_size=1", "expert_model_parallel_size=1", "sequence_parallel=false")
]
SHORT = [
    *SIZES,
    "cluster.cpu_units_per_node=1",
    "policy.generation.vllm_cfg.tensor_parallel_size=1",
    f"data.train.datasets=[{{data_path: {TINY / 'data' / 'train.jsonl'}}}]",
    "data.train.data_path=null",
    "checkpointing.enabled=false",
]
STEPS = "max_num_steps=2 num_prompts_per_step=8 val_at_start=false val_at_end=false val_period=0".split()
PLACES = "on_policy_distillation.non_colocated_teachers"
RUNS = {
    "distillation": ("distillation_tiny.yaml", "distillation", ["distillation.teacher_nodes=1"], 2),
    "mopd": ("mopd_tiny.yaml", "grpo", [f"{PLACES}.enabled=true"], 3),
}


@pytest.mark.long("nodes")
@pytest.mark.parametrize("name", ["distillation", "mopd"])
def test_a_teacher_on_its_own_node_teaches_what_one_beside_the_policy_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    prepare_tiny(TINY, seed=0)
    teacher = shutil.copytree(TINY / "model", tmp_path / "teacher")
    scale_logits(teacher, 0.5)
    config, section, own, num_nodes = RUNS[name]
    overrides = [*SHORT, *(f"{section}.{step}" for step in STEPS)]
    if name == "mopd":
        names = f"{{carrying: {teacher}, plain: {TINY / 'model'}}}"
        overrides += [
            f"on_policy_distillation.teacher_model_by_agent_name={names}",
            f"{PLACES}.default_teacher_cfg.tensor_model_parallel_size=1",
            f"{PLACES}.teacher_overrides.plain.pipeline_model_parallel_size=1",
            f"{PLACES}.teacher_overrides.plain.num_layers_in_first_pipeline_stage=null",
        ]
    else:
        overrides += [f"teacher.model_name={teacher}", "teacher.megatron_cfg.pipeline_model_parallel_size=1"]
    train(tmp_path / "beside", *overrides, config=config)
    with ray_nodes(tmp_path, monkeypatch, *[1] * num_nodes):
        said = train(tmp_path / "apart", *overrides, *own, f"cluster.num_nodes={num_nodes}", config=config)
    assert numbers(tmp_path / "apart") == numbers(tmp_path / "beside")
    slots = re.findall(r"^\d +\S+ +(\S+) +(\S+)(?: +(\S+) (\d+))?$", said, re.MULTILINE)
    models = {"distillation": ["teacher"], "mopd": ["teacher:carrying", "teacher:plain"]}[name]
    assert slots == [("0", "0.0", "", ""), *(("-", "-", model, "0") for model in models)]
    (actors,) = (tmp_path / "apart").glob("logs/exp_*/actors")
    ranks = sorted(path.name for path in actors.glob("*-rank-*.trace.json"))
    assert ranks == ["policy-rank-0.trace.json", *(f"teacher-rank-{index}.trace.json" for index in range(len(models)))]
    # The policy's process holds no teacher.
    assert '"teacher"' not in (actors / ranks[0]).read_text() and '"teacher"' in (actors / ranks[1]).read_text()


KL = [
    *SHORT[:-1],
    *(f"grpo.{step}" for step in STEPS),
    "grpo.max_num_steps=3",
    "loss_fn.reference_policy_kl_penalty=0.5",
]
SAVED = ["checkpointing.save_period=1", "checkpointing.keep_top_k=null", "checkpointing.metric_name=null"]


@pytest.mark.long("nodes")
def test_a_reference_on_its_own_node_is_the_one_that_policy_ranks_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its rank is killed after step 1, and the resumed run ends as one whose policy rank keeps the reference."""
    prepare_tiny(TINY, seed=0)
    train(tmp_path / "kept", *KL, *SAVED)
    apart = [*KL, *SAVED, "reference.num_nodes=1", "cluster.num_nodes=2"]
    folder = tmp_path / "apart"
    with ray_nodes(tmp_path, monkeypatch, 1, 1):
        inputs = [*tiny_inputs(), f"checkpointing.checkpoint_dir={folder}", *SMALL]
        with Attempt(folder, [*inputs, *apart], tmp_path / "killed.log") as killed:
            killed.wait_until((folder / "step_1").exists, "a checkpoint")
            os.kill(killed.actor_pid("reference-rank-0"), signal.SIGKILL)
            assert killed.finish() not in (0, 2)
            assert re.search(r"reference rank 0 died during \w+", killed.text()), killed.text()[-2000:]
        said = train(folder, *apart)
    assert "Resuming from" in said
    ended, expected = rows(folder), rows(tmp_path / "kept")
    # A pass that the policy's ranks no longer make.
    assert [row.pop("train/num_logprob_passes") for row in (*expected, *ended)] == [2.0] * 3 + [1.0] * 3
    differences = [
        {name for name in mine | row if mine.get(name) != row.get(name)}
        for mine, row in zip(ended, expected, strict=True)
    ]
    assert differences == [set()] * 3
    assert ended[-1]["train/kl_penalty"] > 0
    assert re.search(r"^1 +\S+ +- +- +reference 0$", said, re.MULTILINE), said
    *_, actors = sorted(folder.glob("logs/exp_*/actors"))
    policy, reference = ((actors / f"{kind}-rank-0.trace.json").read_text() for kind in ("policy", "reference"))
    assert '"compute_reference_logprobs"' in reference and '"compute_reference_logprobs"' not in policy
