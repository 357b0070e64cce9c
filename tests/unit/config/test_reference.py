# SPDX-License-Identifier: Apache-2.0
"""Section `reference`: nodes and layout of the model that the KL term compares with, and what conflicts."""

from __future__ import annotations

from mrl.cluster.scheduling import own_slots
from mrl.config.load import load_config, resolved_yaml
from mrl.config.schema.run import RunConfig
from tests.unit.config.problems import problems_of

KL = "loss_fn.reference_policy_kl_penalty=0.1"
APART = ("cluster.num_nodes=3", "cluster.cpu_units_per_node=4", "reference.num_nodes=1")
TWO_STAGES = (
    "policy.megatron_cfg.tensor_model_parallel_size=1",
    "policy.megatron_cfg.sequence_parallel=false",
    "policy.megatron_cfg.expert_model_parallel_size=2",
    "reference.megatron_cfg.pipeline_model_parallel_size=2",
    "reference.megatron_cfg.expert_model_parallel_size=1",
)


def tiny(*overrides: str) -> RunConfig:
    return load_config("grpo_tiny.yaml", overrides)


def test_a_reference_has_nodes_and_a_layout_of_its_own(tmp_path):
    config = tiny(KL, *APART, *TWO_STAGES)
    assert config.own_nodes == {"reference": 1} and own_slots(config) == {"reference": range(8, 12)}
    assert (config.num_policy_ranks, config.num_own_slots, config.num_slots) == (8, 4, 12)
    assert (config.data_parallel_size, config.replicas_of("reference")) == (8, 2)
    mine, policy = config.model("reference"), config.policy
    assert (mine.megatron_cfg.pipeline_model_parallel_size, mine.megatron_cfg.expert_model_parallel_size) == (2, 1)
    assert (mine.model_name, mine.megatron_cfg.optimizer) == (policy.model_name, policy.megatron_cfg.optimizer)
    assert config.has_reference_apart and not config.keeps_reference
    assert config.models_beside == () and config.trained_models == ("policy",)
    (tmp_path / "resolved.yaml").write_text(resolved_yaml(config))
    assert load_config(tmp_path / "resolved.yaml").model("reference").megatron_cfg == mine.megatron_cfg
    assert problems_of(KL, *APART, *TWO_STAGES) == problems_of(KL)


def test_without_nodes_the_policys_ranks_keep_it():
    config = tiny(KL)
    assert config.keeps_reference and not config.has_reference_apart and config.own_nodes == {}
    assert not tiny().keeps_reference and list(config.models) == ["policy"]


def test_it_shares_prefixes_where_the_policy_does():
    shared = tiny(KL, *APART, "policy.share_prefixes=true")
    assert shared.model("reference").share_prefixes is True
    assert tiny(KL, *APART, "reference.megatron_cfg.context_parallel_size=2").model("reference").share_prefixes is False


def test_contradictions_are_refused_with_a_way_out():
    def first(*overrides: str, name: str = "grpo_tiny.yaml") -> str:
        return "\n".join(problem for problem in problems_of(*APART, *overrides, name=name) if "reference" in problem)

    assert first() == (
        "reference.num_nodes=1: loss_fn.reference_policy_kl_penalty=0 leaves nothing to compare with a reference; "
        "set this to 0, or raise loss_fn.reference_policy_kl_penalty"
    )
    lora = ("policy.megatron_cfg.peft.enabled=true", "policy.megatron_cfg.peft.target_modules=[linear_proj]")
    assert first(KL, *lora).startswith("reference.num_nodes=1: the reference is the base of the policy's adapters (")
    assert "algorithm=sft compares with no reference; set this to 0" in first(name="sft_tiny.yaml")
    assert "algorithm=dpo compares with the reference that its ranks keep" in first(name="dpo_tiny.yaml")
    none = first(KL, "reference.num_nodes=3")
    assert (
        "3 nodes of the reference leave the policy none of cluster.num_nodes=3; raise cluster.num_nodes above 3" in none
    )
    wrong = first(KL, "reference.megatron_cfg.pipeline_model_parallel_size=3")
    assert wrong.startswith("reference.megatron_cfg.pipeline_model_parallel_size=3: the 4 slots (1 of its own nodes x")
