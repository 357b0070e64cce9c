# SPDX-License-Identifier: Apache-2.0
"""Section `on_policy_distillation`, in NeMo RL's words: a row's teacher, what each is made of, and what conflicts."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.cluster.scheduling import engine_slots, own_slots
from mrl.config.load import load_config, read_run, resolved_yaml
from mrl.config.model import with_cached_folders
from tests.unit.config.problems import texts_of
from tests.unit.config.test_teacher import model

# The keys of NeMo RL's recipe mopd-qwen3-1.7b-3n8g-megatron-pack.yaml, on hosts without GPUs.
STUDENT = """
grpo:
  num_prompts_per_step: 8
  num_generations_per_prompt: 4
  adv_estimator: {name: opd}
  seq_logprob_error_threshold: 2.0
loss_fn: {reference_policy_kl_penalty: 0.0, disable_ppo_ratio: true}
policy:
  model_name: student
  precision: bfloat16
  max_total_sequence_length: 128
  logprob_batch_size: 2
  megatron_cfg: {enabled: true, tensor_model_parallel_size: 2, sequence_parallel: true,
                 num_layers_in_first_pipeline_stage: 3,
                 pipeline_model_parallel_size: 2, peft: {enabled: true}}
data: {train: {data_path: rows.jsonl}, validation: null}
checkpointing: {metric_name: null}
cluster: {cpu_units_per_node: 4}
on_policy_distillation:
  enabled: true
  teacher_model_by_agent_name: {math_agent: one, code_agent: two, mcqa_agent: one}
"""
PLACES = """
  non_colocated_teachers:
    enabled: false
    default_teacher_cfg: {tensor_model_parallel_size: 2, num_nodes: 1, gpus_per_node: 8, precision: bf16,
                          micro_batch_size: 1}
    teacher_overrides:
      code_agent:
        tensor_model_parallel_size: 1
        pipeline_model_parallel_size: 4
        moe_permute_fusion: false
        megatron_cfg_overrides: {activation_checkpointing: true}
"""


def write(tmp_path: Path, *texts: str) -> Path:
    file = tmp_path / "mopd.yaml"
    file.write_text("".join(texts))
    return file


def test_each_model_is_one_teacher_with_the_policys_keys_and_a_layout_of_its_own(tmp_path: Path):
    config = load_config(write(tmp_path, STUDENT, PLACES))
    assert config.models_beside == ("teacher:math_agent", "teacher:code_agent")
    one, two = map(config.model, config.models_beside)
    assert (one.model_name, one.tokenizer.name, one.max_total_sequence_length) == ("one", "one", 128)
    assert (one.precision, one.logprob_batch_size, config.policy.logprob_batch_size) == ("bfloat16", 1, 2)
    assert (one.megatron_cfg.model_parallel_size, one.megatron_cfg.sequence_parallel) == (2, True)
    assert (two.megatron_cfg.tensor_model_parallel_size, two.megatron_cfg.pipeline_model_parallel_size) == (1, 4)
    assert not two.megatron_cfg.sequence_parallel and two.megatron_cfg.activation_checkpointing
    for teacher in (one, two):
        # A teacher is not trained, and its layers are not the policy's.
        assert not teacher.megatron_cfg.peft.enabled and teacher.megatron_cfg.num_layers_in_first_pipeline_stage is None
    assert (
        config.policy.megatron_cfg.peft.enabled and config.policy.megatron_cfg.num_layers_in_first_pipeline_stage == 3
    )
    (tmp_path / "resolved.yaml").write_text(resolved_yaml(config))
    again = load_config(tmp_path / "resolved.yaml")
    assert {name: teacher.megatron_cfg for name, teacher in again.facts.teachers.items()} == {
        name: teacher.megatron_cfg for name, teacher in config.facts.teachers.items()
    }


def test_a_teacher_has_what_the_policys_keys_say_of_the_policy(tmp_path: Path):
    """Follows NeMo RL: its rows are as long as the policy's, whatever its batches, and its positions reach as far."""
    packing = [
        "enabled: true",
        "logprob_mb_tokens: '${mul:${policy.max_total_sequence_length}, ${policy.logprob_batch_size}}'",
    ]
    overrides = [
        f"policy.sequence_packing={{{', '.join(packing)}}}",
        "policy.hf_config_overrides={rope_theta: 7}",
        "on_policy_distillation.non_colocated_teachers.teacher_overrides.code_agent."
        "hf_config_overrides={rope_theta: 9}",
    ]
    config = load_config(write(tmp_path, STUDENT, PLACES), overrides)
    one, two = map(config.model, config.models_beside)
    assert one.logprob_batch_size == 1
    assert one.sequence_packing.logprob_mb_tokens == config.policy.sequence_packing.logprob_mb_tokens == 256
    assert (one.hf_config_overrides, two.hf_config_overrides) == ({"rope_theta": 7}, {"rope_theta": 9})


def test_a_row_has_the_teacher_of_its_agent(tmp_path: Path):
    config = load_config(write(tmp_path, STUDENT))
    assert config.teacher_of("math_agent") == config.teacher_of("mcqa_agent") == "teacher:math_agent"
    assert (config.teacher_of("code_agent"), config.teacher_of("other_agent")) == ("teacher:code_agent", None)
    config = load_config(write(tmp_path, STUDENT, "  default_teacher_alias: code_agent\n"))
    assert config.teacher_of("other_agent") == "teacher:code_agent"
    config = load_config(
        write(tmp_path, STUDENT, "  default_teacher_alias: code_agent\n  strict_agent_name_match: true\n")
    )
    assert config.teacher_of("other_agent") is None
    config = load_config(write(tmp_path, STUDENT, "  deduplicate_shared_teacher_checkpoints: false\n"))
    assert config.models_beside == ("teacher:math_agent", "teacher:code_agent", "teacher:mcqa_agent")
    assert config.teacher_of("mcqa_agent") == "teacher:mcqa_agent"


def test_teachers_have_nodes_of_their_own_in_nemo_rls_words(tmp_path: Path):
    """Follows nemo_rl/algorithms/grpo.py: the policy has cluster.num_nodes less those of teachers and engines."""
    own = "on_policy_distillation.non_colocated_teachers"
    keys = [f"{own}.enabled=true", "cluster.num_nodes=8", "cluster.gpus_per_node=8"]
    keys += ["policy.generation.colocated={enabled: false, resources: {num_nodes: 3}}"]
    sizes = f"{own}.teacher_overrides.code_agent.num_nodes=2"
    config = load_config(write(tmp_path, STUDENT, PLACES), [*keys, sizes])
    one, two = config.own_nodes
    assert config.own_nodes == {one: 1, two: 2} and config.models_beside == ()
    assert (config.num_policy_ranks, config.num_own_slots, config.num_dedicated_slots, config.num_slots) == (
        2 * 8,
        3 * 8,
        3 * 8,
        64,
    )
    assert (config.replicas_of(one), config.replicas_of(two), config.data_parallel_size) == (8 // 2, 16 // 4, 16 // 4)
    assert own_slots(config) == {one: range(16, 24), two: range(24, 40)}
    assert engine_slots(config)[0].slots[0] == 40
    found = problems(tmp_path, *keys, f"{own}.teacher_overrides.code_agent.num_nodes=4")
    assert "5 nodes of teachers and 3 of dedicated engines leave the policy none of cluster.num_nodes=8" in found
    found = problems(tmp_path, *keys, f"{own}.default_teacher_cfg.gpus_per_node=4")
    assert "teacher math_agent has whole nodes to itself, but gpus_per_node=4; set its gpus_per_node to 8" in found
    assert "num_nodes=two; set its num_nodes to a whole number from 1 on" in problems(
        tmp_path, *keys, f"{own}.default_teacher_cfg.num_nodes=two"
    )
    # Enough for the policy, and not for the teacher.
    found = problems(tmp_path, *keys, f"{own}.teacher_overrides.code_agent.pipeline_model_parallel_size=16")
    assert "code_agent: megatron_cfg.pipeline_model_parallel_size=16: the 8 slots (1 of its own nodes x" in found


def problems(tmp_path: Path, *overrides: str) -> str:
    _, _, found = read_run(write(tmp_path, STUDENT, PLACES), list(overrides))
    return "\n".join(map(str, found)) or "\n".join(texts_of(load_config(write(tmp_path, STUDENT, PLACES), overrides)))


def test_logprobs_of_the_policy_are_computed_whatever_the_ratio_needs(tmp_path: Path):
    ratio = "loss_fn.force_on_policy_ratio=true"
    config = load_config(write(tmp_path, STUDENT), [ratio, "grpo.seq_logprob_error_threshold=null"])
    assert config.needs_old_logprobs
    assert not load_config("grpo_tiny.yaml", [ratio]).needs_old_logprobs


WRONG = {
    "another estimator": (
        ["grpo.adv_estimator.name=grpo"],
        "on_policy_distillation.enabled=true: the teachers' logprobs would be unused",
    ),
    "nobody": (
        ["on_policy_distillation=null"],
        "grpo.adv_estimator.name=opd: opd compares with teachers, and there are none",
    ),
    "a default without a model": (
        ["on_policy_distillation.default_teacher_alias=art"],
        "(math_agent, code_agent, mcqa_agent)",
    ),
    "a weight that nobody reads": (
        ["on_policy_distillation.orm_advantage_weight=0.5"],
        "use_orm_advantage=false does not go with it",
    ),
    "truncated sampling": (
        ["policy.generation.top_p=0.9"],
        "top_p or top_k truncates the policy's; set top_p=1 and top_k=null",
    ),
    "another algorithm": (["algorithm=ppo"], "advantages are GRPO's, and algorithm=ppo"),
    "a place for a name that shares another's model": (
        [
            (
                "on_policy_distillation.non_colocated_teachers.teacher_overrides={mcqa_agent: "
                "{tensor_model_parallel_size: 2}}"
            )
        ],
        (
            "no teacher is held under 'mcqa_agent': names of one model share the first of them; use one of math_agent, "
            "code_agent"
        ),
    ),
    "a place that is none": (
        ["on_policy_distillation.non_colocated_teachers.teacher_overrides={math_agent: 2}"],
        "on_policy_distillation.non_colocated_teachers.teacher_overrides={'math_agent': 2}: [math_agent] must be a map",
    ),
    "overrides that are none": (
        ["on_policy_distillation.non_colocated_teachers.default_teacher_cfg={megatron_cfg_overrides: 2}"],
        "on_policy_distillation, teacher math_agent: megatron_cfg.megatron_cfg_overrides=2: no such key",
    ),
    "a layout that does not divide the ranks": (
        ["on_policy_distillation.non_colocated_teachers.default_teacher_cfg={tensor_model_parallel_size: 3}"],
        "on_policy_distillation, teacher math_agent: megatron_cfg.tensor_model_parallel_size=3: ",
    ),
    "a key that no section has": (
        ["on_policy_distillation.non_colocated_teachers.default_teacher_cfg={tensor_size: 2}"],
        "on_policy_distillation, teacher math_agent: megatron_cfg.tensor_size=2: no such key",
    ),
    "a value of another type": (
        ["on_policy_distillation.non_colocated_teachers.default_teacher_cfg={context_parallel_size: two}"],
        "on_policy_distillation, teacher math_agent: megatron_cfg.context_parallel_size=two: must be a whole number",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_go_together_is_refused(tmp_path: Path, name: str):
    overrides, message = WRONG[name]
    config, _, problems = read_run(write(tmp_path, STUDENT), overrides)
    assert config is not None
    found = [*map(str, problems), *texts_of(with_cached_folders(config))]
    assert any(message in problem for problem in found), "\n".join(found)


def test_a_key_that_teachers_inherit_is_refused_once(tmp_path: Path):
    _, _, problems = read_run(write(tmp_path, STUDENT), ["++policy.megatron_cfg.nope=true"])
    assert [problem.key for problem in problems] == ["policy.megatron_cfg.nope"]


def test_teaching_needs_teachers(tmp_path: Path):
    nobody = STUDENT.rpartition("  teacher_model_by_agent_name")[0]
    (problem,) = (text for text in texts_of(load_config(write(tmp_path, nobody))) if "on_policy_distillation" in text)
    assert problem.startswith(
        "on_policy_distillation.teacher_model_by_agent_name={}: no row has a teacher; give a model for each agent"
    )


def test_a_teacher_of_other_tokens_is_refused(tmp_path: Path):
    student, teacher = model(tmp_path / "student"), model(tmp_path / "other", vocab_size=256)
    config = load_config(write(tmp_path, STUDENT), [f"policy.model_name={student}"])
    config.facts.teachers["code_agent"].model_name = str(teacher)
    assert any(
        f"teacher code_agent: model_name={teacher}: its vocab_size is 256, and the" in text for text in texts_of(config)
    )
