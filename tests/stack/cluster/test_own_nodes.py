# SPDX-License-Identifier: Apache-2.0
"""Teachers on nodes of their own, of a real Ray cluster, teach as teachers on the policy's slots do, bit for bit."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from mrl.recipes.tiny import prepare_tiny
from tests.sources import ROOT
from tests.stack.cluster.conftest import ray_nodes
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


@pytest.mark.parametrize("name", ["distillation", pytest.param("mopd", marks=pytest.mark.long("cluster"))])
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
