# SPDX-License-Identifier: Apache-2.0
"""Section `teacher`: read as a policy's, checked as one, and of the student's tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mrl.config.errors import ConfigError
from mrl.config.load import load_config, load_run, read_run, resolved_yaml
from mrl.config.rules.plausible import find_doubts
from mrl.config.rules.tokens import token_difference
from mrl.config.schema.run import RunConfig
from tests.sources import ROOT
from tests.unit.config.problems import texts_of

STUDENT = """
distillation: {num_prompts_per_step: 8, num_generations_per_prompt: 2, topk_logits_k: 4}
loss_fn: {kl_type: reverse}
policy: &POLICY
  model_name: student
  precision: bfloat16
  max_total_sequence_length: 128
  max_grad_norm: 0.5
  dtensor_cfg: &DTENSOR {enabled: true, tensor_parallel_size: 2, context_parallel_size: 1, cpu_offload: false}
  make_sequence_length_divisible_by: ${.dtensor_cfg.tensor_parallel_size}
  megatron_cfg: {enabled: false, optimizer: {clip_grad: "${policy.max_grad_norm}"}}
data: {train: {data_path: rows.jsonl}, validation: null}
checkpointing: {metric_name: null}
cluster: {cpu_units_per_node: 4}
"""
TEACHER = """
teacher:
  <<: *POLICY
  model_name: teacher
  dtensor_cfg: {<<: *DTENSOR, tensor_parallel_size: 4}
logger: {wandb: {name: "${teacher.model_name}-${policy.model_name}"}}
"""


def write(tmp_path: Path, *texts: str) -> Path:
    file = tmp_path / "distillation.yaml"
    file.write_text("".join(texts))
    return file


def test_a_teacher_is_read_in_nemo_rls_words(tmp_path: Path):
    config = load_config(write(tmp_path, STUDENT, TEACHER))
    assert config.algorithm == "distillation" and config.teacher is not None
    assert config.policy.megatron_cfg.tensor_model_parallel_size == 2
    assert config.teacher.megatron_cfg.tensor_model_parallel_size == 4
    assert (config.teacher.make_sequence_length_divisible_by, config.policy.make_sequence_length_divisible_by) == (4, 2)
    assert config.teacher.model_name == config.teacher.tokenizer.name == "teacher"
    assert config.logger.wandb.name == "teacher-student"
    # Several updates of the rollouts of a step would be asked for.
    assert config.policy.train_global_batch_size == config.rollouts.num_rollouts_per_step == 16
    assert config.rollouts.seed == config.distillation.seed and not config.needs_old_logprobs and config.has_engines


def test_a_key_that_a_teacher_leaves_out_is_the_policys(tmp_path: Path):
    config = load_config(write(tmp_path, STUDENT), ["teacher.model_name=teacher", "teacher.precision=float32"])
    assert config.teacher is not None
    assert config.teacher.megatron_cfg.parallel == config.policy.megatron_cfg.parallel
    assert (config.teacher.precision, config.policy.precision) == ("float32", "bfloat16")
    assert (config.teacher.max_total_sequence_length, config.teacher.tokenizer.name) == (128, "teacher")
    assert [model.model_name for model in config.models.values()] == ["student", "teacher"]
    assert config.model("teacher").generation.vllm_cfg is config.policy.generation.vllm_cfg


def test_what_is_written_out_reads_back(tmp_path: Path):
    config = load_config(write(tmp_path, STUDENT, TEACHER))
    again = load_config(write(tmp_path, resolved_yaml(config)))
    assert resolved_yaml(again) == resolved_yaml(config)
    assert again.teacher == config.teacher


def test_a_grpo_section_wins(tmp_path: Path):
    config = load_config(write(tmp_path, STUDENT, "grpo: {num_prompts_per_step: 4}\n"))
    assert config.algorithm == "grpo" and config.models_beside == ()
    assert load_config(write(tmp_path, STUDENT, TEACHER, "grpo: {}\nalgorithm: distillation\n")).models_beside == (
        "teacher",
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "teacher.precison=float32",
            "teacher.precison=float32 (command line): no such key; the nearest is teacher.precision",
        ),
        ("teacher.precision=int8", "teacher.precision=int8 (command line): no such value; use"),
        (
            "teacher.model_name=${nowhere}",
            "teacher.model_name=${nowhere} (command line): Interpolation key 'nowhere' not found",
        ),
    ],
)
def test_problems_of_a_teacher_name_its_keys(tmp_path: Path, override: str, message: str):
    with pytest.raises(ConfigError) as error:
        load_config(write(tmp_path, STUDENT, TEACHER), [override])
    assert any(problem.startswith(message) for problem in map(str, error.value.problems)), error.value.problems
    assert not any("policy.pre" in str(problem) for problem in error.value.problems)


def problems(tmp_path: Path, *overrides: str, texts: tuple[str, ...] = (STUDENT, TEACHER)) -> str:
    config, _, found = read_run(write(tmp_path, *texts), overrides)
    assert config is not None and found == []
    return "\n".join(texts_of(config))


def test_rules_of_distillation(tmp_path: Path):
    (missing,) = (text for text in problems(tmp_path).splitlines() if "teacher." in text)
    assert missing.startswith("teacher.model_name=teacher: no readable config.json in this folder")
    assert "give teacher.model_name" in problems(tmp_path, texts=(STUDENT,))
    assert "teacher.megatron_cfg.peft.enabled=true: a teacher is not trained" in problems(
        tmp_path, "teacher.dtensor_cfg.lora_cfg.enabled=true", "teacher.dtensor_cfg.lora_cfg.dim=4"
    )
    assert "loss_fn.ratio_clip_min=0.3: it belongs to GRPO's loss" in problems(tmp_path, "loss_fn.ratio_clip_min=0.3")
    short = problems(tmp_path, "teacher.max_total_sequence_length=64")
    assert (
        "teacher.max_total_sequence_length=64: the teacher reads sequences of policy.max_total_sequence_length=128"
        in short
    )
    (rows,) = find_doubts(
        load_config(
            write(tmp_path, STUDENT, TEACHER), ["teacher.sequence_packing={enabled: true, train_mb_tokens: 64}"]
        )
    )
    assert rows.startswith("teacher.sequence_packing.train_mb_tokens=64: teacher.max_total_sequence_length=128")
    # To evaluate, nobody teaches.
    assert "teacher." not in problems(tmp_path, "algorithm=grpo") and "kl_type" not in problems(
        tmp_path, "algorithm=grpo"
    )
    # Three ranks to a replica, of four.
    found = problems(tmp_path, "teacher.dtensor_cfg.tensor_parallel_size=3")
    assert "teacher.megatron_cfg.tensor_model_parallel_size=3" in found and "no multiple of tensor 3" in found
    # Enough for the student, and not for four ranks to a replica of the teacher.
    assert "cluster.cpu_units_per_node=2: for the teacher, the 2 slots" in problems(
        tmp_path, "cluster.cpu_units_per_node=2"
    )


@pytest.mark.parametrize("override", ["teacher.precison=float32", "teacher.precision=int8"])
def test_a_teacher_whose_section_has_a_fault_is_not_missing(tmp_path: Path, override: str):
    config, _, found = read_run(write(tmp_path, STUDENT, TEACHER), [override])
    assert config is not None and len(found) == 1 and str(found[0]).startswith(override)
    assert not any("nobody to learn from" in text for text in texts_of(config))
    config, _, found = read_run(write(tmp_path, STUDENT, TEACHER), ["teacher=null", "logger.wandb.name=x"])
    assert config is not None and any("nobody to learn from" in text for text in texts_of(config)), found


def model(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    shutil.copy(ROOT / "scripts/bench/models/qwen3_30b_a3b.config.json", folder / "config.json")
    found = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(found))
    tokens = {"a": 0, "b": 1}
    (folder / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": tokens}, "added_tokens": [{"content": "<end>", "id": 2}]})
    )
    return folder


def with_models(tmp_path: Path, student: Path, teacher: Path, *overrides: str) -> str:
    names = [f"policy.model_name={student}", f"teacher.model_name={teacher}"]
    return problems(tmp_path, *names, *overrides)


def test_models_must_have_the_same_tokens(tmp_path: Path):
    student, teacher = model(tmp_path / "one"), model(tmp_path / "two")
    assert "teacher." not in with_models(tmp_path, student, teacher)
    size = json.loads((student / "config.json").read_text())["vocab_size"]
    too_many = with_models(tmp_path, student, teacher, f"distillation.topk_logits_k={size + 1}")
    assert f"distillation.topk_logits_k={size + 1}: the vocabulary has {size:,} tokens" in too_many
    # 32 heads.
    assert "teacher.megatron_cfg.tensor_model_parallel_size=64" in with_models(
        tmp_path, student, teacher, "teacher.dtensor_cfg.tensor_parallel_size=64", "cluster.cpu_units_per_node=64"
    )
    (teacher / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 1, "b": 0}}, "added_tokens": []}))
    found = with_models(tmp_path, student, teacher)
    assert f"teacher.tokenizer.name={teacher}: its tokens are not those of policy.tokenizer.name={student}" in found
    assert '3 of 3 have other ids, such as "a" is 0 and 1' in found


def test_a_teachers_embedding_may_have_more_rows_than_the_students_and_not_fewer(tmp_path: Path):
    """Covers the models of Qwen 2.5, padded to 151,936 and 152,064."""
    small, large = model(tmp_path / "small", vocab_size=151936), model(tmp_path / "large", vocab_size=152064)
    assert "teacher." not in with_models(tmp_path, small, large)
    refused = (
        f"teacher.model_name={small}: its vocab_size is 151,936, and the student's 152,064: the student may "
        "draw tokens of which"
    )
    assert refused in with_models(tmp_path, large, small)
    # What is taught is among the student's tokens.
    too_many = with_models(tmp_path, small, large, "distillation.topk_logits_k=152000")
    assert "distillation.topk_logits_k=152000: the vocabulary has 151,936 tokens" in too_many
    (large / "tokenizer.json").unlink()
    assert (
        f"teacher.model_name={large}: its vocab_size is 152,064, and the student's 151,936; cannot be checked without"
        in with_models(tmp_path, small, large)
    )
    # The tokenizer's tokens are 0 to 2.
    tiny = model(tmp_path / "tiny", vocab_size=2)
    assert (
        f"teacher.model_name={tiny}: its vocab_size is 2, and policy.tokenizer.name={small} has 3 tokens"
        in with_models(tmp_path, small, tiny)
    )


def test_tokens_are_compared_whatever_the_files_order(tmp_path: Path):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, text in (
        (one, {"model": {"vocab": [["a", -1.0], ["b", -2.0]]}}),
        (two, {"model": {"vocab": {"b": 1, "a": 0}}}),
    ):
        folder.mkdir()
        (folder / "tokenizer.json").write_text(json.dumps(text))
    assert token_difference(one, two) == ""
    assert token_difference(one, tmp_path / "nowhere") is None
    for folder, content in ((one, b"1"), (two, b"2")):
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer.model").write_bytes(content)
    assert token_difference(one, two) == "the files tokenizer.model differ"


def test_a_run_without_a_teacher_has_one_model(tmp_path: Path):
    config, _ = load_run("grpo_tiny.yaml")
    assert isinstance(config, RunConfig) and config.teacher is None and config.models_beside == ()
    assert config.models == {"policy": config.policy}
