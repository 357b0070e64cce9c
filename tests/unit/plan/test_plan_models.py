# SPDX-License-Identifier: Apache-2.0
"""Plans of runs with several models: a teacher, a critic, folders that models share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mrl.config.load import load_config
from mrl.config.model import with_value
from mrl.config.rules.checks import checkpoint_demand, num_kept_at_most
from mrl.plan.deadlines import checkpoint_deadline
from mrl.plan.facts import PlanModel, read_model
from mrl.plan.memory import (
    ENGINE_CONTEXT,
    ROLLOUTS,
    cache_bytes,
    disk_bytes,
    engine_memory,
    host_memory,
    judge_memory,
    judges_misfit,
    memory_apart,
    rank_memory,
    saved_bytes,
    stage_states,
    work_of,
)
from mrl.plan.plan import describe, make_plan
from tests.unit.plan.test_plan import H100, hf_config


def test_a_teacher_needs_most_on_the_stage_that_makes_logits(folders: dict[str, str]):
    # Were it trained, the first stage would need most: it keeps the activations of all microbatches on their way.
    words = ["pipeline_model_parallel_size=4", "activation_checkpointing=false"]
    alone = load_config("grpo_nanov3.yaml", [folders["nano"]])
    teacher = load_config(
        "grpo_nanov3.yaml",
        [folders["qwen"], "policy.logprob_chunk_size=null", *(f"policy.megatron_cfg.{word}" for word in words)],
    ).policy
    config = with_value(with_value(alone, "teacher", teacher), "algorithm", "distillation")
    parts = rank_memory(config, read_model(config), 0, None).phases["teacher"]
    # Five bytes of each logit of a row of 49,152 tokens on four context-parallel ranks, of two that share the
    # vocabulary.
    assert parts["logits or one layer"] == 5 * 49152 / 4 * 151936 / 2
    stages = [work_of(config, PlanModel(hf_config("qwen")), stage, "teacher") for stage in (0, 3)]
    assert sum(stages[0].train.values()) > sum(stages[1].train.values())


def ppo_words(folder: str, critic: str) -> list[str]:
    words = [folder, critic.replace("policy.", "value."), "cluster.gpus_per_node=8", "policy.precision=bfloat16"]
    return [*words, "value.megatron_cfg.num_layers_in_first_pipeline_stage=null"]


def test_checkpoints_hold_policy_and_critic(folders: dict[str, str]):
    both, without, adapters = (
        load_config("ppo_tiny.yaml", [*ppo_words(folders["nano"], folders["qwen"]), *more])
        for more in ([], ["checkpointing.save_optimizer=false"], ["policy.megatron_cfg.peft.enabled=true"])
    )
    # Weights in bfloat16, main parameters and two moments in float32; of a policy with adapters its weights.
    nano, qwen = 31_577_940_288, 30_532_122_624
    for config, expected in (
        (both, 14 * (nano + qwen)),
        (without, 2 * (nano + qwen)),
        (adapters, 2 * nano + 14 * qwen),
    ):
        model, kept = read_model(config), num_kept_at_most(config)
        assert sum(saved_bytes(config, model).values()) == expected
        assert disk_bytes(config, model) == ((kept or 1) * expected + expected, kept)
        assert checkpoint_demand(config, nano).checkpoint_bytes == pytest.approx(expected, rel=1e-4)
        assert checkpoint_deadline(config).seconds == pytest.approx(600 + expected / 200e6)
        assert host_memory(config, model, stage_states(config, model, 0))["checkpoint being written"] == expected
    both.value.megatron_cfg.checkpoint.async_save = False
    assert host_memory(both, model, stage_states(both, model, 0))["checkpoint being written"] == 14 * nano


def test_a_folder_that_two_models_share_is_counted_once(folders: dict[str, str]):
    for critic, num_parameters in (("nano", 31_577_940_288), ("qwen", 31_577_940_288 + 30_532_122_624)):
        config = load_config("ppo_tiny.yaml", ppo_words(folders["nano"], folders[critic]))
        model = read_model(config)
        assert (
            host_memory(config, model, stage_states(config, model, 0))["model files in the page cache"]
            == 2 * num_parameters
        )
        assert cache_bytes(model) == 2 * num_parameters


def test_a_critic_does_not_train_the_output_layer_that_it_does_not_use(folders: dict[str, str]):
    config = load_config("ppo_tiny.yaml", ppo_words(folders["qwen"], folders["qwen"]))
    model = read_model(config)
    assert model.hf_config["tie_word_embeddings"] is False
    alone = with_value(config, "policy", config.model("critic"))
    plain, mine = (work_of(alone, model.beside["critic"], 1, name).states for name in ("policy", "critic"))
    # The layer stays in memory. Gradients are float32, the optimizer has 12 bytes of each element on one of four ranks.
    assert mine.weights == plain.weights
    assert plain.gradients - mine.gradients == 4 * 151936 * 2048
    assert plain.optimizer - mine.optimizer == 12 * 151936 * 2048 / 4


def test_a_teacher_with_nodes_of_its_own_takes_none_of_the_policys(folders: dict[str, str]):
    alone = load_config("grpo_nanov3.yaml", [folders["nano"], "policy.generation.vllm_cfg.max_num_seqs=128"])
    teacher = load_config(
        "grpo_nanov3.yaml", [folders["qwen"], "policy.megatron_cfg.pipeline_model_parallel_size=4"]
    ).policy
    config = with_value(with_value(alone, "teacher", teacher), "algorithm", "distillation")
    config = with_value(config, "distillation.teacher_nodes", 4)
    config = with_value(config, "cluster.num_nodes", alone.cluster.num_nodes + 4)
    assert config.num_policy_ranks == alone.num_policy_ranks
    model, plain = read_model(config), read_model(alone)
    mine, before = (
        rank_memory(*given, 0, engine_memory(given[0], given[1], H100)).phases
        for given in ((config, model), (alone, plain))
    )
    assert mine == before
    stages = [PlanModel(hf_config("qwen")).elements.stage(teacher.megatron_cfg.parallel, stage) for stage in range(4)]
    parts = memory_apart(config, model)["teacher"]
    assert parts["weights"] in [2 * (stage.dense + stage.experts) for stage in stages]
    assert sum(parts.values()) > parts["weights"] and memory_apart(alone, plain) == {}
    host, host_alone = (host_memory(*given, stage_states(*given, 0)) for given in ((config, model), (alone, plain)))
    assert "weights of the teacher" not in host and host.keys() == host_alone.keys()


def test_a_reference_with_nodes_of_its_own_leaves_the_policys_hosts(folders: dict[str, str]):
    kept = load_config("grpo_nanov3.yaml", [folders["nano"], "loss_fn.reference_policy_kl_penalty=0.01"])
    words = ["reference.num_nodes=2", f"cluster.num_nodes={kept.cluster.num_nodes + 2}"]
    sizes = ["tensor_model_parallel_size=1", "sequence_parallel=false", "context_parallel_size=1"]
    sizes = [f"reference.megatron_cfg.{size}" for size in (*sizes, "pipeline_model_parallel_size=2")]
    given = [folders["nano"], "loss_fn.reference_policy_kl_penalty=0.01", *words, *sizes]
    config = load_config("grpo_nanov3.yaml", given)
    assert config.num_policy_ranks == kept.num_policy_ranks and config.num_ranks_of("reference") == 16
    model, plain = read_model(config), read_model(kept)
    host, before = (host_memory(*pair, stage_states(*pair, 0)) for pair in ((config, model), (kept, plain)))
    held = before.pop("weights of the reference")
    tokens = config.rollouts.num_rollouts_per_step * config.policy.max_total_sequence_length
    assert host.pop(ROLLOUTS) - before.pop(ROLLOUTS) == 4 * tokens
    assert held == 8 * stage_states(kept, plain, 0).weights and host == before
    # Two stages of bfloat16 weights; experts on as many ranks as the policy's are.
    layout = config.model("reference").megatron_cfg.parallel
    stages = [PlanModel(hf_config("nano")).elements.stage(layout, stage) for stage in range(2)]
    parts = memory_apart(config, model)["reference"]
    most = max(2 * (stage.dense + stage.experts) for stage in stages)
    assert most <= parts["weights"] < 1.01 * most and "gradients" not in parts
    assert any(
        line.startswith("The reference, on 16 GPUs of its own, GiB: ") for line in describe(make_plan(config, H100))
    )


def test_a_judge_is_counted_on_nodes_of_its_own(folders: dict[str, str]):
    name = folders["qwen"].partition("=")[2]
    judge = [f"judges.fair.model_name={name}", "judges.fair.num_nodes=4", "judges.fair.tensor_parallel_size=4"]
    alone = load_config("grpo_nanov3.yaml", [folders["nano"]])
    nodes = f"cluster.num_nodes={alone.cluster.num_nodes + 4}"
    config = load_config("grpo_nanov3.yaml", [folders["nano"], *judge, nodes])
    assert config.num_policy_ranks == alone.num_policy_ranks and config.num_own_slots == 4 * 8
    found = judge_memory(config, H100)["fair"]
    assert found.weights == pytest.approx(2 * PlanModel(hf_config("qwen")).num_parameters / 4, rel=0.02)
    assert found.cache == pytest.approx(
        0.9 * H100.memory - found.weights - found.activations - found.graphs - ENGINE_CONTEXT
    )
    lines = describe(make_plan(config, H100))
    assert "Judge fair, 8 engines on 4 nodes of its own:" in lines and judges_misfit(config, H100) is None
    small = replace(H100, memory_gib=8.0)
    assert "judge fair has no cache for one question" in (judges_misfit(config, small) or "")


def test_a_teacher_is_counted_where_it_is(folders: dict[str, str]):
    # Without a number it follows from the rollouts, which differ.
    alone = load_config("grpo_nanov3.yaml", [folders["nano"], "policy.generation.vllm_cfg.max_num_seqs=128"])
    teacher = load_config(
        "grpo_nanov3.yaml", [folders["qwen"], "policy.megatron_cfg.pipeline_model_parallel_size=4"]
    ).policy
    config = with_value(with_value(alone, "teacher", teacher), "algorithm", "distillation")
    model, plain = read_model(config), read_model(alone)
    stages = [PlanModel(hf_config("qwen")).elements.stage(teacher.megatron_cfg.parallel, stage) for stage in range(4)]
    mine, before = (
        rank_memory(*given, 0, engine_memory(given[0], given[1], H100)).phases
        for given in ((config, model), (alone, plain))
    )
    assert mine.keys() - before.keys() == {"teacher"}
    weights = mine["teacher"]["weights of the teacher"]
    assert weights in [2 * (stage.dense + stage.experts) for stage in stages]
    assert "gradients of the teacher" not in mine["teacher"] and "KV cache" not in mine["teacher"]
    assert {phase: mine[phase] for phase in before} == before
    host, host_alone = (host_memory(*given, stage_states(*given, 0)) for given in ((config, model), (alone, plain)))
    assert host["weights of the teacher"] == weights * config.cluster.slots_per_node
    files = "model files in the page cache"
    assert host[files] - host_alone[files] == 2 * PlanModel(hf_config("qwen")).num_parameters
